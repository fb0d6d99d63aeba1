/* The messages are canonical CBOR. Both ways to hash use the same messages. */
#include "kv/blockhash.h"

#include <string.h>

#include "check.h"

/* Extra keys of all kinds, each number with its longest head, fit into what `bound` gives: nothing is written past it. */
TEST(the_bound_is_enough_for_either_form) {
    enum { N = 9 };
    int64_t token = INT64_MIN, items[3 * N], end;
    uint8_t digest[32] = {0}, keys[N];
    shms_blockhash_extras x = {
        .lora = keys, .lora_len = 1, .items = items, .n_items = N, .idents = keys, .embeds = digest, .n_embeds = 1};
    memset(keys, 0x60, sizeof keys); /* empty texts */
    for (int i = 0; i < N; i++)
        memcpy(items + 3 * i, (int64_t[]){0, INT64_MAX, i + 1}, 24);
    int64_t first = INT64_MAX - 1;
    for (x.tagged = 0; x.tagged < 2; x.tagged++) {
        int64_t bound = shms_blockhash_bound(1, 1, &x);
        uint8_t *out = malloc((size_t)bound); /* the address sanitizer watches its end */
        CHECK(shms_blockhash_bodies(out, bound, &end, first, 1, 1, &token, &x) > 0 && end <= bound);
        free(out);
    }
}

TEST(each_number_has_its_shortest_head) {
    static const int64_t tokens[] = {0,         23, 24,  255, 256,  65535, 65536,    UINT32_MAX, INT64_C(1) << 32,
                                     INT64_MAX, -1, -24, -25, -256, -257,  INT64_MIN};
    static const int lengths[] = {1, 1, 2, 2, 3, 3, 5, 5, 9, 9, 1, 1, 2, 2, 3, 9};
    uint8_t out[256];
    int64_t ends[1];
    const shms_blockhash_extras none = {0};
    for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
        CHECK(shms_blockhash_bodies(out, sizeof out, ends, 0, 1, 1, &tokens[i], &none) == lengths[i] + 2);
        uint64_t value = (uint64_t)(tokens[i] < 0 ? -1 - tokens[i] : tokens[i]),
                 read = lengths[i] > 1 ? 0 : out[1] & 31;
        for (int k = 1; k < lengths[i]; k++)
            read = read << 8 | out[1 + k];
        CHECK(out[0] == 0x81 && out[1] >> 5 == (tokens[i] < 0) && read == value && out[lengths[i] + 1] == 0xf6);
    }
}

#ifndef __SANITIZE_ADDRESS__
#include "failing.h"

#include <sys/wait.h>
#include <unistd.h>

static const char *stand_in; /* of libcrypto: a library without hashes, or the name of none */
void *dlopen(const char *name, int flags) {
    REAL(dlopen, void *, const char *, int);
    return real(stand_in ? stand_in : name, flags);
}

