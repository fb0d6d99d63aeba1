/* Tables of several groups: the worked examples, and random schedules with the checker after each step. */
#include "kv/tables.h"

#include "check.h"
#include "kv/blockhash.h"

static uint32_t seed = 1;
static uint32_t draw(uint32_t n) {
    seed = seed * 1664525 + 1013904223;
    return (uint32_t)((uint64_t)seed * n >> 32);
}

/* Hashes of a prompt: a chain over few letters, so that prompts share prefixes. */
static shms_hashlist *chain(int64_t n, uint32_t variant) {
    shms_hashlist *list = shms_hashlist_new();
    for (int64_t i = 0; i < n; i++) {
        uint8_t hash[32] = {1};
        uint32_t parts[2] = {(uint32_t)i, i < 3 ? 0 : variant};
        memcpy(hash + 8, parts, sizeof parts);
        CHECK(shms_hashlist_append(list, hash, 1, 32) == 0);
    }
    return list;
}

/* Allocates for a step; with `delay` no block gets a key. */
static int allocate(shms_kvcache *kv, shms_kv_request *r, int64_t passed, int64_t computed, int64_t external,
                    int64_t n_new, int64_t lookahead, int64_t n_tokens, int64_t n_encoder, int64_t reserved, int delay,
                    const shms_hashlist *hashes, const void *ids, const int32_t *counts) {
    shms_kv_step step = {.passed = passed,
                         .computed = computed,
                         .external = external,
                         .n_new = n_new,
                         .lookahead = lookahead,
                         .n_tokens = delay ? 0 : n_tokens,
                         .n_encoder = n_encoder,
                         .reserved = reserved};
    int64_t rc = shms_kvcache_allocate(kv, r, &step, hashes, ids, counts);
    CHECK(rc < 0 || rc == r->n_ids);
    return rc < 0 ? (int)rc : 0;
}

/* The answer of the last allocation names the blocks at the end of each table. */
static void names_what_is_new(const shms_kvcache *kv, const shms_kv_request *r) {
    const int32_t *ids = r->ids;
    for (int32_t g = 0; g < kv->n_groups; ids += r->counts[g++]) {
        const shms_kv_table *t = &kv->tables[r->table * kv->n_groups + g];
        CHECK(r->counts[g] <= t->len);
        if (r->counts[g])
            CHECK(!memcmp(ids, t->ids.at + t->len - r->counts[g], 4 * (size_t)r->counts[g]));
    }
    CHECK(ids == r->ids + r->n_ids);
}

/* A request that has no tables yet. */
#define NEW (&(shms_kv_request){0})

