/*
 * reclaim.c - which objects can be evicted, and how: the writer's half of the protocol.
 *
 * An object is evictable if it has no open lease (W1) and no rank has it pinned (W3). A reader may pin at any moment. So the
 * writer reads the pins again after it has set the state to EVICTING (W2). If it finds a pin then, it sets the state
 * back to LIVE (W5). readers.h explains why one of the two sides must see the other.
 *
 * 1. A put is all or nothing. All victims become EVICTING, then the pins of all are read, then all become FREE or all
 *    LIVE again. Nothing else is done in between, because a reader that meets EVICTING waits.
 * 2. W1 holds as long as the mutex is held. Only the writer opens leases, and acknowledgements only grow. A lease that
 *    is open never comes to expect a rank again that was found closed, retired or dead. A process that attaches as that
 *    rank sets its base above the lease (A4).
 * 3. A probe does not hold for pins: a new process may take the rank at any time. So between W2 and W4 the lock is
 *    probed again, but only if a pin is found (W3p). Before W2, a remembered HERE costs at most a refusal, and the next
 *    call probes again. A remembered GONE is safe for leases by point 2, and W3p checks it for pins.
 *
 * Two locks. Hits need `mutex`, so a put must not hold it for long. From time to time a put *yields* it to waiting
 * threads. Anything may change meanwhile, with two exceptions, which need `placing`: no other put looks for a place,
 * and no thread closes the writer. So what a put has cleared stays clear. W1 may have been done by a scan, many
 * yields ago. So evict checks leases again, and does not yield from there to W4.
 *
 * A search begins near the hand, where a CLOCK finds its victims. If that takes too many steps, it uses the zones,
 * which remember what was held where (zones.h).
 */
#include "reclaim.h"

#include <sched.h>
#include <string.h>

#include "directory.h"
#include "holders.h"
#include "step.h"

enum { AGAIN = 1 }; /* the caller searches again */

#define NEAR 64            /* objects that a search visits from the hand on */
#define BUDGET 64          /* reads of a rank's words between two yields; a scan finishes its zone first */
#define FORGET_AT_ONCE 128 /* victims between two yields */
#define UNPROTECT_AT_ONCE 64
#define SWEEP_AT_ONCE 4096 /* the same, of a sweep of lease entries */
#define COUNT_AT_ONCE 256  /* lease entries between two yields of a count */
#define ASK_AFTER 64       /* leases; a rank may be busy as long as fewer have been opened since */
#define SWEEP_EARLY 512    /* lease entries that each hand-out checks, at most */
/* failed searches before the store counts as full: its readers are then faster than the search */
#define MAX_SEARCHES 1000

/* Where the next victims are listed: their final place. None is protected: shms_protect_slot makes its zone stale, and a
 * search asks again. So the stack has room for all slots but those that are deleted and protected, after it. */
static uint32_t *victims_of(struct shms_writer *w) { return w->free_slots + w->n_free_slots; }

/* W2 to W4: frees the slots of all n victims, or none (SHMS_EFULL). They are still in the ring then, and
 * `forget` must follow. The caller holds `placing`, or there is only one victim. */
