/*
 * handouts.c - hands out references, which opens leases; ends leases, and retires ranks.
 */
#include <string.h>

#include "remote.h"
#include "directory.h"
#include "drops.h"
#include "find.h"
#include "hand.h"
#include "holders.h"
#include "monitor.h"
#include "reclaim.h"
#include "step.h"

#define CANCEL_AT_ONCE 256 /* lease entries between two yields of the mutex */
#define COPY_AT_ONCE 65536 /* bytes between two yields of the mutex */

int shms_batch_hit(shms_writer *w, shms_batch *b, const char *key, uint32_t key_len, uint32_t group, int hold) {
    int rc = shms_batch_ready(b);
    if (rc || (rc = shms_writer_enter_with_key(w, key, key_len)))
        return rc;
    if (group > w->seg.layout.n_groups)
        return shms_writer_leave(w, shms_no_group(w, group));
    uint64_t hash = shms_key_hash(w, key, key_len);
    shms_slot seen;
    uint32_t own, slot = SHMS_NONE, entry = SHMS_NONE;
    bool others;
    do { /* again if the object was evicted while others had the mutex */
        own = shms_find_live(w, hash, key, key_len);
        if (own == SHMS_NONE && (slot = shms_look_remote(w, hash, key, key_len, &seen)) == SHMS_NONE) {
            shms_leases_untake(&w->leases, entry);
            shms_count(w, SHMS_C(misses), 1);
            return shms_writer_leave(w, SHMS_ENOTFOUND);
        }
        others = false;
        if (entry == SHMS_NONE) {
            shms_reclaim_begin(w);
            entry = shms_reclaim_lease(w, &others);
        }
        if (entry == SHMS_NONE) {
            rc = w->closed ? SHMS_ECLOSED : SHMS_ENOLEASE;
            shms_writer_refused(w, rc, b);
            return shms_writer_leave(w, rc);
        }
    } while (others);
    if (own != SHMS_NONE) {
        shms_ring_use(&w->ring, own);
        shms_hand_out(w, shms_writer_global(w, own), entry, group, hold, b->ref);
    } else if (shms_hit_remote(w, slot, shms_get(&seen.id), entry, group, hold, b->ref)) {
        shms_use_remote(w, slot);
        shms_reclaim_leases(w);
        shms_count(w, SHMS_C(remote_hits), 1);
    } else {
        shms_count(w, SHMS_C(misses), 1);
        return shms_writer_leave(w, SHMS_ENOTFOUND);
    }
    shms_batch_note(b, 0);
    shms_count(w, SHMS_C(hits), 1);
    return shms_writer_leave(w, SHMS_OK);
}

int shms_writer_has(shms_writer *w, const char *key, uint32_t key_len) {
    int rc = shms_writer_enter_with_key(w, key, key_len);
    if (rc)
        return rc;
    uint64_t hash = shms_key_hash(w, key, key_len);
    uint32_t slot = shms_find_live(w, hash, key, key_len);
    shms_slot seen;
    const shms_slot *s = slot == SHMS_NONE ? &seen : shms_writer_slot(w, slot);
    if (slot == SHMS_NONE && shms_look_remote(w, hash, key, key_len, &seen) == SHMS_NONE)
        return shms_writer_leave(w, 0);
    return shms_writer_leave(w, shms_slot_extra_len(s) ? 2 : 1);
}

int shms_writer_touch(shms_writer *w, const char *key, uint32_t key_len) {
    int rc = shms_writer_enter_with_key(w, key, key_len);
    if (rc)
        return rc;
    uint64_t hash = shms_key_hash(w, key, key_len);
    uint32_t slot = shms_find_live(w, hash, key, key_len);
    shms_slot seen;
    if (slot != SHMS_NONE)
        shms_ring_use(&w->ring, slot);
    else if ((slot = shms_look_remote(w, hash, key, key_len, &seen)) != SHMS_NONE)
        shms_use_remote(w, slot);
    return shms_writer_leave(w, slot != SHMS_NONE);
}

/* 1: the object is here, and `ref` is what a writer packed. 0: it was evicted. Or an error. */
static int find_ref(struct shms_writer *w, const uint8_t *packed, shms_ref *ref) {
    int rc = shms_ref_read(ref, packed, w->seg.sb, &w->seg.layout);
    if (rc)
        return rc;
    const shms_slot *s = shms_segment_slot(&w->seg, ref->slot);
    if (!shms_slot_whole(s) || shms_get(&s->id) != ref->id)
        return 0;
    /* acquire: before the second read of the id, for an object of another writer */
    uint64_t secret = atomic_load_explicit(&s->secret, memory_order_acquire);
    if (shms_ref_sealed(packed, w->seg.sb->secret, secret))
        return 1;
    return shms_get(&s->id) == ref->id ? SHMS_ESTALE : 0;
}

