/*
 * writer.c - creates, recovers and closes a writer, and reports its figures.
 *
 * Everything that a writer knows is in the segment. One function builds its private memory (address order, key index,
 * lists of leases, stacks of free slots and entries): from an empty segment after create, and from a full one after
 * recover. So recovery after a crash has no path of its own.
 */
#include "writer.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "remote.h"
#include "claims.h"
#include "directory.h"
#include "drops.h"
#include "holders.h"
#include "monitor.h"
#include "reclaim.h"
#include "step.h"

/* V1, V2: settles the slots that a death between two steps has left. The next successor can do all of it again. */
static int settle_slots(struct shms_writer *w) {
    const shms_layout *l = &w->seg.layout;
    for (uint32_t i = 0; i < l->max_objects; i++) {
        shms_word *state = &shms_writer_slot(w, i)->state;
        switch (shms_get(state)) {
        case SHMS_WRITING:
            SHMS_STEP("V1"); /* no process has seen it */
            atomic_store_explicit(state, SHMS_FREE, memory_order_release);
            break;
        case SHMS_EVICTING:
            SHMS_STEP("V2"); /* its bytes are whole, because they are reused only after FREE (W4) */
            atomic_store_explicit(state, SHMS_LIVE, memory_order_release);
            break;
        }
    }
    return shms_slots_valid(w->seg.slots, (uint32_t)l->max_objects, l->capacity, shms_get(&w->seg.writer->next_id));
}

/* Builds the private memory from the segment. */
static int build(struct shms_writer *w, bool keep_leases) {
    const shms_layout *l = &w->seg.layout;
    uint32_t n = (uint32_t)l->max_objects, leases = (uint32_t)l->max_leases, zones = shms_n_zones(l);
    uint32_t ranks = (uint32_t)l->n_readers;
    /* The arrays of 64-bit words first. */
    uint32_t peers = ranks + (uint32_t)l->n_writers;
    bool others = l->n_writers > 1;
    uint64_t zones_size = shms_zones_memory(zones),
             polled_size = peers * (sizeof(shms_peer) + zones * sizeof(uint64_t));
    uint64_t ring_size = shms_align_up(shms_ring_memory(n, zones), 8);
    uint64_t lease_size = shms_leases_memory(leases, n);
    uint64_t ghosts_size = shms_ghosts_memory(n);
    uint64_t size =
        zones_size + polled_size + ring_size + lease_size + ghosts_size + (sizeof(uint32_t) + 1) * (uint64_t)n;
    uint8_t *memory = calloc(1, size), *at = memory;
    uint32_t *order = malloc(((size_t)n + 1) * sizeof *order);
    uint32_t count = memory && order ? shms_slots_sorted(w->seg.slots, n, order) : SHMS_NONE;
    if (count == SHMS_NONE) {
        free(memory);
        free(order);
        return SHMS_ENOMEM;
    }
    w->memory = memory;
    w->heap_bytes = size + sizeof *w;
    shms_writer_table *t = w->seg.writer;
    uint64_t hands[SHMS_AREAS] = {shms_get(&t->hand), shms_get(&t->small_hand)};
    shms_zones_init(&w->zones, at, &w->ring, zones, ranks, shms_evictable, w);
    w->zones.wanted = &w->waiting;
    w->peers = (shms_peer *)(at += zones_size);
    w->polled_zones = (uint64_t *)(w->peers + peers);
    shms_ring_init(&w->ring, at += polled_size, l, w->seg.slots, hands, order, count);
    shms_index_init(&w->index, shms_segment_at(&w->seg, l->index_at, w->seg.arena), n, w->seg.sb->secret, w->seg.slots,
                    w->seg.data);
    shms_leases_init(&w->leases, at += ring_size, l, t, w->seg.leases, w->seg.slots, others ? &w->seg : NULL,
                     keep_leases);
    shms_ghosts_init(&w->ghosts, at += lease_size, l->capacity, n);
    w->free_slots = (uint32_t *)(at += ghosts_size);
    w->ring.used_remotely = shms_used_remotely;
    w->ring.context = w;
    w->protected = (uint8_t *)(w->free_slots + n);
    for (uint32_t i = n; i-- > 0;)
        if (shms_get(&shms_writer_slot(w, i)->state) == SHMS_FREE)
            w->free_slots[w->n_free_slots++] = i;
    int rc = shms_leases_valid(&w->leases, w->seg.slots, 0); /* a number not below the next would be used twice */
    uint64_t used = 0;
    for (uint32_t i = 0; i < count && rc == SHMS_OK; i++) {
        shms_slot *s = shms_writer_slot(w, order[i]);
        used += shms_span(shms_get(&s->length));
        if (shms_slot_deleted(s))
            continue;
        const char *key = (const char *)w->seg.data + shms_get(&s->offset);
        uint64_t hash = shms_slot_hash(w, order[i]);
        if (shms_key_ok(key, shms_slot_key_len(s)) || /* no call takes another */
            shms_index_find(&w->index, hash, key, shms_slot_key_len(s)) != SHMS_NONE)
            rc = SHMS_ECORRUPT; /* D1 ensures that a key is there only once */
        else
            shms_index_add(&w->index, hash, order[i]);
    }
    free(order);
    w->kinds = (shms_kinds){.table = t->kinds, .slots = w->seg.slots, .ring = &w->ring};
    if (rc == SHMS_OK)
        rc = shms_kinds_build(&w->kinds, n, &w->heap_bytes);
    if (rc) /* the segment must show its last writer, not one that refused it */
        return rc;
    shms_set(&t->used_bytes, used);
    shms_set(&t->objects, count);
    shms_words_write(t->tier, &(shms_tier_figures){0}, sizeof(shms_tier_figures)); /* the tier was the predecessor's */
    shms_set(&t->pid, (uint64_t)getpid());
    /* after J1, J2 and V3: another writer that sees it sees their end; pairs with shms_poll */
    atomic_store_explicit(&t->epoch, shms_get(&t->epoch) + 1, memory_order_release);
    return SHMS_OK;
}