static int vacate(struct shms_writer *w, uint32_t n) {
    uint64_t bytes = 0, evicted_bytes = 0;
    uint32_t evicted = 0;
    const uint32_t *victims = victims_of(w);
    for (uint32_t i = 0; i < n; i++) { /* a guard: a search has asked shms_evictable of each */
        const shms_slot *slot = shms_writer_slot(w, victims[i]);
        uint64_t span = shms_span(shms_get(&slot->length));
        if (shms_get(&slot->state) != SHMS_LIVE || w->leases.first[victims[i]] != SHMS_NONE)
            return SHMS_EFULL;
        if (!shms_slot_deleted(slot)) {
            evicted++;
            evicted_bytes += span;
        }
        bytes += span;
    }
    shms_slot *slots = w->seg.slots;
    /* Readers may wait from here to W4. So touch no line of memory that is not needed, and let no load depend on the
     * one before. */
    for (uint32_t i = 0; i < n; i++) {
        /* Together with the fence, pairs with R2a: before the pins are read. Release: a look-up without a pin that meets
         * EVICTING has the words of this object, as after P4. */
        SHMS_STEP("W2");
        atomic_store_explicit(&slots[victims[i]].state, SHMS_EVICTING, memory_order_release);
    }
    atomic_thread_fence(memory_order_seq_cst);
    bool go = !shms_still_held(w, victims, n);
    for (uint32_t i = 0; i < n; i++) {
        if (go)
            /* before the first byte is reused, or a successor would set half-written bytes to LIVE: a put has its fence
             * (P2) between the two */
            SHMS_STEP("W4"); /* the bytes may be reused from here on */
        else
            SHMS_STEP("W5"); /* somebody holds it after all */
        shms_set(&slots[victims[i]].state, go ? SHMS_FREE : SHMS_LIVE);
    }
    if (!go)
        return SHMS_EFULL;
    shms_add(&w->seg.writer->objects, -(uint64_t)n);
    shms_add(&w->seg.writer->used_bytes, -bytes);
    shms_count(w, SHMS_C(evicted_bytes), evicted_bytes);
    w->indexed_free += evicted;
    return SHMS_OK;
}

/* Ends an eviction: the n slots from `first` on, which are cut out of the ring and linked among themselves, leave the
 * index and the lists. True: other threads have had the mutex. */
static bool forget(struct shms_writer *w, uint32_t first, uint32_t n) {
    bool others = false;
    for (uint32_t s = first, i = 1; i <= n; i++, s = w->ring.next[s]) {
        if (!shms_slot_deleted(shms_writer_slot(w, s))) {
            shms_forget_key(w, s, true);
            w->indexed_free--;
        }
        shms_kinds_leave(&w->kinds, s);
        w->free_slots[w->n_free_slots++] = s;
        if (i % FORGET_AT_ONCE == 0)
            others |= shms_reclaim_yield(w);
    }
    return others;
}

/* Evicts all objects from `first` to `end`, or none. `behind` is set to the object after them. */
static int evict(struct shms_writer *w, uint32_t first, uint64_t end, uint32_t *behind) {
    const uint32_t *next = w->ring.next;
    uint32_t *victims = victims_of(w), n = 0, last = SHMS_NONE;
    for (uint32_t s = first; s != SHMS_NONE && shms_ring_start(&w->ring, s) < end; s = next[s])
        last = victims[n++] = s;
    *behind = next[last];
    int rc = vacate(w, n);
    if (rc)
        return rc;
    shms_ring_cut(&w->ring, first, last, n);
    if (forget(w, first, n))
        *behind = shms_ring_at(&w->ring, end);
    return SHMS_OK;
}

/* Evicts the chosen objects of a kind, or none. */
static int evict_chosen(struct shms_writer *w, const shms_kind_choice *c) {
    uint32_t *victims = victims_of(w), *next = w->ring.next;
    for (uint32_t i = 0, s = w->kinds.lists[c->kind].first; i < c->n; i++, s = w->kinds.next[s])
        victims[i] = s;
    int rc = vacate(w, c->n);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < c->n; i++)
        shms_ring_remove(&w->ring, victims[i]);
    for (uint32_t i = 0; i + 1 < c->n; i++)
        next[victims[i]] = victims[i + 1];
    forget(w, victims[0], c->n);
    return SHMS_OK;
}

/* The state of a search: its place, and what the hand does. */
typedef struct search {
    shms_place place;
    enum shms_area_name area;
    bool moves; /* the hand moves there; false for a gap that the hand had passed */
    bool lap;   /* the hand has gone round once before */
    bool polled; /* the ranks were polled in this operation */
    uint64_t longest; /* the longest run, if there is no place */
} search;

/* Is the place a run, still? If an object has come to stay since its scan, the next search knows it. */
static bool is_run(struct shms_writer *w, const shms_place *p, enum shms_level level) {
    shms_ring *r = &w->ring;
    for (uint32_t s = p->first; s != SHMS_NONE && shms_ring_start(r, s) < p->at + p->span; s = r->next[s])
        if ((level == SHMS_LEVEL_COLD && shms_ring_is_used(r, s)) || !shms_evictable(w, s)) {
            shms_ring_stale_slot(r, s);
            return false;
        }
    return true;
}

