/*
 * adopt.c - see adopt.h. Only what leases pins, because the owner takes what is pinned for held.
 */
#include "adopt.h"

#include "find.h"
#include "hand.h"
#include "monitor.h"
#include "step.h"

#define SCAN_AT_ONCE 256 /* slots between two yields of the mutex */
#define SCAN_EACH_CALL 8

static bool has_others(const struct shms_writer *w) { return w->seg.layout.n_writers > 1; }

/* J1, J2 */
static void let_go(const shms_segment *seg) {
    shms_holds *row = shms_holds_row(seg);
    uint32_t slots = shms_all_slots(&seg->layout);
    uint64_t pinned = shms_get(&seg->writer->adopting) - 1;
    SHMS_STEP("J1"); /* pairs with W3h */
    atomic_store_explicit(&seg->writer->adopting, 0, memory_order_release);
    if (pinned < slots)
        shms_holds_count(seg, (uint32_t)pinned);
    for (uint32_t s = 0; s < slots; s++)
        if (atomic_load_explicit(&row[s].first, memory_order_relaxed)) {
            SHMS_STEP("J2"); /* pairs with W3f */
            atomic_store_explicit(&row[s].first, 0, memory_order_release);
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
    SHMS_STEP("B4"); /* release: pairs with W3f, which reads the entry behind it */
    atomic_store_explicit(first, entry + 1, memory_order_release);
    shms_holds_unpin(seg, slot);
    return true;
}

void shms_holds_begin(const shms_segment *seg, bool keep) {
    if (seg->layout.n_writers == 1)
        return;
    let_go(seg);
    bool patient = true;
    for (uint32_t e = 0; keep && e < seg->layout.max_leases; e++) {
        shms_word *number = &seg->leases[e].number;
        if (shms_get(number) == 0 || shms_is_own(seg, shms_lease_slot(shms_get(&seg->leases[e].what))) ||
            open_again(seg, e, &patient))
            continue;
        SHMS_STEP("V3");
        atomic_store_explicit(number, 0, memory_order_release);
    }
}

static void pin(const shms_segment *seg, uint32_t slot) {
    SHMS_STEP("B1"); /* pairs with W3h */
    atomic_store_explicit(&seg->writer->adopting, slot + 1, memory_order_seq_cst);
}

bool shms_holds_pin(const shms_segment *seg, uint32_t slot, uint64_t id) {
    const shms_slot *s = shms_segment_slot(seg, slot);
    pin(seg, slot);
    SHMS_STEP("B2a"); /* pairs with W2 */
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
    SHMS_STEP("B5"); /* pairs with W3h: who misses the pin sees what B4 has stored */
    atomic_store_explicit(&seg->writer->adopting, 0, memory_order_release);
    shms_holds_count(seg, slot);
}

uint32_t shms_look_remote(struct shms_writer *w, uint64_t hash, const char *key, uint32_t key_len, shms_slot *seen) {
    return has_others(w) ? shms_find_key(&w->seg, &w->index, w->seg.arena, hash, key, key_len, seen) : SHMS_NONE;
}

bool shms_adopt(struct shms_writer *w, uint32_t slot, uint64_t id, uint32_t entry, uint32_t group, bool hold,
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
    if (!has_others(w))
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
    return shms_adopt(w, slot, shms_get(&seen.id), entry, 0, true, out);
}

void shms_use_remote(struct shms_writer *w, uint32_t slot) {
    atomic_store_explicit(&shms_holds_row(&w->seg)[slot].used, shms_slot_mark(shms_segment_slot(&w->seg, slot)),
                          memory_order_relaxed);
}

static bool has_mark(struct shms_writer *w, uint32_t slot, uint32_t mark) {
    for (uint32_t r = 0; r < w->seg.layout.n_readers; r++)
        if (atomic_load_explicit(shms_pin_of(w, r, slot), memory_order_relaxed) >> SHMS_PIN_MARK_SHIFT == mark)
            return true;
    for (uint32_t o = 0; has_others(w) && o < w->seg.layout.n_writers; o++)
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

/* Marks the object if its key matches: the mark is for an id, which all who read it compare. So an object in EVICTING,
 * which may stay, is marked, too. */
static bool drop_if(struct shms_writer *w, uint32_t slot, const char *key, uint32_t key_len, bool whole) {
    shms_slot seen;
    if (!shms_matches(&w->seg, slot, key, key_len, whole, &seen))
        return false;
    shms_writer_table *t = w->seg.writer;
    uint64_t drops = shms_get(&t->drops);
    /* release: an owner that reads it in place of an older one then sees the count before it, and scans */
    atomic_store_explicit(&t->dropped_at[drops % SHMS_DROPS], slot, memory_order_release);
    shms_set(&shms_holds_row(&w->seg)[slot].dropped, shms_get(&seen.id));
    SHMS_STEP("D2"); /* after the slot and the id; pairs with D3 */
    atomic_store_explicit(&t->drops, drops + 1, memory_order_release);
    return true;
}

bool shms_drop_remote(struct shms_writer *w, uint64_t hash, const char *key, uint32_t key_len) {
    bool any = false;
    if (!has_others(w))
        return false;
    shms_lookup l = shms_find_begin(&w->seg, &w->index, w->seg.arena, hash);
    for (uint32_t slot; (slot = shms_find_next(&l)) != SHMS_NONE;)
        any |= drop_if(w, slot, key, key_len, true);
    return any;
}

void shms_drop_all_remote(struct shms_writer *w, const char *prefix, uint32_t prefix_len) {
    for (uint32_t s = 0; has_others(w) && s < shms_all_slots(&w->seg.layout) && !w->closed; s++) {
        if (!shms_is_own(&w->seg, s))
            drop_if(w, s, prefix, prefix_len, false);
        if (s % SCAN_AT_ONCE == SCAN_AT_ONCE - 1)
            shms_writer_yield(w);
    }
}

static bool delete_if_dropped(struct shms_writer *w, uint32_t slot) {
    const shms_slot *s = shms_writer_slot(w, slot);
    if (shms_get(&s->state) != SHMS_LIVE || shms_slot_deleted(s) ||
        !shms_dropped(&w->seg, shms_writer_global(w, slot), shms_get(&s->id)))
        return false;
    shms_delete_slot(w, slot);
    return true;
}

uint32_t shms_find(struct shms_writer *w, uint64_t hash, const char *key, uint32_t key_len) {
    uint32_t slot = shms_index_find(&w->index, hash, key, key_len);
    if (slot == SHMS_NONE || slot >= w->scan_left)
        return slot;
    shms_reclaim_begin(w);
    return delete_if_dropped(w, slot) ? SHMS_NONE : slot;
}

uint32_t shms_find_live(struct shms_writer *w, uint64_t hash, const char *key, uint32_t key_len) {
    uint32_t slot = shms_find(w, hash, key, key_len);
    return slot != SHMS_NONE && shms_get(&shms_writer_slot(w, slot)->state) == SHMS_LIVE ? slot : SHMS_NONE;
}

static void scan(struct shms_writer *w, uint32_t slots) {
    for (; slots && w->scan_left; slots--)
        delete_if_dropped(w, --w->scan_left);
}

void shms_delete_dropped(struct shms_writer *w) {
    for (uint32_t o = 0; o < w->seg.layout.n_writers; o++) {
        const shms_writer_table *t = shms_segment_writer(&w->seg, o);
        SHMS_STEP("D3"); /* pairs with D2 */
        uint64_t drops = atomic_load_explicit(&t->drops, memory_order_acquire), seen = w->drops_seen[o];
        if (o == w->seg.arena || drops == seen)
            continue;
        w->drops_seen[o] = drops;
        shms_reclaim_begin(w);
        for (uint64_t n = seen; drops - seen < SHMS_DROPS && n < drops; n++) {
            uint32_t slot =
                atomic_load_explicit(&t->dropped_at[n % SHMS_DROPS], memory_order_relaxed) - shms_writer_global(w, 0);
            if (slot < w->seg.layout.max_objects)
                delete_if_dropped(w, slot);
        }
        atomic_thread_fence(memory_order_acquire); /* after a newer cell, the count that came before it */
        if (shms_get(&t->drops) - seen >= SHMS_DROPS)
            w->scan_left = (uint32_t)w->seg.layout.max_objects;
    }
    if (w->scan_left) {
        shms_reclaim_begin(w);
        scan(w, SCAN_EACH_CALL);
    }
}

int shms_delete_all_dropped(struct shms_writer *w) {
    shms_reclaim_begin(w);
    for (uint32_t s = w->scan_left; s-- > 0;) { /* once, however often another thread falls behind meanwhile */
        delete_if_dropped(w, s);
        if (w->scan_left == s + 1)
            w->scan_left = s;
        if (s % SCAN_AT_ONCE == 0 && shms_reclaim_yield(w) && w->closed)
            return SHMS_ECLOSED;
    }
    return SHMS_OK;
}
