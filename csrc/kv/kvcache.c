/* kvcache.c: every loop over the blocks of a request.
 *
 * A table is an int32 array. Three facts about it carry the rest:
 *
 *   1. Null blocks come first: a table is  0 0 ... 0 b b b ... b.  A look-up returns this form, because only leading
 *      positions need no content. Allocation appends real blocks, and skipping replaces the first real blocks by null
 *      blocks. So `nulls` describes them all, and the real blocks below k are the range [nulls, k).
 *   2. The first `cached` blocks have been given their keys once (or were computed, or were null at that time).
 *      `cached` only grows. Evicting a key does not lower it, so a table gives each of its blocks a key at most once.
 *   3. A real block in a table has a reference for being there.
 *
 * The steps of allocate: check, reserve, drop what the window has passed, compare, commit. Every check that can refuse,
 * except "too few blocks", comes before the first write. The computed blocks are touched before new ones are taken, so
 * the pool cannot hand them out in the same call. Those of them that were free count as needed, so that enough blocks
 * are left after the touch.
 *
 * Numbers: numbers of tokens are below LIMIT = 2^60, so any three of them can be added. A block size is an int32, and
 * so is the number of blocks in a table. A need of more blocks is written as TOO_MANY, one more than fits, which no
 * pool has. So products of blocks and block sizes stay below 2^62, and so does the sum over all groups.
 *
 * Look-ups with several groups (the pool's key contains the group): first the "full" groups are searched from the left,
 * all of them at each position. Then the others are searched within that length. Both types return multiples of the
 * alignment, so the full groups can be cut to the length of the others.
 *
 * `settled` is the largest T such that an allocate with seen <= computed, computed + new + lookahead <= T would find no
 * block to add (T <= blocks * size), none to key (T < (cached + 1) * size) and none to skip. It does not depend on
 * other requests, because it is about this request's table only. */
#include "kvcache_impl.h"

#include <stdlib.h>
#include <string.h>

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t cdiv(int64_t a, int64_t b) { return a <= 0 ? 0 : (a - 1) / b + 1; }

static const int64_t LIMIT = (int64_t)1 << 60, TOO_MANY = (int64_t)INT32_MAX + 1;

static int ids_reserve(shms_kv_ids *a, int64_t n) {
    if (n <= a->cap)
        return 0;
    int64_t cap = max64(n, 2 * a->cap);
    if (cap > INT32_MAX)
        return SHMS_KV_EMEMORY;
    int32_t *at = realloc(a->at, (size_t)cap * sizeof *at);
    if (!at)
        return SHMS_KV_EMEMORY;
    a->at = at;
    a->cap = cap;
    return 0;
}

/* Copies ids from an address that need not be aligned; NULL is allowed if n is 0. */
static void put_ids(int32_t *to, const void *ids, int64_t n) {
    if (n)
        memcpy(to, ids, (size_t)n * sizeof *to);
}

/* ---- creating ---- */

shms_kvcache *shms_kvcache_new(shms_blockpool *pool, int32_t n_groups, const int32_t *kinds, const int32_t *block_sizes,
                               const int64_t *params, int64_t hash_block_size, int64_t alignment, int64_t max_model_len,
                               int flags) {
    if (n_groups < 1 || hash_block_size < 1 || alignment < 1 || max_model_len < 1)
        return NULL;
    for (int32_t g = 0; g < n_groups; g++)
        if (block_sizes[g] < 1 || params[g] < (kinds[g] == SHMS_KV_CHUNK) || kinds[g] < SHMS_KV_FULL ||
            kinds[g] > SHMS_KV_CROSS)
            return NULL;
    shms_kvcache *kv = calloc(1, sizeof *kv);
    if (!kv)
        return NULL;
    size_t n = (size_t)n_groups;
    kv->pool = pool;
    kv->n_groups = n_groups;
    kv->caching = !!(flags & SHMS_KV_CACHING);
    kv->eagle = !!(flags & SHMS_KV_EAGLE);
    kv->alignment = alignment;
    kv->max_model_len = max_model_len;
    kv->n_requests = 1;
    kv->groups = calloc(n, sizeof *kv->groups);
    kv->order = calloc(n, sizeof *kv->order);
    kv->counts = calloc(n, sizeof *kv->counts);
    kv->stored = calloc(2 * n, sizeof *kv->stored);
    if (!kv->groups || !kv->order || !kv->counts || !kv->stored) {
        shms_kvcache_free(kv);
        return NULL;
    }
    for (int32_t g = 0, others = n_groups; g < n_groups; g++) {
        kv->groups[g] = (shms_kv_group){.kind = kinds[g], .size = block_sizes[g], .param = params[g]};
        kv->groups[g].factor = (int32_t)max64(1, block_sizes[g] / hash_block_size);
        kv->order[kinds[g] == SHMS_KV_FULL ? kv->n_full++ : --others] = g;
    }
    return kv;
}