/* Finds a place by zones. 1: found. 0: full. -1: out of budget, call again after a yield. */
static int find_by_zones(struct shms_writer *w, search *f, int64_t *budget) {
    shms_ring *r = &w->ring;
    shms_place *p = &f->place;
    enum shms_level level;
    do {
        const shms_area *area = &r->areas[f->area];
        uint64_t anywhere, longest;
        int rc = shms_zones_find(&w->zones, 0, r->capacity, 0, p->span, SHMS_LEVEL_ANY, budget, &anywhere, &f->longest);
        if (rc <= 0)
            return rc;
        for (level = SHMS_LEVEL_COLD;; level = SHMS_LEVEL_ANY) {
            rc = shms_zones_find(&w->zones, area->from, area->to, area->hand, p->span, level, budget, &p->at, &longest);
            if (rc || level == SHMS_LEVEL_ANY)
                break;
        }
        if (rc < 0)
            return rc;
        f->lap = level == SHMS_LEVEL_ANY;
        if (rc == 0) {
            p->at = anywhere;
            f->area = anywhere < r->areas[SHMS_LARGE].to ? SHMS_LARGE : SHMS_SMALL;
        }
        p->first = shms_ring_at(r, p->at);
    } while (!is_run(w, p, level));
    return 1;
}

static int find(struct shms_writer *w, search *f, int64_t *budget) {
    shms_ring *r = &w->ring;
    uint64_t span = f->place.span;
    f->area = shms_ring_area(r, span);
    f->moves = true;
    f->lap = false;
    /* A gap after the hand is as good as new room, unless an object must be evicted anyway, for its slot. A small
     * object takes one of either area. */
    bool either = span <= r->small;
    bool gaps = span <= r->areas[SHMS_LARGE].gap || (either && span <= r->areas[SHMS_SMALL].gap);
    gaps = gaps && w->n_free_slots && shms_ring_gap(r, f->area) < span;
    for (int a = either ? SHMS_SMALL : SHMS_LARGE; gaps && a >= SHMS_LARGE; a--) {
        shms_area *area = &r->areas[a];
        if (span > area->gap)
            continue;
        uint64_t from = shms_zone_start(r, shms_ring_zone(r, area->hand)), longest;
        from = !either || from == area->to ? area->from : from; /* what the hand has left is near it */
        int rc = shms_zones_find(&w->zones, area->from, area->to, from, span, SHMS_LEVEL_FREE, budget, &f->place.at,
                                 &longest);
        if (rc > 0) {
            f->place.first = shms_ring_at(r, f->place.at);
            f->area = (enum shms_area_name)a;
            f->moves = false;
        }
        if (rc)
            return rc;
        area->gap = longest;
    }
    if (f->polled)
        return find_by_zones(w, f, budget);
    if (shms_ring_near(r, f->area, SHMS_LEVEL_COLD, NEAR, shms_evictable, w, &f->place))
        return 1;
    f->lap = true;
    if (r->count <= NEAR && shms_ring_near(r, f->area, SHMS_LEVEL_ANY, NEAR, shms_evictable, w, &f->place))
        return 1;
    shms_poll(w);
    f->polled = true;
    return -1;
}

/* Finds a victim only for its slot, near the hands or anywhere. 1: found. 0: there is no victim. -1: as
 * find_by_zones. */
