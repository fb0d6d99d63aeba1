/*
 * zones.h - what a search remembers of each zone, so that it need not visit every object again.
 *
 *      zone 0            zone 1            zone 2            zone 3
 *      |obj|....|held|obj|...|obj|.........|...|held|held|...|.........|held|
 *                    <- trail ><- all of it -><- lead: one run over three zones
 *
 * A *survey* visits the objects of one zone and asks who holds each. It keeps the lengths of the zone's runs at each
 * level, and the bytes of each holder. A search adds up zones (some thousand at most). It visits objects only where it
 * has found its run. A refusal is just a failed search; the next refusal costs as little.
 *
 * A zone becomes *stale* if something in it may have been released since its survey; a search surveys it again. The
 * opposite error is possible: an object that was free at the survey may be held now. So the search checks again what it
 * has found. docs/concepts/protocol.md says what makes a zone stale, and why that is enough.
 */
#ifndef SHMS_ZONES_H
#define SHMS_ZONES_H

#include "ring.h"

/* How an object is held: not at all, by the writer only, or by others: ranks, and if there are several writers, those. If
 * `held` is not NULL, the span of the object is added to held[h] of each of these that holds it. */
enum shms_hold { SHMS_FREE_TO_GO, SHMS_KEPT, SHMS_HELD };
typedef enum shms_hold shms_look(void *context, uint32_t slot, uint64_t *held);

typedef struct shms_run {
    /* bytes of the run at the zone's start, of the run at its end, and of the longest run */
    uint64_t lead, trail, longest;
} shms_run;

typedef struct shms_zones {
    shms_ring *ring;
    uint32_t n_holders;
    shms_run *runs[SHMS_LEVELS]; /* [level][zone] */
    /* [zone] bytes of objects that begin in it: reclaimable, and kept by the writer only */
    uint64_t *free, *kept;
    uint64_t *held;       /* [zone][holder] */
    uint64_t *total;      /* [holder]: sums of `held` */
    uint64_t total_free, total_kept;
    shms_look *look;
    void *context;
    _Atomic uint32_t *wanted; /* a budget counts only if this is not 0; NULL: always */
} shms_zones;

uint64_t shms_zones_memory(uint32_t n_zones, uint32_t n_holders);
/* `memory` is zeroed. Every zone starts stale. */
void shms_zones_init(shms_zones *z, void *memory, shms_ring *ring, uint32_t n_zones, uint32_t n_holders,
                     shms_look *look, void *context);

/* Marks as stale: the zones of the objects that begin in `zone`; all zones. Of one object: shms_ring_stale_slot. */
void shms_zones_stale(shms_zones *z, uint32_t zone);
void shms_zones_stale_all(shms_zones *z);

/* Surveys stale zones until *budget is used up and a thread waits for the mutex. Each object visited reduces *budget.
 * False if stale zones are left. */
bool shms_zones_survey(shms_zones *z, int64_t *budget);

/* Finds a run of `span` bytes within [from, to), from < to, and stores its start in *at. It is the first run from
 * `hand` on, else from the start. For SHMS_GAPS it is the shortest gap that fits. Surveys stale zones on its way. 1:
 * found. 0: no such run; *longest is the longest one. -1: the budget is used up. */
int shms_zones_find(shms_zones *z, uint64_t from, uint64_t to, uint64_t hand, uint64_t span, enum shms_level level,
                    int64_t *budget, uint64_t *at, uint64_t *longest);

#endif
