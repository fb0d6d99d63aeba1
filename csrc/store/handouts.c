/*
 * handouts.c - hands out references, which opens leases; ends leases, and retires ranks.
 */
#include <string.h>

#include "step.h"
#include "writer.h"

#define COPY_AT_ONCE 65536 /* bytes between two yields of the mutex */

void shms_hand_out(struct shms_writer *w, uint32_t slot, uint32_t entry, bool hold, uint8_t *out) {
    shms_slot *s = shms_writer_slot(w, slot);
    shms_ref ref = {.store = (uint32_t)w->seg.sb->store,
                    .slot = slot,
                    .entry = entry,
                    .address = shms_get(&s->offset),
                    .id = shms_get(&s->id)};
    ref.lease = shms_leases_open(&w->leases, entry, slot, ref.id, shms_now_ns());
    if (hold)
        shms_leases_hold(&w->leases, entry);
    shms_ref_seal(out, &ref, w->seg.sb->secret, shms_get(&s->secret));
    shms_reclaim_leases(w);
}

int shms_hit(struct shms_writer *w, const char *key, uint32_t key_len, bool hold, uint8_t *out, shms_refusal *why) {
    int rc = shms_writer_enter_with_key(w, key, key_len);
    if (rc)
        return rc;
    uint32_t slot = shms_find_live(w, key, key_len);
    if (slot == SHMS_NONE) {
        shms_count(w, SHMS_C_MISSES, 1);
        return shms_writer_leave(w, SHMS_ENOTFOUND);
    }
    if (!shms_writer_has_numbers(w))
        return shms_writer_leave(w, SHMS_ECORRUPT);
    shms_reclaim_begin(w);
    uint32_t entry = shms_reclaim_lease(w);
    if (entry == SHMS_NONE) {
        rc = w->closed ? SHMS_ECLOSED : SHMS_ENOLEASE;
        shms_writer_refused(w, rc, why);
        return shms_writer_leave(w, rc);
    }
    shms_ring_use(&w->ring, slot);
    shms_count(w, SHMS_C_HITS, 1);
    shms_hand_out(w, slot, entry, hold, out);
    return shms_writer_leave(w, SHMS_OK);
}

int shms_writer_hit(shms_writer *w, const char *key, uint32_t key_len, uint8_t *out) {
    return shms_hit(w, key, key_len, false, out, NULL);
}

int shms_writer_has(shms_writer *w, const char *key, uint32_t key_len) {
    int rc = shms_writer_enter_with_key(w, key, key_len);
    if (rc)
        return rc;
    uint32_t slot = shms_find_live(w, key, key_len);
    return shms_writer_leave(w, slot == SHMS_NONE ? 0 : shms_slot_extra_len(shms_writer_slot(w, slot)) ? 2 : 1);
}

int shms_writer_touch(shms_writer *w, const char *key, uint32_t key_len) {
    int rc = shms_writer_enter_with_key(w, key, key_len);
    if (rc)
        return rc;
    uint32_t slot = shms_find_live(w, key, key_len);
    if (slot != SHMS_NONE)
        shms_ring_use(&w->ring, slot);
    return shms_writer_leave(w, slot != SHMS_NONE);
}

void shms_end_lease(struct shms_writer *w, uint32_t slot, uint32_t entry) {
    shms_leases_close(&w->leases, entry);
    shms_zones_stale_slot(&w->zones, slot);
    shms_count(w, SHMS_C_CANCELS, 1);
}

/* 1: the object is here, and `ref` is what the writer packed. 0: it is gone, and its leases went before it. Or an error. */
static int find_ref(struct shms_writer *w, const uint8_t *packed, shms_ref *ref) {
    int rc = shms_ref_read(ref, packed, w->seg.sb, &w->seg.layout);
    if (rc)
        return rc;
    const shms_slot *s = shms_writer_slot(w, ref->slot);
    if (shms_get(&s->state) == SHMS_FREE || shms_get(&s->id) != ref->id)
        return 0;
    return shms_ref_sealed(packed, w->seg.sb->secret, shms_get(&s->secret)) ? 1 : SHMS_ESTALE;
}

/* The same for a lease: 0 also if it has ended. */
static int find_lease(struct shms_writer *w, const uint8_t *packed, shms_ref *ref) {
    int found = find_ref(w, packed, ref);
    return found == 1 ? shms_get(&w->leases.table[ref->entry].number) == ref->lease : found;
}

int shms_writer_cancel(shms_writer *w, const uint8_t *packed) {
    shms_ref ref;
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    if ((rc = find_lease(w, packed, &ref)) == 1)
        shms_end_lease(w, ref.slot, ref.entry);
    return shms_writer_leave(w, rc);
}

int shms_writer_hold(shms_writer *w, const uint8_t *packed) {
    shms_ref ref;
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    if ((rc = find_lease(w, packed, &ref)) == 1)
        shms_leases_hold(&w->leases, ref.entry);
    return shms_writer_leave(w, rc);
}

int shms_writer_validate(shms_writer *w, const uint8_t *packed, const char *key, uint32_t key_len) {
    shms_ref ref;
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    if ((rc = find_ref(w, packed, &ref)) == 1 && key) {
        const shms_slot *s = shms_writer_slot(w, ref.slot);
        rc = shms_slot_key_len(s) == key_len && memcmp(w->seg.data + shms_get(&s->offset), key, key_len) == 0;
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
        const shms_slot *s = shms_writer_slot(w, ref.slot);
        uint64_t length = shms_slot_extra_len(s), n = length - at < COPY_AT_ONCE ? length - at : COPY_AT_ONCE;
        *size = length;
        if (at >= length || length > room)
            return shms_writer_leave(w, SHMS_OK);
        memcpy(out + at, w->seg.data + shms_get(&s->offset) + shms_get(&s->length) - length + at, n);
        if (shms_writer_yield(w) && w->closed)
            return shms_writer_leave(w, SHMS_ECLOSED);
    }
}

int64_t shms_writer_cancel_all(shms_writer *w) {
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    int64_t ended = 0;
    for (uint32_t e = 0; e < w->leases.n_entries; e++)
        if (shms_get(&w->leases.table[e].number)) {
            shms_leases_close(&w->leases, e);
            ended++;
        }
    shms_count(w, SHMS_C_CANCELS, (uint64_t)ended);
    shms_zones_stale_all(&w->zones);
    pthread_mutex_unlock(&w->mutex);
    return ended;
}

int shms_writer_retire(shms_writer *w, uint32_t rank) {
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    if (rank >= w->seg.layout.n_readers)
        return shms_writer_leave(w, SHMS_EINVAL);
    shms_word *epoch = &shms_segment_reader(&w->seg, rank)->epoch;
    uint64_t seen;
    do { /* a rank that attaches meanwhile sees the retirement (A4), or T2 sees it and retires its new epoch */
        seen = atomic_load_explicit(epoch, memory_order_seq_cst);
        SHMS_STEP("T1"); /* pairs with A4 */
        atomic_store_explicit(&w->seg.sb->retired[rank], seen + 1, memory_order_seq_cst);
        SHMS_STEP("T2"); /* pairs with A3 */
    } while (atomic_load_explicit(epoch, memory_order_seq_cst) != seen);
    return shms_writer_leave(w, SHMS_OK);
}
