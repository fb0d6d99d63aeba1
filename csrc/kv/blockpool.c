/* blockpool.c: a ring through an array, and an open-addressed map into it.
 *
 * One block is one record of 64 bytes, aligned to a cache line. So taking, keying or freeing a block costs one miss for
 * the block and one for the map:
 *
 *     0        32    36    40         44         48        52        56      60      61      62    63
 *     | hash   | ref | tag | prev_off | next_off | key_prev| key_next| group | width | first | out | pad |
 *
 * Free queue: a doubly linked ring. The null block's record is its sentinel, so no operation has a special case for an
 * end. Links are stored as distances from the neighbours that a block has in a new pool, id - 1 and id + 1 (the ends
 * wrap around). So a new pool is all zeros: building it touches no block, and pages are mapped when blocks are used.
 *
 * Map: n_slots = 15/8 n slots of 8 bytes {tag, block}; block 0 means empty. The tag is 32 bits mixed from hash and
 * group. A key's home slot is tag * n_slots / 2^32, which needs no division and allows any table size. Collisions go to
 * the next slot, around the end. A removal shifts back the keys that stood there because of the removed one. So there
 * are no tombstones, and a probe ends at the first empty slot. At most n - 1 keys are in 15/8 n slots, so nearly half
 * are always empty. (With 3/2 n, removals took a third longer; with more, a block would take over 80 bytes in all.)
 *
 * Equal keys: a slot names the block that got the key first ("first" = 1). The others follow it in the ring
 * key_prev/key_next, in the order in which they got the key. The first one's key_prev is the last, so append and
 * removal are O(1). Removing the first one puts the second in its slot; removing another one does not touch the map.
 *
 * Why the pool is always valid:
 *   1. Each operation checks all its arguments and reserves its memory before it writes. Only `put` must count down to
 *      notice that a block is given back once too often (an id may come twice in one call). It then counts up again.
 *   2. ref == 0 if and only if the block is in the queue. get and touch remove it when ref becomes positive, and put
 *      appends it when ref reaches 0. The flag `out` prevents that an id given twice is appended twice.
 *   3. A key is in the map if and only if a block has it. Only add_key and drop_key write these, and both write
 *      both. */
#include "blockpool.h"

#include <stdlib.h>
#include <string.h>

/* ---- creating ---- */

shms_blockpool *shms_blockpool_new(int32_t n_blocks, int free_order) {
    if (n_blocks < 1 || (free_order != SHMS_BLOCKPOOL_TAIL && free_order != SHMS_BLOCKPOOL_UNCACHED_FIRST))
        return NULL;
    uint32_t n_slots = (uint32_t)n_blocks + (uint32_t)n_blocks / 8 * 7 + 2;
    size_t head = (sizeof(shms_blockpool) + 63) / 64 * 64;
    size_t bytes = 63 + head + (size_t)n_blocks * sizeof(shms_pool_block) + (size_t)n_slots * sizeof(shms_pool_slot);
    char *memory = calloc(1, bytes); /* not aligned_alloc: calloc returns untouched zero pages for large sizes */
    if (!memory)
        return NULL;
    shms_blockpool *pool = (shms_blockpool *)(memory + (64 - (uintptr_t)memory % 64) % 64);
    pool->memory = memory;
    pool->blocks = (shms_pool_block *)((char *)pool + head);
    pool->slots = (shms_pool_slot *)(pool->blocks + n_blocks);
    pool->n_slots = n_slots;
    pool->n_blocks = n_blocks;
    pool->n_free = n_blocks - 1;
    pool->free_order = free_order;
    pool->nbytes = (int64_t)bytes;
    return pool;
}

void shms_blockpool_free(shms_blockpool *pool) {
    if (!pool)
        return;
    free(pool->log);
    free(pool->memory);
}

int64_t shms_blockpool_nbytes(const shms_blockpool *pool) { return pool->nbytes; }
int32_t shms_blockpool_len(const shms_blockpool *pool) { return pool->n_blocks; }
int32_t shms_blockpool_n_free(const shms_blockpool *pool) { return pool->n_free; }
int32_t shms_blockpool_n_keys(const shms_blockpool *pool) { return pool->n_keys; }

static inline int32_t id_at(const void *ids, int64_t i) {
    int32_t id; /* ids also come from byte strings, which may not be aligned */
    memcpy(&id, (const char *)ids + 4 * i, sizeof id);
    return id;
}

