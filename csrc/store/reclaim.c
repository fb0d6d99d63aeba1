/*
 * reclaim.c - what may go, and how it goes: the writer's half of the protocol.
 *
 * An object may go when no lease of it is open (W1) and no rank has it pinned (W3).  A reader may pin at any moment;
 * so W3 is asked again after the state has been set to EVICTING (W2), and where the answer is now another one the
 * state goes back to LIVE.  readers.h says why one of the two sides must see the other.
 *
 *   1. All victims of one put are set to EVICTING, then all are asked for pins, then all become FREE, or all LIVE
 *      again.  So a put either has its room or has taken nothing.  Nothing else is done in between: a reader that meets
 *      EVICTING waits.
 *   2. What W1 found stays true while the mutex is held: only the writer opens leases, an acknowledgement only grows,
 *      and to a rank found closed, retired or dead nothing is promised that was opened before: whoever attaches in its
 *      place sets its base above that (A4).
 *   3. What a probe found does not stay true for pins: a new process may have the rank an instant later.  So between
 *      W2 and W4 the lock is asked again, and only where a pin stands.  Before W2 a remembered "alive" costs at most
 *      a refusal, which the next call asks again; a remembered "gone" is of type 2.
 *
 * Two locks.  Hits need `mutex`, so a put does not hold it for long: it *breathes* now and then, that is, lets those in
 * who wait.  Meanwhile anything may change, but no other put looks for a place, and nobody closes the writer: that takes
 * `placing`.  So what a put has cleared stays clear.  W1 may be a survey's, many breaths ago: evict looks again, and from
 * there to W4 there is no breath.
 *
 * A search begins near the hand, which is where a CLOCK finds its victims.  What it does not find within a few steps it
 * looks up in the zones, which remember what was held where (zones.h).
 */
#include <string.h>

#include "step.h"
#include "writer.h"

enum { UNKNOWN, HERE, GONE };
enum { AGAIN = 1 }; /* after a breath */

#define NEAR 64            /* objects: so far a search walks from the hand */
#define BUDGET 64          /* of looks at a rank's words, and then to the end of a zone, between two breaths */
#define FORGET_AT_ONCE 128 /* victims, likewise */
#define SWEEP_AT_ONCE                                                                                                  \
    16384 /* lease entries that one call looks at, when none is free; the next one goes on behind them */
#define SWEEP_EARLY 512    /* and those that each hand-out looks at, at the most */
#define MAX_SEARCHES 1000  /* a store that is read faster than it can be searched this often is full */

void shms_reclaim_begin(struct shms_writer *w) { memset(w->verdict, UNKNOWN, w->seg.layout.n_readers); }

/* Has the rank attached once, and does nobody hold its lock?  The epoch is read first (pairs with A3): a process that
 * attaches in between holds the lock already, so that a first attachment cannot look like a death. */
static bool rank_gone(struct shms_writer *w, uint32_t r) {
    if (w->verdict[r] == UNKNOWN) {
        SHMS_STEP("W1b");
        uint64_t epoch = atomic_load_explicit(&shms_segment_reader(&w->seg, r)->epoch, memory_order_seq_cst);
        SHMS_STEP("W1c");
        w->verdict[r] = epoch > 0 && !shms_segment_held(&w->seg, (int)r) ? GONE : HERE;
        /* A survey may believe this one.  A process that dies before A3 leaves no other trace. */
        if (w->verdict[r] != w->heard[r].verdict)
            w->heard[r].verdict = UNKNOWN;
    }
    return w->verdict[r] == GONE;
}

/* Without asking whether the rank lives. */
static bool lease_left_by(struct shms_writer *w, uint32_t r, uint32_t entry, uint64_t number) {
    SHMS_STEP("W1a"); /* pairs with R3b: who has acknowledged has a visible pin.  And with A3, A4, E1 */
    return !shms_reader_expected(shms_segment_reader(&w->seg, r), &w->seg.layout, shms_get(&w->seg.sb->retired[r]),
                                 entry, number);
}

