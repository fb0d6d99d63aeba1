/* kvcache.h: the block tables of all running requests, for several groups of layers, over one block pool.
 *
 * A group is a set of layers that share one table per request. Each group has a kind of attention and a block size in
 * tokens. The kind decides how many leading tokens are no longer needed, which cached prefix is the longest, and how
 * many leading blocks all requests share.
 *
 *                      group 0 (full)        group 1 (window)
 *     request 7        | 1 2 3 4 5 6 13 |    | 0 0 0 0 11 12 14 |      0: null block, contents not needed
 *
 * One call is one operation on one request, over all groups in index order. A request is a record of the caller's,
 * initially zeros. Each call writes its whole answer there, with the request's state. So a caller that is interrupted
 * on the way back still has both.
 *
 * There is one hash for each hash block. A group whose blocks are `factor` times as large uses every factor-th hash.
 *
 * Caveats: not thread-safe. A call that refuses leaves everything as it was, with one exception; see allocate. A record
 * belongs to one manager. */
#ifndef SHMS_KVCACHE_H
#define SHMS_KVCACHE_H
#include <stdint.h>

#include "blockpool.h"
#include "hashlist.h"

/* cdef: begin */
typedef struct shms_kvcache shms_kvcache;
enum { SHMS_KV_FULL = 0, SHMS_KV_WINDOW = 1, SHMS_KV_CHUNK = 2, SHMS_KV_MAMBA = 3, SHMS_KV_CROSS = 4 };
enum { SHMS_KV_EAGLE = 8 }; /* added to a kind other than CHUNK: a group of the draft model */
enum { SHMS_KV_CACHING = 1, SHMS_KV_AHEAD = 2 };

shms_kvcache *shms_kvcache_new(shms_blockpool *pool, int32_t n_groups, const int32_t *kinds, const int32_t *block_sizes,
                               const int64_t *params, int64_t hash_block_size, int64_t alignment, int64_t max_model_len,
                               int64_t max_in_flight, int64_t interval, int flags);
/* Returns an empty manager, which the caller owns and which borrows the pool. params: window, chunk, or number of
 * speculative blocks of each group. AHEAD: the block that EAGLE leaves out may lie beyond what a look-up asks for.
 * max_in_flight: the most tokens of a request that are allocated and not computed yet, for `whole`. interval: -1, or
 * the blocks of windows get keys only where a later request can go on: at the multiples of `interval` tokens (0: at none
 * of them) and at a request's boundaries. NULL: no memory. The caller has checked the numbers. */
void shms_kvcache_free(shms_kvcache *kv); /* frees it; does not give the blocks of its tables back to the pool */

typedef struct shms_kv_step { /* what an allocate is for; all are 0 .. 2^60 - 1, in tokens if nothing else is said */
    int64_t passed;    /* windows give back what they need no more after these */
    int64_t computed;  /* those before the new ones, with those of blocks that were found; at least `passed` */
    int64_t external;  /* after them, what others compute */
    int64_t n_new;     /* after these, new ones; with `external` at least 1 */
    int64_t lookahead; /* after these, speculative ones: they get no keys */
    int64_t n_tokens;  /* blocks of the first n_tokens may get keys; 0: no keys */
    int64_t n_encoder; /* those of the encoder, for cross attention */
    int64_t whole;     /* so many must fit, too, as in a new request; 0: not asked */
    int64_t reserved;  /* blocks to leave free when the step has its own */
    int64_t headroom;  /* blocks to leave free in any case */
} shms_kv_step;

typedef struct shms_kv_request {
    int64_t table;     /* number of the request's tables; 0: it has no tables */
    int64_t settled; /* without found blocks, a step changes nothing if computed + n_new + lookahead is at most this */
    int64_t boundaries[3]; /* if there is an interval, set by the caller: where later requests go on; -1: nowhere */
    /* The answer of the last call. The next call of the manager reuses the memory to which it points. */
    int64_t n_ids; /* blocks in all groups */
    const int32_t *ids; /* the blocks, group after group */
    const int32_t *counts; /* how many of each group */
    const int64_t *stored; /* two for each group: blocks [first, end) got their keys, if they are kept */
    int64_t longest; /* after find: tokens of the longest prefix that one type of group has */
    int64_t wanted, there; /* after FULL, SHORT (blocks) and NOHASH (hashes): how many are needed, how many there are */
} shms_kv_request;

int64_t shms_kvcache_find(shms_kvcache *kv, shms_kv_request *request, const shms_hashlist *hashes, int64_t max_tokens);
/* Returns the tokens of the longest cached prefix of at most max_tokens, and answers with its blocks. An empty request
 * passes -1, which counts as 0. Changes only the answer. MEMORY; ARGUMENT: below -1, above 2^60 - 1, or more blocks
 * than a table can have. */

int64_t shms_kvcache_allocate(shms_kvcache *kv, shms_kv_request *request, const shms_kv_step *step,
                              const shms_hashlist *hashes, const void *ids, const int32_t *counts);
/* Makes room for a step of the request; answers with the new blocks, and returns their number. A request without tables
 * gets tables that start with the computed blocks `ids` (int32), counts[g] of them for group g (counts NULL: none).
 * FULL: too few blocks are free; blocks that a window has passed are given back all the same, unless it is `whole` that
 * does not fit. COMPUTED, NOHASH, KEYED, RANGE, MEMORY; ARGUMENT: a number of the step is out of range. */

int shms_kvcache_cache(shms_kvcache *kv, shms_kv_request *request, const shms_hashlist *hashes, int64_t n_tokens);
/* Gives the blocks of the first n_tokens their keys. NOHASH, KEYED, SHORT. */
int shms_kvcache_release(shms_kvcache *kv, shms_kv_request *request);
/* Frees the tables, last block first, and resets the record. Does nothing for a request without tables. */
int64_t shms_kvcache_cached(shms_kvcache *kv, const shms_kv_request *request);
/* Returns the number of leading tokens whose blocks have been given keys in all groups. */
int shms_kvcache_table(shms_kvcache *kv, shms_kv_request *request); /* answers with the request's tables */
int shms_kvcache_common(shms_kvcache *kv, shms_kv_request *request);
/* Answers in `counts` with the leading blocks that all requests share. */
int shms_kvcache_valid(const shms_kvcache *kv); /* 0, or CORRUPT: an invariant is broken, or one of the pool */
/* cdef: end */
#endif
