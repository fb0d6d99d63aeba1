/*
 * slots.h - the slot table: one entry an object, written by the writer, read by everybody.
 *
 * A slot goes FREE -> WRITING (P1) -> LIVE (P4) -> EVICTING (W2) -> FREE (W4), or back from EVICTING to LIVE where a
 * reader was faster.  The id is written before the LIVE that it belongs to and ids are never reused, so whoever sees
 * LIVE and then the expected id has seen that object alive, whatever happened in between.
 *
 * Orders: the state is written and read sequentially consistent where it takes part in the handshake with pins (P4,
 * W2, W4 here; R2 in readers.h).  The other words are published by P4 and need no order of their own.
 */
#ifndef SHMS_SLOTS_H
#define SHMS_SLOTS_H

#include <stdbool.h>

#include "layout.h"

#define SHMS_NONE UINT32_MAX /* no slot, no entry */

static inline uint64_t shms_get(const shms_word *w) { return atomic_load_explicit(w, memory_order_relaxed); }
static inline void shms_set(shms_word *w, uint64_t v) { atomic_store_explicit(w, v, memory_order_relaxed); }
static inline void shms_add(shms_word *w, uint64_t v) { shms_set(w, shms_get(w) + v); } /* one writer: no RMW */

static inline uint64_t shms_slot_end(const shms_slot *s) {
    return shms_get(&s->offset) + shms_span(shms_get(&s->length));
}
static inline uint32_t shms_slot_key_len(const shms_slot *s) { return (uint32_t)shms_get(&s->head); }
static inline uint32_t shms_slot_meta_len(const shms_slot *s) { return (uint32_t)(shms_get(&s->head) >> 32); }

static inline bool shms_slot_deleted(const shms_slot *s) { return shms_get(&s->flags) & SHMS_SLOT_DELETED; }
/* Are these flags that this build writes?  No checksum: an upper half of zero. */
static inline bool shms_slot_flags_valid(uint64_t flags) {
    return (uint32_t)flags <= (SHMS_SLOT_DELETED | SHMS_SLOT_CHECKED) &&
           (flags & SHMS_SLOT_CHECKED || flags >> SHMS_SLOT_CRC_SHIFT == 0);
}

/* Do the slot's lengths stay inside the data region, and inside each other?  For whoever does not trust the writer. */
bool shms_slot_bounded(const shms_slot *s, uint64_t capacity);

/* No two objects overlap, all are bounded, no id twice or from the future.  Takes heap memory for a sort. */
int shms_slots_valid(const shms_slot *slots, uint32_t n, uint64_t capacity, uint64_t next_id);

/* The occupied slots (not FREE) in address order, in `out` with room for n; returns how many. */
uint32_t shms_slots_sorted(const shms_slot *slots, uint32_t n, uint32_t *out);

#endif
