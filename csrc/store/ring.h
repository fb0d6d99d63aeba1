/*
 * ring.h - which bytes of the data region are whose, in address order, and where the hands go next.
 *
 *        0                         hand                                          split        hand    capacity
 *        |  obj  |  obj  |..gap..| held |..gap..|  obj  | obj |.......gap........|o|o|.|o|o|o|....|o|o|
 *        large objects             ^ searches start here and move forward        small objects
 *
 * The region has two areas.  From the first small object on, small objects have the last per cent of it to themselves,
 * because a small object that is held among large ones costs the space of a large one.  Each area has a hand, which is the hand of a CLOCK: what is put
 * goes behind it; what it comes by loses its second chance.  The order of addresses is one list over both areas.
 *
 * A *run* is a stretch of gaps and of objects that may go.  It ends at an object that stays.  What may go depends on the
 * *level* of a search: nothing (only gaps), what was not used since the hand last came by, or whatever nobody holds.
 *
 * Nothing here knows why an object stays: a callback looks.  zones.h remembers what it saw.
 *
 * Private memory of the writer throughout.
 */
#ifndef SHMS_RING_H
#define SHMS_RING_H

#include "slots.h"

enum shms_level { SHMS_GAPS, SHMS_UNUSED, SHMS_ANY, SHMS_LEVELS };
enum shms_area_name { SHMS_LARGE, SHMS_SMALL, SHMS_AREAS };

typedef struct shms_area {
    uint64_t from, to;
    uint64_t hand;
    uint32_t hand_next; /* the first object at or behind the hand, also of the next area; SHMS_NONE: none */
} shms_area;

/* A zone: 2^zone_shift bytes of the region; see zones.h. */
typedef struct shms_zone {
    uint32_t first; /* the first object that has bytes in it; SHMS_NONE */
    uint8_t stale;  /* something may have changed since it was surveyed */
    uint8_t lap;    /* how often a hand has jumped over used objects in it, 1 to 255: see shms_ring_is_used */
    bool uses;      /* objects were used in this lap */
} shms_zone;

typedef struct shms_ring {
    const shms_slot *slots;
    uint32_t *next, *prev; /* per slot, in address order; SHMS_NONE at the ends */
    uint8_t *used;         /* per slot: its zone's lap at the last use; 0: not used since the hand came by */
    shms_zone *zones;
    uint32_t first, last, count;
    uint32_t n_zones, zone_shift;
    uint64_t capacity;
    uint64_t small;   /* bytes: objects up to this size are small; 0 in a store that is small itself */
    uint64_t gap;     /* no gap is longer, but for those at the hands */
    bool fifo;
    bool news; /* a zone has become stale since this was set to false */
    shms_area areas[SHMS_AREAS];
} shms_ring;

/* Space for an object.  What has bytes in it must go: the objects from `first` on that begin before its end. */
typedef struct shms_place {
    uint64_t at, span;
    uint32_t first; /* the first object whose end is behind `at`; SHMS_NONE */
} shms_place;

typedef bool shms_may_go(void *context, uint32_t slot);

uint64_t shms_ring_memory(uint32_t n_slots, uint32_t n_zones);
/* `order`: the occupied slots in address order, as of shms_slots_sorted. `memory` is zeroed, and aligned for words. */
void shms_ring_init(shms_ring *r, void *memory, const shms_layout *l, const shms_slot *slots, const uint64_t hands[2],
                    const uint32_t *order, uint32_t count);

/* The area for an object of that span: its own, or for a small one the other where there is room to spare or what would
 * go is older. */
enum shms_area_name shms_ring_area(shms_ring *r, uint64_t span);
/* The gap at the area's hand, in bytes. */
uint64_t shms_ring_gap(const shms_ring *r, enum shms_area_name area);
/* Walks from the area's hand over at most `limit` objects, once round, for a run of place->span bytes.  What may go is
 * asked of `may_go`. */
bool shms_ring_near(const shms_ring *r, enum shms_area_name area, enum shms_level level, uint32_t limit,
                    shms_may_go *may_go, void *context, shms_place *place);
/* The first object whose end is behind `at`; SHMS_NONE. */
uint32_t shms_ring_at(const shms_ring *r, uint64_t at);

/* Enters `slot`, whose offset and length are set, into a gap in front of `behind`. */
void shms_ring_insert(shms_ring *r, uint32_t slot, uint32_t behind);
/* Moves an area's hand behind `slot`, which lies in it; what it comes by loses its second chance.  `lap`: everything in
 * the area does. */
void shms_ring_move_hand(shms_ring *r, enum shms_area_name area, uint32_t slot, bool lap);
void shms_ring_remove(shms_ring *r, uint32_t slot);
/* Takes out the n objects from `first` to `last`; they stay linked among themselves.  If nothing comes in their place,
 * _gap_before follows, for the object behind them. */
void shms_ring_cut(shms_ring *r, uint32_t first, uint32_t last, uint32_t n);
void shms_ring_gap_before(shms_ring *r, uint32_t behind);

/* A use, and whether there was one since the hand last came by. */
void shms_ring_use(shms_ring *r, uint32_t slot);
bool shms_ring_is_used(const shms_ring *r, uint32_t slot);

int shms_ring_valid(const shms_ring *r, uint32_t n_slots);

static inline void shms_ring_stale(shms_ring *r, uint32_t zone) {
    r->zones[zone].stale = 1;
    r->news = true;
}
static inline uint64_t shms_ring_start(const shms_ring *r, uint32_t slot) { return shms_get(&r->slots[slot].offset); }
static inline uint64_t shms_ring_end(const shms_ring *r, uint32_t slot) { return shms_slot_end(&r->slots[slot]); }
static inline uint32_t shms_ring_zone(const shms_ring *r, uint64_t at) { return (uint32_t)(at >> r->zone_shift); }

#endif