void shms_kvcache_free(shms_kvcache *kv) {
    if (!kv)
        return;
    for (int64_t i = kv->n_groups; i < kv->n_requests * kv->n_groups; i++)
        free(kv->tables[i].ids.at);
    for (int32_t g = 0; kv->groups && g < kv->n_groups; g++)
        free(kv->groups[g].scratch.at);
    free(kv->groups);
    free(kv->order);
    free(kv->counts);
    free(kv->stored);
    free(kv->tables);
    free(kv->next_idle);
    free(kv->out.at);
    free(kv);
}

/* ---- requests ---- */

static int is_live(const shms_kvcache *kv, int64_t h) { return h > 0 && h < kv->n_requests && kv->next_idle[h] < 0; }
static shms_kv_table *tables_of(const shms_kvcache *kv, int64_t h) { return kv->tables + h * kv->n_groups; }

/* Makes sure that there is an idle number. No caller can see the difference. */
static int number_reserve(shms_kvcache *kv) {
    if (kv->idle)
        return 0;
    if (kv->n_requests >= kv->cap_requests) {
        int64_t cap = kv->cap_requests ? 2 * kv->cap_requests : 64;
        shms_kv_table *tables = realloc(kv->tables, (size_t)(cap * kv->n_groups) * sizeof *tables);
        if (tables)
            kv->tables = tables;
        int64_t *next_idle = realloc(kv->next_idle, (size_t)cap * sizeof *next_idle);
        if (next_idle)
            kv->next_idle = next_idle;
        if (!tables || !next_idle)
            return SHMS_KV_EMEMORY;
        kv->cap_requests = cap;
    }
    int64_t h = kv->n_requests++;
    memset(tables_of(kv, h), 0, (size_t)kv->n_groups * sizeof(shms_kv_table));
    kv->next_idle[h] = 0;
    kv->idle = h;
    return 0;
}

static void answer(const shms_kvcache *kv, shms_kv_request *r, int64_t n_ids) {
    r->n_ids = n_ids;
    r->ids = kv->out.at;
    r->counts = kv->counts;
    r->stored = kv->stored;
    r->wanted = r->there = 0;
}

static int missing(shms_kv_request *r, int code, int64_t wanted, int64_t there) {
    r->wanted = wanted;
    r->there = there;
    return code;
}

/* ---- the longest cached prefix ---- */

static void put_null(shms_kvcache *kv, const int32_t *which, int32_t n, int64_t from, int64_t to) {
    for (int32_t j = 0; j < n && from < to; j++)
        memset(kv->groups[which[j]].scratch.at + from, 0, (size_t)(to - from) * sizeof(int32_t));
}

/* Searches from the left, from block `at` until the first miss in one of the groups. */
static int64_t find_left(shms_kvcache *kv, const shms_hashlist *hashes, const int32_t *which, int32_t n, int64_t at,
                         int64_t end) {
    int64_t stop = end;
    for (int32_t j = 0; j < n && at < stop; j++)
        stop = at + shms_blockpool_find_run(kv->pool, kv->groups[which[j]].scratch.at + at, hashes, at, stop - at,
                                            kv->groups[which[j]].factor, which[j]);
    return stop;
}

/* Do all groups have the block at position i? Stores their blocks in scratch. */
static int hit(shms_kvcache *kv, const shms_hashlist *hashes, const int32_t *which, int32_t n, int64_t i) {
    const uint8_t *hash = hashes->data + ((i + 1) * kv->groups[which[0]].factor - 1) * SHMS_HASH_BYTES;
    int32_t id = 1;
    for (int32_t j = 0; j < n && id; j++)
        id = kv->groups[which[j]].scratch.at[i] = shms_blockpool_find(kv->pool, hash, hashes->width, which[j]);
    return id;
}

