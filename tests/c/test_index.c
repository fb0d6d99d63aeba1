/* test_index.c - the key index in caller's memory, compared with a linear search. */
#include "support.h"

enum { N = 24, ROUNDS = 300000, KEY = 40 };

static shms_slot slots[N];
static uint8_t data[N * SHMS_ALIGN];
static bool in_table[N];

/* Few different bytes and many lengths: keys are prefixes of one another, and return after their removal. */
static uint32_t draw(uint64_t *seed, char *key) {
    uint32_t len = 1 + (uint32_t)below(seed, KEY - 1);
    memset(key, 'a', len);
    key[below(seed, len)] = (char)('a' + below(seed, 3));
    return len;
}

static uint32_t find(const char *key, uint32_t len) {
    for (uint32_t i = 0; i < N; i++)
        if (in_table[i] && shms_slot_key_len(&slots[i]) == len && !memcmp(data + slots[i].offset, key, len))
            return i;
    return SHMS_NONE;
}

int main(void) {
    for (uint64_t run = 1; run <= 4; run++) {
        uint64_t seed = run, full = 0, hits = 0;
        shms_index x;
        void *memory = zeroed(shms_index_memory(N));
        memset(in_table, 0, sizeof in_table);
        shms_index_init(&x, memory, N, chance(&seed), slots, data);
        CHECK_EQ(SHMS_OK, shms_index_valid(&x, N));
        for (int round = 0; round < ROUNDS / 4; round++) {
            char key[KEY];
            uint32_t len = draw(&seed, key), expected = find(key, len), slot = (uint32_t)below(&seed, N);
            CHECK_EQ(expected, shms_index_find(&x, key, len));
            hits += expected != SHMS_NONE;
            if (in_table[slot] && below(&seed, 8) == 0) {
                CHECK(shms_index_remove(&x, slot));
                CHECK(!shms_index_remove(&x, slot));
                in_table[slot] = false;
                slots[slot].state = SHMS_FREE;
            } else if (!in_table[slot] && expected == SHMS_NONE) {
                slots[slot].state = SHMS_LIVE;
                slots[slot].offset = slot * SHMS_ALIGN;
                slots[slot].head = len;
                memcpy(data + slots[slot].offset, key, len);
                shms_index_add(&x, slot);
                in_table[slot] = true;
            }
            uint32_t count = 0;
            for (uint32_t i = 0; i < N; i++)
                count += in_table[i];
            full += count > N / 2;
            CHECK_EQ(count, x.count);
            CHECK_EQ(SHMS_OK, shms_index_valid(&x, N));
            CHECK_EQ(in_table[slot] ? slot : SHMS_NONE,
                     in_table[slot]
                         ? shms_index_find(&x, (char *)data + slots[slot].offset, shms_slot_key_len(&slots[slot]))
                         : SHMS_NONE);
        }
        CHECK(full > ROUNDS / 16 && hits > ROUNDS / 100); /* the table was nearly full, and keys returned */
        free(memory);
    }
    return 0;
}