TEST(refusals_change_nothing) {
    int32_t kinds[] = {SHMS_KV_FULL}, sizes[] = {4}, counts[] = {1}, id[] = {1}, far[] = {99}, holes[] = {1, 0},
            two[] = {2};
    int64_t params[] = {0};
    shms_blockpool *pool = shms_blockpool_new(5, SHMS_BLOCKPOOL_TAIL);
    shms_kvcache *kv = shms_kvcache_new(pool, 1, kinds, sizes, params, 4, 4, 1 << 20, 1 << 20, -1, SHMS_KV_CACHING);
    shms_hashlist *hashes = chain(3, 0), *none = chain(0, 0);
    shms_kv_request request = {0}, *r = &request;
    CHECK(allocate(kv, r, 0, 0, 0, 17, 0, 17, 0, 0, 0, none, NULL, NULL) == SHMS_KV_ENOHASH);
    CHECK(r->wanted == 4 && r->there == 0);
    CHECK(allocate(kv, r, 0, 0, 0, 17, 0, 12, 0, 0, 0, hashes, NULL, NULL) == SHMS_KV_EFULL);
    CHECK(r->wanted == 5 && r->there == 4);
    CHECK(allocate(kv, r, 0, 0, 0, (int64_t)1 << 50, 0, 12, 0, 0, 0, hashes, NULL, NULL) == SHMS_KV_EFULL);
    CHECK(allocate(kv, r, 0, 0, 0, (int64_t)1 << 61, 0, 12, 0, 0, 0, hashes, NULL, NULL) == SHMS_KV_EARGUMENT);
    CHECK(allocate(kv, r, 0, 0, 0, 0, 0, 12, 0, 0, 0, hashes, NULL, NULL) == SHMS_KV_EARGUMENT);
    CHECK(allocate(kv, &(shms_kv_request){.table = 7}, 0, 0, 0, 1, 0, 12, 0, 0, 0, hashes, NULL, NULL) ==
          SHMS_KV_EARGUMENT);
    CHECK(allocate(kv, r, 0, 4, 0, 4, 0, 12, 0, 0, 0, hashes, far, counts) == SHMS_KV_ERANGE);
    CHECK(allocate(kv, r, 0, 8, 0, 4, 0, 12, 0, 0, 0, hashes, holes, two) == SHMS_KV_ERANGE);
    CHECK(allocate(kv, r, 0, 4, 0, 4, 0, 12, 0, 0, 0, hashes, (int32_t[]){-1}, counts) == SHMS_KV_ERANGE);
    CHECK(shms_kvcache_valid(kv) == 0 && shms_blockpool_n_free(pool) == 4 && r->table == 0);
    CHECK(allocate(kv, r, 0, 0, 0, 12, 0, 12, 0, 0, 1, hashes, NULL, NULL) == 0);
    CHECK(r->table > 0 && shms_blockpool_n_keys(pool) == 0);
    CHECK(allocate(kv, r, 0, 4, 0, 4, 0, 12, 0, 0, 0, hashes, id, counts) == SHMS_KV_ECOMPUTED);
    CHECK(shms_kvcache_cache(kv, r, hashes, 16) == SHMS_KV_ESHORT && r->wanted == 4 && r->there == 3);
    CHECK(shms_blockpool_key(pool, id, 1, hashes, 2, 1, 0) == 0);
    CHECK(shms_kvcache_cache(kv, r, hashes, 12) == SHMS_KV_EKEYED && shms_blockpool_n_keys(pool) == 1);
    CHECK(shms_blockpool_evict(pool, id, 1) == 0 && shms_kvcache_cache(kv, r, hashes, 12) == 0);
    CHECK(shms_blockpool_n_keys(pool) == 3 && r->stored[0] == 0 && r->stored[1] == 3);
    CHECK(shms_blockpool_evict(pool, (int32_t[]){3}, 1) == 0 && shms_kvcache_cached(kv, r) == 12);
    CHECK(shms_kvcache_valid(kv) == 0);
    shms_kv_request gone = {.table = 7}, *g = &gone;
    CHECK(shms_kvcache_cache(kv, g, hashes, 4) == SHMS_KV_EARGUMENT &&
          shms_kvcache_release(kv, g) == SHMS_KV_EARGUMENT);
    CHECK(shms_kvcache_table(kv, g) == SHMS_KV_EARGUMENT && shms_kvcache_common(kv, g) == SHMS_KV_EARGUMENT);
    CHECK(shms_kvcache_cached(kv, g) == SHMS_KV_EARGUMENT);
    CHECK(shms_kvcache_cache(kv, r, hashes, -1) == SHMS_KV_EARGUMENT);
    CHECK(allocate(kv, NEW, 0, 4, 0, 4, 0, 12, 0, 0, 0, hashes, id, (int32_t[]){-1}) == SHMS_KV_EARGUMENT);
    shms_hashlist_free(none);
    shms_hashlist_free(hashes);
    shms_kvcache_free(kv);
    kv = shms_kvcache_new(pool, 0, NULL, NULL, NULL, 4, 4, 1 << 20, 1 << 20, -1, SHMS_KV_CACHING);
    CHECK(shms_kvcache_cached(kv, NEW) == SHMS_KV_EARGUMENT);
    CHECK(allocate(kv, g = NEW, 0, 0, 0, 4, 0, 4, 0, 0, 0, NULL, NULL, NULL) == 0 && shms_kvcache_cached(kv, g) == 0);
    shms_kvcache_free(kv);
    shms_blockpool_free(pool);
}

