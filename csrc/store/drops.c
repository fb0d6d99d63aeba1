/* drops.c - see drops.h. */
#include "drops.h"

#include "directory.h"
#include "find.h"
#include "holders.h"
#include "monitor.h"
#include "reclaim.h"
#include "step.h"

#define SCAN_AT_ONCE 256 /* slots between two yields of the mutex */
#define SCAN_EACH_CALL 8

/* Marks the object if its key matches: the mark is for an id, which whoever reads it compares. So an object in EVICTING,
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
    SHMS_STEP("D2"); /* after the slot and the id; pairs with D3, which reads them once it sees the count */
    atomic_store_explicit(&t->drops, drops + 1, memory_order_release);
    return true;
}

bool shms_drop_remote(struct shms_writer *w, uint64_t hash, const char *key, uint32_t key_len) {
    bool any = false;
    if (!shms_has_others(w))
        return false;
    shms_lookup l = shms_find_begin(&w->seg, &w->index, w->seg.arena, hash);
    for (uint32_t slot; (slot = shms_find_next(&l)) != SHMS_NONE;)
        any |= drop_if(w, slot, key, key_len, true);
    return any;
}

void shms_drop_all_remote(struct shms_writer *w, const char *prefix, uint32_t prefix_len) {
    for (uint32_t s = 0; shms_has_others(w) && s < shms_all_slots(&w->seg.layout) && !w->closed; s++) {
        if (!shms_is_own(&w->seg, s))
            drop_if(w, s, prefix, prefix_len, false);
        if (s % SCAN_AT_ONCE == SCAN_AT_ONCE - 1)
            shms_writer_yield(w);
    }
}

static void delete_if_dropped(struct shms_writer *w, uint32_t slot) {
    if (shms_is_dropped(w, slot))
        shms_delete_slot(w, slot);
}

void shms_delete_dropped_key(struct shms_writer *w, uint64_t hash, const char *key, uint32_t key_len) {
    uint32_t slot = w->scan_left ? shms_index_find(&w->index, hash, key, key_len) : SHMS_NONE;
    if (slot < w->scan_left) {
        shms_reclaim_begin(w);
        delete_if_dropped(w, slot);
    }
}

static void scan(struct shms_writer *w, uint32_t slots) {
    for (; slots && w->scan_left; slots--)
        delete_if_dropped(w, --w->scan_left);
}

void shms_delete_dropped(struct shms_writer *w) {
    for (uint32_t o = 0; o < w->seg.layout.n_writers; o++) {
        const shms_writer_table *t = shms_segment_writer(&w->seg, o);
        SHMS_STEP("D3"); /* pairs with D2: whoever sees the count sees what was dropped */
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

/* Goes through the rest of the scan at once. It may yield the mutex: SHMS_ECLOSED */
static int delete_all_dropped(struct shms_writer *w) {
    shms_reclaim_begin(w);
    for (uint32_t s = w->scan_left; s-- > 0;) { /* once, even if another thread begins a new scan meanwhile */
        delete_if_dropped(w, s);
        if (w->scan_left == s + 1)
            w->scan_left = s;
        if (s % SCAN_AT_ONCE == 0 && shms_reclaim_yield(w) && w->closed)
            return SHMS_ECLOSED;
    }
    return SHMS_OK;
}

int shms_writer_enter_with_key(struct shms_writer *w, const char *key, uint32_t key_len) {
    int rc = shms_key_ok(key, key_len);
    if (rc || (rc = shms_writer_enter(w)))
        return rc;
    shms_settle(w);
    return SHMS_OK;
}

int shms_writer_enter_to_list(struct shms_writer *w) {
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    shms_settle(w);
    rc = delete_all_dropped(w);
    return rc ? shms_writer_leave(w, rc) : SHMS_OK;
}
