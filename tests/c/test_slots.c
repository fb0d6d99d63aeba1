/* test_slots.c - bounds and order of the slot table, compared with a slow implementation of the same rules. */
#include "support.h"

enum { N = 12, CAPACITY = 16 * SHMS_ALIGN, ROUNDS = 200000 / EACH };

static shms_slot slots[N];

static bool bounded(uint64_t offset, uint64_t length, uint64_t key_len, uint64_t meta_len) {
    uint64_t span = length ? (length + 63) / 64 * 64 : 64, payload_at = (key_len + meta_len + 63) / 64 * 64;
    return offset % 64 == 0 && length <= CAPACITY && offset <= CAPACITY && offset + span <= CAPACITY &&
           payload_at <= span && key_len + meta_len <= length;
}

static int valid(uint64_t next_id) {
    for (int i = 0; i < N; i++) {
        const shms_slot *a = &slots[i];
        if (a->state == SHMS_FREE)
            continue;
        uint64_t extra = a->flags >> 8 & SHMS_MAX_EXTRA, at = shms_align_up(shms_slot_key_len(a) + (a->head >> 32), 64);
        if (a->state > SHMS_EVICTING || (a->flags & 0xff) >= 4 * SHMS_KINDS || (extra && at + extra > a->length) ||
            (!(a->flags & 2) && a->flags >> 32) || a->id == 0 || a->id >= next_id ||
            !bounded(a->offset, a->length, shms_slot_key_len(a), a->head >> 32))
            return SHMS_ECORRUPT;
        for (int j = 0; j < i; j++) {
            const shms_slot *b = &slots[j];
            if (b->state == SHMS_FREE)
                continue;
            if (a->id == b->id ||
                (a->offset < b->offset + shms_span(b->length) && b->offset < a->offset + shms_span(a->length)))
                return SHMS_ECORRUPT;
        }
    }
    return SHMS_OK;
}

TEST(bounds_hold_for_every_small_offset_and_some_huge_ones) {
    static const uint64_t odd[] = {
        0,         1, 63, 64, 65, 127, 128, 960, 1023, 1024, 1025, 1088, UINT32_MAX, UINT64_C(1) << 32, UINT64_MAX - 63,
        UINT64_MAX};
    shms_slot s;
    for (size_t a = 0; a < sizeof odd / 8; a++)
        for (size_t b = 0; b < sizeof odd / 8; b++)
            for (size_t c = 0; c < sizeof odd / 8; c++)
                for (size_t d = 0; d < sizeof odd / 8; d++) {
                    uint64_t key_len = odd[c] & UINT32_MAX, meta_len = odd[d] & UINT32_MAX;
                    s = (shms_slot){.offset = odd[a], .length = odd[b], .head = key_len | meta_len << 32};
                    CHECK_EQ(odd[a] <= CAPACITY && odd[b] <= CAPACITY && bounded(odd[a], odd[b], key_len, meta_len),
                             shms_slot_bounded(&s, CAPACITY));
                }
}

TEST(a_table_is_valid_when_no_two_objects_overlap_or_share_an_id) {
    uint64_t seed = 1, counts[2] = {0};
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t at = 0;
        memset(slots, 0, sizeof slots);
        for (int i = 0; i < N; i++) { /* a valid table, with its slots in random order */
            shms_slot *s = &slots[(i * 5) % N];
            uint64_t spans = below(&seed, 3);
            if (spans == 0 || at + 64 * spans > CAPACITY)
                continue;
            uint64_t length = 64 * spans - below(&seed, 32);
            *s = (shms_slot){.state = 1 + below(&seed, 3),
                             .id = 1 + (uint64_t)i,
                             .offset = at,
                             .length = length,
                             .head = 1 + below(&seed, 20),
                             .flags = below(&seed, 4 * SHMS_KINDS) |
                                      below(&seed, length - 64 * (spans - 1)) * (spans > 1) << 8};
            at += 64 * spans;
        }
        if (below(&seed, 2)) { /* with one word changed */
            shms_word *word = (shms_word *)&slots[below(&seed, N)] + below(&seed, 7);
            *word = below(&seed, 2) ? *word ^ UINT64_C(1) << below(&seed, 64) : below(&seed, 20);
        }
        int rc = valid(N + 1);
        counts[rc == SHMS_OK]++;
        CHECK_EQ(rc, shms_slots_valid(slots, N, CAPACITY, N + 1));
    }
    CHECK(counts[0] > ROUNDS / 10 && counts[1] > ROUNDS / 10);
}

TEST(sorting_gives_every_occupied_slot_in_address_order) {
    uint64_t seed = 2;
    for (int round = 0; round < 20000; round++) {
        uint32_t order[N], occupied = 0;
        for (int i = 0; i < N; i++) {
            slots[i] = (shms_slot){.state = below(&seed, 4), .offset = 64 * below(&seed, 1000)};
            occupied += slots[i].state != SHMS_FREE;
        }
        uint32_t count = shms_slots_sorted(slots, N, order), seen = 0;
        CHECK_EQ(occupied, count);
        for (uint32_t i = 0; i < count; i++) {
            CHECK(order[i] < N && slots[order[i]].state != SHMS_FREE && !(seen & 1u << order[i]));
            CHECK(i == 0 || slots[order[i - 1]].offset <= slots[order[i]].offset);
            seen |= 1u << order[i];
        }
    }
}
