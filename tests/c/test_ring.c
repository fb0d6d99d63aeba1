/*
 * test_ring.c - what ring.h promises, over caller memory, after each of many random steps.
 *
 * The model is an array of objects sorted by address.  It knows nothing of laps or hands: from it follow the stretches
 * that could be had, and where a search that goes by insertion order must have found its place.
 */
#include "support.h"

enum { N = 24, UNITS = 40, ROUNDS = 300000 };
#define CAPACITY ((uint64_t)UNITS * SHMS_ALIGN)

static shms_slot slots[N];
static bool held[N], used[N];
static uint32_t order[N], count; /* the model: occupied slots in address order */
static uint64_t hand;
static shms_ring ring;
static void *memory;

static uint64_t at_of(uint32_t s) { return slots[s].offset; }
static uint64_t end_of(uint32_t s) { return slots[s].offset + (slots[s].length + 63) / 64 * 64; }
static bool may_go(void *context, uint32_t s) {
    CHECK(context == held && s < N && slots[s].state == SHMS_LIVE);
    return !held[s];
}

static void model_sort(void) {
    count = 0;
    for (uint32_t s = 0; s < N; s++)
        if (slots[s].state != SHMS_FREE) {
            uint32_t i = count++;
            for (; i && at_of(order[i - 1]) > at_of(s); i--)
                order[i] = order[i - 1];
            order[i] = s;
        }
}

/* The longest stretch of gaps and of objects that may go; with `keep_used`, those in use stay. */
static uint64_t longest(bool keep_used) {
    uint64_t start = 0, best = 0;
    for (uint32_t i = 0; i <= count; i++) {
        uint64_t end = i < count ? at_of(order[i]) : CAPACITY;
        if (end - start > best)
            best = end - start;
        if (i < count && (held[order[i]] || (keep_used && used[order[i]])))
            start = end_of(order[i]);
        else if (i < count)
            best = best > end_of(order[i]) - start ? best : end_of(order[i]) - start;
    }
    return best;
}

/* Where a search finds its place that has only held objects to step over: the first of the hand, the ends of the held
 * objects behind it, 0, and the ends of those before it, from which `span` bytes follow without a held one. */
static uint64_t first_place(uint64_t span) {
    for (int lap = 0; lap < 2; lap++)
        for (uint32_t i = 0; i <= count; i++) {
            uint64_t start, end = CAPACITY;
            if (i == 0)
                start = lap ? 0 : hand;
            else if (held[order[i - 1]] && lap == (at_of(order[i - 1]) < hand))
                start = end_of(order[i - 1]);
            else
                continue;
            for (uint32_t j = count; j-- > 0;)
                if (held[order[j]] && at_of(order[j]) >= start)
                    end = at_of(order[j]);
            if (end - start >= span)
                return start;
        }
    return UINT64_MAX;
}

static bool any_may_go(bool unused_only) {
    for (uint32_t i = 0; i < count; i++)
        if (!held[order[i]] && !(unused_only && used[order[i]]))
            return true;
    return false;
}

static void ring_matches_model(void) {
    CHECK_EQ(SHMS_OK, shms_ring_valid(&ring, N));
    CHECK_EQ(count, ring.count);
    CHECK_EQ(hand, ring.hand);
    uint32_t s = ring.first;
    for (uint32_t i = 0; i < count; i++, s = ring.next[s]) {
        CHECK_EQ(order[i], s);
        CHECK_EQ(used[s], ring.used[s]);
    }
    CHECK_EQ(SHMS_NONE, s);
}

static void use(uint32_t s) {
    ring.used[s] = 1;
    used[s] = true;
}

static void take_out(uint32_t s) {
    shms_ring_remove(&ring, s);
    slots[s].state = SHMS_FREE;
    used[s] = held[s] = false;
    model_sort();
    ring_matches_model();
}