static inline int outside(const shms_blockpool *pool, int32_t id) { return (uint32_t)id >= (uint32_t)pool->n_blocks; }

/* ---- the free queue ---- */

static inline int32_t next_of(const shms_blockpool *pool, int32_t id) {
    int32_t next = id + 1 + pool->blocks[id].next_off;
    return next == pool->n_blocks ? 0 : next;
}

static inline int32_t prev_of(const shms_blockpool *pool, int32_t id) {
    int32_t prev = id - 1 + pool->blocks[id].prev_off;
    return prev == -1 ? pool->n_blocks - 1 : prev;
}

static inline void queue_link(shms_blockpool *pool, int32_t id, int32_t next) {
    pool->blocks[id].next_off = next - id - 1;
    pool->blocks[next].prev_off = id - next + 1;
}

static inline void queue_insert_after(shms_blockpool *pool, int32_t at, int32_t id) {
    int32_t next = next_of(pool, at);
    queue_link(pool, at, id);
    queue_link(pool, id, next);
    pool->blocks[id].out = 0;
    pool->n_free++;
}

static inline void queue_remove(shms_blockpool *pool, int32_t id) {
    queue_link(pool, prev_of(pool, id), next_of(pool, id));
    pool->blocks[id].out = 1;
    pool->n_free--;
}

int shms_blockpool_is_keyed(const shms_blockpool *pool, int32_t id) { return pool->blocks[id].width != 0; }

/* ---- the map ---- */

static inline uint64_t word(const uint8_t *p) {
    uint64_t w;
    memcpy(&w, p, sizeof w);
    return w;
}

/* A SHA-256 needs no mixing, but a caller's own hashes (counters, for example) do. */
static inline uint32_t tag_of(const uint8_t *hash, int32_t group) {
    uint64_t x = word(hash) * 0x9e3779b97f4a7c15u + word(hash + 8) * 0xc2b2ae3d27d4eb4fu;
    x ^= x >> 29;
    x += word(hash + 16) * 0x165667b19e3779f9u + word(hash + 24) * 0xd6e8feb86659fd93u + (uint64_t)(uint32_t)group;
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
    return (uint32_t)(x >> 32);
}

static inline uint32_t home_of(const shms_blockpool *pool, uint32_t tag) {
    return (uint32_t)((uint64_t)tag * pool->n_slots >> 32);
}
static inline uint32_t slot_after(const shms_blockpool *pool, uint32_t s) { return s + 1 == pool->n_slots ? 0 : s + 1; }

static inline int has_key(const shms_pool_block *b, const uint8_t *hash, int32_t width, int32_t group) {
    return b->width == width && b->group == group && !memcmp(b->hash, hash, SHMS_HASH_BYTES);
}

/* Returns the slot of this key, or the empty slot where it would go. */
static inline uint32_t slot_of(const shms_blockpool *pool, uint32_t tag, const uint8_t *hash, int32_t width,
                               int32_t group) {
    uint32_t s = home_of(pool, tag);
    while (pool->slots[s].id &&
           !(pool->slots[s].tag == tag && has_key(pool->blocks + pool->slots[s].id, hash, width, group)))
        s = slot_after(pool, s);
    return s;
}

static void slot_clear(shms_blockpool *pool, uint32_t hole) {
    uint32_t s = hole, n = pool->n_slots;
    for (;;) {
        s = slot_after(pool, s);
        if (!pool->slots[s].id)
            break;
        uint32_t home = home_of(pool, pool->slots[s].tag);
        uint32_t from_home = s >= home ? s - home : s + n - home;
        uint32_t from_hole = s >= hole ? s - hole : s + n - hole;
        if (from_home >= from_hole) { /* its home is at or before the hole, so it may move there */
            pool->slots[hole] = pool->slots[s];
            hole = s;
        }
    }
    pool->slots[hole] = (shms_pool_slot){0, 0};
}

static void add_key(shms_blockpool *pool, int32_t id, uint32_t tag, const uint8_t *hash, int32_t width, int32_t group) {
    shms_pool_block *blocks = pool->blocks, *b = blocks + id;
    uint32_t s = slot_of(pool, tag, hash, width, group);
    int32_t first = pool->slots[s].id;
    memcpy(b->hash, hash, SHMS_HASH_BYTES);
    b->tag = tag;
    b->group = group;
    b->width = (uint8_t)width;
    b->first = first == 0;
    if (first) {
        int32_t last = blocks[first].key_prev;
        b->key_prev = last;
        b->key_next = first;
        blocks[last].key_next = id;
        blocks[first].key_prev = id;
    } else {
        b->key_prev = b->key_next = id;
        pool->slots[s] = (shms_pool_slot){tag, id};
        pool->n_keys++;
    }
}

