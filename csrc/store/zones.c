/* zones.c - see zones.h. */
#include "zones.h"

#include <string.h>

static uint64_t zone_end(const shms_zones *z, uint32_t zone) {
    uint64_t end = shms_zone_start(z->ring, zone + 1);
    return end < z->ring->capacity ? end : z->ring->capacity;
}

uint64_t shms_zones_memory(uint32_t n_zones, uint32_t n_holders) {
    return n_zones * (SHMS_LEVELS * sizeof(shms_run) + 2 * sizeof(uint64_t)) +
           ((uint64_t)n_zones + 1) * n_holders * sizeof(uint64_t);
}

void shms_zones_init(shms_zones *z, void *memory, shms_ring *ring, uint32_t n_zones, uint32_t n_holders,
                     shms_look *look, void *context) {
    *z = (shms_zones){.ring = ring, .n_holders = n_holders, .total = memory, .look = look, .context = context};
    z->held = z->total + n_holders;
    z->free = z->held + (uint64_t)n_zones * n_holders;
    z->kept = z->free + n_zones;
    for (int k = 0; k < SHMS_LEVELS; k++)
        z->runs[k] = (shms_run *)(z->kept + n_zones) + k * n_zones;
}

void shms_zones_stale(shms_zones *z, uint32_t zone) {
    const shms_ring *r = z->ring;
    do
        shms_ring_stale(z->ring, zone);
    while (++zone < r->n_zones && r->zones[zone].first != SHMS_NONE &&
           shms_ring_start(r, r->zones[zone].first) < shms_zone_start(z->ring, zone));
}

void shms_zones_stale_all(shms_zones *z) {
    for (uint32_t zone = 0; zone < z->ring->n_zones; zone++)
        shms_ring_stale(z->ring, zone);
}

/* A run that is being measured: it starts at `start`. `whole`: it starts at the start of the zone. */
typedef struct run_meter {
    uint64_t start;
    bool whole;
} run_meter;

static void end_run(shms_run *run, run_meter *t, uint64_t end, uint64_t next) {
    uint64_t length = end > t->start ? end - t->start : 0;
    if (t->whole)
        run->lead = length;
    if (length > run->longest)
        run->longest = length;
    *t = (run_meter){.start = next};
}

static void survey(shms_zones *z, uint32_t zone, int64_t *budget) {
    shms_ring *r = z->ring;
    shms_zone *of = &r->zones[zone];
    uint64_t start = shms_zone_start(z->ring, zone), end = zone_end(z, zone),
             *held = z->held + (uint64_t)zone * z->n_holders;
    run_meter meters[SHMS_LEVELS];
    for (int k = 0; k < SHMS_LEVELS; k++) {
        meters[k] = (run_meter){.start = start, .whole = true};
        z->runs[k][zone] = (shms_run){0};
    }
    for (uint32_t k = 0; k < z->n_holders; k++)
        z->total[k] -= held[k];
    memset(held, 0, z->n_holders * sizeof *held);
    z->total_free -= z->free[zone];
    z->total_kept -= z->kept[zone];
    z->free[zone] = z->kept[zone] = 0;
    of->stale = 0;
    for (uint32_t s = of->first; s != SHMS_NONE && shms_ring_start(r, s) < end; s = r->next[s]) {
        uint64_t from = shms_ring_start(r, s), to = shms_ring_end(r, s);
        bool begins = from >= start; /* an object counts in the zone where it begins */
        enum shms_hold hold = z->look(z->context, s, begins ? held : NULL);
        *budget -= z->n_holders;
        for (int k = 0; k < SHMS_LEVELS; k++)
            if (k == SHMS_GAPS || hold != SHMS_FREE_TO_GO || (k == SHMS_UNUSED && shms_ring_is_used(r, s)))
                end_run(&z->runs[k][zone], &meters[k], from, to);
        if (begins && hold == SHMS_FREE_TO_GO)
            z->free[zone] += to - from;
        if (begins && hold == SHMS_KEPT)
            z->kept[zone] += to - from;
    }
    for (int k = 0; k < SHMS_LEVELS; k++) {
        z->runs[k][zone].trail = meters[k].start < end ? end - meters[k].start : 0;
        end_run(&z->runs[k][zone], &meters[k], end, end);
    }
    for (uint32_t k = 0; k < z->n_holders; k++)
        z->total[k] += held[k];
    z->total_free += z->free[zone];
    z->total_kept += z->kept[zone];
}