/* What must be true of the place that a search has found, or of its having found none. */
static bool search_is_right(uint64_t span, bool need_slot, bool fifo, bool found, const shms_place *p) {
    bool room = longest(false) >= span && (!need_slot || any_may_go(false));
    CHECK_EQ(room, found);
    if (!found)
        return false;
    CHECK(p->at % SHMS_ALIGN == 0 && p->at + span <= CAPACITY);
    uint32_t inside = 0, behind = SHMS_NONE, s = p->first;
    bool takes_used = false;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t o = order[i];
        if (at_of(o) < p->at + span && end_of(o) > p->at) { /* exactly those in the way go */
            CHECK(at_of(o) >= p->at && !held[o]);
            CHECK_EQ(o, s);
            s = ring.next[s];
            inside++;
            takes_used |= used[o];
        } else if (at_of(o) >= p->at + span && behind == SHMS_NONE && o != p->extra) {
            behind = o;
        }
    }
    CHECK_EQ(inside, p->victims);
    CHECK(inside || p->first == SHMS_NONE);
    CHECK_EQ(behind, p->behind);
    CHECK_EQ(need_slot && inside == 0, p->extra != SHMS_NONE);
    if (p->extra != SHMS_NONE) {
        CHECK(!held[p->extra] && slots[p->extra].state == SHMS_LIVE);
        CHECK(fifo || !used[p->extra] || !any_may_go(true)); /* the second chance, of the object that is in no way */
    }
    if (!fifo && longest(true) >= span)
        CHECK(!takes_used); /* the second chance */
    bool any_used = false;
    for (uint32_t i = 0; i < count; i++)
        any_used |= used[order[i]];
    if (fifo || !any_used) { /* in the first stretch that is long enough, from the hand on */
        uint64_t first = first_place(span);
        CHECK(first <= p->at);
        for (uint32_t i = 0; i < count; i++)
            CHECK(!(held[order[i]] && at_of(order[i]) >= first && at_of(order[i]) < p->at));
    }
    if (inside && !need_slot) { /* and nothing goes where the gap that ends the stretch is long enough */
        uint64_t gap = 0;
        for (uint32_t i = 0; i < count; i++)
            if (at_of(order[i]) < p->at + span)
                gap = end_of(order[i]);
        CHECK((behind == SHMS_NONE ? CAPACITY : at_of(behind)) - gap < span);
    }
    return true;
}

static void put(uint64_t *seed, uint64_t most, uint64_t counts[4]) {
    uint64_t units = 1 + below(seed, below(seed, 3) ? 5 : most), span = units * SHMS_ALIGN;
    uint32_t slot = 0;
    while (slot < N && slots[slot].state != SHMS_FREE)
        slot++;
    bool need_slot = slot == N || (count && below(seed, 8) == 0);
    shms_ring before = ring;
    uint8_t *bytes = malloc(shms_ring_memory(N));
    memcpy(bytes, memory, shms_ring_memory(N));
    shms_place place;
    bool found = shms_ring_find(&ring, span, need_slot, may_go, held, &place);
    CHECK(!memcmp(&before, &ring, sizeof ring) && !memcmp(bytes, memory, shms_ring_memory(N)));
    free(bytes);
    bool second_lap = !ring.fifo && longest(true) < span;
    if (!search_is_right(span, need_slot, ring.fifo, found, &place)) {
        counts[0]++;
        return;
    }
    counts[1 + (place.victims > 0)]++;
    counts[3] += place.extra != SHMS_NONE;
    bool slot_lap = place.extra != SHMS_NONE && used[place.extra]; /* round once more, for a slot alone */
    uint64_t was = hand;
    for (uint32_t i = 0, s = place.first, next; i < place.victims; i++, s = next) {
        next = ring.next[s];
        slot = s;
        take_out(s);
    }
    if (place.extra != SHMS_NONE) {
        slot = place.extra;
        take_out(place.extra);
    }
    for (uint32_t i = 0; i < count; i++) { /* whom the hand passed has had its second chance */
        uint64_t at = at_of(order[i]);
        if (second_lap || (was <= place.at ? at >= was && at < place.at : at >= was || at < place.at))
            used[order[i]] = false;
    }
    slots[slot] = (shms_slot){.state = SHMS_LIVE, .offset = place.at, .length = span - below(seed, SHMS_ALIGN), .head = 1};
    shms_ring_insert(&ring, &place, slot);
    model_sort();
    for (uint32_t i = 0; slot_lap && i < count; i++) /* then one more or less of these may have lost it */
        used[order[i]] &= ring.used[order[i]];
    hand = place.at + span;
    ring_matches_model();
}