static int64_t find_window(shms_kvcache *kv, const shms_hashlist *hashes, const int32_t *which, int32_t n,
                           int64_t end) {
    const shms_kv_group *g = kv->groups + which[0];
    int64_t need = max64(1, cdiv(g->param - 1, g->size) + kv->eagle), run = 0, len = 0;
    for (int64_t i = end - 1; i >= 0; i--) {
        if (run == 0 && (i + 1) * g->size % kv->alignment)
            continue; /* a run must end where the other groups can end, too */
        if (!hit(kv, hashes, which, n, i)) {
            run = 0;
            continue;
        }
        if (run == 0)
            len = i + 1;
        if (++run < need)
            continue;
        put_null(kv, which, n, 0, i);
        return len - kv->eagle;
    }
    /* No run is long enough, except one that reaches block 0, which has the whole context. */
    return run ? len - kv->eagle : 0;
}

static int64_t find_mamba(shms_kvcache *kv, const shms_hashlist *hashes, const int32_t *which, int32_t n, int64_t end) {
    for (int64_t i = end - 1; i >= 0; i--) {
        if ((i + 1) * kv->groups[which[0]].size % kv->alignment || !hit(kv, hashes, which, n, i))
            continue;
        put_null(kv, which, n, 0, i);
        return i + 1;
    }
    return 0;
}

/* Returns the blocks (of the type's size) of the longest prefix of at most max_tokens. They are in scratch. MEMORY. */
static int64_t find_type(shms_kvcache *kv, const shms_hashlist *hashes, const int32_t *which, int32_t n,
                         int64_t max_tokens) {
    const shms_kv_group *g = kv->groups + which[0];
    int64_t end = min64(max_tokens / g->size, hashes->n / g->factor), from = 0, len, rc;
    if (g->kind == SHMS_KV_CHUNK)
        from = max_tokens / g->param * g->param / g->size; /* all before it is in chunks that are over */
    for (int32_t j = 0; j < n; j++)
        if ((rc = ids_reserve(&kv->groups[which[j]].scratch, max64(from, end))))
            return rc;
    switch (g->kind) {
    case SHMS_KV_WINDOW:
        return find_window(kv, hashes, which, n, end);
    case SHMS_KV_MAMBA:
        return find_mamba(kv, hashes, which, n, end);
    case SHMS_KV_CHUNK:
        put_null(kv, which, n, 0, from);
        return from < end ? find_left(kv, hashes, which, n, from, end) : from;
    default:
        len = find_left(kv, hashes, which, n, 0, end);
        if (kv->eagle && len)
            len--;
        while (len * g->size % kv->alignment)
            len--;
        return len;
    }
}

int64_t shms_kvcache_find(shms_kvcache *kv, shms_kv_request *r, const shms_hashlist *hashes, int64_t max_tokens) {
    int64_t tokens = max64(0, max_tokens), rc, n_ids = 0;
    answer(kv, r, 0);
    memset(kv->counts, 0, (size_t)kv->n_groups * sizeof *kv->counts);
    if (max_tokens < -1 || max_tokens >= LIMIT)
        return SHMS_KV_EARGUMENT;
    for (int32_t g = 0; g < kv->n_groups; g++)
        if (tokens / kv->groups[g].size >= TOO_MANY)
            return SHMS_KV_EARGUMENT;
    for (int type = 0; type < 2; type++) {
        int32_t n = type ? kv->n_groups - kv->n_full : kv->n_full;
        const int32_t *which = kv->order + (type ? kv->n_full : 0);
        if (!n)
            continue;
        int64_t blocks = find_type(kv, hashes, which, n, tokens);
        if (blocks < 0)
            return blocks;
        tokens = blocks * kv->groups[which[0]].size;
    }
    for (int32_t g = 0; g < kv->n_groups; g++)
        n_ids += kv->counts[g] = (int32_t)(tokens / kv->groups[g].size);
    if ((rc = ids_reserve(&kv->out, n_ids)))
        return rc;
    for (int32_t g = 0, at = 0; g < kv->n_groups; at += kv->counts[g++])
        put_ids(kv->out.at + at, kv->groups[g].scratch.at, kv->counts[g]);
    answer(kv, r, n_ids);
    return tokens;
}

/* ---- allocation ---- */

