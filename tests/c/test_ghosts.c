/* test_ghosts.c - the list of evicted keys, in caller's memory, compared with a plain LRU stack; and in a store. */
#include "store/ghosts.h"

#include "fixture.h"

#define SLOTS 64
#define UNIT 100

static shms_ghosts g;
static void *memory;

static void begin(uint64_t capacity, uint32_t slots) {
    free(memory);
    memory = zeroed(shms_ghosts_memory(slots));
    shms_ghosts_init(&g, memory, capacity, slots);
}

static uint64_t hash(uint64_t key) { return shms_hash_key(7, (const char *)&key, sizeof key); }

/* The factors that fit, of a ghost behind which `behind` of `capacity` are still ghosts; the largest first. */
static int expected(uint64_t behind, uint64_t capacity) {
    return behind > 3 * capacity ? 0 : behind > capacity ? 1 : 2 * behind > capacity ? 2 : 3;
}

/* Objects of equal sizes that are never used: the distance is exact, whether bytes or slots are the limit. */
static void the_distance_is_that_of_an_lru_stack(bool slots) {
    begin(slots ? UINT64_C(1) << 40 : SLOTS * UNIT, slots ? SLOTS : SHMS_GHOST_SAMPLED - 1);
    uint64_t stack[2000], n = 0, seed = 3; /* ghosts, the oldest first */
    int seen[4] = {0}, lost = 0;
    for (uint64_t i = 0; i < 20000; i++) {
        uint64_t key = i;
        if (n > 20 && below(&seed, 2)) { /* an older one comes back, and another goes for it */
            uint64_t at = n - 1 - below(&seed, n < 250 ? n : 250);
            key = stack[at];
            memmove(&stack[at], &stack[at + 1], (n - at - 1) * sizeof *stack);
            n--;
            int fits = shms_ghosts_put(&g, hash(key), UNIT), low = expected(n - at + 1, SLOTS);
            int high = n - at > 2 ? expected(n - at - 2, SLOTS) : 3;
            lost += fits == 0 && low > 0;
            CHECK(fits <= high && (fits >= low || fits == 0));
            seen[fits]++;
            CHECK_EQ(0, shms_ghosts_put(&g, hash(key), UNIT)); /* not a ghost any more */
        }
        shms_ghosts_add(&g, hash(key), UNIT, false);
        stack[n++] = key;
        if (n == 1000) { /* far past the last factor */
            memmove(stack, stack + 500, 500 * sizeof *stack);
            n = 500;
        }
    }
    for (int i = 0; i < 4; i++)
        CHECK(seen[i] > 50);
    CHECK(lost <= (seen[0] + seen[1] + seen[2] + seen[3]) / 100); /* where a bucket has overflowed */
}

/* An object that was used stays in a CLOCK for one more lap, which is longer in a larger store. */
static void a_used_object_stays_twice_as_long(bool slots) {
    for (uint64_t behind = 1; behind < (slots ? 80 : 600); behind++) /* no bucket overflows */
        for (int used = 0; used <= 1; used++) {
            begin(slots ? UINT64_C(1) << 40 : SLOTS * UNIT, slots ? SLOTS : 4 * SLOTS);
            shms_ghosts_add(&g, hash(0), UNIT, used);
            for (uint64_t i = 1; i <= behind; i++)
                shms_ghosts_add(&g, hash(i), UNIT, false);
            int fits = shms_ghosts_put(&g, hash(0), UNIT);
            CHECK_EQ(expected((used ? (behind + 1) / 2 : behind) - 1, SLOTS), fits);
        }
}

TEST(an_old_a_deleted_and_a_cleared_key_are_no_ghosts) {
    begin(SLOTS * UNIT, SLOTS);
    CHECK_EQ(0, shms_ghosts_put(&g, hash(1), UNIT));
    shms_ghosts_add(&g, hash(1), UNIT, false);
    shms_ghosts_add(&g, hash(2), UNIT, false);
    shms_ghosts_forget(&g, hash(1));
    CHECK_EQ(0, shms_ghosts_put(&g, hash(1), UNIT));
    CHECK_EQ(3, shms_ghosts_put(&g, hash(2), UNIT));
    for (uint64_t i = 1000; i < 1400; i++)
        shms_ghosts_add(&g, hash(i), UNIT, false);
    shms_ghosts_add(&g, hash(3), UNIT, false);
    shms_ghosts_clear(&g);
    CHECK_EQ(0, shms_ghosts_put(&g, hash(3), UNIT));
    shms_ghosts_add(&g, hash(4), UNIT, false);
    CHECK_EQ(0, shms_ghosts_put(&g, hash(3), UNIT));
    CHECK_EQ(3, shms_ghosts_put(&g, hash(4), UNIT));
    shms_ghosts_add(&g, hash(5), UNIT, false);
    for (uint64_t i = 100; i < 100 + SHMS_GHOST_EPOCHS; i++) { /* each comes back, so that the distance stays small */
        shms_ghosts_add(&g, hash(i), UNIT, false);
        CHECK_EQ(3, shms_ghosts_put(&g, hash(i), UNIT));
    }
    CHECK_EQ(0, shms_ghosts_put(&g, hash(5), UNIT));
    for (int i = 0; i < 2; i++) /* another key of that tag has one ghost with it */
        shms_ghosts_add(&g, hash(6), UNIT, false);
    CHECK_EQ(3, shms_ghosts_put(&g, hash(6), UNIT));
    CHECK_EQ(0, shms_ghosts_put(&g, hash(6), UNIT));
}

