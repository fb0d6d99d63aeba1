/* Compares the pool with plain arrays, runs its checker after each step, and runs the checker on broken pools. */
#include "kv/blockpool.h"

#include <string.h>

#include "check.h"

enum { N = 24, HASHES = 6, GROUPS = 2 };

static uint32_t seed = 1;
static uint32_t draw(uint32_t n) {
    seed = seed * 1664525 + 1013904223;
    return (uint32_t)((uint64_t)seed * n >> 32);
}

/* The model: an array for the queue; for each block a reference count, a key number and the time of its key. */
static int32_t queue[N], n_queue, refs[N], keys[N];
static int64_t keyed_at[N], now;

static void model_take(int32_t id) {
    int32_t at = 0;
    while (queue[at] != id)
        at++;
    memmove(queue + at, queue + at + 1, (size_t)(n_queue-- - at - 1) * sizeof *queue);
}

static int32_t model_find(int32_t key) {
    int32_t best = 0;
    for (int32_t id = 1; id < N; id++)
        if (keys[id] == key && (!best || keyed_at[id] < keyed_at[best]))
            best = id;
    return best;
}

static void compare(const shms_blockpool *pool, const shms_hashlist *hashes) {
    int32_t ids[N];
    CHECK(shms_blockpool_valid(pool) == 0);
    CHECK(shms_blockpool_free_ids(pool, ids) == n_queue && shms_blockpool_n_free(pool) == n_queue);
    CHECK(!memcmp(ids, queue, (size_t)n_queue * sizeof *ids));
    for (int32_t id = 1; id < N; id++)
        CHECK(shms_blockpool_ref(pool, id) == refs[id]);
    int32_t n_keys = 0;
    for (int32_t key = 1; key <= HASHES * GROUPS; key++) {
        int32_t want = model_find(key), hash = (key - 1) % HASHES, group = (key - 1) / HASHES;
        CHECK(shms_blockpool_find(pool, hashes->data + 32 * hash, 32, group) == want);
        n_keys += want != 0;
    }
    CHECK(shms_blockpool_n_keys(pool) == n_keys);
    int32_t all[N], n_keyed = 0;
    for (int32_t id = 0; id < N; id++)
        all[id] = id;
    CHECK(shms_blockpool_keyed(pool, ids, all, N) <= N);
    for (int32_t id = 0; id < N; id++)
        CHECK(!keys[id] || ids[n_keyed++] == id);
    CHECK(shms_blockpool_keyed(pool, ids, all, N) == n_keyed);
}