static bool lease_done_by(struct shms_writer *w, uint32_t r, uint32_t entry, uint64_t number) {
    return lease_left_by(w, r, entry, number) || rank_gone(w, r);
}

static bool lease_done(struct shms_writer *w, uint32_t entry) {
    uint64_t number = shms_get(&w->leases.table[entry].number);
    for (uint32_t r = 0; r < w->seg.layout.n_readers; r++)
        if (!lease_done_by(w, r, entry, number))
            return false;
    return true;
}

static shms_pin *pin_of(struct shms_writer *w, uint32_t r, uint32_t slot) {
    return &shms_reader_pins(shms_segment_reader(&w->seg, r))[slot];
}

/* W1 and a first look at the pins; closes what leases it finds complete. */
static bool may_go(void *context, uint32_t slot) {
    struct shms_writer *w = context;
    if (shms_get(&shms_writer_slot(w, slot)->state) != SHMS_LIVE || w->protected[slot])
        return false;
    for (uint32_t e = w->leases.first[slot], next; e != SHMS_NONE; e = next) {
        next = w->leases.next[e];
        if (!lease_done(w, e))
            return false;
        shms_leases_close(&w->leases, e);
    }
    for (uint32_t r = 0; r < w->seg.layout.n_readers; r++)
        if (atomic_load_explicit(pin_of(w, r, slot), memory_order_relaxed) && !rank_gone(w, r))
            return false;
    return true;
}

/* The same for a survey, which also wants to know who holds the object: bytes pinned by a living rank, or promised to it
 * and not yet acknowledged. */
enum shms_hold shms_reclaim_look(void *context, uint32_t slot, uint64_t *held) {
    struct shms_writer *w = context;
    if (!held)
        return may_go(w, slot) ? SHMS_FREE_TO_GO : SHMS_HELD;
    uint64_t span = shms_span(shms_get(&shms_writer_slot(w, slot)->length));
    bool live = shms_get(&shms_writer_slot(w, slot)->state) == SHMS_LIVE, anyone = false;
    if (live && may_go(w, slot))
        return SHMS_FREE_TO_GO;
    for (uint32_t r = 0; live && r < w->seg.layout.n_readers; r++) {
        bool holds = atomic_load_explicit(pin_of(w, r, slot), memory_order_relaxed) && !rank_gone(w, r);
        for (uint32_t e = w->leases.first[slot]; !holds && e != SHMS_NONE; e = w->leases.next[e])
            holds = !lease_done_by(w, r, e, shms_get(&w->leases.table[e].number));
        held[r] += holds ? span : 0;
        anyone |= holds;
    }
    return anyone ? SHMS_HELD : SHMS_KEPT;
}

/* W3 for n slots in EVICTING. */
static bool pinned(struct shms_writer *w, const uint32_t *slots, uint32_t n) {
    for (uint32_t r = 0; r < w->seg.layout.n_readers; r++) {
        const shms_pin *pins = pin_of(w, r, 0);
        for (uint32_t i = 0; i < n; i++) {
            SHMS_STEP("W3"); /* pairs with R1; and, being an acquire, with R4 */
            if (atomic_load_explicit(&pins[slots[i]], memory_order_seq_cst) == 0)
                continue;
            SHMS_STEP("W3p");
            if (shms_segment_held(&w->seg, (int)r))
                return true;
        }
    }
    return false;
}

/* Lets in who waits for the mutex.  What was asked about ranks is asked again after it.  A hit, which does not hold `placing`,
 * may find the writer closed then: nothing may be stored any more. */
static bool breathe(struct shms_writer *w) {
    bool others = shms_writer_let_in(w);
    if (others)
        shms_reclaim_begin(w);
    return others;
}

