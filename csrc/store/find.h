/*
 * find.h - look-ups by key in the published indexes of the arenas (index.h): for writers, and for ranks.
 *
 * What an index leads to is a candidate. Its key is compared without a pin: the object was there if it was whole, with
 * the same id, before and after. An id is never used again. So whoever then pins that id (R1 and R2, or B1 and B2) has the
 * object of that key.
 *
 * Slots have their numbers of all arenas here.
 */
#ifndef SHMS_FIND_H
#define SHMS_FIND_H

#include "index.h"
#include "segment.h"

/* A look-up that has not ended. */
typedef struct shms_lookup {
    const shms_segment *seg;
    const shms_index *index;
    uint64_t hash;
    uint32_t without, arena;
    shms_candidates in_arena;
} shms_lookup;

/* Begins to look for a hash in all arenas `without` one, or SHMS_NONE. The index has the seed and number of slots of all. */
shms_lookup shms_find_begin(const shms_segment *seg, const shms_index *index, uint32_t without, uint64_t hash);
/* The next slot whose tag fits, or SHMS_NONE. */
uint32_t shms_find_next(shms_lookup *l);
/* The slot of an object of this key that is LIVE and may be handed out, and its words in `seen`; or SHMS_NONE. */
uint32_t shms_find_key(const shms_segment *seg, const shms_index *index, uint32_t without, uint64_t hash,
                       const char *key, uint32_t key_len, shms_slot *seen);

/* The bytes of an object without a pin, and its words in `seen`, as checked; or NULL. It may be evicted meanwhile. So what was
 * read counts only if it is still there afterwards: its bytes are reused only after FREE (W4). */
const uint8_t *shms_object_of(const shms_segment *seg, uint32_t slot, shms_slot *seen);
bool shms_still_there(const shms_segment *seg, uint32_t slot, uint64_t id);
/* Has any writer dropped the object? Its owner may be dead or idle, so nobody waits for its next call. */
bool shms_dropped(const shms_segment *seg, uint32_t slot, uint64_t id);
/* Is the object in `slot` one to hand out, with this key, or one that begins so? It may be in EVICTING. */
bool shms_matches(const shms_segment *seg, uint32_t slot, const char *key, uint32_t key_len, bool whole,
                  shms_slot *seen);

#endif