static int64_t skipped_tokens(const shms_kv_group *g, int64_t computed) {
    switch (g->kind) {
    case SHMS_KV_WINDOW:
        return computed - g->param + 1;
    case SHMS_KV_CHUNK:
        return computed / g->param * g->param;
    default:
        return 0;
    }
}

static void skip_passed(shms_kvcache *kv, shms_kv_table *t, const shms_kv_group *g, int64_t computed) {
    int64_t tokens = skipped_tokens(g, computed);
    int32_t k = tokens <= 0 ? 0 : (int32_t)min64(tokens / g->size, t->len);
    if (k <= t->nulls)
        return;
    shms_blockpool_put(kv->pool, t->ids.at + t->nulls, k - t->nulls, 1); /* cannot refuse: fact 3 */
    memset(t->ids.at + t->nulls, 0, (size_t)(k - t->nulls) * sizeof(int32_t));
    t->nulls = k;
}

/* How many blocks a table of this group must have for that many tokens. */
static int64_t blocks_for(const shms_kv_group *g, int64_t tokens, int64_t n_encoder) {
    int64_t n = cdiv(g->kind == SHMS_KV_CROSS ? n_encoder : tokens, g->size);
    return min64(TOO_MANY, g->kind == SHMS_KV_MAMBA ? n + min64(g->param, TOO_MANY) : n);
}

/* May blocks [cached, end) of a table be given their keys? */
static int may_cache(const shms_kvcache *kv, shms_kv_request *r, const shms_kv_group *g, const shms_kv_table *t,
                     int64_t cached, int64_t end, const shms_hashlist *hashes) {
    if (end <= cached)
        return 0;
    if (end * g->factor > hashes->n)
        return missing(r, SHMS_KV_ENOHASH, end * g->factor, hashes->n);
    for (int64_t i = cached; i < min64(end, t->len); i++)
        if (t->ids.at[i] && shms_blockpool_is_keyed(kv->pool, t->ids.at[i]))
            return SHMS_KV_EKEYED;
    return 0;
}

/* Gives blocks [cached, end) their keys, after may_cache, and records which of them got one. */
static void do_cache(shms_kvcache *kv, int32_t g, shms_kv_table *t, int64_t end, const shms_hashlist *hashes) {
    int64_t from = max64(t->cached, t->nulls);
    kv->stored[2 * g] = kv->stored[2 * g + 1] = 0;
    if (end <= t->cached)
        return;
    if (from < end) {
        shms_blockpool_key(kv->pool, t->ids.at + from, end - from, hashes, from, kv->groups[g].factor, g);
        kv->stored[2 * g] = from;
        kv->stored[2 * g + 1] = end;
    }
    t->cached = (int32_t)end;
}

/* The largest sum for which allocate has nothing to do; see above. */
static int64_t settled(const shms_kvcache *kv, const shms_kv_table *tables) {
    int64_t limit = LIMIT - 1; /* a larger sum has a part that allocate refuses */
    for (int32_t g = 0; g < kv->n_groups; g++) {
        const shms_kv_group *gr = kv->groups + g;
        const shms_kv_table *t = tables + g;
        int64_t size = gr->size;
        int64_t next = ((int64_t)t->nulls + 1) * size; /* when that many tokens have passed, one more block goes */
        if (gr->kind == SHMS_KV_CROSS)
            return 0; /* each call says what it needs */
        limit = min64(limit, max64(0, t->len - (gr->kind == SHMS_KV_MAMBA ? gr->param : 0)) * size);
        if (kv->caching)
            limit = min64(limit, ((int64_t)t->cached + 1) * size - 1);
        /* `seen` is below the sum that is compared, because at least one token is new */
        if (gr->kind == SHMS_KV_WINDOW)
            limit = min64(limit, next + min64(gr->param, LIMIT) - 1);
        if (gr->kind == SHMS_KV_CHUNK)
            limit = min64(limit, cdiv(next, gr->param) * gr->param);
    }
    return limit;
}