/* Records that the name stays longer. The writer that closes last reads it, when no other has the name. */
static void stay(struct shms_writer *w, int how) {
    if (shms_get(&w->seg.writer->stays) < (uint64_t)how)
        shms_set(&w->seg.writer->stays, how);
}

/* Arenas that no successor can take, of the file with that inode. */
typedef struct damage {
    uint64_t arenas;
    uint64_t no_room; /* others, for whose data the folder has none */
    ino_t ino;
} damage;

static int start(shms_writer **out, const char *name, const shms_options *options, int arena,
                 const shms_expected *expected, damage *damaged) {
    if (!out)
        return shms_fail(SHMS_EINVAL, SHMS_NO_OUT);
    struct shms_writer *w = calloc(1, sizeof *w);
    *out = NULL;
    if (!w)
        return SHMS_ENOMEM;
    bool keep_leases = !expected || !expected->end_leases;
    /* while it is being created, arena 0 has a living writer, unless there is an owner; the others have none yet */
    int role = arena == 0 ? SHMS_ROLE_WRITER : SHMS_ROLE_OF_WRITER(1);
    int rc = options ? shms_segment_create(&w->seg, name, options) : shms_segment_open(&w->seg, name, role, expected);
    if (rc) {
        free(w);
        return rc;
    }
    if (!options) {
        SHMS_STEP("V0"); /* from here on others find this writer alive */
        if (damaged->ino != w->seg.ino)
            *damaged = (damage){.ino = w->seg.ino};
        w->damaged = damaged->arenas;
        if ((rc = shms_segment_is(&w->seg, expected)) == SHMS_OK)
            rc = shms_segment_take(&w->seg, arena, w->damaged | damaged->no_room);
        if (rc == SHMS_OK)
            rc = shms_segment_reserve(&w->seg, expected ? expected->needed : NULL);
        if (rc == SHMS_OK) {
            /* before anything slow: until then, owners are refused for what the dead has leased */
            shms_holds_begin(&w->seg, keep_leases);
            rc = shms_counters_valid(w->seg.writer) ? settle_slots(w) : SHMS_ECORRUPT;
        }
    }
    if (rc == SHMS_OK && !(options && options->flags & SHMS_OWNS))
        rc = build(w, keep_leases);
    if (rc == SHMS_OK && options)
        rc = shms_segment_publish(&w->seg);
    if (rc) {
        if (rc == SHMS_ECORRUPT)
            damaged->arenas |= UINT64_C(1) << w->seg.arena;
        if (rc == SHMS_ENOSPC)
            damaged->no_room |= UINT64_C(1) << w->seg.arena;
        shms_segment_unlock(&w->seg, options != NULL);
        shms_segment_close(&w->seg);
        free(w->kinds.next);
        free(w->memory);
        free(w);
        return rc;
    }
    shms_monitor_init(w);
    if (!options) { /* after V2, which readers may be waiting for, and B4, for which others may not wait */
        if (expected && expected->options)
            w->seg.layout.flags |= expected->options->flags & SHMS_PREFAULT;
        shms_segment_warm(&w->seg);
    }
    *out = w;
    return SHMS_OK;
}