static void drop_key(shms_blockpool *pool, int32_t id) {
    shms_pool_block *blocks = pool->blocks, *b = blocks + id;
    if (pool->log_on) {
        uint8_t *record = pool->log + pool->log_n++ * SHMS_LOG_BYTES;
        int32_t width = b->width;
        memcpy(record, b->hash, SHMS_HASH_BYTES);
        memcpy(record + 32, &width, 4);
        memcpy(record + 36, &b->group, 4);
    }
    if (b->first) {
        uint32_t s = home_of(pool, b->tag);
        while (pool->slots[s].id != id)
            s = slot_after(pool, s);
        if (b->key_next == id) {
            slot_clear(pool, s);
            pool->n_keys--;
        } else {
            pool->slots[s].id = b->key_next;
            blocks[b->key_next].first = 1;
        }
    }
    blocks[b->key_prev].key_next = b->key_next;
    blocks[b->key_next].key_prev = b->key_prev;
    b->width = b->first = 0;
}

/* ---- get, touch and put ---- */

/* Memory limits long runs. So the slots of the next keys are prefetched while one key is processed. */
enum { AHEAD = 8 };

/* Computes the tag of key i of a run and prefetches its slot; does nothing beyond the end. */
static inline void tag_ahead(const shms_blockpool *pool, uint32_t *tags, const uint8_t *base, int64_t step, int64_t i,
                             int64_t n, int32_t group) {
    if (i >= n)
        return;
    tags[i % AHEAD] = tag_of(base + i * step, group);
    __builtin_prefetch(pool->slots + home_of(pool, tags[i % AHEAD]), 1);
}

int shms_blockpool_get(shms_blockpool *pool, int32_t *out, int64_t n) {
    if (n < 0)
        return SHMS_KV_EARGUMENT;
    if (n > pool->n_free)
        return SHMS_KV_EFULL;
    int rc = shms_blockpool_log_reserve(pool, n);
    if (rc)
        return rc;
    shms_pool_block *blocks = pool->blocks;
    int32_t id = next_of(pool, 0);
    for (int64_t i = 0; i < n; i++) {
        out[i] = id;
        id = next_of(pool, id);
    }
    queue_link(pool, 0, id);
    for (int64_t i = 0; i < n; i++) {
        shms_pool_block *b = blocks + out[i];
        if (i + AHEAD < n)
            __builtin_prefetch(pool->slots + home_of(pool, blocks[out[i + AHEAD]].tag), 1);
        if (b->width)
            drop_key(pool, out[i]);
        b->ref = 1;
        b->out = 1;
    }
    pool->n_free -= (int32_t)n;
    return 0;
}

int shms_blockpool_touch(shms_blockpool *pool, const void *ids, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (outside(pool, id_at(ids, i)))
            return SHMS_KV_ERANGE;
    for (int64_t i = 0; i < n; i++) {
        int32_t id = id_at(ids, i);
        if (id && pool->blocks[id].ref++ == 0)
            queue_remove(pool, id);
    }
    return 0;
}

int shms_blockpool_put(shms_blockpool *pool, const void *ids, int64_t n, int reverse) {
    shms_pool_block *blocks = pool->blocks;
    int32_t head = 0; /* the last block put at the head; the next one follows it */
    for (int64_t i = 0; i < n; i++) {
        int32_t id = id_at(ids, i);
        int rc = outside(pool, id) ? SHMS_KV_ERANGE : id && blocks[id].ref == 0 ? SHMS_KV_EUNUSED : 0;
        if (rc) {
            while (i-- > 0)
                if (id_at(ids, i))
                    blocks[id_at(ids, i)].ref++;
            return rc;
        }
        if (id)
            blocks[id].ref--;
    }
    for (int64_t i = 0; i < n; i++) {
        int32_t id = id_at(ids, reverse ? n - 1 - i : i);
        if (!id || blocks[id].ref || !blocks[id].out)
            continue;
        if (pool->free_order == SHMS_BLOCKPOOL_UNCACHED_FIRST && !blocks[id].width) {
            queue_insert_after(pool, head, id);
            head = id;
        } else {
            queue_insert_after(pool, prev_of(pool, 0), id);
        }
    }
    return 0;
}