/* False: the budget is used up. */
static bool survey_within(shms_zones *z, uint32_t zone, int64_t *budget) {
    survey(z, zone, budget);
    return *budget > 0 || (z->wanted && !atomic_load_explicit(z->wanted, memory_order_relaxed));
}

bool shms_zones_survey(shms_zones *z, int64_t *budget) {
    for (uint32_t zone = 0; zone < z->ring->n_zones; zone++)
        if (z->ring->zones[zone].stale && !survey_within(z, zone, budget))
            return false;
    return true;
}

/* The state of a search: `best` is the length of the run at `at`. */
typedef struct zone_search {
    uint64_t span, at, best, longest;
    enum shms_level level;
} zone_search;

/* Notes a run. Returns true if the search is over. Where objects go, the first run will do, because it is next in the
 * order of the hand. For gaps, the shortest sufficient one is best. */
static bool accept_run(zone_search *q, uint64_t at, uint64_t length) {
    if (length > q->longest)
        q->longest = length;
    if (length >= q->span && length < q->best) {
        q->best = length;
        q->at = at;
    }
    return q->best != UINT64_MAX && q->level != SHMS_GAPS;
}

/* Searches the objects of one zone from `from` on. *start: where the run begins in which the zone ends. */
static bool search_zone(const shms_zones *z, uint32_t zone, uint64_t from, zone_search *q, uint64_t *start) {
    shms_ring *r = z->ring;
    *start = from;
    for (uint32_t s = r->zones[zone].first; s != SHMS_NONE && shms_ring_start(r, s) < zone_end(z, zone);
         s = r->next[s]) {
        if (shms_ring_end(r, s) <= from)
            continue;
        bool stays = q->level == SHMS_GAPS || (q->level == SHMS_UNUSED && shms_ring_is_used(r, s)) ||
                     z->look(z->context, s, NULL) != SHMS_FREE_TO_GO;
        if (!stays)
            continue;
        if (shms_ring_start(r, s) > *start && accept_run(q, *start, shms_ring_start(r, s) - *start))
            return true;
        *start = shms_ring_end(r, s) < zone_end(z, zone) ? shms_ring_end(r, s) : zone_end(z, zone);
    }
    return false;
}

static int search_zones(shms_zones *z, uint64_t from, uint32_t last, zone_search *q, int64_t *budget) {
    uint64_t start = from; /* start of the run in which the last zone ended */
    for (uint32_t zone = shms_ring_zone(z->ring, from); zone <= last; zone++) {
        if (z->ring->zones[zone].stale && !survey_within(z, zone, budget))
            return -1;
        const shms_run *run = &z->runs[q->level][zone];
        uint64_t here = shms_zone_start(z->ring, zone), end = zone_end(z, zone);
        bool cut = here < from; /* the hand is in this zone */
        if (!cut && run->lead == end - here) {
            if (q->level != SHMS_GAPS && accept_run(q, start, end - start))
                return 1;
            continue;
        }
        if (!cut && accept_run(q, start, here + run->lead - start))
            return 1;
        if (cut || run->longest >= q->span) {
            if (search_zone(z, zone, cut ? from : here + run->lead, q, &start))
                return 1;
            /* the run has been pinned since, unless it ends the zone and is long enough with what follows */
            if (!cut && q->best == UINT64_MAX && end - start < q->span && !survey_within(z, zone, budget))
                return -1;
        } else {
            start = end - run->trail;
        }
        if (!cut && run->longest > q->longest)
            q->longest = run->longest;
    }
    uint64_t end = zone_end(z, last);
    return (end > start && accept_run(q, start, end - start)) || q->best != UINT64_MAX;
}

int shms_zones_find(shms_zones *z, uint64_t from, uint64_t to, uint64_t hand, uint64_t span, enum shms_level level,
                    int64_t *budget, uint64_t *at, uint64_t *longest) {
    zone_search q = {.span = span, .best = UINT64_MAX, .level = level};
    uint32_t last = shms_ring_zone(z->ring, to - 1);
    int rc = hand < to ? search_zones(z, hand, last, &q, budget) : 0;
    if (rc == 0 && hand > from)
        rc = search_zones(z, from, last, &q, budget);
    *at = q.at;
    *longest = q.longest;
    return rc;
}