int shms_kvcache_allocate(shms_kvcache *kv, shms_kv_request *r, int64_t seen, int64_t computed, int64_t n_new,
                          int64_t lookahead, int64_t n_tokens, int64_t n_encoder, int delay,
                          const shms_hashlist *hashes, const void *given, const int32_t *counts) {
    int is_new = r->table == 0, rc;
    /* or-ed, so that one comparison finds a negative number and one finds a large one */
    int64_t all = n_new | lookahead | seen | computed | n_encoder | n_tokens;
    answer(kv, r, 0);
    if (all < 0 || all >= LIMIT || n_new < 1 || computed < seen || (!is_new && !is_live(kv, r->table)))
        return SHMS_KV_EARGUMENT;
    int64_t tokens = min64(computed + n_new + lookahead, kv->max_model_len), total = 0, n_given = 0, revived = 0;
    int64_t to_cache = kv->caching && !delay ? min64(computed + n_new, n_tokens) : 0;
    if (is_new && (rc = number_reserve(kv)))
        return rc;
    shms_kv_table *tables = tables_of(kv, is_new ? kv->idle : r->table);
    for (int32_t g = 0; counts && g < kv->n_groups; g++) {
        if (counts[g] < 0)
            return SHMS_KV_EARGUMENT;
        n_given += counts[g];
    }
    if (n_given && (!is_new || !kv->caching))
        return SHMS_KV_ECOMPUTED;
    for (int64_t g = 0, i = 0, end = 0; n_given && g < kv->n_groups; g++) {
        int32_t id, before = 0;
        for (end += counts[g]; i < end; i++, before = id) {
            memcpy(&id, (const char *)given + 4 * i, 4);
            if (id < 0 || id >= shms_blockpool_len(kv->pool) || (before && !id))
                return SHMS_KV_ERANGE; /* fact 1 */
            revived += id && shms_blockpool_ref(kv->pool, id) == 0;
        }
    }
    for (int32_t g = 0; g < kv->n_groups; g++) {
        const shms_kv_group *gr = kv->groups + g;
        int64_t have = is_new && counts ? counts[g] : tables[g].len;
        int64_t len = max64(have, blocks_for(gr, tokens, n_encoder));
        int64_t cached = is_new ? have : tables[g].cached;
        if ((rc = may_cache(kv, r, gr, tables + g, cached, min64(to_cache / gr->size, len), hashes)))
            return rc;
        kv->groups[g].needed = len - have;
        total += kv->groups[g].needed;
    }
    if (total <= shms_blockpool_len(kv->pool)) { /* otherwise it is FULL, and would need absurd amounts of memory */
        for (int32_t g = 0; g < kv->n_groups; g++)
            if ((rc = ids_reserve(&tables[g].ids,
                                  (is_new && counts ? counts[g] : tables[g].len) + kv->groups[g].needed)))
                return rc;
        if ((rc = ids_reserve(&kv->out, total)) || (rc = shms_blockpool_log_reserve(kv->pool, total)))
            return rc;
    }

    for (int32_t g = 0; g < kv->n_groups; g++)
        skip_passed(kv, tables + g, kv->groups + g, seen);
    if (total + revived > shms_blockpool_n_free(kv->pool))
        return missing(r, SHMS_KV_EFULL, total + revived, shms_blockpool_n_free(kv->pool));

    if (is_new) {
        r->table = kv->idle;
        kv->idle = kv->next_idle[r->table];
        kv->next_idle[r->table] = -1;
        shms_blockpool_touch(kv->pool, given, n_given);
    }
    int64_t n_ids = 0, at = 0;
    for (int32_t g = 0; g < kv->n_groups; g++) {
        shms_kv_table *t = tables + g;
        int had = t->len > 0;
        if (is_new) {
            int32_t n = counts ? counts[g] : 0;
            put_ids(t->ids.at, (const char *)given + 4 * at, n);
            at += n;
            t->len = t->cached = n;
            for (t->nulls = 0; t->nulls < n && t->ids.at[t->nulls] == 0;)
                t->nulls++;
        }
        int64_t n = kv->groups[g].needed;
        if (n) {
            shms_blockpool_get(kv->pool, t->ids.at + t->len, n);
            put_ids(kv->out.at + n_ids, t->ids.at + t->len, n);
            t->len += (int32_t)n;
        }
        kv->counts[g] = (int32_t)n;
        n_ids += n;
        kv->groups[g].n_holders += !had && t->len > 0;
        do_cache(kv, g, t, min64(to_cache / kv->groups[g].size, t->len), hashes);
    }
    answer(kv, r, n_ids);
    r->settled = settled(kv, tables);
    return 0;
}