static void a_pool_matches_plain_arrays(int order) {
    shms_hashlist *hashes = shms_hashlist_new();
    for (int i = 0; i < HASHES; i++) {
        uint8_t hash[32] = {(uint8_t)(i + 1)};
        CHECK(shms_hashlist_append(hashes, hash, 1, 32) == 0);
    }
    shms_blockpool *pool = shms_blockpool_new(N, order);
    CHECK(pool && shms_blockpool_len(pool) == N);
    shms_blockpool_log(pool, 1);
    memset(refs, 0, sizeof refs);
    memset(keys, 0, sizeof keys);
    for (n_queue = 0; n_queue < N - 1; n_queue++)
        queue[n_queue] = n_queue + 1;
    for (int step = 0; step < 20000; step++) {
        int32_t ids[2 * N], n = (int32_t)draw(5), key;
        int64_t logged = 0;
        switch (draw(6)) {
        case 0:
            if (n > n_queue) {
                CHECK(shms_blockpool_get(pool, ids, n) == SHMS_KV_EFULL);
                break;
            }
            CHECK(shms_blockpool_get(pool, ids, n) == 0);
            for (int32_t i = 0; i < n; i++) {
                CHECK(ids[i] == queue[0]);
                model_take(ids[i]);
                refs[ids[i]] = 1;
                logged += keys[ids[i]] != 0;
                keys[ids[i]] = 0;
            }
            CHECK(shms_blockpool_log_len(pool) == logged);
            shms_blockpool_log_take(pool, &(int64_t){0});
            break;
        case 1:
            for (int32_t i = 0; i < n; i++)
                ids[i] = (int32_t)draw(N);
            CHECK(shms_blockpool_touch(pool, ids, n) == 0);
            for (int32_t i = 0; i < n; i++)
                if (ids[i] && refs[ids[i]]++ == 0)
                    model_take(ids[i]);
            break;
        case 2: {
            int reverse = (int)draw(2), bad = 0;
            int32_t left[N], at_head = 0;
            n = (int32_t)draw(2 * N);
            memcpy(left, refs, sizeof left);
            for (int32_t i = 0; i < n; i++) {
                do
                    ids[i] = (int32_t)draw(N);
                while (refs[ids[i]] == 0 && ids[i] && draw(20));
                bad |= ids[i] && left[ids[i]]-- == 0;
            }
            CHECK(shms_blockpool_put(pool, ids, n, reverse) == (bad ? SHMS_KV_EUNUSED : 0));
            if (bad)
                break;
            for (int32_t i = 0; i < n; i++)
                refs[ids[i]] -= ids[i] != 0;
            for (int32_t i = 0; i < n; i++) {
                int32_t id = ids[reverse ? n - 1 - i : i], queued = 0;
                for (int32_t j = 0; j < n_queue; j++)
                    queued |= queue[j] == id;
                if (!id || refs[id] || queued)
                    continue;
                int32_t at = order && !keys[id] ? at_head++ : n_queue;
                memmove(queue + at + 1, queue + at, (size_t)(n_queue++ - at) * sizeof *queue);
                queue[at] = id;
            }
            break;
        }
        case 3:
        case 4:
            ids[0] = (int32_t)draw(N);
            key = 1 + (int32_t)draw(HASHES * GROUPS);
            CHECK(shms_blockpool_key(pool, ids, 1, hashes, (key - 1) % HASHES, 1, (key - 1) / HASHES) ==
                  (keys[ids[0]] ? SHMS_KV_EKEYED : 0));
            if (ids[0] && !keys[ids[0]]) {
                keys[ids[0]] = key;
                keyed_at[ids[0]] = ++now;
            }
            break;
        default:
            for (int32_t i = 0; i < n; i++)
                ids[i] = (int32_t)draw(N);
            for (int32_t i = n; i < N; i++)
                ids[i] = 1;
            int null = 0;
            for (int32_t i = 0; i < n; i++)
                null |= ids[i] == 0;
            CHECK(shms_blockpool_evict(pool, ids, n) == (null ? SHMS_KV_ERANGE : 0));
            for (int32_t i = 0; !null && i < n; i++)
                keys[ids[i]] = 0;
            shms_blockpool_log_take(pool, &(int64_t){0});
            if (n_queue == N - 1 && draw(4) == 0) {
                CHECK(shms_blockpool_reset(pool) == 0);
                memset(keys, 0, sizeof keys);
            } else if (n_queue < N - 1) {
                CHECK(shms_blockpool_reset(pool) == SHMS_KV_EBUSY);
            }
        }
        compare(pool, hashes);
    }
    int32_t bad[] = {1, N}, negative[] = {-1};
    CHECK(shms_blockpool_touch(pool, bad, 2) == SHMS_KV_ERANGE);
    CHECK(shms_blockpool_put(pool, negative, 1, 0) == SHMS_KV_ERANGE);
    CHECK(shms_blockpool_evict(pool, bad, 2) == SHMS_KV_ERANGE);
    CHECK(shms_blockpool_key(pool, bad + 1, 1, hashes, 0, 1, 0) == SHMS_KV_ERANGE);
    CHECK(shms_blockpool_key(pool, bad, 1, hashes, HASHES, 1, 0) == SHMS_KV_ENOHASH);
    CHECK(shms_blockpool_ref(pool, N) == SHMS_KV_ERANGE);
    CHECK(shms_blockpool_get(pool, bad, -1) == SHMS_KV_EARGUMENT);
    CHECK(shms_blockpool_key(pool, bad, -1, hashes, 0, 1, 0) == SHMS_KV_EARGUMENT);
    CHECK(shms_blockpool_key(pool, bad, 1, hashes, -1, 1, 0) == SHMS_KV_EARGUMENT);
    CHECK(shms_blockpool_key(pool, bad, 1, hashes, 0, 0, 0) == SHMS_KV_EARGUMENT);
    CHECK(shms_blockpool_key(pool, bad, 0, hashes, 0, 1, 0) == 0);
    CHECK(shms_blockpool_key_of(pool, N, (uint8_t[32]){0}, bad) == SHMS_KV_ERANGE);
    CHECK(shms_blockpool_keyed(pool, (int32_t[2]){0}, bad, 2) == SHMS_KV_ERANGE);
    compare(pool, hashes);
    shms_blockpool_free(pool);
    shms_hashlist_free(hashes);
}