static int find_victim(struct shms_writer *w, search *f, int64_t *budget, uint32_t *out) {
    shms_ring *r = &w->ring;
    for (int level = SHMS_LEVEL_COLD; level <= SHMS_LEVEL_ANY; level++)
        if ((*out = shms_ring_victim(r, level, NEAR, shms_evictable, w)) != SHMS_NONE)
            return 1;
    if (!f->polled)
        shms_poll(w);
    f->polled = true;
    if (!shms_zones_scan(&w->zones, budget))
        return -1;
    for (uint32_t z = 0; z < r->n_zones; z++) {
        if (w->zones.free[z] == 0)
            continue;
        for (uint32_t s = r->zones[z].first; s != SHMS_NONE && shms_ring_zone(r, shms_ring_start(r, s)) <= z;
             s = r->next[s])
            if (shms_evictable(w, s)) {
                *out = s;
                return 1;
            }
        shms_zones_stale(&w->zones, z); /* everything in it is held by now */
    }
    return 0;
}

/* After a failed search: records what room is left. shms_writer_holders adds who holds the rest. */
static int refuse(struct shms_writer *w, int code, uint64_t longest) {
    const shms_layout *l = &w->seg.layout;
    shms_refusal *why = &w->refusal;
    why->capacity = l->capacity;
    why->used_bytes = shms_get(&w->seg.writer->used_bytes);
    why->max_objects = l->max_objects;
    why->max_leases = l->max_leases;
    why->reclaimable = w->zones.total_free;
    why->longest = longest;
    why->kind = why->quota = why->kind_bytes = 0;
    w->refused_at = w->ring.changes;
    return code;
}

/* Would the last refusal be repeated, because nothing has changed since? This one memo buys a refusal in 0.5 us with 10^5
 * objects of a kind held, where a visit to each takes 3 ms. */
static bool still_refused(const struct shms_writer *w, uint64_t span, uint32_t kind) {
    uint32_t of = shms_kinds_over(&w->kinds, kind, span) ? kind : 0;
    return w->refused_at == w->ring.changes && w->refusal.kind == of && span > w->refusal.longest;
}

/* Raises the budget, so that a search ends: each use during a yield makes a zone stale again. */
static int64_t raise_budget(int64_t budget) { return budget < INT32_MAX ? budget + budget / 8 : budget; }

/* The same if some zones have not been scanned yet. */
static int scan_and_refuse(struct shms_writer *w, int code) {
    uint64_t at, longest;
    for (int64_t allowed = BUDGET; shms_zones_find(&w->zones, 0, w->ring.capacity, 0, UINT64_MAX, SHMS_LEVEL_ANY,
                                                   &(int64_t){allowed}, &at, &longest) < 0;
         allowed = raise_budget(allowed))
        if (shms_reclaim_yield(w) && w->closed)
            return SHMS_ECLOSED;
    return refuse(w, code, longest);
}

/* The same for a kind that fills its quota with objects that are held. */
static int refuse_quota(struct shms_writer *w, const shms_kind_choice *c) {
    uint64_t missing = shms_kinds_over(&w->kinds, c->kind, c->span) - c->found;
    refuse(w, SHMS_EQUOTA, c->span > missing ? c->span - missing : 0);
    shms_refusal *why = &w->refusal;
    why->kind = c->kind;
    why->quota = shms_get(&w->kinds.table[c->kind].quota);
    why->kind_bytes = shms_get(&w->kinds.table[c->kind].bytes);
    w->refused_at = c->changes;
    return SHMS_EQUOTA;
}

/* Is there a gap of that size, once one of the chosen objects is evicted? */
static bool gap_of_chosen(const struct shms_writer *w, const shms_kind_choice *c, search *f) {
    const shms_ring *r = &w->ring;
    for (uint32_t i = 0, s = w->kinds.lists[c->kind].first; i < c->n; i++, s = w->kinds.next[s]) {
        uint64_t from = r->prev[s] == SHMS_NONE ? 0 : shms_ring_end(r, r->prev[s]);
        uint64_t to = r->next[s] == SHMS_NONE ? r->capacity : shms_ring_start(r, r->next[s]);
        if (to - from < f->place.span)
            continue;
        f->place.at = from;
        f->area = from < r->areas[SHMS_LARGE].to ? SHMS_LARGE : SHMS_SMALL;
        f->moves = from == r->areas[f->area].hand; /* else the hand would meet the new object first */
        f->lap = false;
        return true;
    }
    return false;
}

