/*
 * zones.h - what a search remembers of each zone, so that it need not visit every object again.
 *
 *      zone 0            zone 1            zone 2            zone 3
 *      |obj|....|held|obj|...|obj|.........|...|held|held|...|.........|held|
 *                    <- trail ><- all of it -><- lead: one run over three zones
 *
 * A *scan* visits the objects of one zone and asks whether each may go. It keeps the lengths of the zone's runs at each
 * level but SHMS_LEVEL_FREE: gaps are measured where objects were added or removed. A search adds up zones (some thousand at most). A refusal is just a failed search; the next refusal costs as
 * little.
 *
 * A zone becomes *stale* if something in it may have been released since its scan; a search scans it again. The
 * opposite error is possible: an object that was free at the scan may be held now. So the caller checks again what a
 * search has found. docs/concepts/protocol.md says what makes a zone stale, and why that is enough.
 */
#ifndef SHMS_ZONES_H
#define SHMS_ZONES_H

#include "ring.h"

typedef struct shms_run {
    /* bytes of the run at the zone's start, of the run at its end, and of the longest run, which starts at `at` */
    uint64_t lead, trail, longest, at;
} shms_run;

/* A scan that has used up its budget within its zone. It goes on if nothing has changed there since. */
typedef struct shms_scan {
    uint32_t zone; /* SHMS_NONE: there is none */
    uint32_t next; /* the object that it comes to */
    uint64_t starts[SHMS_LEVELS]; /* of the runs that it is in */
} shms_scan;

typedef struct shms_zones {
    shms_ring *ring;
    uint32_t reads;              /* of other processes' words, for an object that is evictable */
    shms_run *runs[SHMS_LEVELS]; /* [level][zone] */
    uint64_t *free;              /* [zone] bytes of evictable objects that begin in it */
    uint64_t total_free;
    shms_scan unfinished;
    shms_evictable_fn *evictable;
    void *context;
    _Atomic uint32_t *wanted; /* a budget counts only if this is not 0; NULL: always */
} shms_zones;

uint64_t shms_zones_memory(uint32_t n_zones);
/* `memory` is zeroed. Every zone starts stale. */
void shms_zones_init(shms_zones *z, void *memory, shms_ring *ring, uint32_t n_zones, uint32_t reads,
                     shms_evictable_fn *evictable, void *context);

/* Marks as stale: the zones of the objects that begin in `zone`; all zones. Of one object: shms_ring_stale_slot. */
void shms_zones_stale(shms_zones *z, uint32_t zone);
void shms_zones_stale_all(shms_zones *z);

/* Scans stale zones until *budget is used up and a thread waits for the mutex. Each object visited reduces *budget by
 * `reads`. False if stale zones are left. */
bool shms_zones_scan(shms_zones *z, int64_t *budget);

/* Finds a run of `span` bytes within [from, to), from < to, and stores its start in *at. It is one in the first zone from
 * that of `hand` on, else from the start. For a large object and SHMS_LEVEL_FREE it is the shortest of those that are the
 * longest of their zones. Scans stale zones on its way. 1: found. 0: no such run; *longest is the longest one. -1: the
 * budget is used up. */
int shms_zones_find(shms_zones *z, uint64_t from, uint64_t to, uint64_t hand, uint64_t span, enum shms_level level,
                    int64_t *budget, uint64_t *at, uint64_t *longest);

#endif