/* Thousands of keys in a small map: long probes that wrap around, and removals that shift keys back. */
TEST(a_nearly_full_map_loses_nothing) {
    enum { M = 3000 };
    shms_blockpool *pool = shms_blockpool_new(M, SHMS_BLOCKPOOL_TAIL);
    shms_hashlist *hashes = shms_hashlist_new();
    int32_t *ids = malloc(M * sizeof *ids), *out = malloc(M * sizeof *out);
    for (uint32_t i = 0; i < M; i++) {
        uint8_t hash[16] = {0};
        memcpy(hash + 4, &i, 4);
        CHECK(shms_hashlist_append(hashes, hash, 1, 16) == 0);
        ids[i] = (int32_t)i;
    }
    CHECK(shms_blockpool_key(pool, ids, M, hashes, 0, 1, 3) == 0);
    CHECK(shms_blockpool_valid(pool) == 0 && shms_blockpool_n_keys(pool) == M - 1);
    CHECK(shms_blockpool_find_run(pool, out, hashes, 1, M - 1, 1, 3) == M - 1);
    CHECK(!memcmp(out, ids + 1, (M - 1) * sizeof *ids));
    CHECK(shms_blockpool_find_run(pool, out, hashes, 0, M, 1, 3) == 0);
    for (int32_t i = 1; i < M; i += 3)
        CHECK(shms_blockpool_evict(pool, ids + i, 1) == 0);
    CHECK(shms_blockpool_valid(pool) == 0);
    for (int32_t i = 1; i < M; i++)
        CHECK(shms_blockpool_find(pool, hashes->data + 32 * i, 16, 3) == (i % 3 == 1 ? 0 : i));
    shms_blockpool_free(pool);
    shms_hashlist_free(hashes);
    free(ids);
    free(out);
}

TEST(two_keys_of_one_tag_are_told_apart) {
    const uint64_t c = 0x165667b19e3779f9u, d = 0xd6e8feb86659fd93u; /* by which words 2 and 3 are multiplied */
    shms_blockpool *pool = shms_blockpool_new(4, SHMS_BLOCKPOOL_TAIL);
    shms_hashlist *hashes = shms_hashlist_new();
    uint8_t two[64] = {0};
    int32_t ids[] = {1, 1, 2};
    memcpy(two + 16, &d, 8);
    memcpy(two + 56, &c, 8);
    CHECK(shms_hashlist_append(hashes, two, 2, 32) == 0);
    CHECK(shms_blockpool_key(pool, ids, 2, hashes, 0, 1, 0) == 0); /* the first of the two */
    CHECK(shms_blockpool_find(pool, two, 32, 0) == 1 && shms_blockpool_find(pool, two + 32, 32, 0) == 0);
    CHECK(shms_blockpool_key(pool, ids + 2, 1, hashes, 1, 1, 0) == 0);
    CHECK(pool->blocks[1].tag == pool->blocks[2].tag && shms_blockpool_valid(pool) == 0);
    CHECK(shms_blockpool_evict(pool, ids, 1) == 0);
    CHECK(shms_blockpool_find(pool, two, 32, 0) == 0 && shms_blockpool_find(pool, two + 32, 32, 0) == 2);
    shms_blockpool_free(pool);
    shms_hashlist_free(hashes);
}

