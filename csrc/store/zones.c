/* zones.c - see zones.h. */
#include "zones.h"

#include <string.h>

static uint64_t zone_end(const shms_zones *z, uint32_t zone) {
    uint64_t end = shms_zone_start(z->ring, zone + 1);
    return end < z->ring->capacity ? end : z->ring->capacity;
}

uint64_t shms_zones_memory(uint32_t n_zones) { return n_zones * (SHMS_LEVELS * sizeof(shms_run) + sizeof(uint64_t)); }

void shms_zones_init(shms_zones *z, void *memory, shms_ring *ring, uint32_t n_zones, uint32_t reads,
                     shms_evictable_fn *evictable, void *context) {
    *z = (shms_zones){.ring = ring,
                      .reads = reads,
                      .free = memory,
                      .unfinished.zone = SHMS_NONE,
                      .evictable = evictable,
                      .context = context};
    for (int k = 0; k < SHMS_LEVELS; k++)
        z->runs[k] = (shms_run *)(z->free + n_zones) + k * n_zones;
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

/* Ends the run at `*start`, and starts the next one. The first of a zone is the one at its start. */
static void end_run(shms_run *run, uint64_t *start, uint64_t zone_start, uint64_t end, uint64_t next) {
    uint64_t length = end > *start ? end - *start : 0;
    if (*start == zone_start)
        run->lead = length;
    if (length > run->longest) {
        run->longest = length;
        run->at = *start;
    }
    *start = next;
}

/* The same for the last one. */
static void end_runs(shms_run *run, uint64_t *start, uint64_t zone_start, uint64_t end) {
    run->trail = *start < end ? end - *start : 0;
    end_run(run, start, zone_start, end, end);
}

static bool is_used_up(const shms_zones *z, const int64_t *budget) {
    return *budget <= 0 && (!z->wanted || atomic_load_explicit(z->wanted, memory_order_relaxed));
}

/* Measures the gaps of a zone, which takes no reads of other processes' words. False: the budget is used up. */
static bool measure(shms_zones *z, uint32_t zone, int64_t *budget) {
    shms_ring *r = z->ring;
    uint64_t start = shms_zone_start(r, zone), end = zone_end(z, zone), from = start;
    shms_run *run = &z->runs[SHMS_LEVEL_FREE][zone];
    if (!r->zones[zone].moved)
        return true;
    if (is_used_up(z, budget))
        return false;
    *run = (shms_run){0};
    r->zones[zone].moved = false;
    for (uint32_t s = r->zones[zone].first; s != SHMS_NONE && shms_ring_start(r, s) < end; s = r->next[s])
        end_run(run, &from, start, shms_ring_start(r, s), shms_ring_end(r, s));
    end_runs(run, &from, start, end);
    --*budget;
    return true;
}

static void begin_scan(shms_zones *z, uint32_t zone) {
    if (z->unfinished.zone != SHMS_NONE) { /* of another zone, or of this one before a change */
        z->ring->zones[z->unfinished.zone].stale = true;
        z->free[z->unfinished.zone] = 0; /* it is in no total yet */
    }
    z->unfinished = (shms_scan){.zone = zone, .next = z->ring->zones[zone].first};
    for (int k = SHMS_LEVEL_COLD; k < SHMS_LEVELS; k++) {
        z->unfinished.starts[k] = shms_zone_start(z->ring, zone);
        z->runs[k][zone] = (shms_run){0};
    }
    z->total_free -= z->free[zone];
    z->free[zone] = 0;
    z->ring->zones[zone].stale = false;
}

/* True: the zone is scanned. False: the budget is used up. */
static bool scan(shms_zones *z, uint32_t zone, int64_t *budget) {
    shms_ring *r = z->ring;
    uint64_t start = shms_zone_start(r, zone), end = zone_end(z, zone);
    shms_scan *now = &z->unfinished;
    if (r->zones[zone].stale)
        begin_scan(z, zone);
    else if (now->zone != zone)
        return true;
    for (uint32_t s; (s = now->next) != SHMS_NONE && shms_ring_start(r, s) < end; now->next = r->next[s]) {
        if (is_used_up(z, budget))
            return false;
        *budget -= z->reads;
        uint64_t from = shms_ring_start(r, s), to = shms_ring_end(r, s);
        bool evictable = z->evictable(z->context, s);
        for (int k = SHMS_LEVEL_COLD; k < SHMS_LEVELS; k++)
            if (!evictable || (k == SHMS_LEVEL_COLD && shms_ring_is_used(r, s)))
                end_run(&z->runs[k][zone], &now->starts[k], start, from, to);
        if (evictable && from >= start) /* an object counts in the zone where it begins */
            z->free[zone] += to - from;
    }
    for (int k = SHMS_LEVEL_COLD; k < SHMS_LEVELS; k++)
        end_runs(&z->runs[k][zone], &now->starts[k], start, end);
    z->total_free += z->free[zone];
    now->zone = SHMS_NONE;
    return true;
}

bool shms_zones_scan(shms_zones *z, int64_t *budget) {
    for (uint32_t zone = 0; zone < z->ring->n_zones; zone++)
        if (!scan(z, zone, budget))
            return false;
    return true;
}

/* The state of a search: `best` is the length of the run at `at`. */
typedef struct zone_search {
    uint64_t span, at, best, longest;
    enum shms_level level;
    /* The first one will do, because it is next in the order of the hand; else the shortest of the zones' longest ones. */
    bool first;
} zone_search;

/* Notes a run. Returns true if the search is over. */
static bool accept_run(zone_search *q, uint64_t at, uint64_t length) {
    if (length > q->longest)
        q->longest = length;
    if (length >= q->span && length < q->best) {
        q->best = length;
        q->at = at;
    }
    return q->best != UINT64_MAX && q->first;
}

static int search_zones(shms_zones *z, uint64_t from, uint32_t last, zone_search *q, int64_t *budget) {
    uint64_t start = from; /* start of the run in which the last zone ended */
    for (uint32_t zone = shms_ring_zone(z->ring, from); zone <= last; zone++) {
        if (!(q->level == SHMS_LEVEL_FREE ? measure : scan)(z, zone, budget))
            return -1;
        const shms_run *run = &z->runs[q->level][zone];
        uint64_t here = shms_zone_start(z->ring, zone), end = zone_end(z, zone);
        bool cut = here < from; /* the hand is in this zone; what is not at its end is found last, with all of it */
        if (!cut && run->lead == end - here) {
            if (q->first && accept_run(q, start, end - start))
                return 1;
            continue;
        }
        if (!cut && accept_run(q, start, here + run->lead - start))
            return 1;
        if (!cut && accept_run(q, run->at, run->longest))
            return 1;
        start = cut && end - run->trail < from ? from : end - run->trail;
    }
    uint64_t end = zone_end(z, last);
    return (end > start && accept_run(q, start, end - start)) || q->best != UINT64_MAX;
}

int shms_zones_find(shms_zones *z, uint64_t from, uint64_t to, uint64_t hand, uint64_t span, enum shms_level level,
                    int64_t *budget, uint64_t *at, uint64_t *longest) {
    zone_search q = {
        .span = span, .best = UINT64_MAX, .level = level, .first = level != SHMS_LEVEL_FREE || span <= z->ring->small};
    uint32_t last = shms_ring_zone(z->ring, to - 1);
    int rc = hand < to ? search_zones(z, hand, last, &q, budget) : 0;
    if (rc == 0 && hand > from) /* all of the hand's zone, too */
        rc = search_zones(z, from, last, &q, budget);
    *at = q.at;
    *longest = q.longest;
    return rc;
}
