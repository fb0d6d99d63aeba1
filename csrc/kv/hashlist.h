/* hashlist.h: a growing array of block hashes, one for each full block of a request.
 *
 * A hash is 1 .. 32 bytes. The first one sets the width of all hashes of the list. Each takes 32 bytes here, padded
 * with zeros. So two hashes compare as four words, and a prefix look-up reads one contiguous array.
 *
 *     hash 0                             hash 1
 *     | width bytes ... | zeros to 32 |  | width bytes ... | zeros to 32 |  ...
 *
 * Caveats: not thread-safe. `data` moves with the next append. */
#ifndef SHMS_HASHLIST_H
#define SHMS_HASHLIST_H
#include <stdint.h>

#include "errors.h"

#define SHMS_HASH_BYTES 32 /* bytes that one hash takes, and the largest width */

/* cdef: begin */
typedef struct shms_hashlist { /* every caller may read it; only the functions below write it */
    uint8_t *data;             /* hash i begins at 32 * i */
    int64_t n, cap;            /* hashes in use, and hashes that fit the memory */
    int32_t width;             /* bytes of each hash; 0 before the first */
} shms_hashlist;

shms_hashlist *shms_hashlist_new(void);       /* an empty list that the caller owns; NULL: no memory */
void shms_hashlist_free(shms_hashlist *list); /* frees it; NULL is allowed */
int shms_hashlist_append(shms_hashlist *list, const uint8_t *hashes, int64_t n, int32_t width);
/* Appends n hashes, which are `width` bytes apart. WIDTH: not 1 .. 32, or not the list's; MEMORY. Both change
 * nothing. */
/* cdef: end */

int shms_hashlist_reserve(shms_hashlist *list, int64_t more); /* reserves room for `more` hashes; MEMORY */
#endif