/* W2 to W4: all go, or none (SHMS_EFULL); `behind` is what comes after them.  Nobody else looks for a place, or there is
 * one victim. */
static int evict(struct shms_writer *w, uint32_t first, uint64_t end, uint32_t *behind) {
    uint64_t bytes = 0, keys = 0, evicted = 0, evicted_bytes = 0, promised = w->evicted.promised;
    const uint32_t *next = w->ring.next;
    uint32_t *victims =
        w->free_slots + w->n_free_slots; /* where they will be, at last; there is room for all that are not free */
    uint32_t n = 0, last = SHMS_NONE;
    for (uint32_t s = first; s != SHMS_NONE && shms_ring_start(&w->ring, s) < end;
         s = next[s]) { /* W1 may be long ago */
        const shms_slot *slot = shms_writer_slot(w, s);
        uint64_t span = shms_span(shms_get(&slot->length));
        if (shms_get(&slot->state) != SHMS_LIVE || w->protected[s] || w->leases.first[s] != SHMS_NONE)
            return SHMS_EFULL;
        if (!shms_slot_deleted(slot)) {
            keys += shms_slot_key_len(slot);
            evicted++;
            evicted_bytes += span;
        }
        bytes += span;
        last = victims[n++] = s;
    }
    *behind = next[last];
    if (evicted && !shms_room_for_keys(w, evicted, keys))
        return SHMS_ENOMEM; /* before anything has changed */
    shms_slot *slots = w->seg.slots;
    /* From here to W4 readers wait: no line of memory is touched that need not be, and no load waits for the one before. */
    for (uint32_t i = 0; i < n; i++) {
        SHMS_STEP("W2"); /* with the fence; pairs with R2a */
        shms_set(&slots[victims[i]].state, SHMS_EVICTING);
    }
    atomic_thread_fence(memory_order_seq_cst);
    bool go = !pinned(w, victims, n);
    for (uint32_t i = 0; i < n; i++) {
        if (go)
            SHMS_STEP("W4"); /* before one byte is reused, or a successor would call half-written bytes LIVE */
        else
            SHMS_STEP("W5");
        atomic_store_explicit(&slots[victims[i]].state, go ? SHMS_FREE : SHMS_LIVE, memory_order_release);
    }
    if (!go) {
        w->evicted.promised = promised;
        return SHMS_EFULL;
    }
    atomic_thread_fence(memory_order_release); /* W4 before the stores that reuse the bytes */
    shms_add(&w->seg.sb->objects, -(uint64_t)n);
    shms_add(&w->seg.sb->used_bytes, -bytes);
    shms_count(w, SHMS_C_EVICTIONS, evicted);
    shms_count(w, SHMS_C_EVICTED_BYTES, evicted_bytes);
    shms_ring_cut(&w->ring, first, last, n);
    w->leaving += (uint32_t)evicted;
    for (uint32_t s = first, i = 1; i <= n; i++, s = next[s]) { /* what has been cut out keeps its links */
        if (!shms_slot_deleted(shms_writer_slot(w, s))) {
            shms_forget_key(w, s);
            w->leaving--;
        }
        w->free_slots[w->n_free_slots++] = s;
        if (i % FORGET_AT_ONCE == 0 && breathe(w))
            *behind = shms_ring_at(&w->ring, end);
    }
    return SHMS_OK;
}

/* Marks what ranks may have let go since the last call; see zones.h.  What is asked here about a rank holds for the
 * surveys that follow: a rank that dies after it is news to the next call. */
