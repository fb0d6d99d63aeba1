/*
 * pending.c - how an object comes into the store: a pending put is begun, filled, and committed or aborted.
 *
 * A put is P1 to P4, then L1 and L2. Its bytes are copied outside the mutex, because no other thread uses a slot in
 * WRITING. Everything that can fail comes before the first store to the segment. So the lease entry, if there will be a
 * lease, is taken (in private memory) before the space, and a commit always succeeds.
 */
#include <string.h>
#include <sys/random.h>

#include "remote.h"
#include "crc.h"
#include "directory.h"
#include "drops.h"
#include "hand.h"
#include "holders.h"
#include "monitor.h"
#include "reclaim.h"
#include "room.h"
#include "step.h"

static int next_secret(struct shms_writer *w, uint64_t *out) {
    if (w->n_random == 0) {
        if (getrandom(w->random, sizeof w->random, 0) != sizeof w->random)
            return SHMS_ESYS;
        w->n_random = sizeof w->random / sizeof *w->random;
    }
    *out = w->random[--w->n_random];
    return SHMS_OK;
}

/* Takes space for the object, and everything that a commit needs. The mutex and `placing` are held. */
static int place(struct shms_writer *w, shms_batch *b, const shms_put *put) {
    uint32_t kind = put->kind;
    uint64_t payload_at = shms_payload_at(put->key_len, put->meta_len);
    if (put->meta_len > SHMS_MAX_META || put->extra_len > SHMS_MAX_EXTRA || put->payload_size > w->seg.layout.capacity)
        return SHMS_ETOOLARGE;
    uint64_t tail = put->payload_size + put->extra_len;
    uint64_t length = tail ? payload_at + tail : (uint64_t)put->key_len + put->meta_len;
    uint64_t span = shms_span(length), secret;
    if (length > w->seg.layout.max_object_size)
        return SHMS_ETOOLARGE;
    if (put->group > w->seg.layout.n_groups)
        return shms_no_group(w, put->group);
    if (kind && (kind >= SHMS_KINDS || !shms_kind_named(&w->kinds.table[kind])))
        return SHMS_EINVAL;
    uint64_t quota = shms_get(&w->kinds.table[kind].quota);
    if (quota && span > quota)
        return SHMS_ETOOLARGE;
    uint64_t hash = shms_key_hash(w, put->key, put->key_len);
    shms_slot seen;
    shms_settle(w);
    shms_delete_dropped_key(w, hash, put->key, put->key_len);
    if (shms_index_find(&w->index, hash, put->key, put->key_len) != SHMS_NONE ||
        (put->unless_stored && shms_look_remote(w, hash, put->key, put->key_len, &seen) != SHMS_NONE))
        return SHMS_EEXISTS;
    int rc = next_secret(w, &secret);
    if (rc)
        return rc;
    shms_reclaim_begin(w);
    uint32_t entry = SHMS_NONE;
    if (!put->unleased && (entry = shms_reclaim_lease(w, &(bool){false})) == SHMS_NONE)
        return SHMS_ENOLEASE;
    shms_placement place;
    if ((rc = shms_reclaim_space(w, span, kind, put->waits_since, &place))) {
        shms_leases_untake(&w->leases, entry);
        return rc;
    }
    uint32_t slot = w->free_slots[--w->n_free_slots];
    shms_slot *s = shms_writer_slot(w, slot);
    uint64_t id = shms_get(&w->seg.writer->next_id);
    SHMS_STEP("P1"); /* the id is taken before it is used: a crash loses only a number */
    /* every writer takes the ids of its own remainder, so ids are unique in the store */
    atomic_store_explicit(&w->seg.writer->next_id, id + w->seg.layout.n_writers, memory_order_release);
    /* WRITING, and before it W4 of what was evicted, before the words and bytes below: look-ups without a pin and a
     * successor do not meet these under an older state. */
    SHMS_STEP("P2");
    atomic_store_explicit(&s->state, SHMS_WRITING, memory_order_release);
    atomic_thread_fence(memory_order_release);
    shms_set(&s->id, id);
    atomic_store_explicit(&s->secret, secret, memory_order_release); /* after the id; pairs with shms_reader_release */
    shms_set(&s->offset, place.at);
    shms_set(&s->length, length);
    shms_set(&s->head, shms_slot_head(put->key_len, shms_slot_mark(s), put->meta_len));
    shms_set(&s->flags, (uint64_t)put->extra_len << SHMS_SLOT_EXTRA_SHIFT | (uint64_t)kind << SHMS_SLOT_KIND_SHIFT);
    shms_ring_insert(&w->ring, slot, place.behind);
    if (place.moves) {
        shms_ring_move_hand(&w->ring, place.area, slot, place.lap);
        shms_set(place.area == SHMS_LARGE ? &w->seg.writer->hand : &w->seg.writer->small_hand,
                 w->ring.areas[place.area].hand);
    }
    shms_add(&w->seg.writer->used_bytes, span);
    shms_kinds_enter(&w->kinds, slot);
    w->protected[slot] = shms_key_kept(w, hash);
    char *at = (char *)w->seg.data + place.at;
    SHMS_STEP("P3"); /* the bytes, here and until the commit */
    memcpy(at, put->key, put->key_len);
    shms_index_add(&w->index, hash, slot);
    w->unfinished++;
    w->leased += entry != SHMS_NONE;
    b->pending = (shms_pending){at + payload_at, put->payload_size, id, hash, slot, entry, put->group, put->hold};
    return SHMS_OK;
}

