/* blockpool_impl.h: the memory of a block pool, for blockpool.c and for tests that break it. The top of blockpool.c
 * explains it. */
#ifndef SHMS_BLOCKPOOL_IMPL_H
#define SHMS_BLOCKPOOL_IMPL_H
#include "blockpool.h"

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
