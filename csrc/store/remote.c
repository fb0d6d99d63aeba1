/*
 * remote.c - see remote.h. Only what leases pins, because the owner takes what is pinned for held.
 */
#include "remote.h"

#include "directory.h"
#include "find.h"
#include "hand.h"
#include "holders.h"
#include "reclaim.h"
#include "step.h"

/* J1, J2 */
static void release_all(const shms_segment *seg) {
    shms_holds *row = shms_holds_row(seg);
    uint32_t slots = shms_all_slots(&seg->layout);
    uint64_t pinned = shms_get(&seg->writer->pinning) - 1;
    SHMS_STEP("J1"); /* pairs with W3h: else the owner takes the dead pin for a living one */
    shms_set(&seg->writer->pinning, 0);
    if (pinned < slots)
        shms_holds_count(seg, (uint32_t)pinned);
    for (uint32_t s = 0; s < slots; s++)
        if (atomic_load_explicit(&row[s].first, memory_order_relaxed)) {
            SHMS_STEP("J2"); /* pairs with W3f: the same for the dead leases */
            atomic_store_explicit(&row[s].first, 0, memory_order_relaxed);
            shms_holds_count(seg, s);
        }
    SHMS_STEP("D2"); /* once more: the predecessor may have died before it */
    atomic_store_explicit(&seg->writer->drops, shms_get(&seg->writer->drops) + 1, memory_order_release);
}

/* Opens a lease on another's object again, if that is still there. Nobody was promised anything from the death on, so the
 * owner may have reclaimed it; from B1 on it may not. One owner that was stopped is waited for, and no second one. */
static bool open_again(const shms_segment *seg, uint32_t entry, bool *patient) {
    shms_lease *e = &seg->leases[entry];
    uint64_t what = shms_get(&e->what);
    uint32_t slot = shms_lease_slot(what);
    if (shms_get(&e->number) >= shms_get(&seg->writer->published) || slot >= shms_all_slots(&seg->layout))
        return false;
    uint64_t id = shms_get(&e->id);
    int pinned = shms_holds_pin_again(seg, slot, id, *patient);
    *patient &= pinned != SHMS_EBUSY;
    if (pinned != 1)
        return false;
    _Atomic uint32_t *first = &shms_holds_row(seg)[slot].first;
    shms_set(&e->what, shms_lease_with_next(what, atomic_load_explicit(first, memory_order_relaxed)));
    SHMS_STEP("B4"); /* release: pairs with W3f, which reads the entry that `first` names */
    atomic_store_explicit(first, entry + 1, memory_order_release);
    shms_holds_unpin(seg, slot);
    return true;
}

void shms_holds_begin(const shms_segment *seg, bool keep) {
    if (seg->layout.n_writers == 1)
        return;
    release_all(seg);
    bool patient = true;
    for (uint32_t e = 0; keep && e < seg->layout.max_leases; e++) {
        shms_word *number = &seg->leases[e].number;
        if (shms_get(number) == 0 || shms_is_own(seg, shms_lease_slot(shms_get(&seg->leases[e].what))) ||
            open_again(seg, e, &patient))
            continue;
        SHMS_STEP("V3"); /* its object was evicted, or the lease is not to be kept */
        shms_set(number, 0);
    }
}

static void pin(const shms_segment *seg, uint32_t slot) {
    SHMS_STEP("B1"); /* pairs with W3h: before B2a, as R1 is before R2a */
    atomic_store_explicit(&seg->writer->pinning, slot + 1, memory_order_seq_cst);
}

bool shms_holds_pin(const shms_segment *seg, uint32_t slot, uint64_t id) {
    const shms_slot *s = shms_segment_slot(seg, slot);
    pin(seg, slot);
    SHMS_STEP("B2a"); /* pairs with W2: not LIVE is a miss */
    if (atomic_load_explicit(&s->state, memory_order_seq_cst) == SHMS_LIVE && shms_get(&s->id) == id)
        return true;
    shms_holds_unpin(seg, slot);
    return false;
}