int shms_batch_begin(shms_writer *w, shms_batch *b, shms_put *put) {
    shms_pending *out = &b->pending;
    int rc = shms_key_ok(put->key, put->key_len);
    if (rc || (rc = shms_batch_ready(b)) || (rc = shms_writer_enter_to_place(w)))
        return rc;
    rc = place(w, b, put);
    if (shms_is_refusal(rc) && put->timeout && shms_room_await(w, put))
        return SHMS_AGAIN;
    put->waits_since = 0; /* the record can be used again */
    shms_writer_refused(w, rc, b);
    if (shms_writer_leave_place(w, rc))
        return rc;
    SHMS_STEP("P3c"); /* outside the mutex like the payload, because they may have any size */
    if (put->meta_len)
        memcpy(w->seg.data + shms_get(&shms_writer_slot(w, out->slot)->offset) + put->key_len, put->meta,
               put->meta_len);
    if (put->extra_len)
        memcpy(out->payload + put->payload_size, put->extra, put->extra_len);
    b->items[b->n_items++] = (shms_batch_item){out->id, 0, shms_writer_global(w, out->slot), out->entry, 1};
    return SHMS_OK;
}

/* Enters the writer, even a closed one, and checks that the pending put has not ended. */
static int enter_with_pending(struct shms_writer *w, const shms_pending *t) {
    int rc = shms_writer_enter_to_end(w);
    if (rc)
        return rc;
    if (t->slot >= w->seg.layout.max_objects || (t->entry != SHMS_NONE && t->entry >= w->seg.layout.max_leases) ||
        shms_get(&shms_writer_slot(w, t->slot)->state) != SHMS_WRITING ||
        shms_get(&shms_writer_slot(w, t->slot)->id) != t->id)
        return shms_writer_leave(w, w->closed ? SHMS_ECLOSED : SHMS_EINVAL);
    return SHMS_OK;
}

/* Counts the put for each factor by which a larger store would have made it a hit. */
static void count_more_hits(struct shms_writer *w, const shms_pending *t) {
    uint64_t span = shms_span(shms_get(&shms_writer_slot(w, t->slot)->length));
    for (int i = shms_ghosts_put(&w->ghosts, t->hash, span); i-- > 0;)
        shms_count(w, SHMS_C(more_hits_at_4x) + i, w->ghosts.one_in);
}

