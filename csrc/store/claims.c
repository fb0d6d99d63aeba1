/*
 * claims.c - see claims.h.
 */
#include "claims.h"

#include "outlast.h"
#include "step.h"

void shms_claims_begin(const shms_segment *seg) {
    shms_claim *row = shms_claims(seg);
    if (seg->layout.n_writers == 1)
        return;
    uint32_t slots = shms_all_slots(&seg->layout);
    uint64_t pinned = shms_get(&seg->writer->adopting) - 1;
    SHMS_STEP("J1"); /* pairs with W3h */
    atomic_store_explicit(&seg->writer->adopting, 0, memory_order_release);
    if (pinned < slots)
        shms_claims_count(seg, (uint32_t)pinned);
    for (uint32_t s = 0; s < slots; s++)
        if (atomic_load_explicit(&row[s].first, memory_order_relaxed)) {
            SHMS_STEP("J2"); /* pairs with W3f */
            atomic_store_explicit(&row[s].first, 0, memory_order_release);
            shms_claims_count(seg, s);
        }
}

bool shms_claims_pin(const shms_segment *seg, uint32_t slot) {
    const shms_slot *s = shms_segment_slot(seg, slot);
    SHMS_STEP("B1"); /* pairs with W3h */
    atomic_store_explicit(&seg->writer->adopting, slot + 1, memory_order_seq_cst);
    SHMS_STEP("B2a"); /* pairs with W2 */
    if (atomic_load_explicit(&s->state, memory_order_seq_cst) == SHMS_LIVE)
        return true;
    shms_claims_unpin(seg, slot);
    return false;
}

int shms_claims_pin_again(const shms_segment *seg, uint32_t slot, uint64_t id) {
    SHMS_STEP("B1"); /* pairs with W3h */
    atomic_store_explicit(&seg->writer->adopting, slot + 1, memory_order_seq_cst);
    int rc = shms_outlast_eviction(seg, slot, id);
    if (rc == SHMS_OK)
        return 1;
    shms_claims_unpin(seg, slot);
    return rc == SHMS_EBUSY ? rc : 0;
}

void shms_claims_unpin(const shms_segment *seg, uint32_t slot) {
    SHMS_STEP("B5"); /* pairs with W3h: who misses the pin sees what B4 has stored */
    atomic_store_explicit(&seg->writer->adopting, 0, memory_order_release);
    shms_claims_count(seg, slot);
}

/* As shms_reader_table_unpin_vain: if the slot has another object by now, its owner has marked the zone of this one. */
void shms_claims_count(const shms_segment *seg, uint32_t slot) {
    const shms_layout *l = &seg->layout;
    atomic_thread_fence(memory_order_seq_cst);
    uint64_t offset = shms_get(&shms_segment_slot(seg, slot)->offset);
    shms_word *counts = shms_segment_at(seg, l->counts_at, seg->arena), *total = &seg->writer->releases;
    if (offset < l->capacity) {
        shms_word *zone = &counts[shms_arena_of(l, slot) * shms_n_zones(l) + shms_zone_of(l, offset)];
        atomic_store_explicit(zone, shms_get(zone) + 1, memory_order_release);
    }
    atomic_store_explicit(total, shms_get(total) + 1, memory_order_release);
}
