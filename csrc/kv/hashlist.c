/* hashlist.c: why the list is as its header says.
 *
 * 1. `data` has cap slots of 32 bytes. The first n are in use, and 0 <= n <= cap. Only reserve changes cap, after
 *    realloc has succeeded, so a refusal changes neither list nor contents. n * 32 fits an int64.
 * 2. Every slot in use is zero beyond `width`, because append writes all 32 bytes. So equal hashes of equal width are
 *    equal in all 32 bytes, and the pool may compare words.
 * 3. The first append sets the width, and all later ones check it before they write. */
#include "hashlist.h"

#include <stdlib.h>
#include <string.h>

shms_hashlist *shms_hashlist_new(void) { return calloc(1, sizeof(shms_hashlist)); }

void shms_hashlist_free(shms_hashlist *list) {
    if (list)
        free(list->data);
    free(list);
}

int shms_hashlist_reserve(shms_hashlist *list, int64_t more) {
    if (more > INT64_MAX / SHMS_HASH_BYTES - list->n)
        return SHMS_KV_EMEMORY;
    int64_t want = list->n + more;
    if (want <= list->cap)
        return 0;
    if (want < list->cap * 2)
        want = list->cap * 2; /* doubling keeps many single appends linear */
    uint8_t *data = realloc(list->data, (size_t)want * SHMS_HASH_BYTES);
    if (!data)
        return SHMS_KV_EMEMORY;
    list->data = data;
    list->cap = want;
    return 0;
}

int shms_hashlist_append(shms_hashlist *list, const uint8_t *hashes, int64_t n, int32_t width) {
    if (n < 0)
        return SHMS_KV_EARGUMENT;
    if (n == 0)
        return 0;
    if (width < 1 || width > SHMS_HASH_BYTES || (list->width && list->width != width))
        return SHMS_KV_EWIDTH;
    int rc, own = hashes == list->data;
    if ((rc = shms_hashlist_reserve(list, n)))
        return rc;
    if (own) /* its hashes have moved */
        hashes = list->data;
    uint8_t *to = list->data + list->n * SHMS_HASH_BYTES;
    if (width == SHMS_HASH_BYTES) {
        memcpy(to, hashes, (size_t)n * SHMS_HASH_BYTES);
    } else {
        memset(to, 0, (size_t)n * SHMS_HASH_BYTES);
        for (int64_t i = 0; i < n; i++)
            memcpy(to + i * SHMS_HASH_BYTES, hashes + i * width, (size_t)width);
    }
    list->width = width;
    list->n += n;
    return 0;
}
