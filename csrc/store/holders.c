/*
 * holders.c - who holds an object: leases (W1, W3f), pins (W3, W3h), and what has changed since the last poll.
 *
 * Other writers pin and lease objects of this one by words of their own (remote.h), at any time. So what a look finds of
 * their leases saves work, but only W3f answers. The order after W2 is W3h for all victims, then W3, then W3f, and
 * between the first two every verdict is forgotten; docs/concepts/protocol.md says why.
 */
#include "holders.h"

#include <stddef.h>
#include <string.h>

#include "monitor.h"
#include "step.h"

#define READS_AT_ONCE 256 /* of ranks' words between two yields of the mutex */

void shms_reclaim_begin(struct shms_writer *w) { w->operation++; }

bool shms_reclaim_yield(struct shms_writer *w) {
    bool others = shms_writer_yield(w);
    if (others) {
        shms_reclaim_begin(w);
        atomic_thread_fence(memory_order_seq_cst); /* as in shms_poll, for what they have put */
    }
    return others;
}

/* Has a rank or another writer ended? Then its pins and leases do not count, whatever its words say. */
static bool gone(struct shms_writer *w, uint32_t peer) {
    shms_peer *p = &w->peers[peer];
    uint32_t n_ranks = (uint32_t)w->seg.layout.n_readers;
    if (p->asked != w->operation) {
        bool attached = true, before = p->gone;
        if (peer < n_ranks) {
            /* It is gone only if it has attached once. The epoch is read first (pairs with A3): a process that attaches
             * for the first time in between holds the lock already. */
            SHMS_STEP("W1b");
            attached = atomic_load_explicit(&shms_segment_reader(&w->seg, peer)->epoch, memory_order_acquire) > 0;
            SHMS_STEP("W1c");
        } else {
            SHMS_STEP("W3w"); /* pairs with that writer's death: the lease of a dead writer promises nothing */
        }
        int role = peer < n_ranks ? (int)peer : SHMS_ROLE_OF_WRITER(peer - n_ranks);
        p->gone = attached && !shms_segment_held(&w->seg, role);
        p->turned |= p->gone != before;
        p->asked = w->operation;
    }
    p->blamed |= !p->gone;
    return p->gone;
}

static bool writer_gone(struct shms_writer *w, uint32_t o) { return gone(w, (uint32_t)w->seg.layout.n_readers + o); }

/* W1a, for a lease of writer `o`: the part of W1 that does not probe the rank's lock. */
static bool acknowledged_by(struct shms_writer *w, uint32_t r, uint32_t o, uint32_t entry, uint64_t number,
                            uint64_t what) {
    SHMS_STEP("W1a"); /* pairs with R3b: a rank that has acknowledged has a visible pin; also with A3, A4, E1 */
    return !shms_reader_expected(shms_segment_reader(&w->seg, r), &w->seg.layout, r, o,
                                 shms_get(&shms_segment_writer(&w->seg, o)->retired[r]),
                                 o * w->leases.n_entries + entry, number, what);
}

static bool lease_acknowledged_by(struct shms_writer *w, uint32_t r, uint32_t entry) {
    const shms_lease *e = &w->leases.table[entry];
    return acknowledged_by(w, r, w->seg.arena, entry, shms_get(&e->number), shms_get(&e->what));
}

/* W3f: has writer `o` an open lease on the slot, or has its list moved under the walk? With `expected`, the walk goes to
 * the end, and sets it for each rank that a lease expects. A list that comes round, which only a broken writer has, counts
 * as moved. */
