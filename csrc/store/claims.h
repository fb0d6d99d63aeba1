/*
 * claims.h - what a writer does with objects of other writers: it finds them, pins them and opens leases on them.
 *
 * The writer never waits for the owner of an object, and the owner never for it. Both write words of their own:
 *
 * - B1, B5: `adopting` in the writer table names the one slot that this writer has pinned; its mutex is held meanwhile.
 *   The owner reads it behind W2 (W3h), as it reads the pins of ranks: either the owner sees the pin, or B2 sees
 *   EVICTING (readers.h has the argument).
 * - B4: a lease on another's object is an entry of this writer's table, in a list that begins at `first` in its row of
 *   claims. It is published before B5. So an owner that has missed the pin sees the lease (W3f).
 * - `uses` and `dropped` in the row tell the owner what this writer would do with an object of its own. Other writers
 *   read `dropped`, too, so a deletion does not wait for an owner that is idle or dead.
 *
 * Slots have their numbers of all arenas here.
 */
#ifndef SHMS_CLAIMS_H
#define SHMS_CLAIMS_H

#include "segment.h"
#include "slots.h"

/* The row of this writer. Only stores with more than one writer have rows. */
static inline shms_claim *shms_claims(const shms_segment *seg) { return shms_segment_claims(seg, seg->arena); }
static inline bool shms_is_own(const shms_segment *seg, uint32_t slot) {
    return shms_arena_of(&seg->layout, slot) == seg->arena;
}

/* J1, J2: a new process ends what its predecessor had pinned and leased, and counts that. Whatever it does before, the
 * owners are refused for what the dead held, because a writer with that lock lives again. */
void shms_claims_begin(const shms_segment *seg);
/* B1, B2: pins the object of another writer, if it is LIVE. An object in EVICTING is a miss, without a wait. */
bool shms_claims_pin(const shms_segment *seg, uint32_t slot);
/* The same for an object that this writer has leased, which the owner may be asking about: waits until it has decided.
 * 1: pinned. 0: it is gone. SHMS_EBUSY: the owner was stopped meanwhile. */
int shms_claims_pin_again(const shms_segment *seg, uint32_t slot, uint64_t id);
/* B5; also for a pin that missed. */
void shms_claims_unpin(const shms_segment *seg, uint32_t slot);
/* Counts that this writer has let go of something, after it has; the owner polls the counts before it surveys. */
void shms_claims_count(const shms_segment *seg, uint32_t slot);

#endif