static void hear(struct shms_writer *w) {
    const shms_layout *l = &w->seg.layout;
    uint32_t n_zones = w->ring.n_zones;
    shms_reclaim_begin(w);
    for (uint32_t r = 0; r < l->n_readers; r++) {
        shms_reader_table *t = shms_segment_reader(&w->seg, r);
        shms_heard now = {.retired = shms_get(&w->seg.sb->retired[r])}, before = w->heard[r];
        now.epoch = atomic_load_explicit(&t->epoch, memory_order_acquire);
        now.base = atomic_load_explicit(&t->base, memory_order_acquire);
        now.releases = atomic_load_explicit(&t->releases, memory_order_acquire);
        now.verdict = rank_gone(w, r) ? GONE : HERE;
        uint64_t *zones = w->heard_zones + (uint64_t)r * n_zones;
        w->heard[r] = now;
        if (now.epoch != before.epoch || now.base != before.base || now.verdict != before.verdict ||
            now.retired != before.retired)
            shms_zones_stale_all(&w->zones);
        else if (now.releases == before.releases)
            continue;
        w->unswept = w->leases.n_entries;
        const shms_word *counts = shms_reader_zone_releases(t, l);
        for (uint32_t z = 0; z < n_zones; z++) {
            uint64_t count = shms_get(&counts[z]);
            if (count != zones[z])
                shms_zones_stale(&w->zones, z);
            zones[z] = count;
        }
    }
    atomic_thread_fence(memory_order_acquire); /* the counts before the surveys; pairs with their release */
}

/* A search that has found its place: where, and what the hand does. */
typedef struct search {
    shms_place place;
    enum shms_area_name area;
    bool moves; /* the hand goes there; not to a gap that it has left behind */
    bool lap;   /* and has been round once before */
    bool heard; /* what ranks have let go, in this operation */
    uint64_t longest; /* of the runs, where there is no place */
} search;

/* The last search that was in vain has seen all there is, and nothing is news since. */
static bool known_in_vain(const struct shms_writer *w, const search *f) {
    return !w->ring.news && f->place.span > w->longest;
}

/* Finds a place by the zones: 1 found, 0 full, -1 to be called again after a breath. */
static int find_far(struct shms_writer *w, search *f, int64_t *budget) {
    shms_ring *r = &w->ring;
    const shms_area *area = &r->areas[f->area];
    uint64_t anywhere, longest;
    if (known_in_vain(w, f)) {
        f->longest = w->longest;
        return 0;
    }
    int rc = shms_zones_find(&w->zones, 0, r->capacity, 0, f->place.span, SHMS_ANY, budget, &anywhere, &f->longest);
    if (rc == 0) {
        r->news = false;
        w->longest = f->longest;
    }
    if (rc <= 0)
        return rc;
    for (enum shms_level level = SHMS_UNUSED;; level = SHMS_ANY) {
        rc = shms_zones_find(&w->zones, area->from, area->to, area->hand, f->place.span, level, budget, &f->place.at,
                             &longest);
        f->lap = level == SHMS_ANY;
        if (rc || f->lap)
            break;
    }
    if (rc < 0)
        return rc;
    if (rc == 0) {
        f->place.at = anywhere;
        f->area = anywhere < r->areas[SHMS_LARGE].to ? SHMS_LARGE : SHMS_SMALL;
    }
    f->place.first = shms_ring_at(r, f->place.at);
    return 1;
}

static int find(struct shms_writer *w, search *f, int64_t *budget) {
    shms_ring *r = &w->ring;
    uint64_t span = f->place.span;
    enum shms_level level = r->fifo ? SHMS_ANY : SHMS_UNUSED;
    f->area = shms_ring_area(r, span);
    f->moves = true;
    f->lap = false;
    /* A gap that a hand has left is as good as new room; in order of insertion nothing is out of turn. */
    if (span > r->small && !r->fifo && span <= r->gap && shms_ring_gap(r, SHMS_LARGE) < span) {
        int rc = shms_zones_find(&w->zones, 0, r->areas[SHMS_LARGE].to, 0, span, SHMS_GAPS, budget, &f->place.at,
                                 &f->longest);
        if (rc > 0) {
            f->place.first = shms_ring_at(r, f->place.at);
            f->moves = false;
        }
        if (rc)
            return rc;
        r->gap = f->longest;
    }
    if (f->heard)
        return find_far(w, f, budget);
    if (!known_in_vain(w, f)) {
        if (shms_ring_near(r, f->area, level, NEAR, may_go, w, &f->place))
            return 1;
        f->lap = true;
        if (r->count <= NEAR && shms_ring_near(r, f->area, SHMS_ANY, NEAR, may_go, w, &f->place))
            return 1;
    }
    hear(w);
    f->heard = true;
    return -1;
}

