/*
 * ring.h - the objects of the data region in address order, and the hands of the searches.
 *
 *        0                         hand                                          split        hand    capacity
 *        |  obj  |  obj  |..gap..| held |..gap..|  obj  | obj |.......gap........|o|o|.|o|o|o|....|o|o|
 *        large objects             ^ searches start here and move forward        small objects
 *
 * Two areas. From the first small object on, the last per cent of the region is for small objects. A small object that
 * is held among large ones can cost the room of a large one. Each area has a hand, the hand of a CLOCK. A search starts
 * there, and the hand moves past the new object. An object that the hand passes loses its second chance. One list has
 * the objects of both areas in address order.
 *
 * A *run* is a stretch of gaps and of evictable objects. It ends at an object that stays. What is evictable depends on the
 * *level* of the search: nothing (gaps only), objects not used since the hand last passed, or all that nobody holds.
 *
 * This file does not know why an object stays: a callback decides. zones.h remembers the answers.
 *
 * All of this is private memory of the writer.
 */
#ifndef SHMS_RING_H
#define SHMS_RING_H

#include "slots.h"

enum shms_level { SHMS_LEVEL_FREE, SHMS_LEVEL_COLD, SHMS_LEVEL_ANY, SHMS_LEVELS };
enum shms_area_name { SHMS_LARGE, SHMS_SMALL, SHMS_AREAS };

typedef struct shms_area {
    uint64_t from, to;
    uint64_t hand;
    uint32_t hand_next; /* the first object at or after the hand, perhaps of the next area; SHMS_NONE */
    /* No gap is longer, except those at the hands. It buys a put that evicts in 0.6 us where a search for gaps in 4,096
     * zones takes 8. */
    uint64_t gap;
} shms_area;

/* A zone: 2^zone_shift bytes of the region; see zones.h. */
typedef struct shms_zone {
    uint32_t first; /* the first object that has bytes in it; SHMS_NONE */
    bool stale; /* something may have changed since its scan */
    bool moved; /* objects were added or removed since its gaps were measured */
    uint8_t lap; /* how many times a hand has passed used objects in it, 1 to 254; see shms_ring_is_used */
    bool uses; /* objects were used in this lap */
} shms_zone;

typedef bool shms_used_fn(void *context, uint32_t slot);

typedef struct shms_ring {
    const shms_slot *slots;
    uint32_t *next, *prev; /* per slot, in address order; SHMS_NONE at the ends */
    uint8_t *used; /* per slot: lap of its zone at the last use, or UINT8_MAX for an earlier lap; 0: never used */
    shms_used_fn *used_remotely; /* by ranks and other writers, since it was asked last; NULL: there are none */
    void *context;
    shms_zone *zones;
    uint32_t first, last, count;
    uint32_t n_zones, zone_shift;
    uint64_t capacity;
    uint64_t small; /* objects up to this many bytes are small; 0 if the store itself is small */
    uint64_t changes; /* how many times a zone has become stale, from 1 on */
    shms_area areas[SHMS_AREAS];
} shms_ring;

/* Room for an object. The objects in it must go: those from `first` on that begin before its end. */
typedef struct shms_place {
    uint64_t at, span;
    uint32_t first; /* the first object that ends after `at`; SHMS_NONE */
} shms_place;

typedef bool shms_evictable_fn(void *context, uint32_t slot);

uint64_t shms_ring_memory(uint32_t n_slots, uint32_t n_zones);
/* `order`: the occupied slots in address order, from shms_slots_sorted. `memory` is zeroed, and aligned for words. */
void shms_ring_init(shms_ring *r, void *memory, const shms_layout *l, const shms_slot *slots, const uint64_t hands[2],
                    const uint32_t *order, uint32_t count);

/* Chooses the area for an object of that span. A small object may go to the other area if that has room to spare at its
 * hand, or if its next victim is older. */
enum shms_area_name shms_ring_area(shms_ring *r, uint64_t span);
/* From each area's hand on, looks for an object that may go, among at most `limit`, and returns the older of the two
 * it finds. SHMS_NONE: it finds none. */
uint32_t shms_ring_victim(shms_ring *r, enum shms_level level, uint32_t limit, shms_evictable_fn *evictable,
                          void *context);
/* The gap at the area's hand, in bytes. */
uint64_t shms_ring_gap(const shms_ring *r, enum shms_area_name area);
/* Walks once round from the area's hand, over at most `limit` objects, and looks for a run of place->span bytes. Asks
 * `evictable` which objects may go. */
bool shms_ring_near(shms_ring *r, enum shms_area_name area, enum shms_level level, uint32_t limit,
                    shms_evictable_fn *evictable, void *context, shms_place *place);
/* The first object that ends after `at`, or SHMS_NONE. */
uint32_t shms_ring_at(const shms_ring *r, uint64_t at);

/* Inserts `slot`, whose offset and length are set, into a gap in front of `behind`. */
void shms_ring_insert(shms_ring *r, uint32_t slot, uint32_t behind);
/* Moves an area's hand to the end of `slot`, which lies in the area. Objects that it passes lose their second chance.
 * With `lap`, all objects of the area do. */
void shms_ring_move_hand(shms_ring *r, enum shms_area_name area, uint32_t slot, bool lap);
void shms_ring_remove(shms_ring *r, uint32_t slot);
/* Removes the n objects from `first` to `last`, which stay linked among themselves. If nothing takes their place,
 * _gap_before must follow, for the object after them. */
void shms_ring_cut(shms_ring *r, uint32_t first, uint32_t last, uint32_t n);
void shms_ring_gap_before(shms_ring *r, uint32_t behind);

/* Records a use. _is_used: was there one since the hand last passed? Uses of other writers count when it is asked. */
void shms_ring_use(shms_ring *r, uint32_t slot);
bool shms_ring_is_used(shms_ring *r, uint32_t slot);
/* The hand of a kind passes the object, which loses its second chance. */
void shms_ring_pass(shms_ring *r, uint32_t slot);

int shms_ring_valid(const shms_ring *r, uint32_t n_slots);

static inline void shms_ring_stale(shms_ring *r, uint32_t zone) {
    r->zones[zone].stale = true;
    r->changes++;
}
static inline uint64_t shms_ring_start(const shms_ring *r, uint32_t slot) { return shms_get(&r->slots[slot].offset); }
static inline uint64_t shms_ring_end(const shms_ring *r, uint32_t slot) { return shms_slot_end(&r->slots[slot]); }
static inline uint32_t shms_ring_zone(const shms_ring *r, uint64_t at) { return (uint32_t)(at >> r->zone_shift); }
static inline uint64_t shms_zone_start(const shms_ring *r, uint32_t zone) { return (uint64_t)zone << r->zone_shift; }
/* Marks the zones in which the object has bytes: what they remember of it may have changed. */
static inline void shms_ring_stale_slot(shms_ring *r, uint32_t slot) {
    for (uint32_t z = shms_ring_zone(r, shms_ring_start(r, slot)); z <= shms_ring_zone(r, shms_ring_end(r, slot) - 1);
         z++)
        shms_ring_stale(r, z);
}

#endif