TEST(the_checker_finds_each_broken_invariant) {
    shms_blockpool *pool = shms_blockpool_new(8, SHMS_BLOCKPOOL_TAIL);
    shms_kvcache *kv = shms_kvcache_new(pool, 1, (int32_t[]){SHMS_KV_FULL}, (int32_t[]){4}, (int64_t[]){0}, 4, 4, 64,
                                        64, -1, SHMS_KV_CACHING);
    shms_hashlist *hashes = chain(2, 0);
    shms_kv_request request = {0}, gone = {0}, *r = &request;
    CHECK(allocate(kv, r, 0, 0, 0, 12, 0, 8, 0, 0, 0, hashes, NULL, NULL) == 0);
    CHECK(allocate(kv, &gone, 0, 0, 0, 12, 0, 0, 0, 0, 0, hashes, NULL, NULL) == 0);
    shms_kv_table *t = &kv->tables[r->table], *idle = &kv->tables[gone.table];
    CHECK(shms_kvcache_release(kv, &gone) == 0 && t->len == 3 && t->cached == 2 && t->nulls == 0);
#define BREAKS(field, value)                                                                                           \
    do {                                                                                                               \
        __typeof__(field) was = field;                                                                                 \
        CHECK(shms_kvcache_valid(kv) == 0);                                                                            \
        field = value;                                                                                                 \
        CHECK(shms_kvcache_valid(kv) == SHMS_KV_ECORRUPT);                                                             \
        field = was;                                                                                                   \
    } while (0)
    BREAKS(pool->n_free, 1);
    BREAKS(kv->groups[0].n_holders, 2);
    BREAKS(idle->len, 1);
    BREAKS(t->ids.cap, 2);
    BREAKS(t->cached, -1);
    BREAKS(t->cached, 4);
    BREAKS(t->nulls, -1);
    BREAKS(t->nulls, 1);
    BREAKS(t->ids.at[1], 0);
    BREAKS(t->ids.at[1], 7); /* which is free */
    memset(t->ids.at, 0, 3 * sizeof(int32_t));
    t->nulls = 3;
    BREAKS(t->nulls, 4);
    shms_hashlist_free(hashes);
    shms_kvcache_free(kv);
    shms_blockpool_free(pool);
}

/* A pool in which each group has the blocks of a prompt that are 1 in its text: blocks 1, 2, ... in this order. */
static shms_blockpool *pool_of(const shms_hashlist *hashes, int32_t n_groups, const char *const *cached) {
    shms_blockpool *pool = shms_blockpool_new(32, SHMS_BLOCKPOOL_TAIL);
    int32_t id = 0;
    for (int32_t g = 0; g < n_groups; g++)
        for (int64_t i = 0; cached[g][i]; i++)
            if (cached[g][i] == '1' && ++id)
                CHECK(shms_blockpool_key(pool, &id, 1, hashes, i, 1, g) == 0);
    return pool;
}

TEST(a_prefix_that_the_alignment_cuts_short_needs_the_chunk_in_which_it_ends_now) {
    int32_t kinds[] = {SHMS_KV_CHUNK}, sizes[] = {4};
    int64_t params[] = {8};
    shms_hashlist *hashes = chain(5, 0);
    shms_kv_request r = {0};
    for (int third = 0; third < 2; third++) { /* of five blocks the last would do; of three, the third is needed */
        shms_blockpool *pool = pool_of(hashes, 1, (const char *[]){third ? "00101" : "00001"});
        shms_kvcache *kv = shms_kvcache_new(pool, 1, kinds, sizes, params, 4, 12, 64, 64, -1, SHMS_KV_CACHING);
        CHECK(shms_kvcache_find(kv, &r, hashes, 20) == (third ? 12 : 0) && r.n_ids == (third ? 3 : 0));
        CHECK(!third || !memcmp(r.ids, (int32_t[]){0, 0, 1}, 12));
        shms_kvcache_free(kv);
        shms_blockpool_free(pool);
    }
    shms_hashlist_free(hashes);
}