/* The same for a lease of this writer: 0 also if it has ended; SHMS_ESTALE if it is another writer's. `ref->entry` is
 * its own number then. */
static int find_lease(struct shms_writer *w, const uint8_t *packed, shms_ref *ref) {
    int found = find_ref(w, packed, ref);
    if (found != 1)
        return found;
    if (ref->lease == 0) /* what a rank has found */
        return 0;
    ref->entry -= w->seg.arena * w->leases.n_entries;
    return ref->entry < w->leases.n_entries ? shms_get(&w->leases.table[ref->entry].number) == ref->lease : SHMS_ESTALE;
}

int shms_writer_cancel(shms_writer *w, const uint8_t *packed) {
    shms_ref ref;
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    if ((rc = find_lease(w, packed, &ref)) == 1) {
        shms_end_lease(w, ref.slot, ref.entry);
        shms_count(w, SHMS_C(cancels), 1); /* here: what a batch undoes was never its caller's */
    }
    return shms_writer_leave(w, rc);
}

int shms_batch_hold(shms_writer *w, shms_batch *b, const uint8_t *packed) {
    shms_ref ref;
    int rc = shms_batch_ready(b);
    if (rc || (rc = shms_writer_enter(w)))
        return rc;
    if ((rc = find_lease(w, packed, &ref)) != 1)
        return shms_writer_leave(w, rc);
    /* An owner that has found the lease complete may be about to free the object. */
    bool others = !shms_is_own(&w->seg, ref.slot);
    if (others && (rc = shms_holds_pin_again(&w->seg, ref.slot, ref.id, false)) != 1)
        return shms_writer_leave(w, rc);
    shms_leases_hold(&w->leases, ref.entry);
    if (others)
        shms_holds_unpin(&w->seg, ref.slot);
    memcpy(b->ref, packed, SHMS_REF_SIZE);
    shms_batch_note(b, 0);
    return shms_writer_leave(w, rc);
}

int shms_writer_assign_group(shms_writer *w, const uint8_t *packed, uint32_t group) {
    shms_ref ref;
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    if ((rc = find_lease(w, packed, &ref)) == 1) {
        uint32_t before = shms_lease_group(shms_get(&w->leases.table[ref.entry].what));
        if (group > w->seg.layout.n_groups)
            return shms_writer_leave(w, shms_no_group(w, group));
        if (before && before != group)
            return shms_writer_leave(w,
                                     shms_fail(SHMS_EINVAL, "the lease waits for group %u already: _hit opens another",
                                               (unsigned)before - 1));
        shms_leases_assign_group(&w->leases, ref.entry, group);
        /* the object is evictable earlier than a scan or a sweep has found */
        if (shms_is_own(&w->seg, ref.slot))
            shms_ring_stale_slot(&w->ring, ref.slot - w->leases.base);
        else
            shms_holds_count(&w->seg, ref.slot);
        w->to_sweep = w->leases.n_entries;
        shms_room_made(w);
    }
    return shms_writer_leave(w, rc);
}

int shms_writer_validate(shms_writer *w, const uint8_t *packed, const char *key, uint32_t key_len) {
    shms_ref ref;
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    shms_settle(w);
    if ((rc = find_ref(w, packed, &ref)) == 1 && key) {
        shms_slot seen;
        const uint8_t *at = shms_object_of(&w->seg, ref.slot, &seen);
        rc = at && shms_slot_key_len(&seen) == key_len && memcmp(at, key, key_len) == 0 &&
             shms_still_there(&w->seg, ref.slot, ref.id);
    }
    return shms_writer_leave(w, rc);
}