int shms_writer_create(shms_writer **out, const char *name, const shms_options *options) {
    if (out)
        *out = NULL;
    return options ? start(out, name, options, 0, NULL, &(damage){0}) : shms_fail(SHMS_EINVAL, SHMS_NO_OPTIONS);
}

int shms_writer_take(shms_writer **out, const char *name, int arena, const shms_expected *expected) {
    damage damaged = {0}, before;
    uint32_t turns = 0;
    int rc;
    do { /* again without an arena that turned out to be damaged, or to have no room */
        before = damaged;
        rc = start(out, name, NULL, arena, expected, &damaged);
    } while (((rc == SHMS_ECORRUPT || rc == SHMS_ENOSPC) && arena == SHMS_ANY_ARENA &&
              memcmp(&before, &damaged, sizeof before)) ||
             (rc == SHMS_EWRITERACTIVE && shms_lock_again(&turns)));
    if (rc == SHMS_EWRITERACTIVE && damaged.no_room)
        return SHMS_ENOSPC;
    return rc == SHMS_EWRITERACTIVE && damaged.arenas ? SHMS_ECORRUPT : rc;
}

int shms_writer_join(shms_writer **out, const char *name, int arena, const shms_expected *expected) {
    int rc = shms_writer_take(out, name, arena, expected);
    if (rc == SHMS_OK && (rc = shms_writer_stay(*out, SHMS_UNTIL_CLOSED))) {
        shms_writer_free(*out);
        *out = NULL;
    }
    return rc;
}

int shms_writer_recover(shms_writer **out, const char *name, const shms_expected *expected) {
    return shms_writer_join(out, name, 0, expected);
}

static int end(struct shms_writer *w, int unlinks, bool stays) {
    int rc = shms_writer_enter_to_close(w); /* not in a put's search: a successor may come at once */
    if (rc)
        return rc == SHMS_ECLOSED ? SHMS_OK : rc;
    w->closed = true;
    shms_room_made(w);
    if (stays && !shms_has_no_arena(w))
        stay(w, SHMS_BEYOND_DEATH);
    w->unlinks = unlinks;
    if (w->unfinished == 0) /* otherwise a successor would reuse bytes that holders of pending puts still write */
        shms_writer_say_goodbye(w, unlinks);
    return shms_writer_leave_place(w, SHMS_OK);
}

int shms_writer_close(shms_writer *w, int unlink) {
    if (unlink < SHMS_AS_IT_WAS || unlink > 1)
        return shms_fail(SHMS_EINVAL, "unlink must be 1, 0, SHMS_AS_RECORDED or SHMS_AS_IT_WAS, not %d", unlink);
    return end(w, unlink == SHMS_AS_IT_WAS ? 0 : unlink, unlink == 0);
}