/* Finds an object to go for its slot alone, near the place or anywhere: 1 found, 0 there is none, -1 as find_far. */
static int find_victim(struct shms_writer *w, search *f, int64_t *budget, uint32_t *out) {
    const shms_ring *r = &w->ring;
    for (int spare_used = !r->fifo; spare_used >= 0; spare_used--)
        for (uint32_t i = 0, s = f->place.first; i < NEAR && i < r->count; i++, s = r->next[s]) {
            if (s == SHMS_NONE)
                s = r->first;
            if (!(spare_used && shms_ring_is_used(r, s)) && may_go(w, s)) {
                *out = s;
                return 1;
            }
        }
    if (!f->heard)
        hear(w);
    f->heard = true;
    if (!shms_zones_survey(&w->zones, budget))
        return -1;
    for (uint32_t z = 0; z < r->n_zones; z++) {
        if (w->zones.free[z] == 0)
            continue;
        for (uint32_t s = r->zones[z].first; s != SHMS_NONE && shms_ring_zone(r, shms_ring_start(r, s)) <= z;
             s = r->next[s])
            if (may_go(w, s)) {
                *out = s;
                return 1;
            }
        shms_zones_stale(&w->zones, z); /* all of it is held by now */
    }
    return 0;
}

/* After a search in vain: who holds how much, and what that leaves. */
static int refuse(struct shms_writer *w, int code, uint64_t longest) {
    const shms_layout *l = &w->seg.layout;
    shms_refusal *why = &w->refusal;
    why->capacity = l->capacity;
    why->used_bytes = shms_get(&w->seg.sb->used_bytes);
    why->max_objects = l->max_objects;
    why->max_leases = l->max_leases;
    why->reclaimable = w->zones.total_free;
    why->longest = longest;
    why->kept = w->zones.total_kept;
    for (uint32_t r = 0; r < l->n_readers; r++) {
        why->held[r] = w->zones.total[r];
        why->awaited[r] = atomic_load_explicit(&shms_segment_reader(&w->seg, r)->epoch, memory_order_acquire) == 0 &&
                          shms_get(&w->seg.sb->retired[r]) == 0;
    }
    shms_count(w, SHMS_C_REFUSALS, 1);
    return code;
}

/* Budgets grow, so that a search ends: each use that is let in makes a zone stale again. */
static int64_t more(int64_t budget) { return budget < INT32_MAX ? budget + budget / 8 : budget; }

/* The same where not every zone was surveyed. */
static int survey_and_refuse(struct shms_writer *w, int code) {
    uint64_t at, longest;
    for (int64_t allowed = BUDGET; shms_zones_find(&w->zones, 0, w->ring.capacity, 0, UINT64_MAX, SHMS_ANY,
                                                   &(int64_t){allowed}, &at, &longest) < 0;
         allowed = more(allowed))
        if (breathe(w) && w->closed)
            return SHMS_ECLOSED;
    return refuse(w, code, longest);
}

/* SHMS_OK: the place is a gap in front of place.first, and there is a slot.  SHMS_EFULL: a victim is held by now. */
static int make_room(struct shms_writer *w, search *f, int64_t *budget) {
    shms_ring *r = &w->ring;
    shms_place *p = &f->place;
    uint32_t victim, behind;
    if (p->first != SHMS_NONE && shms_ring_start(r, p->first) < p->at + p->span)
        return evict(w, p->first, p->at + p->span, &p->first);
    if (w->n_free_slots)
        return SHMS_OK;
    int rc = find_victim(w, f, budget, &victim);
    if (rc <= 0)
        return rc ? AGAIN : SHMS_ENOSLOT;
    if ((rc = evict(w, victim, shms_ring_start(r, victim) + 1, &behind)))
        return rc;
    shms_ring_gap_before(r, behind);
    if (victim == p->first)
        p->first = behind;
    return SHMS_OK;
}