TEST(the_checker_finds_each_broken_invariant) {
    shms_blockpool *pool = shms_blockpool_new(8, SHMS_BLOCKPOOL_TAIL);
    shms_hashlist *hashes = shms_hashlist_new();
    int32_t ids[4];
    uint8_t three[96] = {1};
    three[32] = 2;
    three[64] = 3;
    CHECK(shms_hashlist_append(hashes, three, 3, 32) == 0);
    CHECK(shms_blockpool_get(pool, ids, 4) == 0 && shms_blockpool_key(pool, ids, 3, hashes, 0, 1, 0) == 0);
#define BREAKS(field, value)                                                                                           \
    do {                                                                                                               \
        __typeof__(field) was = field;                                                                                 \
        CHECK(shms_blockpool_valid(pool) == 0);                                                                        \
        field = value;                                                                                                 \
        CHECK(shms_blockpool_valid(pool) == SHMS_KV_ECORRUPT);                                                         \
        field = was;                                                                                                   \
    } while (0)
    BREAKS(pool->n_free, 2);
    BREAKS(pool->blocks[5].ref, 1);
    BREAKS(pool->blocks[1].ref, 0);
    BREAKS(pool->blocks[1].out, 0);
    BREAKS(pool->blocks[5].out, 1);
    BREAKS(pool->blocks[0].ref, 1);
    BREAKS(pool->blocks[5].next_off, -1); /* its own successor */
    BREAKS(pool->blocks[5].next_off, 99);
    BREAKS(pool->blocks[0].prev_off, 5);
    BREAKS(pool->blocks[2].hash[0], 9);
    BREAKS(pool->blocks[2].group, 9);
    BREAKS(pool->blocks[2].width, 0);
    BREAKS(pool->blocks[4].width, 32);
    BREAKS(pool->blocks[2].key_next, 3);
    BREAKS(pool->n_keys, 2);
    BREAKS(pool->blocks[1].ref, -1);
    BREAKS(pool->blocks[0].width, 1);
    BREAKS(pool->blocks[2].first, 0);
    BREAKS(pool->blocks[2].tag, 0);
    BREAKS(pool->blocks[2].key_next, 99);
    uint32_t s = 0;
    while (!pool->slots[s].id)
        s++;
    BREAKS(pool->slots[s].id, 99);
    BREAKS(pool->slots[s].tag, 0);
    CHECK(shms_blockpool_key(pool, ids + 3, 1, hashes, 0, 1, 0) == 0); /* the same key as the first */
    BREAKS(pool->blocks[ids[3]].first, 1);
    BREAKS(pool->blocks[ids[3]].width, 31);
    BREAKS(pool->blocks[ids[3]].hash[0], 9);
    BREAKS(pool->blocks[ids[3]].group, 9);
    pool->blocks[1].ref = pool->blocks[1].out = 0; /* as if it were in the queue */
    CHECK(shms_blockpool_valid(pool) == SHMS_KV_ECORRUPT);
    pool->blocks[1].ref = pool->blocks[1].out = 1;
    uint32_t empty = 0;
    while (pool->slots[empty].id)
        empty++;
    pool->slots[empty] = pool->slots[s]; /* where no look-up finds it */
    pool->slots[s].id = 0;
    CHECK(shms_blockpool_valid(pool) == SHMS_KV_ECORRUPT);
    pool->slots[s] = pool->slots[empty];
    pool->slots[empty].id = 0;
    CHECK(shms_blockpool_valid(pool) == 0);
    shms_blockpool_free(pool);
    shms_hashlist_free(hashes);
    CHECK(shms_blockpool_new(0, 0) == NULL && shms_blockpool_new(8, 2) == NULL);
}

TEST(each_in_all_its_cases) {
    a_pool_matches_plain_arrays(SHMS_BLOCKPOOL_TAIL);
    a_pool_matches_plain_arrays(SHMS_BLOCKPOOL_UNCACHED_FIRST);
}