static bool leased_by(struct shms_writer *w, uint32_t o, uint32_t slot, bool *expected) {
    uint32_t n_entries = w->leases.n_entries, of_all = shms_writer_global(w, slot), mark = 0;
    bool held = false;
    SHMS_STEP("W3f"); /* pairs with B4 and C2: a writer whose pin is over has its lease in the list */
    uint32_t next = atomic_load_explicit(&shms_segment_holds(&w->seg, o)[of_all].first, memory_order_acquire);
    if (expected && next && writer_gone(w, o))
        return false;
    for (uint32_t n = 0; next && (expected || !held); n++) {
        if (next > n_entries || n == n_entries || shms_is_cyclic(&mark, n, next))
            return !writer_gone(w, o);
        const shms_lease *e = shms_segment_lease(&w->seg, o * n_entries + next - 1);
        /* Before `what`: pairs with L2. If the entry has come to another lease between the two loads, that lease
         * is on another slot. */
        SHMS_STEP("W3n"); /* the entry may serve another lease by now */
        uint64_t number = atomic_load_explicit(&e->number, memory_order_acquire), what = shms_get(&e->what);
        if (number == 0 || shms_lease_slot(what) != of_all)
            return !writer_gone(w, o);
        held |= shms_lease_held(what);
        for (uint32_t r = 0; r < w->seg.layout.n_readers && (expected || !held); r++)
            if (!acknowledged_by(w, r, o, next - 1, number, what) && !gone(w, r)) {
                held = true;
                if (expected)
                    expected[r] = true;
            }
        next = shms_lease_next(what);
    }
    return held && !writer_gone(w, o);
}

/* The own slot that another writer has pinned, or SHMS_NONE. */
static uint32_t pinned_by(struct shms_writer *w, uint32_t o) {
    /* after the fence of W2, pairs with B1: the pin is seen here, or its writer sees EVICTING; acquire: pairs with B5 */
    SHMS_STEP("W3h");
    uint64_t slot = atomic_load_explicit(&shms_segment_writer(&w->seg, o)->pinning, memory_order_acquire);
    slot -= 1 + (uint64_t)shms_writer_global(w, 0);
    return o != w->seg.arena && slot < w->seg.layout.max_objects ? (uint32_t)slot : SHMS_NONE;
}

/* Writer `o` will soon turn its pin into a lease, or release it. It may not have counted that by the next poll. So that
 * poll treats the slot's zone as changed. */
static void note_transient_pin(struct shms_writer *w, uint32_t o, uint32_t slot) {
    uint32_t peer = (uint32_t)w->seg.layout.n_readers + o, n_zones = w->ring.n_zones;
    w->transient_pin = true;
    w->peers[peer].releases = UINT64_MAX;
    w->polled_zones[(uint64_t)peer * n_zones + shms_ring_zone(&w->ring, shms_ring_start(&w->ring, slot))] = UINT64_MAX;
}

/* Does writer `o` hold the slot? For a look before W2; `expected` as for leased_by. */
static bool held_by(struct shms_writer *w, uint32_t o, uint32_t slot, bool *expected) {
    if (o == w->seg.arena)
        return false;
    bool pinned = pinned_by(w, o) == slot && !writer_gone(w, o), leased = leased_by(w, o, slot, expected);
    if (pinned && !leased)
        note_transient_pin(w, o, slot);
    return leased || pinned;
}

static bool held_remotely(struct shms_writer *w, uint32_t slot) {
    if (w->seg.layout.n_writers == 1)
        return false;
    for (uint32_t o = 0; o < w->seg.layout.n_writers; o++)
        if (held_by(w, o, slot, NULL))
            return true;
    return false;
}

bool shms_lease_done(struct shms_writer *w, uint32_t entry, bool ask) {
    const shms_lease *e = &w->leases.table[entry];
    if (shms_get(&e->number) == 0 || shms_lease_held(shms_get(&e->what)))
        return false;
    for (uint32_t n = (uint32_t)w->seg.layout.n_readers, i = n, r = w->laggard; i > 0; i--, r = r + 1 < n ? r + 1 : 0)
        if (!lease_acknowledged_by(w, r, entry) && !(ask && gone(w, r))) {
            w->laggard = r;
            return false;
        }
    return true;
}

shms_pin *shms_pin_of(struct shms_writer *w, uint32_t r, uint32_t slot) {
    return &shms_reader_pins(shms_segment_reader(&w->seg, r))[shms_writer_global(w, slot)];
}

bool shms_evictable(void *context, uint32_t slot) {
    struct shms_writer *w = context;
    if (shms_get(&shms_writer_slot(w, slot)->state) != SHMS_LIVE || w->protected[slot])
        return false;
    for (uint32_t e = w->leases.first[slot], next; e != SHMS_NONE; e = next) {
        next = w->leases.next[e];
        if (!shms_lease_done(w, e, true))
            return false;
        shms_leases_close(&w->leases, e);
    }
    for (uint32_t n = (uint32_t)w->seg.layout.n_readers, i = n, r = w->laggard; i > 0; i--, r = r + 1 < n ? r + 1 : 0)
        if (shms_pin_count(shms_pin_of(w, r, slot), memory_order_relaxed) && !gone(w, r)) {
            w->laggard = r;
            return false;
        }
    return !held_remotely(w, slot);
}

