/* blockpool.h: which KV-cache blocks are free, how many requests use each, and what contents each still has.
 *
 * Blocks are numbered 0 .. n-1. Block 0 is the null block: a placeholder in tables, never handed out, freed or counted.
 * A block has a reference count, and is in the free queue if and only if that is 0. A block may have a key (block hash,
 * group) that says what it contains. It keeps the key in the free queue until it is handed out again. So its contents
 * can be found and used again (shms_blockpool_touch).
 *
 * Several blocks may have one key. A look-up returns the one that got it first and still has it.
 *
 *     get n ──► head ┌───────────── free queue ─────────────┐ tail ◄── put
 *                    └─ touched blocks leave from the middle ┘
 *
 * Order: "get" takes blocks from the head and drops their keys. "put" appends at the tail. With
 * SHMS_BLOCKPOOL_UNCACHED_FIRST, it puts blocks without a key at the head.
 *
 * Caveats: not thread-safe. A call that refuses leaves the pool as it was. Removed keys are logged only after
 * shms_blockpool_log(pool, 1), and the log grows until it is taken. */
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
void shms_blockpool_free(shms_blockpool *pool);                       /* frees it; NULL is allowed */
int64_t shms_blockpool_nbytes(const shms_blockpool *pool);            /* bytes it takes, without the log */
int32_t shms_blockpool_len(const shms_blockpool *pool);               /* blocks, with the null block */
int32_t shms_blockpool_n_free(const shms_blockpool *pool);            /* length of the free queue */
int32_t shms_blockpool_n_keys(const shms_blockpool *pool);            /* number of different keys */

int shms_blockpool_get(shms_blockpool *pool, int32_t *out,
                       int64_t n); /* takes n blocks from the head, sets their counts to 1 and drops their keys; FULL */
int shms_blockpool_touch(
    shms_blockpool *pool, const void *ids,
    int64_t n); /* adds 1 to each count, and removes the block from the queue; skips nulls; RANGE */
int shms_blockpool_put(shms_blockpool *pool, const void *ids, int64_t n, int reverse);
/* Subtracts 1 from each count; then blocks at 0 join the queue, in the given or the reverse order. Skips nulls. RANGE,
 * UNUSED. */

int32_t shms_blockpool_find(const shms_blockpool *pool, const uint8_t *hash, int32_t width, int32_t group);
/* Returns the block that got this key first and still has it, or 0. hash: 32 bytes, zeros beyond `width`. */
int shms_blockpool_key(shms_blockpool *pool, const void *ids, int64_t n, const shms_hashlist *hashes, int64_t first,
                       int64_t factor, int32_t group);
/* Gives ids[i] hash number (first + i + 1) * factor - 1 of `hashes`; skips nulls. RANGE, KEYED, NOHASH. */
int shms_blockpool_evict(shms_blockpool *pool, const void *ids,
                         int64_t n); /* drops the keys of these blocks, if they have one; RANGE */
int shms_blockpool_reset(shms_blockpool *pool); /* drops all keys without logging them; BUSY while a block is in use */

int32_t shms_blockpool_ref(const shms_blockpool *pool, int32_t id); /* its reference count; RANGE */
int shms_blockpool_key_of(const shms_blockpool *pool, int32_t id, uint8_t *hash, int32_t *group);
/* Returns the width of its key (0: it has no key), the hash's 32 bytes and the group; RANGE. */
int32_t shms_blockpool_free_ids(const shms_blockpool *pool, int32_t *out); /* head to tail; returns how many */
int64_t shms_blockpool_keyed(const shms_blockpool *pool, int32_t *out, const void *ids, int64_t n);
/* Stores those of `ids` that have a key, in order; RANGE. */

void shms_blockpool_log(shms_blockpool *pool, int on); /* logs removed keys from now on, or stops */
int64_t shms_blockpool_log_len(const shms_blockpool *pool); /* records since the last take */
const uint8_t *shms_blockpool_log_take(shms_blockpool *pool, int64_t *n);
/* Returns n records of 40 bytes (32 of hash, int32 width, int32 group) and empties the log. The records stay until the
 * next key is dropped. */

int shms_blockpool_valid(const shms_blockpool *pool); /* 0, or CORRUPT: an invariant is broken */
/* cdef: end */

#define SHMS_LOG_BYTES 40
int shms_blockpool_log_reserve(shms_blockpool *pool,
                               int64_t more); /* reserves room for `more` records, so that get cannot fail; MEMORY */
int shms_blockpool_is_keyed(const shms_blockpool *pool, int32_t id); /* 1: the block has a key; id must be valid */
int64_t shms_blockpool_find_run(const shms_blockpool *pool, int32_t *out, const shms_hashlist *hashes, int64_t first,
                                int64_t n, int64_t factor, int32_t group);
/* Finds the blocks of positions first .. first+n-1 until the first miss, and returns how many. */

/* The memory of it, for blockpool.c and for tests that break it. The top of blockpool.c explains it. */
typedef struct shms_pool_block {
    uint8_t hash[SHMS_HASH_BYTES];
    int32_t ref;
    uint32_t tag;
    int32_t prev_off, next_off; /* neighbours in the queue, as distances from id - 1 and id + 1 */
    int32_t key_prev, key_next;
    int32_t group;
    uint8_t width; /* 0: it has no key */
    uint8_t first; /* 1: the slot of its key names it */
    uint8_t out; /* 1: not in the queue */
    uint8_t pad;
} shms_pool_block;
_Static_assert(sizeof(shms_pool_block) == 64, "one block, one cache line");

typedef struct shms_pool_slot {
    uint32_t tag;
    int32_t id;
} shms_pool_slot;

struct shms_blockpool {
    void *memory; /* the allocation that has all of it */
    shms_pool_block *blocks;
    shms_pool_slot *slots;
    uint32_t n_slots;
    int32_t n_blocks, n_free, n_keys;
    int free_order, log_on;
    uint8_t *log;
    int64_t log_n, log_cap;
    int64_t nbytes;
};
#endif
