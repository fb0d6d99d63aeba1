/* tables.h: what kvcache.c (tables, and what they take from the pool) and prefix.c (look-ups) share. */
#ifndef SHMS_KV_TABLES_H
#define SHMS_KV_TABLES_H
#include <string.h>

#include "kvcache.h"

static const int64_t LIMIT = (int64_t)1 << 60, TOO_MANY = (int64_t)INT32_MAX + 1;

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t cdiv(int64_t a, int64_t b) { return a <= 0 ? 0 : (a - 1) / b + 1; }

/* The memory of a shms_kvcache, also for tests that break it. The top of kvcache.c explains it. */
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
    int64_t alignment, max_model_len, max_in_flight, interval;
    shms_kv_kind *kinds; /* those of full attention, then the others */
    int32_t *order; /* indices of the groups, kind after kind */
    shms_kv_table *tables; /* n_groups for each request; number 0 is not used */
    int64_t idle, *next_idle; /* list of the numbers to reuse, ended by 0; -1: a request has this one */
    int64_t n_requests, cap_requests;
    shms_kv_ids out; /* the last answer */
    int32_t *counts;
    int64_t *stored;
};

/* How many blocks in a row a request needs to go on after them. */
static inline int64_t window_blocks(const shms_kv_group *g, int drop) {
    return max64(1, cdiv(g->param - 1, g->size) + drop);
}

/* Copies ids from an address that need not be aligned; NULL is allowed if n is 0. */
static inline void put_ids(int32_t *to, const void *ids, int64_t n) {
    if (n)
        memcpy(to, ids, (size_t)n * sizeof *to);
}

int shms_kv_ids_reserve(shms_kv_ids *a, int64_t n); /* room for n ids; MEMORY */
/* The answer of a call that has so many blocks in `out`. */
void shms_kv_answer(const shms_kvcache *kv, shms_kv_request *r, int64_t n_ids);
#endif