int shms_kvcache_cache(shms_kvcache *kv, shms_kv_request *r, const shms_hashlist *hashes, int64_t n_tokens) {
    int rc;
    answer(kv, r, 0);
    if (!is_live(kv, r->table) || n_tokens < 0)
        return SHMS_KV_EARGUMENT;
    shms_kv_table *tables = tables_of(kv, r->table);
    for (int32_t g = 0; g < kv->n_groups; g++) {
        int64_t end = n_tokens / kv->groups[g].size;
        if (end > tables[g].len)
            return missing(r, SHMS_KV_ESHORT, end, tables[g].len);
        if ((rc = may_cache(kv, r, kv->groups + g, tables + g, tables[g].cached, end, hashes)))
            return rc;
    }
    for (int32_t g = 0; g < kv->n_groups; g++)
        do_cache(kv, g, tables + g, n_tokens / kv->groups[g].size, hashes);
    r->settled = settled(kv, tables);
    return 0;
}

int shms_kvcache_release(shms_kvcache *kv, shms_kv_request *r) {
    if (r->table == 0)
        return 0;
    if (!is_live(kv, r->table))
        return SHMS_KV_EARGUMENT;
    for (int32_t g = 0; g < kv->n_groups; g++) {
        shms_kv_table *t = tables_of(kv, r->table) + g;
        kv->groups[g].n_holders -= t->len > 0;
        shms_blockpool_put(kv->pool, t->ids.at + t->nulls, t->len - t->nulls, 1); /* cannot refuse: fact 3 */
        free(t->ids.at);
        *t = (shms_kv_table){0};
    }
    kv->next_idle[r->table] = kv->idle;
    kv->idle = r->table;
    *r = (shms_kv_request){0};
    return 0;
}

/* ---- reading ---- */

int shms_kvcache_table(shms_kvcache *kv, shms_kv_request *r) {
    answer(kv, r, 0);
    if (!is_live(kv, r->table))
        return SHMS_KV_EARGUMENT;
    const shms_kv_table *tables = tables_of(kv, r->table);
    int64_t n_ids = 0;
    for (int32_t g = 0; g < kv->n_groups; g++)
        n_ids += kv->counts[g] = tables[g].len;
    int rc = ids_reserve(&kv->out, n_ids);
    if (rc)
        return rc;
    for (int32_t g = 0, at = 0; g < kv->n_groups; at += kv->counts[g++])
        put_ids(kv->out.at + at, tables[g].ids.at, tables[g].len);
    answer(kv, r, n_ids);
    return 0;
}

int shms_kvcache_common(shms_kvcache *kv, shms_kv_request *r) {
    answer(kv, r, 0);
    if (!is_live(kv, r->table))
        return SHMS_KV_EARGUMENT;
    for (int32_t g = 0; g < kv->n_groups; g++) {
        const shms_kv_table *t = tables_of(kv, r->table) + g;
        int32_t n = 0;
        if (kv->groups[g].kind == SHMS_KV_FULL)
            while (n < t->len && shms_blockpool_ref(kv->pool, t->ids.at[n]) == kv->groups[g].n_holders)
                n++;
        kv->counts[g] = n;
    }
    return 0;
}

int shms_kvcache_valid(const shms_kvcache *kv) {
    int rc = shms_blockpool_valid(kv->pool);
    if (rc)
        return rc;
    for (int32_t g = 0; g < kv->n_groups; g++) {
        int32_t holders = 0;
        for (int64_t h = 1; h < kv->n_requests; h++) {
            const shms_kv_table *t = tables_of(kv, h) + g;
            if (!is_live(kv, h)) {
                if (t->len)
                    return SHMS_KV_BAD_TABLE;
                continue;
            }
            if (t->len < 0 || t->len > t->ids.cap || t->cached < 0 || t->cached > t->len || t->nulls < 0 ||
                t->nulls > t->len)
                return SHMS_KV_BAD_TABLE;
            for (int32_t i = 0; i < t->len; i++)
                if ((t->ids.at[i] == 0) != (i < t->nulls) ||
                    (t->ids.at[i] && shms_blockpool_ref(kv->pool, t->ids.at[i]) < 1))
                    return SHMS_KV_BAD_TABLE;
            holders += t->len > 0;
        }
        if (holders != kv->groups[g].n_holders)
            return SHMS_KV_BAD_HOLDERS;
    }
    return 0;
}