/* ---- keys ---- */

int32_t shms_blockpool_find(const shms_blockpool *pool, const uint8_t *hash, int32_t width, int32_t group) {
    return pool->slots[slot_of(pool, tag_of(hash, group), hash, width, group)].id;
}

int64_t shms_blockpool_find_run(const shms_blockpool *pool, int32_t *out, const shms_hashlist *hashes, int64_t first,
                                int64_t n, int64_t factor, int32_t group) {
    uint32_t tags[AHEAD];
    const uint8_t *base = hashes->data + ((first + 1) * factor - 1) * SHMS_HASH_BYTES;
    int64_t step = factor * SHMS_HASH_BYTES, i;
    for (i = 0; i < AHEAD; i++)
        tag_ahead(pool, tags, base, step, i, n, group);
    for (i = 0; i < n; i++) {
        const uint8_t *hash = base + i * step;
        uint32_t tag = tags[i % AHEAD];
        tag_ahead(pool, tags, base, step, i + AHEAD, n, group);
        if (i + AHEAD / 2 < n) /* its slot has arrived: prefetch the block that it names */
            __builtin_prefetch(pool->blocks + pool->slots[home_of(pool, tags[(i + AHEAD / 2) % AHEAD])].id);
        out[i] = pool->slots[slot_of(pool, tag, hash, hashes->width, group)].id;
        if (!out[i])
            break;
    }
    return i;
}

int shms_blockpool_key(shms_blockpool *pool, const void *ids, int64_t n, const shms_hashlist *hashes, int64_t first,
                       int64_t factor, int32_t group) {
    if (n <= 0)
        return n < 0 ? SHMS_KV_EARGUMENT : 0;
    if (first < 0 || factor < 1)
        return SHMS_KV_EARGUMENT;
    if (n > hashes->n / factor - first)
        return SHMS_KV_ENOHASH; /* (first + n) * factor > hashes->n, without the overflow */
    for (int64_t i = 0; i < n; i++) {
        int32_t id = id_at(ids, i);
        if (outside(pool, id))
            return SHMS_KV_ERANGE;
        if (id && pool->blocks[id].width)
            return SHMS_KV_EKEYED;
    }
    uint32_t tags[AHEAD];
    const uint8_t *base = hashes->data + ((first + 1) * factor - 1) * SHMS_HASH_BYTES;
    int64_t step = factor * SHMS_HASH_BYTES;
    for (int64_t i = 0; i < AHEAD; i++)
        tag_ahead(pool, tags, base, step, i, n, group);
    for (int64_t i = 0; i < n; i++) {
        const uint8_t *hash = base + i * step;
        uint32_t tag = tags[i % AHEAD];
        tag_ahead(pool, tags, base, step, i + AHEAD, n, group);
        int32_t id = id_at(ids, i);
        /* An id given twice has its first key by now, and does not get a second one. */
        if (id && !pool->blocks[id].width)
            add_key(pool, id, tag, hash, hashes->width, group);
    }
    return 0;
}

int shms_blockpool_evict(shms_blockpool *pool, const void *ids, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (outside(pool, id_at(ids, i)) || id_at(ids, i) == 0)
            return SHMS_KV_ERANGE;
    int rc = shms_blockpool_log_reserve(pool, n);
    if (rc)
        return rc;
    for (int64_t i = 0; i < n; i++)
        if (pool->blocks[id_at(ids, i)].width)
            drop_key(pool, id_at(ids, i));
    return 0;
}

int shms_blockpool_reset(shms_blockpool *pool) {
    if (pool->n_free != pool->n_blocks - 1)
        return SHMS_KV_EBUSY;
    for (int32_t i = 1; i < pool->n_blocks; i++)
        pool->blocks[i].width = pool->blocks[i].first = 0;
    memset(pool->slots, 0, (size_t)pool->n_slots * sizeof(shms_pool_slot));
    pool->n_keys = 0;
    return 0;
}

/* ---- reading ---- */

int32_t shms_blockpool_ref(const shms_blockpool *pool, int32_t id) {
    return outside(pool, id) ? SHMS_KV_ERANGE : pool->blocks[id].ref;
}

int shms_blockpool_key_of(const shms_blockpool *pool, int32_t id, uint8_t *hash, int32_t *group) {
    if (outside(pool, id))
        return SHMS_KV_ERANGE;
    memcpy(hash, pool->blocks[id].hash, SHMS_HASH_BYTES);
    *group = pool->blocks[id].group;
    return pool->blocks[id].width;
}

