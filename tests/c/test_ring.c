/*
 * test_ring.c - checks what ring.h and zones.h promise, in caller's memory, after each of many random steps.
 *
 * The model is an array of objects sorted by address, without hands or zones. The possible runs at each level, and the
 * bytes of each holder, follow from it.
 */
#include "support.h"

enum { N = 300, RANKS = 2, ROUNDS = 120000 / (1 + EACH) };
#define CAPACITY (UINT64_C(1) << 20) /* 64 zones of 16 KiB; objects of up to 256 bytes are small */

static shms_layout layout;
static shms_slot slots[N];
static int holder[N]; /* rank, or NOBODY, or THE_WRITER */
enum { NOBODY = -1, THE_WRITER = RANKS };
static uint32_t order[N], count; /* the model: occupied slots in address order */
static shms_ring ring;
static shms_zones zones;
static void *memory;
static uint64_t next_id, looks;

static uint64_t at_of(uint32_t s) { return slots[s].offset; }
static uint64_t end_of(uint32_t s) { return slots[s].offset + (slots[s].length + 63) / 64 * 64; }

static bool evictable(void *context, uint32_t s) {
    CHECK(context == holder && s < N && slots[s].state == SHMS_LIVE);
    looks++;
    return holder[s] == NOBODY;
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

static bool stays(uint32_t s, enum shms_level level) {
    return level == SHMS_LEVEL_FREE || holder[s] != NOBODY || (level == SHMS_LEVEL_COLD && shms_ring_is_used(&ring, s));
}

/* The longest run within [from, to). */
static uint64_t longest(uint64_t from, uint64_t to, enum shms_level level) {
    uint64_t start = from, best = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t s = order[i];
        if (!stays(s, level) || end_of(s) <= from || at_of(s) >= to)
            continue;
        if (at_of(s) > start && at_of(s) - start > best)
            best = at_of(s) - start;
        start = end_of(s);
    }
    return to > start && to - start > best ? to - start : best;
}

static void in_a_run(uint64_t at, uint64_t span, enum shms_level level) {
    CHECK(at % SHMS_ALIGN == 0 && at + span <= CAPACITY);
    for (uint32_t i = 0; i < count; i++)
        CHECK(!(stays(order[i], level) && at_of(order[i]) < at + span && end_of(order[i]) > at));
}

static void ring_matches_model(void) {
    CHECK_EQ(SHMS_OK, shms_ring_valid(&ring, N));
    CHECK_EQ(count, ring.count);
    uint32_t s = ring.first;
    for (uint32_t i = 0; i < count; i++, s = ring.next[s])
        CHECK_EQ(order[i], s);
    CHECK_EQ(SHMS_NONE, s);
}

static void take_out(uint32_t s) {
    shms_ring_remove(&ring, s);
    slots[s].state = SHMS_FREE;
    model_sort();
    ring_matches_model();
}

static void hold(uint32_t s, int who) {
    holder[s] = who;
    if (who == NOBODY)
        shms_ring_stale_slot(&ring, s); /* a release must mark its zones; a hold need not */
}

static void begin(void) {
    shms_options o = {.capacity = CAPACITY, .n_readers = RANKS, .max_objects = N};
    CHECK_EQ(SHMS_OK, shms_layout_compute(&layout, &o, 4096));
    CHECK_EQ(64, shms_n_zones(&layout));
    free(memory);
    uint64_t ring_size = shms_align_up(shms_ring_memory(N, 64), 8);
    memory = zeroed(ring_size + shms_zones_memory(64));
    memset(slots, 0, sizeof slots);
    model_sort();
    shms_ring_init(&ring, memory, &layout, slots, (uint64_t[]){0, 0}, order, 0);
    shms_zones_init(&zones, (uint8_t *)memory + ring_size, &ring, 64, RANKS, evictable, holder);
    ring_matches_model();
}

/* What a search by zones finds, and what it reports. A zone may remember more room than there is. */
static bool find(uint64_t from, uint64_t to, uint64_t span, enum shms_level level, uint64_t *at) {
    int64_t budget = 1;
    uint64_t seen;
    int rc, rounds = 0;
    while ((rc = shms_zones_find(&zones, from, to, from, span, level, &budget, at, &seen)) < 0 && ++rounds < 400)
        budget = 1; /* at least one zone in each call */
    CHECK(rc >= 0);
    if (rc == 0) {
        CHECK(longest(from, to, level) < span);
        CHECK(seen >= longest(from, to, level)); /* an object that is held by now may have been free */
        CHECK(seen < span);
    }
    return rc;
}

static uint64_t answers[6];