enum { OBJECTS = SHMS_GHOST_SAMPLED - 1, REQUESTS = 400000 };

/* A store of so many objects of one size, which evicts in order, and what both lists of ghosts say of its puts. */
static void a_sample_says_what_all_ghosts_say(uint64_t n_keys, bool skewed, bool slots) {
    uint32_t fit = slots ? OBJECTS : OBJECTS - OBJECTS / 8;
    shms_ghosts *lists = calloc(2, sizeof *lists); /* all, and a sample */
    void *memories[2];
    uint64_t more[2][SHMS_GHOST_FACTORS] = {0}, hits = 0, seed = 5, *stored = calloc(OBJECTS, sizeof *stored);
    uint32_t *place = calloc(n_keys, sizeof *place); /* + 1 */
    for (int i = 0; i < 2; i++) {
        memories[i] = zeroed(shms_ghosts_memory(OBJECTS + (uint32_t)i));
        shms_ghosts_init(&lists[i], memories[i], slots ? UINT64_C(1) << 40 : fit * UNIT, OBJECTS + (uint32_t)i);
    }
    for (uint32_t i = 0, n = 0; i < REQUESTS; i++) {
        uint64_t key = below(&seed, n_keys), at = n % fit;
        if (skewed)
            key = key * below(&seed, n_keys) / n_keys;
        if (place[key]) {
            hits++;
            continue;
        }
        for (int k = 0; k < 2; k++) {
            if (n >= fit)
                shms_ghosts_add(&lists[k], hash(stored[at]), UNIT, false);
            for (int f = shms_ghosts_put(&lists[k], hash(key), UNIT); f-- > 0;)
                more[k][f] += lists[k].one_in;
        }
        if (n++ >= fit)
            place[stored[at]] = 0;
        stored[at] = key;
        place[key] = 1;
    }
    for (int f = 0; f < SHMS_GHOST_FACTORS; f++) {
        double error = ((double)more[1][f] - (double)more[0][f]) / REQUESTS;
        CHECK(more[0][f] > REQUESTS / 50 && error > -0.02 && error < 0.02);
    }
    for (int i = 0; i < 2; i++)
        free(memories[i]);
    free(lists), free(stored), free(place);
}

static shms_stats stats(void) {
    shms_stats s;
    CHECK_EQ(SHMS_OK, shms_writer_stats(w, &s));
    return s;
}

static void put(int key) { CHECK_EQ(SHMS_OK, put_marked(w, key_of("k", key), 64, 1, NULL)); }

static void the_store_remembers_whether_an_object_was_used(bool used) {
    open_store("used", (shms_options){.capacity = 100 * 128, .n_readers = 1, .max_objects = 256}, 0);
    put(0);
    CHECK_EQ(used, shms_writer_touch(w, used ? "k0" : "none", used ? 2 : 4));
    int next = 1;
    while (shms_writer_has(w, "k0", 2))
        put(next++);
    for (int i = 0; i < 80; i++)
        put(next++);
    put(0);
    CHECK_EQ(used, stats().counters.more_hits_at_1_5x);
    CHECK_EQ(1, stats().counters.more_hits_at_2x);
    end();
}

TEST(each_in_all_its_cases) {
    the_distance_is_that_of_an_lru_stack(false);
    the_distance_is_that_of_an_lru_stack(true);
    a_used_object_stays_twice_as_long(false);
    a_used_object_stays_twice_as_long(true);
    for (int slots = 0; slots < 2; slots++) {
        a_sample_says_what_all_ghosts_say(6000, true, slots);
        a_sample_says_what_all_ghosts_say(24000, true, slots);
        a_sample_says_what_all_ghosts_say(16000, false, slots);
    }
    CHECK(shms_ghosts_memory(100000) <= 3 * 100000 + 128);
    the_store_remembers_whether_an_object_was_used(false);
    the_store_remembers_whether_an_object_was_used(true);
    free(memory);
}