int32_t shms_blockpool_free_ids(const shms_blockpool *pool, int32_t *out) {
    int32_t n = 0;
    for (int32_t id = next_of(pool, 0); id; id = next_of(pool, id))
        out[n++] = id;
    return n;
}

int64_t shms_blockpool_keyed(const shms_blockpool *pool, int32_t *out, const void *ids, int64_t n) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t id = id_at(ids, i);
        if (outside(pool, id))
            return SHMS_KV_ERANGE;
        if (pool->blocks[id].width)
            out[found++] = id;
    }
    return found;
}

/* ---- the log of removed keys ---- */

void shms_blockpool_log(shms_blockpool *pool, int on) { pool->log_on = on != 0; }

int shms_blockpool_log_reserve(shms_blockpool *pool, int64_t more) {
    if (!pool->log_on || pool->log_n + more <= pool->log_cap)
        return 0;
    int64_t cap = pool->log_n + more > 2 * pool->log_cap ? pool->log_n + more : 2 * pool->log_cap;
    uint8_t *log = realloc(pool->log, (size_t)cap * SHMS_LOG_BYTES);
    if (!log)
        return SHMS_KV_EMEMORY;
    pool->log = log;
    pool->log_cap = cap;
    return 0;
}

int64_t shms_blockpool_log_len(const shms_blockpool *pool) { return pool->log_n; }

const uint8_t *shms_blockpool_log_take(shms_blockpool *pool, int64_t *n) {
    *n = pool->log_n;
    pool->log_n = 0;
    return pool->log;
}

/* ---- the checker: trusts nothing, writes nothing, ends on any contents ---- */

static int queue_valid(const shms_blockpool *pool) {
    int32_t n = 0, before = 0, id = next_of(pool, 0);
    for (; id; before = id, id = next_of(pool, id), n++) /* ends: a block has one predecessor, so none comes twice */
        if (outside(pool, id) || prev_of(pool, id) != before || pool->blocks[id].ref)
            return SHMS_KV_ECORRUPT;
    return prev_of(pool, 0) == before && n == pool->n_free ? 0 : SHMS_KV_ECORRUPT;
}

static int ring_valid(const shms_blockpool *pool, uint32_t s, int32_t *n_in_rings) {
    const shms_pool_block *first = pool->blocks + pool->slots[s].id;
    int32_t id = pool->slots[s].id, n = 0;
    if (first->tag != pool->slots[s].tag || !first->first || first->tag != tag_of(first->hash, first->group) ||
        slot_of(pool, first->tag, first->hash, first->width, first->group) != s)
        return SHMS_KV_ECORRUPT;
    do {
        const shms_pool_block *b = pool->blocks + id;
        if (!b->width || !has_key(b, first->hash, first->width, first->group) || (n && b->first) ||
            outside(pool, b->key_next) || pool->blocks[b->key_next].key_prev != id)
            return SHMS_KV_ECORRUPT;
        id = b->key_next;
        n++;
    } while (id != pool->slots[s].id);
    *n_in_rings += n;
    return 0;
}

int shms_blockpool_valid(const shms_blockpool *pool) {
    int32_t n_keys = 0, in_rings = 0, n_keyed = 0, n_free = 0;
    if (queue_valid(pool))
        return SHMS_KV_ECORRUPT;
    for (int32_t id = 1; id < pool->n_blocks; id++) {
        const shms_pool_block *b = pool->blocks + id;
        /* queue_valid has counted n_free blocks with ref 0, so there must be exactly that many here */
        if (b->ref < 0 || (b->ref == 0) == (b->out != 0))
            return SHMS_KV_ECORRUPT;
        n_keyed += b->width != 0;
        n_free += b->ref == 0;
    }
    if (pool->blocks[0].ref || pool->blocks[0].width || n_free != pool->n_free)
        return SHMS_KV_ECORRUPT;
    for (uint32_t s = 0; s < pool->n_slots; s++) {
        if (!pool->slots[s].id)
            continue;
        if (outside(pool, pool->slots[s].id) || ring_valid(pool, s, &in_rings))
            return SHMS_KV_ECORRUPT;
        n_keys++;
    }
    return n_keys == pool->n_keys && in_rings == n_keyed ? 0 : SHMS_KV_ECORRUPT;
}
