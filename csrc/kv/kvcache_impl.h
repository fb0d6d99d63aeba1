/* kvcache_impl.h: the memory behind the block tables, for kvcache.c and for tests that break it. The top of kvcache.c
 * explains it. */
#ifndef SHMS_KVCACHE_IMPL_H
#define SHMS_KVCACHE_IMPL_H
#include "kvcache.h"

typedef struct shms_kv_ids {
    int32_t *at;
    int64_t cap;
} shms_kv_ids;

typedef struct shms_kv_table {
    shms_kv_ids ids;
    int32_t len, cached, nulls;
} shms_kv_table;

typedef struct shms_kv_group {
    int32_t kind, eagle, size, factor;
    int64_t param;
    int32_t n_holders; /* requests whose table is not empty */
    int64_t skip, first, needed; /* of the allocate in progress: null blocks of a new table; the place and number of the
                                  * blocks that it adds */
    shms_kv_ids scratch; /* blocks that the look-up in progress has found */
} shms_kv_group;

/* Groups that are searched together. */
typedef struct shms_kv_kind {
    int32_t n, *which; /* the groups, in `order` */
    int32_t dropped; /* EAGLE has left a block out in the look-up in progress; */
    int64_t tokens; /* and the kind's last answer there, or -1 */
} shms_kv_kind;

struct shms_kvcache {
    shms_blockpool *pool;
    shms_kv_group *groups;
    int32_t n_groups, n_kinds, caching, ahead;
    int64_t alignment, max_model_len, interval;
    shms_kv_kind *kinds; /* those of full attention, then the others */
    int32_t *order; /* indices of the groups, kind after kind */
    shms_kv_table *tables; /* n_groups for each request; number 0 is not used */
    int64_t idle, *next_idle; /* list of the numbers to reuse, ended by 0; -1: a request has this one */
    int64_t n_requests, cap_requests;
    shms_kv_ids out; /* the last answer */
    int32_t *counts;
    int64_t *stored;
};
#endif