static void put(uint64_t *seed) {
    uint64_t size = 1 + below(seed, (uint64_t[]){200, 3000, 60000, 400000}[below(seed, 4)]);
    uint32_t slot = 0;
    while (slot < N && slots[slot].state != SHMS_FREE)
        slot++;
    if (slot == N)
        return;
    shms_place p = {.span = shms_span(size)};
    enum shms_area_name area = shms_ring_area(&ring, p.span);
    enum shms_level level = SHMS_LEVEL_COLD;
    const shms_area *a = &ring.areas[area];
    CHECK(area == SHMS_LARGE || p.span <= ring.small);
    bool near = shms_ring_near(&ring, area, level, 20, evictable, holder, &p);
    answers[near]++;
    if (near)
        CHECK(p.at >= a->from && p.at + p.span <= a->to);
    else if (count <= 20) /* once round, from the hand */
        CHECK(longest(a->from, a->hand, level) < p.span && longest(a->hand, a->to, level) < p.span);
    if (!near) {
        level = SHMS_LEVEL_ANY;
        for (uint64_t at; !find(0, CAPACITY, p.span, SHMS_LEVEL_ANY, &p.at);) {
            CHECK(!find(0, CAPACITY, p.span, SHMS_LEVEL_FREE, &at));
            answers[2]++;
            return;
        }
        /* a zone may count an object that is held by now: mark it stale, and search again */
        for (uint32_t i = 0; i < count; i++)
            if (holder[order[i]] != NOBODY && at_of(order[i]) < p.at + p.span && end_of(order[i]) > p.at) {
                shms_ring_stale_slot(&ring, order[i]);
                answers[3]++;
                return;
            }
        p.first = shms_ring_at(&ring, p.at);
        area = p.at < ring.areas[SHMS_LARGE].to ? SHMS_LARGE : SHMS_SMALL;
    }
    in_a_run(p.at, p.span, level);
    uint32_t behind = p.first, n = 0, last = SHMS_NONE;
    CHECK_EQ(shms_ring_at(&ring, p.at), p.first);
    for (; behind != SHMS_NONE && at_of(behind) < p.at + p.span; last = behind, behind = ring.next[behind], n++)
        slots[behind].state = SHMS_EVICTING;
    answers[4] += n > 1;
    if (n)
        shms_ring_cut(&ring, p.first, last, n);
    for (uint32_t s = 0; s < N; s++)
        if (slots[s].state == SHMS_EVICTING)
            slots[s].state = SHMS_FREE;
    slots[slot] = (shms_slot){.state = SHMS_LIVE, .id = ++next_id, .offset = p.at, .length = size, .head = 1};
    holder[slot] = below(seed, 3) ? NOBODY : (int)below(seed, RANKS + 1);
    shms_ring_insert(&ring, slot, behind);
    if (near || below(seed, 2))
        shms_ring_move_hand(&ring, area, slot, !near);
    answers[5] += area == SHMS_SMALL;
    model_sort();
    ring_matches_model();
}

static void zones_match_model(void) {
    int64_t budget = INT64_MAX;
    uint64_t reclaimable = 0, at, seen;
    for (uint32_t s = 0; s < N; s++) /* exact if every zone is stale */
        if (slots[s].state != SHMS_FREE)
            shms_ring_stale_slot(&ring, s);
    CHECK(shms_zones_scan(&zones, &budget));
    for (uint32_t i = 0; i < count; i++)
        reclaimable += holder[order[i]] == NOBODY ? end_of(order[i]) - at_of(order[i]) : 0;
    CHECK_EQ(reclaimable, zones.total_free);
    for (int level = 0; level < SHMS_LEVELS; level++) {
        uint64_t there = longest(0, CAPACITY, (enum shms_level)level);
        CHECK_EQ(0, shms_zones_find(&zones, 0, CAPACITY, 0, CAPACITY + 1, (enum shms_level)level, &budget, &at, &seen));
        CHECK_EQ(there, seen);
        CHECK_EQ(there > 0, shms_zones_find(&zones, 0, CAPACITY, CAPACITY / 3, there ? there : 1,
                                            (enum shms_level)level, &budget, &at, &seen));
        if (there)
            in_a_run(at, there, (enum shms_level)level);
    }
}