TEST(a_group_of_the_draft_model_is_not_searched_with_those_of_the_target_model) {
    int32_t kinds[] = {SHMS_KV_FULL, SHMS_KV_FULL | SHMS_KV_EAGLE}, sizes[] = {4, 4};
    int64_t params[] = {0, 0};
    shms_hashlist *hashes = chain(3, 0);
    shms_blockpool *pool = pool_of(hashes, 2, (const char *[]){"111", "111"});
    shms_kvcache *kv = shms_kvcache_new(pool, 2, kinds, sizes, params, 4, 4, 64, 64, -1, SHMS_KV_CACHING);
    shms_kv_request r = {0};
    CHECK(shms_kvcache_find(kv, &r, hashes, 12) == 8 && r.longest == 12);
    CHECK(r.n_ids == 4 && !memcmp(r.ids, (int32_t[]){1, 2, 4, 5}, 16));
    shms_kvcache_free(kv);
    shms_blockpool_free(pool);
    shms_hashlist_free(hashes);
}

/* Group 0 leaves block 10 out, group 1 block 9, group 0 is 8 blocks long since it has no block 8, and group 1 agrees.
 * Now group 0 leaves out block 7, its last one; and group 1 has all of 5 to 7, and leaves out the last. */
TEST(a_group_that_became_shorter_for_another_reason_leaves_its_last_block_out_again) {
    int32_t kinds[] = {SHMS_KV_WINDOW | SHMS_KV_EAGLE, SHMS_KV_WINDOW | SHMS_KV_EAGLE}, sizes[] = {1, 1};
    int64_t params[] = {1, 3};
    shms_hashlist *hashes = chain(12, 0);
    shms_blockpool *pool = pool_of(hashes, 2, (const char *[]){"111111110111", "011011111101"});
    shms_kvcache *kv =
        shms_kvcache_new(pool, 2, kinds, sizes, params, 1, 1, 64, 64, -1, SHMS_KV_CACHING | SHMS_KV_AHEAD);
    shms_kv_request r = {0};
    CHECK(shms_kvcache_find(kv, &r, hashes, 10) == 7);
    shms_kvcache_free(kv);
    shms_blockpool_free(pool);
    shms_hashlist_free(hashes);
}

/* Of 4 blocks in a row, a request that goes on at a multiple of 4 needs the last two. */
TEST(tokens_that_a_window_has_not_kept_do_not_count_as_cached) {
    static const struct {
        int64_t passed, tokens, cached;
    } cases[] = {{0, 8, 8}, {0, 7, 7}, {0, 6, 4}, {0, 2, 0}, {0, 4, 4}, {6, 6, 0}};
    int32_t kinds[] = {SHMS_KV_WINDOW}, sizes[] = {1};
    int64_t params[] = {3};
    shms_hashlist *hashes = chain(8, 0);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        shms_blockpool *pool = shms_blockpool_new(16, SHMS_BLOCKPOOL_TAIL);
        shms_kvcache *kv = shms_kvcache_new(pool, 1, kinds, sizes, params, 1, 1, 64, 64, 4, SHMS_KV_CACHING);
        shms_kv_request r = {.boundaries = {-1, -1, -1}};
        int64_t passed = cases[i].passed, tokens = cases[i].tokens;
        CHECK(allocate(kv, &r, 0, 0, 0, tokens, 0, tokens, 0, 0, 0, hashes, NULL, NULL) == 0);
        if (passed) /* all kept ones are given back, and their places are null */
            CHECK(allocate(kv, &r, passed, passed, 0, 1, 0, tokens, 0, 0, 0, hashes, NULL, NULL) == 0);
        CHECK(shms_kvcache_cached(kv, &r) == cases[i].cached);
        shms_kvcache_free(kv);
        shms_blockpool_free(pool);
    }
    shms_hashlist_free(hashes);
}