int shms_writer_extra(shms_writer *w, const uint8_t *packed, uint8_t *out, uint64_t *size) {
    shms_ref ref;
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    uint64_t room = *size;
    for (uint64_t at = 0;; at += COPY_AT_ONCE) {
        if ((rc = find_ref(w, packed, &ref)) != 1) /* again after each yield: it may have been evicted */
            return shms_writer_leave(w, rc ? rc : SHMS_ESTALE);
        shms_slot s;
        SHMS_LOOK("copy");
        const uint8_t *object = shms_object_of(&w->seg, ref.slot, &s);
        if (!object)
            return shms_writer_leave(w, SHMS_ESTALE);
        uint64_t length = shms_slot_extra_len(&s), left = at < length && length <= room ? length - at : 0;
        memcpy(out + at, object + shms_get(&s.length) - length + at, left < COPY_AT_ONCE ? left : COPY_AT_ONCE);
        if (!shms_still_there(&w->seg, ref.slot, ref.id))
            return shms_writer_leave(w, SHMS_ESTALE);
        *size = length;
        if (left <= COPY_AT_ONCE)
            return shms_writer_leave(w, SHMS_OK);
        if (shms_writer_yield(w) && w->closed)
            return shms_writer_leave(w, SHMS_ECLOSED);
    }
}

int shms_writer_equals(shms_writer *w, const uint8_t *packed, const char *meta, uint32_t meta_len,
                       uint64_t payload_size, const shms_piece *pieces, uint32_t n_pieces) {
    shms_ref ref;
    int rc = shms_pieces_fit(pieces, n_pieces, payload_size);
    if (rc || (rc = shms_writer_enter(w)))
        return rc;
    if ((rc = find_ref(w, packed, &ref)) != 1)
        return shms_writer_leave(w, rc);
    shms_slot s;
    const uint8_t *object = shms_object_of(&w->seg, ref.slot, &s);
    uint32_t key_len = object ? shms_slot_key_len(&s) : 0;
    bool same = object && shms_slot_meta_len(&s) == meta_len && shms_slot_payload_size(&s) == payload_size &&
                memcmp(object + key_len, meta, meta_len) == 0;
    for (uint32_t i = 0; i < n_pieces; i++)
        for (uint64_t at = 0; same && at < pieces[i].size; at += COPY_AT_ONCE) {
            uint64_t left = pieces[i].size - at;
            SHMS_LOOK("copy");
            same = memcmp(object + shms_payload_at(key_len, meta_len) + pieces[i].offset + at,
                          (const uint8_t *)(uintptr_t)pieces[i].address + at,
                          left < COPY_AT_ONCE ? left : COPY_AT_ONCE) == 0;
            if (shms_writer_yield(w)) {
                if (w->closed)
                    return shms_writer_leave(w, SHMS_ECLOSED);
                same &= shms_still_there(&w->seg, ref.slot, ref.id);
            }
        }
    return shms_writer_leave(w, same && shms_still_there(&w->seg, ref.slot, ref.id));
}

int64_t shms_writer_cancel_all(shms_writer *w) {
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    int64_t ended = 0;
    uint64_t end = shms_get(&w->seg.writer->next_lease); /* what is handed out meanwhile stays */
    for (uint32_t e = 0; e < w->leases.n_entries; e++) {
        uint64_t number = shms_get(&w->leases.table[e].number);
        if (number && number < end) {
            shms_leases_close(&w->leases, e);
            shms_count(w, SHMS_C(cancels), 1);
            ended++;
        }
        if (e % CANCEL_AT_ONCE == 0 && shms_writer_yield(w) && w->closed)
            break;
    }
    shms_zones_stale_all(&w->zones);
    shms_room_made(w);
    shms_writer_leave(w, SHMS_OK);
    return ended;
}

int shms_writer_retire(shms_writer *w, uint32_t rank) {
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    if (rank >= w->seg.layout.n_readers)
        return shms_writer_leave(w, shms_fail(SHMS_EINVAL, "rank must be below n_readers, %u, not %u",
                                              (unsigned)w->seg.layout.n_readers, rank));
    shms_word *epoch = &shms_segment_reader(&w->seg, rank)->epoch;
    uint64_t seen;
    do { /* a rank that attaches meanwhile sees the retirement (A4), or T2 sees it and retires its new epoch */
        seen = shms_get(epoch); /* relaxed: T2 reads it again */
        SHMS_STEP("T1"); /* pairs with A4: a rank that attaches later sees it, so no older lease is for it */
        atomic_store_explicit(&w->seg.writer->retired[rank], seen + 1, memory_order_seq_cst);
        /* pairs with A3: the rank or this call sees the other, so no retirement is for an epoch that is over */
        SHMS_STEP("T2");
    } while (atomic_load_explicit(epoch, memory_order_seq_cst) != seen);
    /* after it; other writers, whose objects this one leases, poll it */
    shms_word *retirements = &w->seg.writer->retirements;
    atomic_store_explicit(retirements, shms_get(retirements) + 1, memory_order_release);
    shms_room_made(w);
    return shms_writer_leave(w, SHMS_OK);
}