int shms_holds_pin_again(const shms_segment *seg, uint32_t slot, uint64_t id, bool patient) {
    pin(seg, slot);
    int rc = shms_wait_for_eviction(seg, slot, id, patient);
    if (rc == SHMS_OK)
        return 1;
    shms_holds_unpin(seg, slot);
    return rc == SHMS_EBUSY ? rc : 0;
}

void shms_holds_unpin(const shms_segment *seg, uint32_t slot) {
    SHMS_STEP("B5"); /* pairs with W3h: an owner that misses the pin sees what B4 has stored */
    atomic_store_explicit(&seg->writer->pinning, 0, memory_order_release);
    shms_holds_count(seg, slot);
}

uint32_t shms_look_remote(struct shms_writer *w, uint64_t hash, const char *key, uint32_t key_len, shms_slot *seen) {
    return shms_has_others(w) ? shms_find_key(&w->seg, &w->index, w->seg.arena, hash, key, key_len, seen) : SHMS_NONE;
}

bool shms_hit_remote(struct shms_writer *w, uint32_t slot, uint64_t id, uint32_t entry, uint32_t group, bool hold,
                     uint8_t *out) {
    if (!shms_holds_pin(&w->seg, slot, id)) {
        shms_leases_untake(&w->leases, entry);
        return false;
    }
    shms_open_lease(w, slot, entry, group, hold, out);
    shms_holds_unpin(&w->seg, slot);
    return true;
}

int shms_keep_remote(struct shms_writer *w, const char *key, uint32_t key_len, uint8_t *out) {
    shms_slot seen;
    if (!shms_has_others(w))
        return 0;
    uint64_t hash = shms_key_hash(w, key, key_len);
    uint32_t slot =
        shms_find_live(w, hash, key, key_len) == SHMS_NONE ? shms_look_remote(w, hash, key, key_len, &seen) : SHMS_NONE;
    if (slot == SHMS_NONE)
        return 0;
    shms_reclaim_begin(w);
    uint32_t entry = shms_reclaim_lease(w, &(bool){false}); /* the id is asked again under the pin */
    if (entry == SHMS_NONE)
        return w->closed ? SHMS_ECLOSED : SHMS_ENOLEASE;
    return shms_hit_remote(w, slot, shms_get(&seen.id), entry, 0, true, out);
}

void shms_use_remote(struct shms_writer *w, uint32_t slot) {
    atomic_store_explicit(&shms_holds_row(&w->seg)[slot].used, shms_slot_mark(shms_segment_slot(&w->seg, slot)),
                          memory_order_relaxed);
}

static bool has_mark(struct shms_writer *w, uint32_t slot, uint32_t mark) {
    for (uint32_t r = 0; r < w->seg.layout.n_readers; r++)
        if (atomic_load_explicit(shms_pin_of(w, r, slot), memory_order_relaxed) >> SHMS_PIN_MARK_SHIFT == mark)
            return true;
    for (uint32_t o = 0; shms_has_others(w) && o < w->seg.layout.n_writers; o++)
        if (atomic_load_explicit(&shms_segment_holds(&w->seg, o)[shms_writer_global(w, slot)].used,
                                 memory_order_relaxed) == mark)
            return true;
    return false;
}

bool shms_used_remotely(void *context, uint32_t slot) {
    struct shms_writer *w = context;
    shms_slot *s = shms_writer_slot(w, slot);
    uint32_t mark = shms_slot_mark(s);
    if (mark && !has_mark(w, slot, mark))
        return false;
    do
        mark = mark % (SHMS_MARKS - 1) + 1;
    while (has_mark(w, slot, mark));
    shms_set(&s->head, shms_slot_head(shms_slot_key_len(s), mark, shms_slot_meta_len(s)));
    return true;
}