int shms_batch_commit(shms_writer *w, shms_batch *b) {
    const shms_pending *t = &b->pending;
    int rc = enter_with_pending(w, t);
    if (rc)
        return rc;
    shms_slot *s = shms_writer_slot(w, t->slot);
    uint64_t flags = 0;
    if (w->seg.layout.flags & SHMS_CHECKSUMS) {
        /* Outside the mutex, like the copy: only the pending put's holder touches a slot in WRITING. */
        shms_writer_leave(w, SHMS_OK);
        uint64_t crc = shms_object_crc(w->seg.data, shms_get(&s->offset), shms_slot_key_len(s), shms_slot_meta_len(s),
                                       shms_get(&s->length));
        flags = crc << SHMS_SLOT_CRC_SHIFT | SHMS_SLOT_CHECKED;
        if ((rc = enter_with_pending(w, t)))
            return rc;
    }
    if (w->closed) {
        shms_end_uncommitted(w, t->slot, t->entry);
        return shms_writer_leave(w, SHMS_ECLOSED);
    }
    shms_set(&s->flags, shms_get(&s->flags) | flags);
    shms_set(&s->put_ns, shms_now_ns());
    SHMS_STEP("P4"); /* publishes id, place and bytes; pairs with R2a */
    atomic_store_explicit(&s->state, SHMS_LIVE, memory_order_release);
    shms_add(&w->seg.writer->objects, 1);
    shms_count(w, SHMS_C(puts), 1);
    shms_count(w, SHMS_C(put_bytes), t->payload_size);
    count_more_hits(w, t);
    shms_writer_pending_ended(w, t->entry);
    shms_ring_stale_slot(&w->ring, t->slot); /* a slot in WRITING may not go, but this one may */
    shms_room_made(w);
    b->n_items--; /* the item of _begin, which is still the last one */
    if (t->entry != SHMS_NONE)
        shms_hand_out(w, shms_writer_global(w, t->slot), t->entry, t->group, t->hold, b->ref);
    else
        shms_refer(w, shms_writer_global(w, t->slot), 0, 0, b->ref);
    shms_batch_note(b, 1);
    return shms_writer_leave(w, SHMS_OK);
}

/* Outside the mutex: the slot is WRITING, so only the pending put's holder uses the bytes, also after a close. */
static void copy_pieces(const shms_pending *t, const shms_piece *pieces, uint32_t n) {
    SHMS_STEP("P3c");
    for (uint32_t i = 0; i < n; i++)
        shms_copy(t->payload + pieces[i].offset, (const void *)(uintptr_t)pieces[i].address, pieces[i].size);
}

int shms_batch_copy(shms_writer *w, shms_batch *b, const shms_piece *pieces, uint32_t n) {
    int rc = enter_with_pending(w, &b->pending);
    if (rc ||
        (rc = shms_writer_leave(w, w->closed ? SHMS_ECLOSED : shms_pieces_fit(pieces, n, b->pending.payload_size))))
        return rc;
    copy_pieces(&b->pending, pieces, n);
    return SHMS_OK;
}

int shms_batch_put(shms_writer *w, shms_batch *b, shms_put *put) {
    int rc = shms_pieces_fit(put->pieces, put->n_pieces, put->payload_size);
    if (rc || (rc = shms_batch_begin(w, b, put)))
        return rc;
    copy_pieces(&b->pending, put->pieces, put->n_pieces);
    return shms_batch_commit(w, b);
}

int shms_batch_put_lent(shms_writer *w, shms_batch *b, shms_put *put, const char *key, uint32_t key_len,
                        const char *meta, uint32_t meta_len, const char *extra, uint32_t extra_len,
                        uint64_t payload_size, const shms_piece *pieces, uint32_t n_pieces) {
    shms_put all = *put; /* which threads share, unless it waits */
    all.key = key, all.meta = meta, all.extra = extra, all.pieces = pieces;
    all.key_len = key_len, all.meta_len = meta_len, all.extra_len = extra_len, all.n_pieces = n_pieces;
    all.payload_size = payload_size;
    int rc = pieces ? shms_batch_put(w, b, &all) : shms_batch_begin(w, b, &all);
    if (put->timeout)
        put->waits_since = all.waits_since;
    return rc;
}
