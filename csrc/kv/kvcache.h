/* kvcache.h: the block tables of all running requests, for several groups of layers, over one block pool.
 *
 * A group is a set of layers that share one table per request. Each has a kind of attention, a block size in tokens and
 * its own answer to: how many tokens at the front does nobody need any more, how long is the longest prefix that the
 * cache holds, how many leading blocks do all requests share.
 *
 *                      group 0 (full)        group 1 (window)
 *     request 7        | 1 2 3 4 5 6 13 |    | 0 0 0 0 11 12 14 |      0: null block, contents not needed
 *
 * One call is one operation on one request, over all groups in index order. A request is a record of the caller, zeros at
 * first. Each call writes its whole answer there, with the request's state: so a caller that is interrupted on the way back
 * still has both.
 *
 * Hashes are those of the hash block size; a group whose blocks are `factor` times as large uses the last of each
 * `factor`.
 *
 * Caveats: not for several threads at once. Every call that refuses leaves everything as it was, but for the one thing
 * that allocate says. A record belongs to one manager. */
#ifndef SHMS_KVCACHE_H
#define SHMS_KVCACHE_H
#include <stdint.h>

#include "blockpool.h"
#include "hashlist.h"

/* cdef: begin */
typedef struct shms_kvcache shms_kvcache;
enum { SHMS_KV_FULL = 0, SHMS_KV_WINDOW = 1, SHMS_KV_CHUNK = 2, SHMS_KV_MAMBA = 3, SHMS_KV_CROSS = 4 };
enum { SHMS_KV_CACHING = 1, SHMS_KV_EAGLE = 2 };

shms_kvcache *shms_kvcache_new(shms_blockpool *pool, int32_t n_groups, const int32_t *kinds, const int32_t *block_sizes,
                               const int64_t *params, int64_t hash_block_size, int64_t alignment, int64_t max_model_len,
                               int flags);
/* an empty manager over a pool that it borrows; params: window, chunk, or number of speculative blocks of each group.
 * The caller owns it. NULL: no memory, or a number below 1 (of windows and speculative blocks: below 0). */
void shms_kvcache_free(shms_kvcache *kv); /* gives it back; the blocks of its tables stay as the pool has them */

typedef struct shms_kv_request {
    int64_t table;   /* the request's tables, by number; 0: it has none */
    int64_t
        settled; /* allocate would change nothing while computed + n_new + lookahead is at most this and no blocks are given */
    int64_t
        n_ids; /* the answer: so many blocks, all groups together; below, in memory that the manager's next call reuses, */
    const int32_t *ids; /* the blocks, group after group, */
    const int32_t *counts; /* how many of each group, */
    const int64_t *stored; /* and two for each group: blocks [first, end) got their keys; equal: none did */
    int64_t wanted,
        there; /* after FULL, SHORT (blocks) and NOHASH (hashes): how many were needed, how many there are */
} shms_kv_request;

int64_t shms_kvcache_find(shms_kvcache *kv, shms_kv_request *request, const shms_hashlist *hashes, int64_t max_tokens);
/* tokens of the longest cached prefix of at most max_tokens (-1, what an empty request has left to find: as 0), and its
 * blocks. Changes nothing but the answer. MEMORY; ARGUMENT: below -1, above 2^60 - 1, or more blocks than a table can have. */

int shms_kvcache_allocate(shms_kvcache *kv, shms_kv_request *request, int64_t seen, int64_t computed, int64_t n_new,
                          int64_t lookahead, int64_t n_tokens, int64_t n_encoder, int delay,
                          const shms_hashlist *hashes, const void *ids, const int32_t *counts);
/* makes room for n_new tokens behind `computed`, of which `seen` stood in the request's own count; answers with the new
 * blocks. A request without tables gets them, beginning with the computed blocks `ids` (int32), counts[g] of them for
 * group g (counts NULL: none). FULL: too few blocks are free; blocks that the window has passed are given back even then.
 * COMPUTED, NOHASH, KEYED, RANGE, MEMORY, ARGUMENT (each number of tokens is 0 .. 2^60 - 1, and computed at least seen). */

int shms_kvcache_cache(shms_kvcache *kv, shms_kv_request *request, const shms_hashlist *hashes, int64_t n_tokens);
/* gives the blocks of the first n_tokens their keys: NOHASH, KEYED, SHORT */
int shms_kvcache_release(shms_kvcache *kv, shms_kv_request *request);
/* frees the tables, last block first; the record is as at first. A request without tables: nothing */
int shms_kvcache_table(shms_kvcache *kv, shms_kv_request *request); /* answers with the request's tables */
int shms_kvcache_common(shms_kvcache *kv, shms_kv_request *request);
/* counts: leading blocks that all requests share */
int shms_kvcache_valid(const shms_kvcache *kv); /* 0, or the code of the first broken invariant, the pool's too */
/* cdef: end */
#endif
