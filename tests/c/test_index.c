/*
 * test_index.c - the key index in caller's memory: compared with a linear search, while another thread looks, and full
 * of garbage.
 */
#include <pthread.h>

#include "support.h"

enum { N = 24, LINES = 8, ROUNDS = 300000, KEY = 40, LOOKS = 50000 };

static shms_slot slots[N];
static uint8_t data[N * SHMS_ALIGN];
static bool in_table[N];

static void store_key(uint32_t slot, const char *key, uint32_t len) {
    slots[slot].state = SHMS_LIVE;
    slots[slot].offset = slot * SHMS_ALIGN;
    slots[slot].head = len;
    memcpy(data + slots[slot].offset, key, len);
}

static const char *key_at(uint32_t slot) { return (const char *)data + slots[slot].offset; }

static uint64_t hash_of(const shms_index *x, uint32_t slot) {
    return shms_hash_key(x->seed, key_at(slot), shms_slot_key_len(&slots[slot]));
}

/* Few different bytes and many lengths: keys are prefixes of one another, and return after their removal. Their homes
 * are the second of the eight lines and the last, so that keys pass lines and go round the end. */
static uint32_t draw(const shms_index *x, uint64_t *seed, char *key) {
    uint32_t len;
    do {
        len = 1 + (uint32_t)below(seed, KEY - 1);
        memset(key, 'a', len);
        key[below(seed, len)] = (char)('a' + below(seed, 3));
    } while ((shms_hash_key(x->seed, key, len) & (LINES - 1)) % (LINES - 2) != 1);
    return len;
}

static uint32_t find(const char *key, uint32_t len) {
    for (uint32_t i = 0; i < N; i++)
        if (in_table[i] && shms_slot_key_len(&slots[i]) == len && !memcmp(key_at(i), key, len))
            return i;
    return SHMS_NONE;
}

/* Each line's count is the number of keys that have passed it. */
static void counts_are_right(const shms_index *x) {
    uint64_t passed[LINES] = {0};
    for (uint64_t at = 0; at < LINES; at++)
        for (uint32_t i = 0; i < SHMS_INDEX_CELLS; i++) {
            uint64_t cell = x->lines[at].cells[i];
            for (uint64_t l = cell ? hash_of(x, cell & 0xffffff) : at; (l - at) % LINES; l++)
                passed[l % LINES]++;
        }
    for (uint64_t at = 0; at < LINES; at++)
        CHECK_EQ(passed[at], x->lines[at].passed);
}

static uint32_t cells_changed(const shms_index *x, const shms_index_line *was) {
    uint32_t changed = 0;
    for (uint32_t i = 0; i < LINES * SHMS_INDEX_CELLS; i++)
        changed += x->lines[i / SHMS_INDEX_CELLS].cells[i % SHMS_INDEX_CELLS] !=
                   was[i / SHMS_INDEX_CELLS].cells[i % SHMS_INDEX_CELLS];
    return changed;
}

static void new_index(shms_index *x, uint64_t seed) {
    void *memory = aligned_alloc(SHMS_INDEX_LINE, shms_index_memory(N));
    CHECK_EQ(LINES * sizeof(shms_index_line), shms_index_memory(N));
    memset(memory, 0x5a, shms_index_memory(N));
    memset(in_table, 0, sizeof in_table);
    shms_index_init(x, memory, N, seed, slots, data);
    CHECK_EQ(SHMS_OK, shms_index_valid(x));
}