static void every_search_finds_what_the_model_has(uint64_t seed) {
    begin();
    for (int round = 0; round < ROUNDS / 8; round++) {
        uint32_t s = (uint32_t)below(&seed, N);
        bool there = slots[s].state != SHMS_FREE;
        switch (below(&seed, 12)) {
        case 0:
            if (there) /* deleted, aborted */
                take_out(s);
            break;
        case 1:
            if (there)
                hold(s, (int)below(&seed, RANKS + 1));
            break;
        case 2:
        case 3:
        case 4:
            if (there)
                hold(s, NOBODY);
            break;
        case 5:
            if (there) {
                shms_ring_use(&ring, s);
                CHECK(shms_ring_is_used(&ring, s));
            }
            break;
        case 6:
            /* a successor, which may find a hand inside an object or beyond the region */
            if (below(&seed, 100) == 0) {
                uint64_t hands[2] = {
                    below(&seed, 4) ? ring.areas[0].hand : SHMS_ALIGN * below(&seed, CAPACITY / 64 + 2),
                    below(&seed, 4) ? ring.areas[1].hand : SHMS_ALIGN * below(&seed, CAPACITY / 64 + 2)};
                shms_ring_init(&ring, memory, &layout, slots, hands, order, count);
                ring_matches_model();
            } else if (below(&seed, 20) == 0) {
                zones_match_model();
            }
            break;
        default:
            put(&seed);
        }
    }
}

/* A scan that has used up its budget, and then begins anew, counts what may go once. */
TEST(a_scan_that_begins_anew_counts_once) {
    int64_t budget;
    begin();
    for (uint32_t s = 0; s < 8; s++) {
        slots[s] = (shms_slot){.state = SHMS_LIVE, .id = ++next_id, .offset = 64 * s, .length = 64, .head = 1};
        holder[s] = NOBODY;
        shms_ring_insert(&ring, s, SHMS_NONE);
    }
    model_sort();
    for (int round = 0; round < 3; round++) {
        budget = 1;
        CHECK(!shms_zones_scan(&zones, &budget));
        if (round == 1) /* another zone comes in between */
            CHECK_EQ(0, shms_zones_find(&zones, CAPACITY / 2, CAPACITY, CAPACITY / 2, CAPACITY, SHMS_LEVEL_ANY,
                                        &(int64_t){INT64_MAX}, &(uint64_t){0}, &(uint64_t){0}));
        shms_ring_stale_slot(&ring, 7);
    }
    zones_match_model();
}

/* The ring knows of a gap that a hand has left. */
TEST(no_gap_is_longer_than_the_ring_reports) {
    uint64_t seed = 3;
    begin();
    for (int round = 0; round < 4000; round++) {
        uint32_t s = (uint32_t)below(&seed, N);
        if (slots[s].state != SHMS_FREE && below(&seed, 4) == 0)
            take_out(s);
        put(&seed);
        for (int a = 0; a < SHMS_AREAS; a++) {
            uint64_t at_hand = shms_ring_gap(&ring, (enum shms_area_name)a), known = ring.areas[a].gap;
            CHECK(longest(ring.areas[a].from, ring.areas[a].to, SHMS_LEVEL_FREE) <=
                  (at_hand > known ? at_hand : known));
        }
    }
}

static void insert_at_hand(uint32_t s, uint64_t size) {
    shms_place p = {.span = shms_span(size)};
    CHECK(shms_ring_near(&ring, SHMS_LARGE, SHMS_LEVEL_COLD, N, evictable, holder, &p));
    if (p.first != SHMS_NONE && at_of(p.first) < p.at + p.span) {
        CHECK_EQ(s, p.first);
        shms_ring_remove(&ring, s);
        p.first = ring.next[s];
    }
    slots[s] = (shms_slot){.state = SHMS_LIVE, .id = ++next_id, .offset = p.at, .length = size, .head = 1};
    holder[s] = NOBODY;
    shms_ring_insert(&ring, s, p.first);
    shms_ring_move_hand(&ring, SHMS_LARGE, s, false);
    model_sort();
    ring_matches_model();
}

TEST(an_object_out_of_bounds_or_within_another_is_found) {
    begin();
    for (uint32_t s = 0; s < 3; s++)
        insert_at_hand(s, CAPACITY / 4);
    slots[2].offset++;
    slots[2].length -= SHMS_ALIGN;
    CHECK_EQ(SHMS_ECORRUPT, shms_ring_valid(&ring, N));
    slots[2].offset--;
    slots[2].length += SHMS_ALIGN;
    slots[1].offset -= SHMS_ALIGN;
    CHECK_EQ(SHMS_ECORRUPT, shms_ring_valid(&ring, N));
    slots[1].offset += SHMS_ALIGN;
    CHECK_EQ(SHMS_OK, shms_ring_valid(&ring, N));
}

