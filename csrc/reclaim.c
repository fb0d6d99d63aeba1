/*
 * reclaim.c - what may go, and how it goes: the writer's half of the protocol.
 *
 * An object may go when no lease of it is open (W1) and no rank has it pinned (W3).  A reader may pin at any moment;
 * so W3 is asked again after the state has been set to EVICTING (W2), and where the answer is now another one the
 * state goes back to LIVE.  readers.h says why one of the two sides must see the other.
 *
 *   1. All victims of one put are set to EVICTING, then all are asked for pins, then all become FREE, or all LIVE
 *      again.  So a put either has its room or has taken nothing.
 *   2. What W1 found stays true while the mutex is held: only the writer opens leases, an acknowledgement only grows,
 *      and to a rank found closed, retired or dead nothing is promised that was opened before: whoever attaches in its
 *      place sets its base above that (A4).
 *   3. What a probe found does not stay true for pins: a new process may have the rank an instant later.  So between
 *      W2 and W4 the lock is asked again, and only where a pin stands.  Before W2 a remembered "alive" costs at most
 *      a refusal, which the next call asks again; a remembered "gone" is of type 2.
 *
 * Two laps over many held objects are slow.  A refusal is therefore remembered together with everything that could
 * turn it: the writer's own books, each rank's count of releases (read before the laps, so that what is released
 * during them counts as news), its epoch, and whether it lives.
 */
#include <sched.h>
#include <string.h>

#include "step.h"
#include "writer.h"

enum { UNKNOWN, HERE, GONE };

/* A victim that is pinned between being looked at and W3 makes the search start again; a store that is read faster
 * than it can be searched this often is full. */
#define MAX_SEARCHES 1000

void shms_reclaim_begin(struct shms_writer *w) { memset(w->verdict, UNKNOWN, w->seg.layout.n_readers); }

/* Has the rank attached once, and does nobody hold its lock?  The epoch is read first (pairs with A3): a process that
 * attaches in between holds the lock already, so that a first attachment cannot look like a death. */
static bool rank_gone(struct shms_writer *w, uint32_t r) {
    if (w->verdict[r] == UNKNOWN) {
        SHMS_STEP("W1b");
        uint64_t epoch = atomic_load_explicit(&shms_segment_reader(&w->seg, r)->epoch, memory_order_seq_cst);
        SHMS_STEP("W1c");
        w->verdict[r] = epoch > 0 && !shms_segment_held(&w->seg, (int)r) ? GONE : HERE;
    }
    return w->verdict[r] == GONE;
}