TEST(numbers_whose_sum_overflows_are_refused) {
    int32_t kinds[] = {SHMS_KV_MAMBA}, sizes[] = {1 << 20}, chunks[] = {SHMS_KV_CHUNK}, ones[] = {1},
            windows[] = {SHMS_KV_WINDOW};
    int64_t params[] = {INT64_MAX}, fours[] = {4}, limit = (int64_t)1 << 60;
    shms_blockpool *pool = shms_blockpool_new(5, SHMS_BLOCKPOOL_TAIL);
    shms_hashlist *hashes = chain(8, 0);
    shms_kvcache *kv = shms_kvcache_new(pool, 1, kinds, sizes, params, 4, 4, INT64_MAX, 1 << 20, -1, 0);
    for (int i = 0; i < 3; i++) { /* a need that overflows an int64, as a product or a sum, is refused */
        CHECK(allocate(kv, NEW, 0, 0, 0, 9, 0, 9, 0, 0, 0, hashes, NULL, NULL) == SHMS_KV_EFULL);
        kv->groups[0].param = i ? ((int64_t)1 << 44) - 1 : (int64_t)1 << 44;
    }
    shms_kv_request request = {0}, *r = &request;
    int64_t numbers[6] = {0, 0, 1, 0, 9, 0}; /* seen, computed, new, lookahead, tokens, encoder */
    for (int i = 0; i < 6; i++) {
        static const int64_t wrong[] = {-1, INT64_MIN, (int64_t)1 << 60, INT64_MAX};
        for (int w = 0; w < 4; w++) {
            int64_t n[6];
            memcpy(n, numbers, sizeof n);
            n[i] = wrong[w];
            if (i == 0)
                n[1] = n[0];
            CHECK(allocate(kv, NEW, n[0], n[1], 0, n[2], n[3], n[4], n[5], 0, 0, hashes, NULL, NULL) ==
                  SHMS_KV_EARGUMENT);
        }
    }
    CHECK(allocate(kv, NEW, limit - 1, limit - 1, 0, limit - 1, limit - 1, 0, 0, 0, 0, hashes, NULL, NULL) ==
          SHMS_KV_EFULL);
    CHECK(allocate(kv, NEW, 1, 0, 0, 1, 0, 9, 0, 0, 0, hashes, NULL, NULL) == SHMS_KV_EARGUMENT);
    CHECK(allocate(kv, NEW, -1, 0, 0, 1, 0, 9, 0, 0, 0, hashes, NULL, NULL) == SHMS_KV_EARGUMENT);
    CHECK(allocate(kv, NEW, 0, 0, 0, limit, 0, 0, 0, 0, 0, hashes, NULL, NULL) == SHMS_KV_EARGUMENT);
    kv->groups[0].param = 2;
    CHECK(allocate(kv, r, 0, 0, 0, 9, 0, 9, 0, 0, 0, hashes, NULL, NULL) == 0 && r->n_ids == 3);
    CHECK(r->settled == 1 << 20 && shms_kvcache_release(kv, r) == 0);
    shms_kvcache_free(kv);
    int32_t many[16] = {0}, largest[] = {INT32_MAX};
    int64_t none[16] = {0};
    for (int i = 0; i < 16; i++)
        many[i] = 1;
    int32_t full[16] = {SHMS_KV_FULL};
    kv = shms_kvcache_new(pool, 16, full, many, none, 1, 1, INT64_MAX, 1 << 20, -1, 0); /* 16 times 2^60 is 0 */
    CHECK(allocate(kv, NEW, 0, 0, 0, limit - 1, 0, 0, 0, 0, 0, hashes, NULL, NULL) == SHMS_KV_EFULL);
    shms_kvcache_free(kv);
    kv = shms_kvcache_new(pool, 1, full, largest, none, INT32_MAX, INT32_MAX, INT64_MAX, 1 << 20, -1, SHMS_KV_CACHING);
    CHECK(shms_kvcache_find(kv, r, hashes, limit - 1) == 0 &&
          shms_kvcache_find(kv, r, hashes, limit) == SHMS_KV_EARGUMENT);
    shms_kvcache_free(kv);
    /* one token for each block: as many ids as tokens, four bytes each */
    kv = shms_kvcache_new(pool, 1, chunks, ones, fours, 1, 1, INT64_MAX, 1 << 20, -1, SHMS_KV_CACHING);
    const int64_t far[] = {-2,        INT64_MIN, (int64_t)INT32_MAX + 1, (int64_t)1 << 40,
                           limit - 1, limit,     ((int64_t)1 << 62) + 1, INT64_MAX};
    for (size_t i = 0; i < sizeof far / sizeof *far; i++)
        CHECK(shms_kvcache_find(kv, r, hashes, far[i]) == SHMS_KV_EARGUMENT);
    CHECK(shms_kvcache_find(kv, r, hashes, -1) == 0 && shms_kvcache_find(kv, r, hashes, 4001) == 4000 &&
          r->n_ids == 4000);
    CHECK(shms_kvcache_valid(kv) == 0 && shms_blockpool_n_free(pool) == 4);
    int32_t id[] = {1};
    CHECK(shms_blockpool_key(pool, id, 1, hashes, INT64_MAX, 1, 0) == SHMS_KV_ENOHASH);
    CHECK(shms_blockpool_key(pool, id, 1, hashes, 3, (int64_t)1 << 62, 0) == SHMS_KV_ENOHASH);
    CHECK(shms_blockpool_key(pool, id, 1, hashes, 0, 9, 0) == SHMS_KV_ENOHASH && shms_blockpool_n_keys(pool) == 0);
    shms_kvcache_free(kv);
    kv = shms_kvcache_new(pool, 1, windows, ones, params, 1, 1, INT64_MAX, 1 << 20, -1, 0);
    CHECK(allocate(kv, r, 0, 0, 0, 3, 0, 3, 0, 0, 0, hashes, NULL, NULL) == 0 && r->settled == 3);
    kv->groups[0].param = 1; /* an external prefix of more blocks than a table can have, and the window passes them */
    CHECK(allocate(kv, NEW, 0, 0, (int64_t)1 << 40, 1, 0, 0, 0, 0, 0, hashes, NULL, NULL) == SHMS_KV_EMEMORY);
    shms_kvcache_free(kv);
    shms_hashlist_free(hashes);
    shms_blockpool_free(pool);
}