int shms_writer_stay(shms_writer *w, int how) {
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    if (!w->seg.name)
        rc = shms_segment_have_name(&w->seg);
    if (rc == SHMS_OK)
        stay(w, how);
    return shms_writer_leave(w, rc);
}

void shms_writer_free(shms_writer *w) {
    if (!w)
        return;
    end(w, 0, false); /* the caller has not said whether the store stays */
    shms_segment_close(&w->seg);
    free(w->kept);
    free(w->kinds.next);
    free(w->memory);
    free(w);
}

void shms_writer_drop(shms_writer **w) { shms_writer_free(*w); }

uint64_t shms_writer_data(const shms_writer *w, uint64_t *place) {
    w = shms_has_no_arena(w) ? NULL : w;
    const shms_layout *l = w ? &w->seg.layout : NULL;
    place[0] = w ? l->capacity : 0;
    place[1] = w ? l->data_at + w->seg.arena * l->data_stride : 0;
    return w ? (uint64_t)(uintptr_t)w->seg.data : 0;
}

const char *shms_writer_path(const shms_writer *w) { return w->seg.path; }

int shms_writer_claim_for(shms_writer *w, uint32_t holder, const char *key, uint32_t key_len, shms_claim *out) {
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    shms_writer_leave(w, SHMS_OK);
    return shms_claim_take(&w->seg, holder, key, key_len, out);
}

int shms_writer_claimed(shms_writer *w, const char *key, uint32_t key_len) {
    int rc = shms_key_ok(key, key_len);
    if (rc || (rc = shms_writer_enter(w)))
        return rc;
    shms_writer_leave(w, SHMS_OK);
    return shms_claimed(&w->seg, key, key_len);
}

uint64_t shms_writer_options(shms_writer *w, shms_options *out, uint64_t *place) {
    if (!w)
        return 0;
    shms_layout_options(out, &w->seg.layout);
    place[0] = w->seg.arena;
    place[1] = w->damaged;
    return w->seg.sb->store;
}

int shms_writer_stats(shms_writer *w, shms_stats *out) {
    int rc = out ? shms_writer_enter_to_list(w) : shms_fail(SHMS_EINVAL, SHMS_NO_OUT);
    if (rc)
        return rc;
    uint64_t open = shms_reclaim_open(w);
    if (w->closed)
        return shms_writer_leave(w, SHMS_ECLOSED);
    const shms_layout *l = &w->seg.layout;
    const shms_writer_table *t = w->seg.writer;
    *out = (shms_stats){.capacity = l->capacity,
                        .max_object_size = l->max_object_size,
                        .max_objects = l->max_objects,
                        .n_readers = l->n_readers,
                        .objects = shms_get(&t->objects),
                        .used_bytes = shms_get(&t->used_bytes),
                        .next_id = shms_get(&t->next_id),
                        .next_lease = shms_get(&t->next_lease),
                        .open_leases = open,
                        .max_leases = w->seg.layout.max_leases,
                        .control_bytes = l->readers_at + l->n_readers * l->reader_stride,
                        .heap_bytes = w->heap_bytes};
    shms_words_read(t->counters, &out->counters, sizeof out->counters);
    shms_words_read(t->tier, &out->tier, sizeof out->tier);
    return shms_writer_leave(w, SHMS_OK);
}

int shms_writer_tier(shms_writer *w, const shms_tier_figures *figures) {
    int rc = shms_writer_enter(w); /* once closed, the words may be a successor's */
    if (rc)
        return rc;
    shms_words_write(w->seg.writer->tier, figures, sizeof *figures);
    return shms_writer_leave(w, SHMS_OK);
}

int shms_writer_clear_tier(shms_writer *w, uint64_t moment) {
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    shms_set(&w->seg.writer->cleared, moment);
    atomic_thread_fence(memory_order_seq_cst); /* a writer that stored the object earlier sees this, or it is deleted */
    return shms_writer_leave(w, SHMS_OK);
}