TEST(any_adds_and_removals_find_what_a_linear_search_finds) {
    for (uint64_t run = 1; run <= 4; run++) {
        uint64_t seed = run, full = 0, hits = 0, far = 0;
        shms_index x;
        shms_index_line was[LINES];
        new_index(&x, chance(&seed));
        for (int round = 0; round < ROUNDS / 4; round++) {
            char key[KEY];
            uint32_t len = draw(&x, &seed, key), expected = find(key, len), slot = (uint32_t)below(&seed, N);
            uint64_t hash = shms_hash_key(x.seed, key, len);
            CHECK_EQ(expected, shms_index_find(&x, hash, key, len));
            hits += expected != SHMS_NONE;
            bool before = in_table[slot];
            memcpy(was, x.lines, sizeof was);
            if (in_table[slot] && below(&seed, 8) == 0) {
                CHECK(shms_index_remove(&x, hash_of(&x, slot), slot));
                CHECK(!shms_index_remove(&x, hash_of(&x, slot), slot));
                in_table[slot] = false;
                slots[slot].state = SHMS_FREE;
            } else if (!in_table[slot] && expected == SHMS_NONE) {
                store_key(slot, key, len);
                shms_index_add(&x, hash, slot);
                in_table[slot] = true;
            }
            CHECK_EQ(before != in_table[slot], cells_changed(&x, was)); /* nothing moves */
            uint32_t count = 0;
            for (uint32_t i = 0; i < N; i++)
                count += in_table[i];
            full += count > N / 2;
            far += x.lines[1].passed > 0 && x.lines[2].passed > 0 && x.lines[LINES - 1].passed > 0;
            CHECK_EQ(count, x.count);
            CHECK_EQ(SHMS_OK, shms_index_valid(&x));
            counts_are_right(&x);
            if (in_table[slot])
                CHECK_EQ(slot, shms_index_find(&x, hash_of(&x, slot), key_at(slot), shms_slot_key_len(&slots[slot])));
        }
        CHECK(full > ROUNDS / 16 && hits > ROUNDS / 100); /* the table was nearly full, and keys returned */
        CHECK(far > ROUNDS / 100);                        /* keys have passed two lines, and the end */
        for (uint32_t i = 0; i < N; i++)
            if (in_table[i])
                CHECK(shms_index_remove(&x, hash_of(&x, i), i));
        for (uint32_t i = 0; i < LINES * 8; i++)
            CHECK_EQ(0, ((shms_word *)x.lines)[i]);
        free(x.lines);
    }
}

TEST(a_key_with_the_hash_of_another_is_not_found) {
    shms_index x;
    new_index(&x, 7);
    store_key(3, "abc", 3);
    shms_index_add(&x, 0, 3); /* a hash of zeros must not look like an empty cell, nor slot 0 */
    store_key(0, "abd", 3);
    shms_index_add(&x, 0, 0);
    CHECK_EQ(3, shms_index_find(&x, 0, "abc", 3));
    CHECK_EQ(0, shms_index_find(&x, 0, "abd", 3));
    CHECK_EQ(SHMS_NONE, shms_index_find(&x, 0, "abe", 3));
    CHECK_EQ(SHMS_NONE, shms_index_find(&x, 0, "ab", 2));
    CHECK_EQ(SHMS_NONE, shms_index_find(&x, UINT64_C(1) << 63, "abc", 3)); /* another tag */
    shms_candidates c = shms_index_look(&x, x.lines, 0);
    CHECK_EQ(3, shms_candidates_next(&c));
    CHECK_EQ(0, shms_candidates_next(&c));
    CHECK_EQ(SHMS_NONE, shms_candidates_next(&c));
    CHECK_EQ(SHMS_NONE, shms_candidates_next(&c));
    CHECK_EQ(1, c.at); /* no key has passed the first line, so no other was visited */
    CHECK(!shms_index_remove(&x, 0, 2));
    CHECK_EQ(2, x.count);
    free(x.lines);
}

TEST(damage_is_not_valid) {
    shms_index x;
    new_index(&x, 7);
    store_key(3, "abc", 3);
    uint64_t hash = hash_of(&x, 3);
    shms_index_add(&x, hash, 3);
    CHECK_EQ(SHMS_OK, shms_index_valid(&x));
    for (uint32_t i = 0; i < LINES * 8; i++)
        for (int bit = 0; bit < 64; bit++) {
            shms_word *word = (shms_word *)x.lines + i;
            *word ^= UINT64_C(1) << bit;
            CHECK_EQ(SHMS_ECORRUPT, shms_index_valid(&x));
            *word ^= UINT64_C(1) << bit;
        }
    slots[3].state = SHMS_FREE;
    CHECK_EQ(SHMS_ECORRUPT, shms_index_valid(&x));
    slots[3].state = SHMS_LIVE;
    x.count++;
    CHECK_EQ(SHMS_ECORRUPT, shms_index_valid(&x));
    free(x.lines);
}

/* ---- Another thread looks ---- */

static _Atomic bool done;

/* Even slots stay. A look must find each of them, alone, and never another slot for a key. */
static void *look(void *of) {
    const shms_index *x = of;
    uint64_t found = 0, missed = 0;
    for (int i = 0; i < LOOKS || !found || !missed; i++)
        for (uint32_t s = 0; s < N; s++) {
            shms_candidates c = shms_index_look(x, x->lines, hash_of(x, s));
            uint32_t slot = shms_candidates_next(&c);
            CHECK(slot == s || (slot == SHMS_NONE && s % 2));
            if (s % 2 == 0)
                CHECK_EQ(SHMS_NONE, shms_candidates_next(&c));
            found += slot == s && s % 2;
            missed += slot != s;
        }
    done = true;
    return NULL;
}