/* Adds an object that may not go to what each holds. A live rank holds it if it has pinned it, or has not acknowledged a
 * lease that expects it. Another writer holds it if it has pinned it, or has an open lease on it. */
static void add_holders(struct shms_writer *w, uint32_t slot, shms_refusal *why) {
    uint32_t n_ranks = (uint32_t)w->seg.layout.n_readers, n_writers = (uint32_t)w->seg.layout.n_writers;
    uint64_t span = shms_span(shms_get(&shms_writer_slot(w, slot)->length));
    bool anyone = false, expected[SHMS_MAX_READERS] = {false},
         live = shms_get(&shms_writer_slot(w, slot)->state) == SHMS_LIVE;
    for (uint32_t o = 0; live && n_writers > 1 && o < n_writers; o++)
        if (held_by(w, o, slot, expected)) {
            why->held_by_writer[o] += span;
            anyone = true;
        }
    for (uint32_t r = 0; live && r < n_ranks; r++) {
        bool holds = expected[r] || (shms_pin_count(shms_pin_of(w, r, slot), memory_order_relaxed) && !gone(w, r));
        for (uint32_t e = w->leases.first[slot]; !holds && e != SHMS_NONE; e = w->leases.next[e])
            holds = !lease_acknowledged_by(w, r, e) && !gone(w, r);
        why->held[r] += holds ? span : 0;
        anyone |= holds;
    }
    why->kept += anyone ? 0 : span;
}

#define SUMS (sizeof(shms_refusal) - offsetof(shms_refusal, kept))

int shms_writer_holders(shms_writer *w, shms_refusal *why) {
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    uint32_t n_ranks = (uint32_t)w->seg.layout.n_readers, read = 0;
    shms_refusal *last = &w->refusal;
    shms_poll(w);
    uint64_t changes = w->ring.changes;
    if (w->summed_at == changes && w->summed_kind == why->kind) { /* as of the last try, probably */
        memmove(&why->kept, &last->kept, SUMS);
        return shms_writer_leave(w, SHMS_OK);
    }
    why->kept = 0;
    memset(why->held, 0, sizeof why->held);
    memset(why->held_by_writer, 0, sizeof why->held_by_writer);
    for (uint32_t r = 0; r < n_ranks; r++)
        why->awaited[r] = atomic_load_explicit(&shms_segment_reader(&w->seg, r)->epoch, memory_order_acquire) == 0;
    for (uint32_t s = 0; s < w->seg.layout.max_objects; s++) {
        const shms_slot *slot = shms_writer_slot(w, s);
        if (shms_get(&slot->state) == SHMS_FREE || (why->kind && why->kind != shms_slot_kind(slot)) ||
            shms_evictable(w, s))
            continue;
        add_holders(w, s, why);
        if ((read += n_ranks) >= READS_AT_ONCE) {
            read = 0;
            if (shms_reclaim_yield(w) && w->closed)
                return shms_writer_leave(w, SHMS_ECLOSED);
        }
    }
    memmove(&last->kept, &why->kept, SUMS);
    w->summed_at = changes; /* if others changed something during a yield, the next call sums up again */
    w->summed_kind = why->kind;
    return shms_writer_leave(w, SHMS_OK);
}

/* W3 for n slots in EVICTING. */
static bool pinned(struct shms_writer *w, const uint32_t *slots, uint32_t n) {
    for (uint32_t r = 0; r < w->seg.layout.n_readers; r++) {
        const shms_pin *pins = shms_pin_of(w, r, 0);
        for (uint32_t i = 0; i < n; i++) {
            /* after the fence, pairs with R1: the pin is seen here, or the reader sees EVICTING; acquire: pairs with R4 */
            SHMS_STEP("W3");
            if (shms_pin_count(&pins[slots[i]], memory_order_acquire) == 0)
                continue;
            SHMS_STEP("W3p");
            if (shms_segment_held(&w->seg, (int)r))
                return true;
        }
    }
    return false;
}

