/*
 * ring.h - which bytes of the data region are whose, in address order, and where the hand goes next.
 *
 *        0                                            hand                                  capacity
 *        |  obj  |  obj  |......gap......| held |..gap..|   obj   | obj |.......gap...........|
 *                                                       ^ searches start here and only move forward
 *
 * A search walks the gaps and objects from the hand on.  A *run* is a stretch of gaps and objects that may go; it ends
 * at an object that is held (stepped over, left in place) and at the end of the region.  The first run that is long
 * enough is the answer, and only so many of its objects go as the new one needs.  The first lap also steps over what
 * was used since the hand last came by (CLOCK's second chance); the second does not.  Two laps without a run: full.
 *
 * The search changes nothing, so a refusal leaves everything as it was.  Private memory of the writer throughout.
 */
#ifndef SHMS_RING_H
#define SHMS_RING_H

#include "slots.h"

typedef struct shms_ring {
    const shms_slot *slots;
    uint32_t *next, *prev; /* per slot, in address order; SHMS_NONE at the ends */
    uint8_t *used;         /* per slot: asked for since the hand came by */
    uint32_t first, last;
    uint32_t hand_next; /* the first object at or behind the hand; SHMS_NONE: none before the end */
    uint32_t count;
    uint64_t hand;
    uint64_t capacity;
    bool fifo;
} shms_ring;

/* Space for an object, and what must go first: `victims` objects from `first` on, and `extra` (for its slot only). */
typedef struct shms_place {
    uint64_t at;
    uint32_t first, victims;
    uint32_t extra;
    uint32_t behind; /* the neighbour behind the place */
    uint32_t passed; /* objects that stay, between the hand and the place: they lose their second chance */
} shms_place;

uint64_t shms_ring_memory(uint32_t n_slots);
/* `order`: the occupied slots in address order, as of shms_slots_sorted. */
void shms_ring_init(shms_ring *r, void *memory, uint32_t n_slots, const shms_slot *slots, uint64_t capacity, bool fifo,
                    uint64_t hand, const uint32_t *order, uint32_t count);
/* Finds `span` bytes.  may_go(context, slot) says whether nobody holds it.  `need_slot`: no slot is free, so that at
 * least one object must go whatever the gaps are.  false: full. */
bool shms_ring_find(const shms_ring *r, uint64_t span, bool need_slot, bool (*may_go)(void *, uint32_t), void *context,
                    shms_place *out);
/* After the victims have been removed: enters `slot`, whose offset and length are set, and moves the hand behind it. */
void shms_ring_insert(shms_ring *r, const shms_place *place, uint32_t slot);
void shms_ring_remove(shms_ring *r, uint32_t slot);
int shms_ring_valid(const shms_ring *r, uint32_t n_slots);

#endif
