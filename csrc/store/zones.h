/*
 * zones.h - what can be had where, remembered: so that a search need not look at every object again.
 *
 *      zone 0            zone 1            zone 2            zone 3
 *      |obj|....|held|obj|...|obj|.........|...|held|held|...|.........|held|
 *                    <- trail ><- all of it -><- lead: one run over three zones
 *
 * A *survey* walks the objects of one zone, asks who holds each, and keeps the lengths of the zone's runs, at each level,
 * and the bytes by holder.  A search adds up zones (some thousand at the most) and walks objects only where it has found
 * its run.  A refusal is nothing but a search in vain; the next one costs as little.
 *
 * Why a survey may be believed.  A zone is *stale* from the moment when something in it may have been let go until its next
 * survey.  The writer marks what it does itself.  What ranks let go, they count by zone (layout.h), after they have let
 * it go (R3b, R4); the writer reads the counts before it surveys.  So what is let go during a survey is counted after it,
 * and makes the zone stale for the next search.  A rank that dies, closes, attaches or is retired makes all zones stale.
 *
 * What may be wrong is the other side: an object that could go at the survey is held now.  So whatever is found is looked
 * at once more before it is taken; where it is held now, its zone is stale, and the search starts again.
 */
#ifndef SHMS_ZONES_H
#define SHMS_ZONES_H

#include "ring.h"

/* How an object is held: by ranks (its span is added to held[r] of each, where `held` is not NULL), by the writer, or not. */
enum shms_hold { SHMS_FREE_TO_GO, SHMS_KEPT, SHMS_HELD };
typedef enum shms_hold shms_look(void *context, uint32_t slot, uint64_t *held);

typedef struct shms_run {
    uint64_t lead, trail, longest; /* bytes of runs: at the zone's start, at its end, anywhere in it */
} shms_run;

typedef struct shms_zones {
    shms_ring *ring;
    uint32_t n_ranks;
    shms_run *runs[SHMS_LEVELS]; /* [level][zone] */
    uint64_t *free, *kept;       /* [zone] bytes of objects that begin in it: that may go, that the writer keeps */
    uint64_t *held;       /* [zone][rank] */
    uint64_t *total;      /* [rank]: sums of these */
    uint64_t total_free, total_kept;
    shms_look *look;
    void *context;
    _Atomic uint32_t *wanted; /* a budget counts only where this is not 0; NULL: always */
} shms_zones;

uint64_t shms_zones_memory(uint32_t n_zones, uint32_t n_ranks);
/* `memory` is zeroed. All zones are stale. */
void shms_zones_init(shms_zones *z, void *memory, shms_ring *ring, uint32_t n_zones, uint32_t n_ranks, shms_look *look,
                     void *context);

/* Something may have been let go: of the object in `slot`; of any object that begins in the zone; of any. */
void shms_zones_stale_slot(shms_zones *z, uint32_t slot);
void shms_zones_stale(shms_zones *z, uint32_t zone);
void shms_zones_stale_all(shms_zones *z);

/* Surveys stale zones, as long as *budget, which each object looked at reduces, is above 0 or nobody wants the mutex.
 * false: some are left. */
bool shms_zones_survey(shms_zones *z, int64_t *budget);

/* A run of `span` bytes within [from, to), the first one from `hand` on, then from the start; of gaps the shortest; *at: where.
 * Surveys stale zones on its way: 1 found, 0 there is none, -1 the budget is used up.  *longest: of the runs, for 0. */
int shms_zones_find(shms_zones *z, uint64_t from, uint64_t to, uint64_t hand, uint64_t span, enum shms_level level,
                    int64_t *budget, uint64_t *at, uint64_t *longest);

#endif