TEST(a_host_without_a_usable_libcrypto_says_so_and_appends_nothing) {
    static const char *const libraries[] = {"none", "libc.so.6"};
    for (int i = 0; i < 2; i++) {
        int status;
        pid_t child = fork(); /* the first call in a process looks for it */
        if (child == 0) {
            shms_hashlist *list = shms_hashlist_new();
            int64_t token = 0;
            stand_in = libraries[i];
            CHECK(shms_blockhash_ready() == SHMS_KV_ENOLIB);
            CHECK(shms_blockhash_extend(list, (uint8_t[32]){0}, 0, 1, 1, &token, &(shms_blockhash_extras){0}) ==
                  SHMS_KV_ENOLIB);
            CHECK(list->n == 0 && list->width == 0);
            _exit(0);
        }
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
}
#endif

static void blocks_one_by_one_hash_as_all_at_once(int32_t tagged) {
    enum { N = 37, SIZE = 5 };
    int64_t tokens[N * SIZE], items[] = {3, 20, 5, 3, 0, 9, 20, 30, 11, 90, 1, 15}, ends[N];
    uint8_t embeds[32 * 4] = {9}, seed[32] = {7};
    shms_blockhash_extras x = {.lora = (const uint8_t *)"\x61L",
                               .lora_len = 2,
                               .items = items,
                               .n_items = 4,
                               .idents = (const uint8_t *)"\x64"
                                                          "aaaa"
                                                          "\x63"
                                                          "bbb"
                                                          "\x61"
                                                          "c"
                                                          "\x63"
                                                          "ddd",
                               .embeds = embeds,
                               .n_embeds = 4,
                               .tagged = tagged};
    for (int i = 0; i < N * SIZE; i++)
        tokens[i] = (i * 7919) % 70000;
    int64_t room = shms_blockhash_bound(N, SIZE, &x);
    uint8_t *bodies = malloc((size_t)room);
    CHECK(shms_blockhash_bodies(bodies, room, ends, 0, N, SIZE, tokens, &x) > 0);
    if (shms_blockhash_ready()) {
        printf("no libcrypto here: only the messages were checked\n");
        free(bodies);
        return;
    }
    shms_hashlist *list = shms_hashlist_new(), *pieces = shms_hashlist_new();
    CHECK(shms_blockhash_extend(list, seed, 0, N, SIZE, tokens, &x) == 0 && list->n == N);
    /* block by block; the parent is in the list, which grows and moves */
    for (int i = 0; i < N; i++) {
        shms_blockhash_extras one = x;
        one.embeds = i < 4 ? embeds + 32 * i : NULL;
        one.n_embeds = i < 4;
        const uint8_t *before = i ? pieces->data + 32 * (i - 1) : seed;
        CHECK(shms_blockhash_extend(pieces, before, i, 1, SIZE, tokens + SIZE * i, &one) == 0);
    }
    CHECK(!memcmp(pieces->data, list->data, 32 * N));
    CHECK(shms_blockhash_extend(list, seed, -1, 1, SIZE, tokens, &x) == SHMS_KV_EARGUMENT);
    CHECK(shms_blockhash_extend(list, seed, 0, -1, SIZE, tokens, &x) == SHMS_KV_EARGUMENT);
    CHECK(shms_blockhash_extend(list, seed, 0, 1, 0, tokens, &x) == SHMS_KV_EARGUMENT);
    CHECK(shms_blockhash_bodies(bodies, ends[N - 1] - 1, ends, 0, N, SIZE, tokens, &x) == SHMS_KV_EFULL);
    shms_hashlist *narrow = shms_hashlist_new();
    CHECK(shms_blockhash_extend(narrow, seed, 0, 0, SIZE, tokens, &x) == 0 && narrow->width == 0);
    CHECK(shms_hashlist_append(narrow, seed, 1, 16) == 0);
    CHECK(shms_blockhash_extend(narrow, seed, 0, 1, SIZE, tokens, &x) == SHMS_KV_EWIDTH && narrow->n == 1);
    shms_hashlist_free(narrow);
    shms_hashlist_free(list);
    shms_hashlist_free(pieces);
    free(bodies);
}

/* Numbers whose sum or product overflows an int64, and items that would be missed because of that. */
TEST(numbers_whose_sum_overflows_are_refused) {
    static const struct {
        int64_t items[6];
        int refused;
    } cases[] = {
        {{4, 3, 4, 5, 1, 8}, 0},
        {{4, 3, 4, 4, 0, 8}, 0},
        {{5, 3, 4, 4, 3, 8}, 1},
        {{-1, 3, 4, 4, 3, 8}, 1},
        {{4, 3, 4, 5, -1, 8}, 1},
        {{4, INT64_MAX, 4, 5, 1, 8}, 1},
        {{4, INT64_MAX - 4, 4, 5, 1, 8}, 0},
        {{INT64_MIN, 1, 4, 5, 1, 8}, 1},
    };
    int64_t tokens[8] = {0}, ends[2];
    uint8_t out[512], seed[32] = {0};
    shms_hashlist *list = shms_hashlist_new();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        shms_blockhash_extras x = {.items = cases[i].items, .n_items = 2, .idents = (const uint8_t *)"\x63img\x63png"};
        int64_t n = shms_blockhash_bodies(out, sizeof out, ends, 0, 2, 4, tokens, &x);
        CHECK(cases[i].refused ? n == SHMS_KV_EARGUMENT : n > 0);
        if (shms_blockhash_ready())
            continue;
        CHECK(shms_blockhash_extend(list, seed, 0, 2, 4, tokens, &x) == (cases[i].refused ? SHMS_KV_EARGUMENT : 0));
    }
    shms_blockhash_extras none = {0}, salted = {.salt = seed, .salt_len = INT64_MAX};
    const int64_t n = INT64_MAX / 4, len = list->n;
    CHECK(shms_blockhash_bodies(out, sizeof out, ends, INT64_MAX / 4, 1, 4, tokens, &none) == SHMS_KV_EARGUMENT);
    CHECK(shms_blockhash_bodies(out, sizeof out, ends, INT64_MAX / 4 - 1, 1, 4, tokens, &none) > 0);
    CHECK(shms_blockhash_bodies(out, INT64_MAX, ends, 0, n, 4, tokens, &none) == SHMS_KV_EARGUMENT);
    CHECK(shms_blockhash_bound(n, 4, &none) == SHMS_KV_EARGUMENT &&
          shms_blockhash_bound(-1, 4, &none) == SHMS_KV_EARGUMENT);
    CHECK(shms_blockhash_bound(1, 4, &salted) == SHMS_KV_EARGUMENT &&
          shms_blockhash_bound(1, 0, &none) == SHMS_KV_EARGUMENT);
    CHECK(shms_blockhash_ready() || shms_blockhash_extend(list, seed, 0, 1, 4, tokens, &salted) == SHMS_KV_EARGUMENT);
    salted.salt_len -= shms_blockhash_bound(1, 4, &none); /* it fits, but not with what comes before it */
    CHECK(shms_blockhash_bound(1, 4, &salted) == INT64_MAX);
    CHECK(shms_blockhash_ready() || shms_blockhash_extend(list, seed, 0, 1, 4, tokens, &salted) == SHMS_KV_EARGUMENT);
    CHECK(list->n == len);
    shms_hashlist_free(list);
}

TEST(each_in_all_its_cases) {
    blocks_one_by_one_hash_as_all_at_once(0);
    blocks_one_by_one_hash_as_all_at_once(1);
}