/* Evicts objects of the kind itself, so that it stays within its quota. 1: one of them leaves a place. -1: call again.
 * SHMS_EQUOTA. 0 or SHMS_EFULL: as for find and evict. */
static int find_in_quota(struct shms_writer *w, search *f, shms_kind_choice *c, int64_t *budget) {
    int rc = shms_kinds_choose(&w->kinds, c, shms_evictable, w, (uint32_t)w->seg.layout.n_readers, budget);
    if (rc <= 0)
        return rc ? rc : refuse_quota(w, c);
    bool fits = gap_of_chosen(w, c, f);
    if (!fits && (rc = find(w, f, budget)) <= 0) /* nothing is evicted for a put that finds no place */
        return rc;
    if ((rc = evict_chosen(w, c)))
        return rc;
    if (!fits)
        return -1; /* now gaps may do, instead of the place found */
    f->place.first = shms_ring_at(&w->ring, f->place.at);
    return 1;
}

/* SHMS_OK: the place is a gap in front of place.first, and a slot is free. SHMS_EFULL: a victim is held by now. */
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

static int search_space(struct shms_writer *w, uint64_t span, uint32_t kind, bool waits, shms_placement *out) {
    search f = {.place.span = span};
    shms_kind_choice choice;
    if (still_refused(w, span, kind)) {
        f.polled = !(waits && w->room_looks); /* else another thread polls for it */
        if (f.polled)
            shms_poll(w);
        if (still_refused(w, span, kind))
            return w->refusal.kind ? SHMS_EQUOTA : SHMS_EFULL;
    }
    shms_kinds_begin(&w->kinds, &choice, kind, span);
    int failed = 0;
    for (int64_t allowed = BUDGET; failed < MAX_SEARCHES; allowed = raise_budget(allowed)) {
        int64_t budget = allowed;
        int rc = shms_kinds_over(&w->kinds, kind, span) ? find_in_quota(w, &f, &choice, &budget) : find(w, &f, &budget);
        if (rc == 0)
            return refuse(w, SHMS_EFULL, f.longest);
        if (rc == SHMS_EQUOTA)
            return rc;
        if (rc > 0) {
            rc = make_room(w, &f, &budget);
            if (rc == SHMS_ENOSLOT)
                return scan_and_refuse(w, rc);
            if (rc == SHMS_OK) {
                *out = (shms_placement){
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
        shms_reclaim_yield(w);
    }
    return scan_and_refuse(w, SHMS_EFULL);
}

int shms_reclaim_space(struct shms_writer *w, uint64_t span, uint32_t kind, bool waits, shms_placement *out) {
    w->transient_pin = false;
    int rc = search_space(w, span, kind, waits, out);
    if (rc && w->transient_pin) { /* it may be over by now, or as soon as that writer runs */
        pthread_mutex_unlock(&w->mutex);
        sched_yield();
        pthread_mutex_lock(&w->mutex);
        shms_reclaim_begin(w);
        rc = search_space(w, span, kind, waits, out);
    }
    return rc;
}

/* Closes the complete leases among the next n entries after the last sweep, or of fewer, if that takes too many reads.
 * Returns how many entries it has checked. */
static uint32_t sweep(struct shms_writer *w, uint32_t n, bool ask) {
    uint32_t reads = 0, i = 0;
    for (; i < n && reads < SWEEP_AT_ONCE; i++) {
        uint32_t e = w->sweep_at, laggard = w->laggard;
        w->sweep_at = e + 1 < w->leases.n_entries ? e + 1 : 0;
        bool done = shms_lease_done(w, e, ask);
        if (done)
            shms_leases_close(&w->leases, e);
        reads += done || laggard != w->laggard ? (uint32_t)w->seg.layout.n_readers : 1;
    }
    return i;
}

static uint32_t at_most(uint32_t n, uint32_t limit) { return n < limit ? n : limit; }

/* The fewer entries are free, the more are checked. So most entries have been checked before none is free. */
void shms_reclaim_leases(struct shms_writer *w) {
    w->to_sweep =
        /* a lease that is opened after every rank has ended is complete at once, without a later change to see */
        w->leases.n_entries;
    if (w->leases.n_free < w->leases.n_entries / 2)
        sweep(w, at_most(w->leases.n_entries / (w->leases.n_free + 1), SWEEP_EARLY), false);
}

/* The entries in use lie in front, as long as the last one that was freed is the next one taken. */
uint64_t shms_reclaim_open(struct shms_writer *w) {
    uint64_t in_use = shms_get(&w->seg.writer->open_leases), open = 0;
    shms_reclaim_begin(w);
    for (uint32_t e = 0; in_use && !w->closed && e < w->leases.n_entries; e++) {
        if (shms_get(&w->leases.table[e].number)) {
            in_use--;
            open += !shms_lease_done(w, e, true);
        }
        if (e % COUNT_AT_ONCE == COUNT_AT_ONCE - 1)
            shms_reclaim_yield(w);
    }
    return open;
}

void shms_reclaim_list(struct shms_writer *w, uint32_t slot) {
    for (int i = 0; i < 2; i++) {
        uint32_t e = shms_leases_next(&w->leases, slot);
        if (e == SHMS_NONE)
            return;
        bool old = shms_get(&w->leases.table[e].number) + ASK_AFTER < shms_get(&w->seg.writer->next_lease);
        if (shms_lease_done(w, e, old))
            shms_leases_close(&w->leases, e);
    }
}

uint32_t shms_reclaim_lease(struct shms_writer *w, bool *others) {
    uint32_t entry = shms_leases_take(&w->leases);
    if (entry == SHMS_NONE)
        shms_poll(w); /* without a change, entries that were swept since the last one need no second sweep */
    while (entry == SHMS_NONE && w->to_sweep) {
        w->to_sweep -= sweep(w, w->to_sweep, true);
        entry = shms_leases_take(&w->leases);
        if (entry == SHMS_NONE && shms_reclaim_yield(w)) {
            *others = true;
            if (w->closed)
                return SHMS_NONE;
        }
    }
    if (entry == SHMS_NONE)
        scan_and_refuse(w, SHMS_ENOLEASE);
    return entry;
}

void shms_reclaim_slot(struct shms_writer *w, uint32_t slot) {
    uint32_t behind;
    shms_ring_stale_slot(&w->ring, slot);
    if (shms_evictable(w, slot) && evict(w, slot, shms_ring_start(&w->ring, slot) + 1, &behind) == SHMS_OK)
        shms_ring_gap_before(&w->ring, behind);
}

/* The slots of deleted objects that are protected, after the stack of free slots, which has room for all. */
static uint32_t *deleted_but_protected(const struct shms_writer *w, uint32_t i) {
    return &w->free_slots[w->seg.layout.max_objects - 1 - i];
}

void shms_reclaim_unprotected(struct shms_writer *w) {
    for (uint32_t i = w->n_deleted_but_protected, n = 1; i-- > 0; n++) {
        uint32_t s = *deleted_but_protected(w, i);
        if (!shms_key_kept(w, shms_slot_hash(w, s))) {
            *deleted_but_protected(w, i) = *deleted_but_protected(w, --w->n_deleted_but_protected);
            shms_protect_slot(w, s, false);
            shms_reclaim_slot(w, s);
        }
        if (n % UNPROTECT_AT_ONCE == 0 && shms_reclaim_yield(w)) {
            if (w->closed)
                return;
            i = i < w->n_deleted_but_protected ? i : w->n_deleted_but_protected;
        }
    }
}

void shms_delete_slot(struct shms_writer *w, uint32_t slot) {
    shms_slot *s = shms_writer_slot(w, slot);
    shms_forget_key(w, slot, false);
    SHMS_STEP("D1"); /* before the key can be put again: a successor must not find it twice */
    atomic_store_explicit(&s->flags, shms_get(&s->flags) | SHMS_SLOT_DELETED, memory_order_release);
    w->ring.used[slot] = 0;
    if (w->protected[slot])
        *deleted_but_protected(w, w->n_deleted_but_protected++) = slot;
    shms_reclaim_slot(w, slot);
}