TEST(a_key_that_stays_is_found_whatever_comes_and_goes) {
    uint64_t seed = 5;
    shms_index x;
    pthread_t thread;
    new_index(&x, chance(&seed));
    for (uint32_t i = 0; i < N;) {
        char key[KEY];
        uint32_t len = draw(&x, &seed, key);
        if (find(key, len) != SHMS_NONE)
            continue;
        store_key(i, key, len);
        shms_index_add(&x, hash_of(&x, i), i);
        in_table[i++] = true;
    }
    CHECK(pthread_create(&thread, NULL, look, &x) == 0);
    while (!done) {
        uint32_t slot = 1 + 2 * (uint32_t)below(&seed, N / 2);
        if (in_table[slot])
            CHECK(shms_index_remove(&x, hash_of(&x, slot), slot));
        else
            shms_index_add(&x, hash_of(&x, slot), slot);
        in_table[slot] ^= true;
    }
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK_EQ(SHMS_OK, shms_index_valid(&x));
    counts_are_right(&x);
    free(x.lines);
}

/* ---- Garbage ---- */

TEST(a_look_up_in_garbage_ends_and_yields_only_slots) {
    enum { MANY = 100000 };
    shms_index x;
    uint64_t size = shms_index_memory(MANY), seed = 9;
    shms_index_line *lines = aligned_alloc(SHMS_INDEX_LINE, size);
    shms_index_init(&x, lines, MANY, 7, slots, data);
    for (int run = 0; run < 1000; run++) {
        uint64_t hash = chance(&seed);
        uint32_t found = 0, slot;
        for (uint64_t at = 0; at <= 2 * SHMS_INDEX_REACH; at++)
            for (int i = 0; i < SHMS_INDEX_CELLS + 1; i++) {
                shms_word *word = (shms_word *)&lines[(hash + at) & x.mask] + i;
                *word = run ? chance(&seed) : UINT64_MAX;
                if (i < SHMS_INDEX_CELLS && chance(&seed) % 4 == 0) /* the tag fits, the slot may */
                    *word = ((hash | 1 << 24) & ~UINT64_C(0xffffff)) | below(&seed, 1 << 18);
            }
        shms_candidates c = shms_index_look(&x, lines, hash);
        for (; (slot = shms_candidates_next(&c)) != SHMS_NONE; found++)
            CHECK(slot < MANY);
        CHECK_EQ(SHMS_INDEX_REACH, c.at - hash);
        CHECK(found > SHMS_INDEX_REACH / 4);
    }
    free(lines);
    /* A small index has fewer lines than that; the sanitizer sees a look-up that leaves them. */
    new_index(&x, 7);
    memset(x.lines, 0xff, shms_index_memory(N));
    shms_candidates c = shms_index_look(&x, x.lines, 0);
    CHECK_EQ(SHMS_NONE, shms_candidates_next(&c));
    CHECK_EQ(LINES, c.at);
    CHECK_EQ(SHMS_NONE, shms_index_find(&x, 0, "abc", 3));
    CHECK(!shms_index_remove(&x, 0, 0));
    free(x.lines);
}

TEST(most_keys_are_in_their_home_lines_and_none_is_far) {
    static const uint32_t sizes[] = {1, 3, 4, 3584, 4096, 28672};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        uint32_t n = sizes[i], lines = (uint32_t)(shms_index_memory(n) / sizeof(shms_index_line)), passed = 0, run = 0;
        shms_index x;
        uint64_t seed = 3;
        CHECK(2 * n <= SHMS_INDEX_CELLS * lines && (lines & (lines - 1)) == 0);
        void *memory = aligned_alloc(SHMS_INDEX_LINE, shms_index_memory(n));
        shms_index_init(&x, memory, n, 7, NULL, NULL);
        for (uint32_t s = 0; s < n; s++)
            shms_index_add(&x, shms_hash_key(7, (char *)&(uint64_t){chance(&seed)}, 8), s);
        for (uint32_t l = 0; l < 2 * lines; l++) {
            run = x.lines[l % lines].passed ? run + 1 : 0;
            CHECK(run < SHMS_INDEX_REACH / 4);
            passed += l < lines && run;
        }
        CHECK(passed <= lines / 20);
        free(memory);
    }
}