TEST(a_used_object_outlives_an_unused_one_once) {
    begin();
    for (uint32_t s = 0; s < 4; s++)
        insert_at_hand(s, CAPACITY / 4);
    shms_ring_use(&ring, 0);
    insert_at_hand(1, CAPACITY / 4);
    CHECK(!shms_ring_is_used(&ring, 0));
    for (uint32_t expected = 2; expected < 5; expected++) /* 2, 3, and then the one that had its second chance */
        insert_at_hand(expected % 4, CAPACITY / 4);
}

/* A hand that passes whole zones ends the second chance of all their objects, without visiting any. */
TEST(a_hand_that_passes_a_zone_ends_its_second_chances) {
    begin();
    for (uint32_t s = 0; s < 256; s++)
        insert_at_hand(s, CAPACITY / 256);
    for (int lap = 0; lap < 300; lap++) {
        for (uint32_t s = 0; s < 200; s++)
            shms_ring_use(&ring, s);
        shms_ring_remove(&ring, 250);
        model_sort();
        shms_ring_insert(&ring, 250, 251);
        shms_ring_move_hand(&ring, SHMS_LARGE, 250, lap % 2); /* from after 250, or from after 255: once round */
        model_sort();
        for (uint32_t s = 0; s < 200; s++)
            CHECK(!shms_ring_is_used(&ring, s));
    }
}

/* A use marks every zone of the object, and so does the hand that passes it. */
TEST(a_use_marks_all_zones_of_an_object) {
    uint64_t at;
    begin();
    insert_at_hand(0, CAPACITY / 4);
    for (uint32_t s = 1; s < 97; s++) {
        insert_at_hand(s, CAPACITY / 128);
        holder[s] = 0;
    }
    CHECK(find(0, CAPACITY, CAPACITY / 4, SHMS_LEVEL_COLD, &at)); /* all zones are scanned */
    shms_ring_use(&ring, 0);
    CHECK(!find(0, CAPACITY, CAPACITY / 8, SHMS_LEVEL_COLD, &at));
    CHECK(!find(0, CAPACITY, CAPACITY / 128, SHMS_LEVEL_COLD, &at));
    shms_ring_move_hand(&ring, SHMS_LARGE, 96, true);
    CHECK(find(0, CAPACITY, CAPACITY / 4, SHMS_LEVEL_COLD, &at));
    CHECK_EQ(0, at);
}

/* If everything is scanned, a search visits only zones that have become stale. */
TEST(a_search_scans_only_zones_with_releases) {
    uint64_t at;
    begin();
    for (uint32_t s = 0; s < 256; s++) {
        insert_at_hand(s, CAPACITY / 256);
        holder[s] = 0;
    }
    CHECK(!find(0, CAPACITY, CAPACITY / 128, SHMS_LEVEL_ANY, &at));
    looks = 0;
    CHECK(!find(0, CAPACITY, CAPACITY / 128, SHMS_LEVEL_ANY, &at));
    CHECK_EQ(0, looks);
    hold(77, NOBODY);
    CHECK(!find(0, CAPACITY, CAPACITY / 128, SHMS_LEVEL_ANY, &at));
    CHECK_EQ(4, looks); /* of the four objects of its zone */
    hold(78, NOBODY);
    CHECK(find(0, CAPACITY, CAPACITY / 128, SHMS_LEVEL_ANY, &at));
    CHECK_EQ(at_of(77), at);
}

/* A zone with many objects. */
TEST(a_scan_goes_on_where_its_budget_ended_unless_its_zone_has_changed) {
    enum { MANY = 60, AT_ONCE = 7 };
    uint64_t at, seen;
    begin();
    for (uint32_t s = 0; s < MANY; s++) {
        insert_at_hand(s, CAPACITY / 64 / (MANY + 8));
        holder[s] = 0;
    }
    for (int change = 0; change < 2; change++) {
        hold(MANY - 1, NOBODY);
        looks = 0;
        for (uint64_t most = AT_ONCE;; most += AT_ONCE) {
            int64_t budget = AT_ONCE * RANKS;
            int rc = shms_zones_find(&zones, 0, CAPACITY, 0, CAPACITY, SHMS_LEVEL_ANY, &budget, &at, &seen);
            CHECK(looks <= most);
            if (rc == 0)
                break;
            if (change && most == 3 * AT_ONCE)
                hold(0, NOBODY);
        }
        CHECK_EQ(change ? MANY + 3 * AT_ONCE : MANY, looks);
        CHECK_EQ(CAPACITY - at_of(MANY - 1), seen);
        zones_match_model();
    }
}

TEST(each_in_all_its_cases) {
    for (uint64_t seed = 1; seed <= 16; seed++)
        every_search_finds_what_the_model_has(seed);
    for (int i = 0; i < 6; i++)
        CHECK(answers[i] > 50 / EACH); /* every kind of answer occurred often */
    free(memory);
}