static void begin(bool fifo) {
    memset(slots, 0, sizeof slots);
    memset(held, 0, sizeof held);
    memset(used, 0, sizeof used);
    hand = 0;
    model_sort();
    shms_ring_init(&ring, memory, N, slots, CAPACITY, fifo, 0, order, 0);
    ring_matches_model();
}

static void every_search_finds_what_there_is(uint64_t seed, bool fifo) {
    uint64_t counts[4] = {0};
    begin(fifo);
    for (int round = 0; round < ROUNDS / 8; round++) {
        uint32_t s = (uint32_t)below(&seed, N);
        bool there = slots[s].state != SHMS_FREE;
        switch (below(&seed, 12)) {
        case 0:
            if (there && below(&seed, 2)) /* deleted, aborted */
                take_out(s);
            break;
        case 1: case 2:
            held[s] = there && below(&seed, 3) == 0;
            break;
        case 3: case 4:
            if (there)
                use(s);
            break;
        case 5:
            if (below(&seed, 40) == 0) { /* a successor, which may find the hand inside an object or beyond */
                memset(used, 0, sizeof used);
                hand = below(&seed, 4) ? hand : SHMS_ALIGN * below(&seed, UNITS + 2);
                shms_ring_init(&ring, memory, N, slots, CAPACITY, fifo, hand, order, count);
                hand = hand > CAPACITY ? 0 : hand;
                for (uint32_t i = 0; i < count; i++)
                    if (at_of(order[i]) < hand && hand < end_of(order[i]))
                        hand = end_of(order[i]);
                ring_matches_model();
            } else if (below(&seed, 60) == 0) {
                memset(held, 0, sizeof held);
            }
            break;
        default:
            put(&seed, UNITS + 1, counts);
        }
    }
    for (int i = 0; i < 4; i++)
        CHECK(counts[i] > ROUNDS / 8 / 200); /* every kind of answer was seen often */
}

static void with_nothing_held_any_span_has_its_place(void) {
    uint64_t seed = 6;
    for (int fifo = 0; fifo < 2; fifo++) {
        begin(fifo);
        for (int round = 0; round < 20000; round++) {
            shms_place place;
            uint64_t span = SHMS_ALIGN * (1 + below(&seed, UNITS));
            CHECK(shms_ring_find(&ring, span, count == N, may_go, held, &place));
            CHECK(!shms_ring_find(&ring, CAPACITY + SHMS_ALIGN, false, may_go, held, &place));
            uint64_t counts[4] = {0};
            put(&seed, UNITS, counts);
            CHECK_EQ(0, counts[0]);
            use(order[below(&seed, count)]);
        }
    }
}

static void a_used_object_outlives_an_unused_one_once(void) {
    begin(false);
    for (uint32_t s = 0; s < 4; s++) {
        shms_place place;
        CHECK(shms_ring_find(&ring, 10 * SHMS_ALIGN, false, may_go, held, &place));
        slots[s] = (shms_slot){.state = SHMS_LIVE, .offset = place.at, .length = 10 * SHMS_ALIGN, .head = 1};
        shms_ring_insert(&ring, &place, s);
    }
    ring.used[0] = 1;
    shms_place place;
    CHECK(shms_ring_find(&ring, 10 * SHMS_ALIGN, false, may_go, held, &place));
    CHECK_EQ(1, place.first);
    shms_ring_remove(&ring, 1);
    slots[1] = (shms_slot){.state = SHMS_LIVE, .offset = place.at, .length = 10 * SHMS_ALIGN, .head = 1};
    shms_ring_insert(&ring, &place, 1);
    CHECK_EQ(0, ring.used[0]);
    for (uint32_t expected = 2; expected < 5; expected++) { /* 2, 3, and then the one that was spared */
        CHECK(shms_ring_find(&ring, 10 * SHMS_ALIGN, false, may_go, held, &place));
        CHECK_EQ(expected % 4, place.first);
        shms_ring_remove(&ring, expected % 4);
        slots[expected % 4].offset = place.at;
        shms_ring_insert(&ring, &place, expected % 4);
    }
}

int main(void) {
    memory = zeroed(shms_ring_memory(N));
    for (uint64_t seed = 1; seed <= 16; seed++)
        every_search_finds_what_there_is(seed, seed % 2);
    with_nothing_held_any_span_has_its_place();
    a_used_object_outlives_an_unused_one_once();
    free(memory);
    return 0;
}