static bool lease_done_by(struct shms_writer *w, uint32_t r, uint32_t entry, uint64_t number) {
    SHMS_STEP("W1a"); /* pairs with R3b: who has acknowledged has a visible pin.  And with A3, A4, E1 */
    return !shms_reader_expected(shms_segment_reader(&w->seg, r), &w->seg.layout, shms_get(&w->seg.sb->retired[r]), entry,
                                 number) ||
           rank_gone(w, r);
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

/* W3 for one slot in EVICTING. */
static bool pinned(struct shms_writer *w, uint32_t slot) {
    for (uint32_t r = 0; r < w->seg.layout.n_readers; r++) {
        SHMS_STEP("W3"); /* pairs with R1; and, being an acquire, with R4 */
        if (atomic_load_explicit(pin_of(w, r, slot), memory_order_seq_cst)) {
            SHMS_STEP("W3p");
            if (shms_segment_held(&w->seg, (int)r))
                return true;
        }
    }
    return false;
}

static void set_state(struct shms_writer *w, uint32_t slot, enum shms_state state) {
    atomic_store_explicit(&shms_writer_slot(w, slot)->state, state, memory_order_seq_cst);
}

void shms_forget(struct shms_writer *w, uint32_t slot) {
    shms_slot *s = shms_writer_slot(w, slot);
    shms_add(&w->seg.sb->used_bytes, -shms_span(shms_get(&s->length)));
    shms_ring_remove(&w->ring, slot);
    w->free_slots[w->n_free_slots++] = slot;
}

/* W2 to W4 for n slots: those of the list, and `extra`.  All go or none. */
static bool evict(struct shms_writer *w, uint32_t first, uint32_t n, uint32_t extra) {
    bool go = true;
    uint32_t s = first;
    for (uint32_t i = 0; i < n; i++, s = w->ring.next[s]) {
        SHMS_STEP("W2"); /* seq_cst; pairs with R2a */
        set_state(w, s, SHMS_EVICTING);
    }
    if (extra != SHMS_NONE) {
        SHMS_STEP("W2");
        set_state(w, extra, SHMS_EVICTING);
    }
    s = first;
    for (uint32_t i = 0; go && i < n; i++, s = w->ring.next[s])
        go = !pinned(w, s);
    if (go && extra != SHMS_NONE)
        go = !pinned(w, extra);
    s = first;
    for (uint32_t i = 0; i <= n; i++) {
        uint32_t victim = i < n ? s : extra;
        if (victim == SHMS_NONE)
            break;
        if (i < n)
            s = w->ring.next[s];
        if (!go) {
            SHMS_STEP("W5");
            set_state(w, victim, SHMS_LIVE);
            continue;
        }
        shms_slot *slot = shms_writer_slot(w, victim);
        if (!shms_slot_deleted(slot)) {
            shms_forget_key(w, victim);
            shms_count(w, SHMS_C_EVICTIONS, 1);
            shms_count(w, SHMS_C_EVICTED_BYTES, shms_span(shms_get(&slot->length)));
        }
        SHMS_STEP("W4"); /* before one byte is reused, or a successor would call half-written bytes LIVE */
        set_state(w, victim, SHMS_FREE);
        shms_add(&w->seg.sb->objects, (uint64_t)-1);
        shms_forget(w, victim);
    }
    atomic_thread_fence(memory_order_release); /* W4 before the stores that reuse the bytes */
    return go;
}

static bool refusal_stands(struct shms_writer *w, const shms_refusal *f, uint64_t span) {
    if (!f->known || span < f->span || f->books != w->books)
        return false;
    for (uint32_t r = 0; r < w->seg.layout.n_readers; r++) {
        shms_reader_table *t = shms_segment_reader(&w->seg, r);
        if (atomic_load_explicit(&t->releases, memory_order_acquire) != f->releases[r] ||
            atomic_load_explicit(&t->epoch, memory_order_acquire) != f->epochs[r] ||
            atomic_load_explicit(&t->base, memory_order_acquire) != f->bases[r] ||
            (f->epochs[r] && shms_segment_held(&w->seg, (int)r) != f->here[r]))
            return false;
    }
    return true;
}

/* Before a search: what is released while it runs is news to the next call. */
static void refusal_prepare(struct shms_writer *w, shms_refusal *f, uint64_t span) {
    f->known = false;
    f->span = span;
    f->books = w->books;
    for (uint32_t r = 0; r < w->seg.layout.n_readers; r++) {
        shms_reader_table *t = shms_segment_reader(&w->seg, r);
        f->releases[r] = atomic_load_explicit(&t->releases, memory_order_acquire);
        f->epochs[r] = atomic_load_explicit(&t->epoch, memory_order_acquire);
        f->bases[r] = atomic_load_explicit(&t->base, memory_order_acquire);
    }
}

static void stretch_ends(shms_room *room, uint64_t start, uint64_t end) {
    if (end - start > room->longest)
        room->longest = end - start;
}

/* Who holds how much: bytes pinned by a living rank, or promised to it and not yet acknowledged.  And what that leaves:
 * whatever no rank holds may go, unless the writer itself still needs it. */
static void count_held(struct shms_writer *w) {
    uint64_t start = 0; /* of the stretch: the end of the last object that stays */
    memset(w->held, 0, sizeof w->held);
    w->room = (shms_room){0};
    for (uint32_t s = w->ring.first; s != SHMS_NONE; s = w->ring.next[s]) {
        shms_slot *slot = shms_writer_slot(w, s);
        uint64_t span = shms_span(shms_get(&slot->length));
        bool live = shms_get(&slot->state) == SHMS_LIVE, anyone = false;
        for (uint32_t r = 0; r < w->seg.layout.n_readers; r++) {
            bool holds = live && atomic_load_explicit(pin_of(w, r, s), memory_order_relaxed) && !rank_gone(w, r);
            for (uint32_t e = w->leases.first[s]; !holds && e != SHMS_NONE; e = w->leases.next[e])
                holds = !lease_done_by(w, r, e, shms_get(&w->leases.table[e].number));
            w->held[r] += holds ? span : 0;
            anyone |= holds;
        }
        bool stays = !live || w->protected[s];
        w->room.kept += stays && !anyone ? span : 0;
        if (!stays && !anyone) {
            w->room.reclaimable += span;
            continue;
        }
        stretch_ends(&w->room, start, shms_get(&slot->offset));
        start = shms_slot_end(slot);
    }
    stretch_ends(&w->room, start, w->ring.capacity);
}

/* After a search in vain.  `here` is what the search went by: a rank that has died since is news, too. */
static int refuse(struct shms_writer *w, shms_refusal *f, int code) {
    count_held(w);
    for (uint32_t r = 0; r < w->seg.layout.n_readers; r++)
        f->here[r] = w->verdict[r] == UNKNOWN ? shms_segment_held(&w->seg, (int)r) : w->verdict[r] == HERE;
    f->known = true;
    f->code = code;
    shms_count(w, SHMS_C_REFUSALS, 1);
    return code;
}

int shms_reclaim_space(struct shms_writer *w, uint64_t span, shms_place *place) {
    if (refusal_stands(w, &w->no_space, span)) {
        shms_count(w, SHMS_C_REFUSALS, 1);
        return w->no_space.code;
    }
    bool prepared = false;
    for (int i = 0; i < MAX_SEARCHES; i++) {
        bool need_slot = w->n_free_slots == 0, need_bytes = w->ring.capacity - shms_get(&w->seg.sb->used_bytes) < span;
        if (!prepared && (need_slot || need_bytes)) {
            refusal_prepare(w, &w->no_space, span);
            prepared = true;
        }
        if (!shms_ring_find(&w->ring, span, need_slot, may_go, w, place)) {
            if (prepared)
                return refuse(w, &w->no_space, need_slot && !need_bytes && place->extra == SHMS_NONE ? SHMS_ENOSLOT : SHMS_EFULL);
            refusal_prepare(w, &w->no_space, span); /* room enough, but in pieces: the search counts from here */
            prepared = true;
            continue;
        }
        if (place->victims == 0 && place->extra == SHMS_NONE)
            return SHMS_OK;
        if (evict(w, place->first, place->victims, place->extra)) {
            w->books++;
            return SHMS_OK;
        }
        shms_reclaim_begin(w);
        sched_yield();
    }
    count_held(w); /* told, but not remembered: the next search may be luckier */
    w->no_space.known = false;
    shms_count(w, SHMS_C_REFUSALS, 1);
    return SHMS_EFULL;
}

uint32_t shms_reclaim_lease(struct shms_writer *w) {
    uint32_t entry = shms_leases_take(&w->leases);
    if (entry != SHMS_NONE)
        return entry;
    if (refusal_stands(w, &w->no_lease, 0)) {
        shms_count(w, SHMS_C_REFUSALS, 1);
        return SHMS_NONE;
    }
    refusal_prepare(w, &w->no_lease, 0);
    for (uint32_t e = 0; e < w->leases.n_entries; e++)
        if (shms_get(&w->leases.table[e].number) && lease_done(w, e))
            shms_leases_close(&w->leases, e);
    entry = shms_leases_take(&w->leases);
    if (entry == SHMS_NONE)
        refuse(w, &w->no_lease, SHMS_ENOLEASE);
    return entry;
}

void shms_reclaim_slot(struct shms_writer *w, uint32_t slot) {
    if (may_go(w, slot))
        evict(w, SHMS_NONE, 0, slot);
    w->books++;
}
