/* hashlist.h: a growing array of block hashes, one per full block of a request.
 *
 * A hash is 1 .. 32 bytes; every hash of one list has the same width, which the first one fixes. Each takes 32 bytes
 * here whatever its width, the rest zero, so that two hashes compare as four words and a prefix look-up of
 * thousands of blocks reads one contiguous array.
 *
 *     hash 0                             hash 1
 *     | width bytes ... | zeros to 32 |  | width bytes ... | zeros to 32 |  ...
 *
 * Caveats: not for several threads at once. `data` moves with the next append. */
#ifndef SHMS_HASHLIST_H
#define SHMS_HASHLIST_H
#include <stdint.h>

#include "errors.h"

#define SHMS_HASH_BYTES 32 /* what one hash takes, and the widest hash there is */

/* cdef: begin */
typedef struct shms_hashlist { /* to be read by all, written by the functions below */
    uint8_t *data;             /* hash i begins at 32 * i */
    int64_t n, cap;            /* hashes in use, and as many as there is memory for */
    int32_t width;             /* bytes of each hash; 0 while the list has never held one */
} shms_hashlist;

shms_hashlist *shms_hashlist_new(void);       /* an empty list that the caller owns; NULL: no memory */
void shms_hashlist_free(shms_hashlist *list); /* gives it back; NULL is nothing */
int shms_hashlist_append(shms_hashlist *list, const uint8_t *hashes, int64_t n, int32_t width);
/* appends n hashes that stand `width` bytes apart; WIDTH: not 1 .. 32 or not the list's; MEMORY. Nothing is changed then. */
int shms_hashlist_valid(const shms_hashlist *list); /* 0, or CORRUPT */
/* cdef: end */

int shms_hashlist_reserve(shms_hashlist *list, int64_t more); /* room for `more` hashes; MEMORY */
#endif
