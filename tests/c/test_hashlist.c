/* A list of hashes keeps its width and grows; its arguments are checked. */
#include "kv/hashlist.h"

#include <string.h>

#include "check.h"

TEST(a_list_returns_what_was_appended) {
    shms_hashlist *list = shms_hashlist_new(), *other = shms_hashlist_new();
    uint8_t hashes[100 * 16], wide[32] = {0};
    for (int i = 0; i < 100 * 16; i++)
        hashes[i] = (uint8_t)(i * 7 + 1);
    CHECK(list->width == 0 && list->n == 0);
    for (int i = 0; i < 100; i++)
        CHECK(shms_hashlist_append(list, hashes + 16 * i, 1, 16) == 0);
    CHECK(list->n == 100 && list->width == 16);
    for (int i = 0; i < 100; i++) {
        CHECK(!memcmp(list->data + 32 * i, hashes + 16 * i, 16));
        CHECK(!memcmp(list->data + 32 * i + 16, wide, 16));
    }
    CHECK(shms_hashlist_append(list, wide, 1, 32) == SHMS_KV_EWIDTH);
    CHECK(shms_hashlist_append(other, wide, 1, 33) == SHMS_KV_EWIDTH);
    CHECK(shms_hashlist_append(other, wide, 1, 0) == SHMS_KV_EWIDTH);
    CHECK(shms_hashlist_append(other, wide, -1, 32) == SHMS_KV_EARGUMENT);
    CHECK(shms_hashlist_append(other, NULL, 0, 16) == 0 && other->width == 0);
    CHECK(shms_hashlist_reserve(list, INT64_MAX) == SHMS_KV_EMEMORY &&
          shms_hashlist_reserve(list, INT64_MAX / 32 - 99) == SHMS_KV_EMEMORY);
    CHECK(shms_hashlist_reserve(other, INT64_MAX / 4 + 1) == SHMS_KV_EMEMORY &&
          other->cap == 0); /* times 32 is 0 in 64 bits */
    CHECK(shms_hashlist_append(other, wide, 1, 32) == 0);
    CHECK(shms_hashlist_append(other, other->data, 1, 32) == 0 && other->n == 2);
    CHECK(!memcmp(other->data, other->data + 32, 32));
    shms_hashlist_free(list);
    shms_hashlist_free(other);
    shms_hashlist_free(NULL);
}
