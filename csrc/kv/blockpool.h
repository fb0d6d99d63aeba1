/* blockpool.h: which KV-cache blocks are free, who shares one, and what contents each still has.
 *
 * Blocks are numbered 0 .. n-1. Block 0 is the null block: a placeholder in tables, never handed out, freed or counted.
 * A block has a reference count; at 0 it stands in the free queue, at more it does not. A block may have a key
 * (block hash, group) that says what it contains; it keeps it in the free queue until it is handed out again,
 * so that its contents can be found and taken back (shms_blockpool_touch).
 *
 * Several blocks may have one key: a look-up gives the one that got it first and still has it.
 *
 *     get n ──► head ┌───────────── free queue ─────────────┐ tail ◄── put
 *                    └─ touched blocks leave from the middle ┘
 *
 * Order: "get" takes from the head and drops the keys of what it takes; "put" appends at the tail, or, with
 * SHMS_BLOCKPOOL_UNCACHED_FIRST, blocks without a key at the head.
 *
 * Caveats: not for several threads at once. Every call that refuses leaves the pool as it was. Removed keys are logged
 * only after shms_blockpool_log(pool, 1), and the log grows until it is taken. */
#ifndef SHMS_BLOCKPOOL_H
#define SHMS_BLOCKPOOL_H
#include <stddef.h>
#include <stdint.h>

#include "hashlist.h"

/* cdef: begin */
typedef struct shms_blockpool shms_blockpool;
enum { SHMS_BLOCKPOOL_TAIL = 0, SHMS_BLOCKPOOL_UNCACHED_FIRST = 1 };

shms_blockpool *shms_blockpool_new(int32_t n_blocks,
                                   int free_order); /* the caller owns it; NULL: no memory, or n_blocks < 1 */
void shms_blockpool_free(shms_blockpool *pool);                       /* gives it back; NULL is nothing */
int64_t shms_blockpool_nbytes(const shms_blockpool *pool);            /* bytes it takes, without the log */
int32_t shms_blockpool_len(const shms_blockpool *pool);               /* blocks, with the null block */
int32_t shms_blockpool_n_free(const shms_blockpool *pool);            /* length of the free queue */
int32_t shms_blockpool_n_keys(const shms_blockpool *pool);            /* keys that find something */

int shms_blockpool_get(shms_blockpool *pool, int32_t *out,
                       int64_t n); /* n blocks from the head, count 1, keys dropped; FULL */
int shms_blockpool_touch(shms_blockpool *pool, const void *ids,
                         int64_t n); /* count + 1, out of the queue; nulls skipped; RANGE */
int shms_blockpool_put(shms_blockpool *pool, const void *ids, int64_t n, int reverse);
/* counts - 1 first, then those at 0 join the queue in the given (or the reverse) order; nulls skipped. RANGE, UNUSED. */

int32_t shms_blockpool_find(const shms_blockpool *pool, const uint8_t *hash, int32_t width, int32_t group);
/* the block that got this key first and still has it; 0: none. hash: 32 bytes, zeros behind `width`. */
int shms_blockpool_key(shms_blockpool *pool, const void *ids, int64_t n, const shms_hashlist *hashes, int64_t first,
                       int64_t factor, int32_t group);
/* ids[i] gets hash number (first + i + 1) * factor - 1 of `hashes`; nulls get none. RANGE, KEYED, NOHASH. */
int shms_blockpool_evict(shms_blockpool *pool, const void *ids,
                         int64_t n); /* drops the keys of those that have one; RANGE */
int shms_blockpool_reset(shms_blockpool *pool); /* drops all keys, logs none; BUSY while a block is in use */

int32_t shms_blockpool_ref(const shms_blockpool *pool, int32_t id); /* its count; RANGE */
int shms_blockpool_key_of(const shms_blockpool *pool, int32_t id, uint8_t *hash, int32_t *group);
/* width of the key it has (0: none), the hash's 32 bytes and the group; RANGE */
int32_t shms_blockpool_free_ids(const shms_blockpool *pool, int32_t *out); /* head to tail; gives how many */
int64_t shms_blockpool_keyed(const shms_blockpool *pool, int32_t *out, const void *ids, int64_t n);
/* those of ids that have a key, in order; RANGE */

void shms_blockpool_log(shms_blockpool *pool, int on); /* log removed keys from now on, or stop */
int64_t shms_blockpool_log_len(const shms_blockpool *pool); /* records since the last take */
const uint8_t *shms_blockpool_log_take(shms_blockpool *pool, int64_t *n);
/* n records of 40 bytes: 32 of hash, int32 width, int32 group; the log is empty, its memory stays until a key is dropped */

int shms_blockpool_valid(const shms_blockpool *pool); /* 0, or the code of the first broken invariant (errors.h) */
/* cdef: end */

#define SHMS_LOG_BYTES 40
int shms_blockpool_log_reserve(shms_blockpool *pool,
                               int64_t more); /* room for `more` records, so that get cannot fail; MEMORY */
int shms_blockpool_is_keyed(const shms_blockpool *pool, int32_t id); /* 1: id (a valid one) has a key */
int64_t shms_blockpool_find_run(const shms_blockpool *pool, int32_t *out, const shms_hashlist *hashes, int64_t first,
                                int64_t n, int64_t factor, int32_t group);
/* blocks for positions first .. first+n-1 until the first miss; gives how many */
#endif