#ifndef __SANITIZE_ADDRESS__ /* which does not let an allocation fail */
#include "failing.h"

/* A call that has no memory once is done the second time, and has changed nothing before. */
#define DONE(call, done, valid)                                                                                        \
    do {                                                                                                               \
        if (!((call)done)) {                                                                                           \
            CHECK(failed == 1 && (valid));                                                                             \
            CHECK((call)done);                                                                                         \
        }                                                                                                              \
    } while (0)
#define AGAIN(call) DONE(rc = (call), >= 0, rc == SHMS_KV_EMEMORY && shms_kvcache_valid(kv) == 0)

/* The calls in turn, with one allocation that fails. False: there are fewer. */
static bool lives_without(int64_t nth) {
    enum { REQUESTS = 66, SIZE = 200 };
    static const int64_t tokens[2 * SIZE], params[] = {0, 50};
    static const uint8_t parent[32];
    const shms_blockhash_extras none = {0};
    int32_t kinds[] = {SHMS_KV_FULL, SHMS_KV_WINDOW}, sizes[] = {SIZE, SIZE}, ids[2 * REQUESTS];
    shms_blockpool *pool;
    shms_kvcache *kv;
    shms_hashlist *hashes;
    shms_kv_request r[REQUESTS] = {0};
    int64_t rc;
    for (int i = 0; i < REQUESTS; i++)
        ids[i] = 1;
    until_failure = nth;
    failed = 0;
    DONE(pool = shms_blockpool_new(6 * REQUESTS + 3, SHMS_BLOCKPOOL_TAIL), != NULL, true);
    DONE(kv = shms_kvcache_new(pool, 2, kinds, sizes, params, SIZE, SIZE, 1 << 20, 1 << 20, -1, SHMS_KV_CACHING),
         != NULL, true);
    DONE(hashes = shms_hashlist_new(), != NULL, true);
    AGAIN(shms_blockhash_extend(hashes, parent, 0, 2, SIZE, tokens, &none));
    AGAIN(shms_hashlist_append(hashes, hashes->data, 1, 32));
    shms_blockpool_log(pool, 1);
    for (int i = 0; i < REQUESTS; i++) {
        AGAIN(shms_kvcache_find(kv, &r[i], hashes, 2 * SIZE));
        CHECK(r[i].n_ids == (i ? 4 : 0));
        for (int64_t at = 0; at <= SIZE; at += SIZE)
            AGAIN(allocate(kv, &r[i], at, at, 0, SIZE, 0, 2 * SIZE, 0, 0, 0, hashes, NULL, NULL));
        CHECK(shms_kvcache_cached(kv, &r[i]) == 2 * SIZE);
    }
    AGAIN(allocate(kv, r, 2 * SIZE, 2 * SIZE, 0, SIZE, 0, 0, 0, 0, 0, hashes, NULL, NULL));
    AGAIN(shms_kvcache_table(kv, r));
    CHECK(r->n_ids == 6 && kv->out.cap >= 6);
    AGAIN(shms_blockpool_evict(pool, ids, REQUESTS));
    CHECK(pool->log_cap >= REQUESTS && shms_blockpool_log_len(pool) == 1);
    AGAIN(shms_blockpool_get(pool, ids, 2 * REQUESTS));
    CHECK(pool->log_cap >= 2 * REQUESTS && shms_blockpool_put(pool, ids, 2 * REQUESTS, 0) == 0);
    CHECK(shms_kvcache_valid(kv) == 0);
    until_failure = -1;
    shms_hashlist_free(hashes);
    shms_kvcache_free(kv);
    shms_blockpool_free(pool);
    return failed;
}