int shms_reclaim_space(struct shms_writer *w, uint64_t span, shms_room_for *out) {
    search f = {.place.span = span};
    int failed = 0;
    for (int64_t allowed = BUDGET; failed < MAX_SEARCHES; allowed = more(allowed)) {
        int64_t budget = allowed;
        int rc = find(w, &f, &budget);
        if (rc == 0)
            return refuse(w, SHMS_EFULL, f.longest);
        if (rc > 0) {
            rc = make_room(w, &f, &budget);
            if (rc == SHMS_ENOSLOT)
                return survey_and_refuse(w, rc);
            if (rc == SHMS_OK || rc == SHMS_ENOMEM) {
                *out = (shms_room_for){
                    .at = f.place.at, .behind = f.place.first, .area = f.area, .moves = f.moves, .lap = f.lap};
                return rc;
            }
        }
        if (rc == SHMS_EFULL) {
            failed++;
            for (uint32_t z = shms_ring_zone(&w->ring, f.place.at);
                 z <= shms_ring_zone(&w->ring, f.place.at + span - 1); z++)
                shms_zones_stale(&w->zones, z);
            shms_reclaim_begin(w);
        }
        breathe(w);
    }
    return survey_and_refuse(w, SHMS_EFULL);
}

/* Closes the complete ones among the n lease entries behind the last sweep. */
static void sweep(struct shms_writer *w, uint32_t n, bool ask) {
    for (uint32_t i = 0; i < n; i++) {
        uint32_t e = w->sweep_at;
        w->sweep_at = e + 1 < w->leases.n_entries ? e + 1 : 0;
        uint64_t number = shms_get(&w->leases.table[e].number);
        bool done = number != 0;
        for (uint32_t r = 0; done && r < w->seg.layout.n_readers; r++)
            done = ask ? lease_done_by(w, r, e, number) : lease_left_by(w, r, e, number);
        if (done)
            shms_leases_close(&w->leases, e);
    }
}

static uint32_t at_most(uint32_t n, uint32_t limit) { return n < limit ? n : limit; }

/* The fewer are free, the more are looked at, so that most have been before none is. */
void shms_reclaim_leases(struct shms_writer *w) {
    w->unswept =
        w->leases.n_entries; /* a lease that is opened when every rank is gone is over, and no news will come of it */
    if (w->leases.n_free < w->leases.n_entries / 2)
        sweep(w, at_most(w->leases.n_entries / (w->leases.n_free + 1), SWEEP_EARLY), false);
}

uint32_t shms_reclaim_lease(struct shms_writer *w) {
    uint32_t entry = shms_leases_take(&w->leases);
    if (entry == SHMS_NONE) {
        hear(w); /* without news, what was swept since the last need not be swept again */
        uint32_t n = at_most(w->unswept, SWEEP_AT_ONCE);
        w->unswept -= n;
        sweep(w, n, true);
        entry = shms_leases_take(&w->leases);
    }
    if (entry != SHMS_NONE)
        return entry;
    survey_and_refuse(w, SHMS_ENOLEASE);
    return SHMS_NONE;
}

void shms_reclaim_slot(struct shms_writer *w, uint32_t slot) {
    uint32_t behind;
    shms_zones_stale_slot(&w->zones, slot);
    if (may_go(w, slot) && evict(w, slot, shms_ring_start(&w->ring, slot) + 1, &behind) == SHMS_OK)
        shms_ring_gap_before(&w->ring, behind);
}