int shms_writer_tier_cleared(shms_writer *w, uint64_t *out) {
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    *out = 0;
    atomic_thread_fence(memory_order_seq_cst); /* pairs with shms_writer_clear_tier, after a commit */
    for (uint32_t a = 0; a < w->seg.layout.n_writers; a++) {
        uint64_t moment = shms_get(&shms_segment_writer(&w->seg, a)->cleared);
        *out = moment > *out ? moment : *out;
    }
    return shms_writer_leave(w, SHMS_OK);
}

int shms_writer_kind(shms_writer *w, const char *name, uint32_t len) {
    uint64_t words[3] = {0};
    if (!name || len == 0 || len >= sizeof words || memchr(name, 0, len))
        return SHMS_EINVAL;
    memcpy(words, name, len);
    int rc = shms_writer_enter(w), number = 0;
    if (rc)
        return rc;
    for (int k = 1; k < SHMS_KINDS && !number; k++) {
        shms_kind *kind = &w->kinds.table[k];
        if (!shms_kind_named(kind)) { /* the first word last, which says that there is a name */
            shms_set(&kind->name[1], words[1]);
            shms_set(&kind->name[2], words[2]);
            atomic_store_explicit(&kind->name[0], words[0], memory_order_release);
        }
        bool same = true;
        for (int i = 0; i < 3; i++)
            same &= shms_get(&kind->name[i]) == words[i];
        number = same ? k : 0;
    }
    return shms_writer_leave(w, number);
}

int shms_writer_quota(shms_writer *w, uint32_t number, uint64_t quota) {
    int rc = shms_writer_enter_to_place(w); /* no put is choosing from the lists */
    if (rc)
        return rc;
    if (number == 0 || number >= SHMS_KINDS || !shms_kind_named(&w->kinds.table[number])) {
        rc = SHMS_EINVAL;
    } else {
        shms_word *word = &w->kinds.table[number].quota;
        uint64_t before = shms_get(word);
        w->refused_at = 0;
        shms_room_made(w);
        shms_set(word, quota);
        if ((rc = shms_kinds_build(&w->kinds, (uint32_t)w->seg.layout.max_objects, &w->heap_bytes)))
            shms_set(word, before);
    }
    return shms_writer_leave_place(w, rc);
}

int shms_writer_kinds(shms_writer *w, shms_kind_info *out) {
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    shms_settle(w);
    for (int k = 0; k < SHMS_KINDS; k++)
        shms_kind_read(&w->kinds.table[k], &out[k]);
    return shms_writer_leave(w, SHMS_OK);
}

/* Checks what the writer writes. The tables of ranks are the inspector's to check, because a rank may spoil its own. */
static int check(struct shms_writer *w) {
    const shms_layout *l = &w->seg.layout;
    uint32_t n = (uint32_t)l->max_objects, live = 0, occupied = 0;
    uint64_t used = 0;
    int rc;
    if ((rc = shms_slots_valid(w->seg.slots, n, l->capacity, shms_get(&w->seg.writer->next_id))) ||
        (rc = shms_ring_valid(&w->ring, n)) || (rc = shms_index_valid(&w->index)) ||
        (rc = shms_leases_valid(&w->leases, w->seg.slots, w->leased)) || (rc = shms_kinds_valid(&w->kinds, n)))
        return rc;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t state = shms_get(&w->seg.slots[i].state);
        if (state == SHMS_FREE)
            continue;
        occupied++;
        live += state == SHMS_LIVE;
        used += shms_span(shms_get(&w->seg.slots[i].length));
        if (state == SHMS_EVICTING)
            return SHMS_ECORRUPT; /* EVICTING lasts only while the mutex is held */
    }
    return occupied == w->ring.count && occupied + w->n_free_slots == n && occupied - live == w->unfinished &&
                   live == shms_get(&w->seg.writer->objects) && used == shms_get(&w->seg.writer->used_bytes)
               ? SHMS_OK
               : SHMS_ECORRUPT;
}

int shms_writer_valid(shms_writer *w) {
    int rc = shms_writer_enter_to_place(w); /* no put is in the middle of an eviction */
    if (rc)
        return rc;
    return shms_writer_leave_place(w, check(w));
}