TEST(a_call_without_memory_changes_nothing_and_is_done_the_second_time) {
    if (shms_blockhash_ready()) {
        printf("no libcrypto here: no allocation failed\n");
        return;
    }
    for (int64_t nth = 0; lives_without(nth); nth++)
        continue;
    shms_kvcache_free(NULL);
    shms_blockpool_free(NULL);
}
#endif

/* Random calls without regard to order. They must not break anything; other tests check the answers. */
static void random_schedules_keep_the_tables_valid(int kind, int64_t param, int order, int flags) {
    enum { REQUESTS = 6, SIZE = 4 };
    int32_t kinds[] = {SHMS_KV_FULL, kind}, sizes[] = {SIZE, kind == SHMS_KV_WINDOW ? 2 * SIZE : SIZE};
    int64_t params[] = {0, param};
    if (flags & SHMS_KV_AHEAD)
        kinds[1] |= SHMS_KV_EAGLE;
    shms_blockpool *pool = shms_blockpool_new(30, order);
    shms_kvcache *kv = shms_kvcache_new(pool, 2, kinds, sizes, params, SIZE, sizes[1], 90, 1 << 20, -1, flags);
    struct {
        shms_kv_request c;
        int64_t tokens, computed;
        shms_hashlist *hashes;
    } r[REQUESTS];
    memset(r, 0, sizeof r);
    shms_blockpool_log(pool, 1);
    for (int step = 0; step < 4000; step++) {
        int i = (int)draw(REQUESTS);
        shms_blockpool_log_take(pool, &(int64_t){0});
        if (!r[i].c.table) {
            int32_t ids[64], counts[2] = {0, 0};
            if (r[i].hashes)
                shms_hashlist_free(r[i].hashes);
            r[i].tokens = 1 + draw(40);
            r[i].hashes = chain(40, draw(3));
            r[i].hashes->n = r[i].tokens / SIZE;
            int64_t hit = flags & SHMS_KV_CACHING ? shms_kvcache_find(kv, &r[i].c, r[i].hashes, r[i].tokens - 1) : 0;
            CHECK(hit >= 0 && hit < r[i].tokens);
            if (hit) {
                memcpy(counts, r[i].c.counts, sizeof counts);
                memcpy(ids, r[i].c.ids, (size_t)r[i].c.n_ids * 4);
            }
            int64_t n = 1 + draw((uint32_t)(r[i].tokens - hit));
            int rc = allocate(kv, &r[i].c, 0, hit, 0, n, draw(3), r[i].tokens, 0, 0, (int)draw(5) == 0, r[i].hashes,
                              ids, counts);
            CHECK(rc == (r[i].c.table ? 0 : SHMS_KV_EFULL));
            r[i].computed = hit + n;
        } else if (draw(8) == 0) {
            CHECK(shms_kvcache_release(kv, &r[i].c) == 0);
        } else {
            if (r[i].computed == r[i].tokens && r[i].tokens < 80)
                r[i].tokens++;
            r[i].hashes->n = r[i].tokens / SIZE;
            if (r[i].computed == r[i].tokens)
                continue;
            int64_t look = draw(3), settled = r[i].c.settled;
            int32_t n_free = shms_blockpool_n_free(pool), n_keys = shms_blockpool_n_keys(pool);
            int rc = allocate(kv, &r[i].c, r[i].computed, r[i].computed, 0, 1, look, r[i].tokens, 0, 0, 0, r[i].hashes,
                              NULL, NULL);
            if (r[i].computed + 1 + look <= settled)
                CHECK(rc == 0 && !r[i].c.n_ids && n_free == shms_blockpool_n_free(pool) &&
                      n_keys == shms_blockpool_n_keys(pool));
            if (rc == 0)
                r[i].computed++;
            if (rc == 0 && r[i].c.n_ids)
                names_what_is_new(kv, &r[i].c);
        }
        CHECK(shms_kvcache_valid(kv) == 0);
    }
    for (int i = 0; i < REQUESTS; i++) {
        CHECK(shms_kvcache_release(kv, &r[i].c) == 0);
        shms_hashlist_free(r[i].hashes);
    }
    CHECK(shms_blockpool_n_free(pool) == 29 && shms_kvcache_valid(kv) == 0);
    shms_kvcache_free(kv);
    shms_blockpool_free(pool);
}

TEST(each_in_all_its_cases) {
    for (int order = 0; order < 2; order++) {
        random_schedules_keep_the_tables_valid(SHMS_KV_WINDOW, 9, order, SHMS_KV_CACHING);
        random_schedules_keep_the_tables_valid(SHMS_KV_WINDOW, 9, order, SHMS_KV_CACHING | SHMS_KV_AHEAD);
        random_schedules_keep_the_tables_valid(SHMS_KV_CHUNK, 8, order, SHMS_KV_CACHING);
        random_schedules_keep_the_tables_valid(SHMS_KV_MAMBA, 2, order, SHMS_KV_CACHING);
        random_schedules_keep_the_tables_valid(SHMS_KV_CROSS, 0, order, 0);
    }
}