/* W3h for the slots in EVICTING: a pin counts if its writer holds its lock now. */
static bool pinned_remotely(struct shms_writer *w) {
    for (uint32_t o = 0; o < w->seg.layout.n_writers; o++) {
        uint32_t slot = pinned_by(w, o);
        if (slot == SHMS_NONE || shms_get(&shms_writer_slot(w, slot)->state) != SHMS_EVICTING)
            continue;
        SHMS_STEP("W3p");
        if (shms_segment_held(&w->seg, SHMS_ROLE_OF_WRITER(o)))
            return true;
    }
    return false;
}

bool shms_still_held(struct shms_writer *w, const uint32_t *slots, uint32_t n) {
    if (w->seg.layout.n_writers == 1)
        return pinned(w, slots, n);
    if (pinned_remotely(w))
        return true;
    shms_reclaim_begin(w);
    if (pinned(w, slots, n))
        return true;
    for (uint32_t o = 0; o < w->seg.layout.n_writers; o++)
        for (uint32_t i = 0; o != w->seg.arena && i < n; i++) /* in the order of the memory of one writer's row */
            if (leased_by(w, o, slots[i], NULL))
                return true;
    return false;
}

/* Compares a peer with what the last poll has found, and marks the zones where it may have released something. */
static bool poll(struct shms_writer *w, uint32_t peer, shms_peer now, const shms_word *counts) {
    shms_peer *p = &w->peers[peer];
    uint32_t n_zones = w->ring.n_zones;
    uint64_t *zones = w->polled_zones + (uint64_t)peer * n_zones;
    if (p->blamed) /* else no object was found held by it, so its death releases nothing */
        gone(w, peer);
    now.asked = p->asked;
    now.gone = p->gone;
    now.blamed = p->blamed;
    bool all = p->turned || now.epoch != p->epoch || now.base != p->base || now.retired != p->retired;
    bool some = now.releases != p->releases;
    *p = now;
    if (all) {
        shms_zones_stale_all(&w->zones);
        for (uint32_t i = 0; i < w->seg.layout.n_readers + w->seg.layout.n_writers; i++)
            w->peers[i].blamed = 0;
    } else if (!some)
        return false;
    w->to_sweep = w->leases.n_entries;
    for (uint32_t z = 0; z < n_zones; z++) {
        uint64_t count = shms_get(&counts[z]);
        if (count != zones[z])
            shms_zones_stale(&w->zones, z);
        zones[z] = count;
    }
    return true;
}

bool shms_poll(struct shms_writer *w) {
    const shms_layout *l = &w->seg.layout;
    uint32_t arena = w->seg.arena;
    bool any = false;
    shms_reclaim_begin(w);
    for (uint32_t r = 0; r < l->n_readers; r++) {
        shms_reader_table *t = shms_segment_reader(&w->seg, r);
        shms_peer now = {.retired = shms_get(&w->seg.writer->retired[r])};
        now.epoch = shms_get(&t->epoch);
        /* All of them, which the rank changes one by one: leases of other writers on objects of this one go by theirs.
         * Each store of an attach or a close changes the sum, and so the last one does. */
        for (uint32_t o = 0; o < l->n_writers; o++)
            now.base += shms_get(&t->base[o]);
        now.releases = atomic_load_explicit(&t->releases, memory_order_acquire);
        any |= poll(w, r, now, shms_reader_zone_releases(t, l, arena));
    }
    for (uint32_t o = 0; o < l->n_writers; o++) {
        const shms_writer_table *t = shms_segment_writer(&w->seg, o);
        if (o == arena)
            continue;
        shms_peer now = {.retired = shms_get(&t->retirements)};
        now.epoch = shms_get(&t->epoch);
        now.releases = atomic_load_explicit(&t->releases, memory_order_acquire);
        const shms_word *counts = shms_segment_at(&w->seg, l->counts_at, o);
        any |= poll(w, (uint32_t)l->n_readers + o, now, counts + (uint64_t)arena * w->ring.n_zones);
    }
    /* Orders what was read here before the scans, and pairs with the fence after a failed R4: if a scan sees that pin,
     * its rank counts the zone where this writer has put the slot's object. */
    atomic_thread_fence(memory_order_seq_cst);
    w->released |= any;
    return any;
}
