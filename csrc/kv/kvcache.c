/* kvcache.c: the tables of requests, and what they take from the pool.
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
 * `settled` is the largest T such that an allocate with passed <= computed, computed + new + lookahead <= T would find no
 * block to add (T <= blocks * size), none to key (T < (cached + 1) * size) and none to skip. It does not depend on
 * other requests, because it is about this request's table only. */
#include <stdlib.h>

#include "tables.h"

int shms_kv_ids_reserve(shms_kv_ids *a, int64_t n) {
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

/* ---- creating ---- */

static int alike(const shms_kv_group *a, const shms_kv_group *b) {
    return a->kind == b->kind && a->eagle == b->eagle && a->size == b->size && a->param == b->param;
}

/* Puts the groups of each kind together: full attention first, then the others, each in order of its first group. */
static void sort_groups(shms_kvcache *kv) {
    int32_t at = 0;
    for (int full = 1; full >= 0; full--)
        for (int32_t g = 0; g < kv->n_groups; g++) {
            int32_t first = 0;
            while (!alike(kv->groups + first, kv->groups + g))
                first++;
            if (first < g || (kv->groups[g].kind == SHMS_KV_FULL) != full)
                continue;
            shms_kv_kind *kind = kv->kinds + kv->n_kinds++;
            kind->which = kv->order + at;
            for (int32_t other = g; other < kv->n_groups; other++)
                if (alike(kv->groups + other, kv->groups + g))
                    kind->which[kind->n++] = other;
            at += kind->n;
        }
}

shms_kvcache *shms_kvcache_new(shms_blockpool *pool, int32_t n_groups, const int32_t *kinds, const int32_t *block_sizes,
                               const int64_t *params, int64_t hash_block_size, int64_t alignment, int64_t max_model_len,
                               int64_t max_in_flight, int64_t interval, int flags) {
    shms_kvcache *kv = calloc(1, sizeof *kv);
    if (!kv)
        return NULL;
    size_t n = (size_t)max64(1, n_groups); /* a model without layers has no groups */
    kv->pool = pool;
    kv->n_groups = n_groups;
    kv->caching = !!(flags & SHMS_KV_CACHING);
    kv->ahead = !!(flags & SHMS_KV_AHEAD);
    kv->alignment = alignment;
    kv->max_model_len = max_model_len;
    kv->max_in_flight = max_in_flight;
    kv->interval = interval;
    kv->n_requests = 1;
    kv->groups = calloc(n, sizeof *kv->groups);
    kv->kinds = calloc(n, sizeof *kv->kinds);
    kv->order = calloc(n, sizeof *kv->order);
    kv->counts = calloc(n, sizeof *kv->counts);
    kv->stored = calloc(2 * n, sizeof *kv->stored);
    if (!kv->groups || !kv->kinds || !kv->order || !kv->counts || !kv->stored) {
        shms_kvcache_free(kv);
        return NULL;
    }
    for (int32_t g = 0; g < n_groups; g++) {
        kv->groups[g] = (shms_kv_group){.size = block_sizes[g], .param = params[g]};
        kv->groups[g].kind = kinds[g] & ~SHMS_KV_EAGLE;
        kv->groups[g].eagle = !!(kinds[g] & SHMS_KV_EAGLE);
        kv->groups[g].factor = (int32_t)max64(1, block_sizes[g] / hash_block_size);
    }
    sort_groups(kv);
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
    free(kv->kinds);
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
        shms_kv_table *tables = realloc(kv->tables, (size_t)(cap * max64(1, kv->n_groups)) * sizeof *tables);
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

void shms_kv_answer(const shms_kvcache *kv, shms_kv_request *r, int64_t n_ids) {
    r->n_ids = n_ids;
    r->ids = kv->out.at;
    r->counts = kv->counts;
    r->stored = kv->stored;
    r->longest = r->wanted = r->there = 0;
}

static int missing(shms_kv_request *r, int code, int64_t wanted, int64_t there) {
    r->wanted = wanted;
    r->there = there;
    return code;
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

/* How many leading blocks of a table have passed, and need no content, after that many tokens. */
static int64_t passed_blocks(const shms_kv_group *g, int64_t computed) {
    return max64(0, skipped_tokens(g, computed)) / g->size;
}

static void skip_passed(shms_kvcache *kv, shms_kv_table *t, const shms_kv_group *g, int64_t computed) {
    int32_t k = (int32_t)min64(passed_blocks(g, computed), t->len);
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

/* Does a later request need block i of a window, because it goes on at a multiple of `interval` or at a boundary? With
 * EAGLE it also needs the block after that position, which it computes again. */
static int is_kept(const shms_kvcache *kv, const shms_kv_request *r, const shms_kv_group *g, int64_t i) {
    int64_t need = window_blocks(g, g->eagle), period = kv->interval / g->size;
    if (period && (need >= period || (i - g->eagle) % period >= period - need))
        return 1;
    for (int k = 0; k < 3; k++) {
        int64_t end = r->boundaries[k] / kv->alignment * kv->alignment / g->size + g->eagle;
        if (r->boundaries[k] >= 0 && end - need <= i && i < end)
            return 1;
    }
    return 0;
}

/* Gives blocks [cached, end) their keys, after may_cache, and records which of them got one. */
static void do_cache(shms_kvcache *kv, const shms_kv_request *r, int32_t g, shms_kv_table *t, int64_t end,
                     const shms_hashlist *hashes) {
    int64_t from = max64(t->cached, t->nulls);
    int all = kv->interval < 0 || kv->groups[g].kind != SHMS_KV_WINDOW;
    kv->stored[2 * g] = kv->stored[2 * g + 1] = 0;
    if (end <= t->cached)
        return;
    for (int64_t first = from, next = all ? end : from; first < end; first = ++next) {
        while (next < end && is_kept(kv, r, kv->groups + g, next))
            next++;
        if (first < next)
            shms_blockpool_key(kv->pool, t->ids.at + first, next - first, hashes, first, kv->groups[g].factor, g);
    }
    if (from < end) {
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
        /* `passed` is below the sum that is compared, because at least one token is new */
        if (gr->kind == SHMS_KV_WINDOW)
            limit = min64(limit, next + min64(gr->param, LIMIT) - 1);
        if (gr->kind == SHMS_KV_CHUNK)
            limit = min64(limit, cdiv(next, gr->param) * gr->param);
    }
    return limit;
}

/* Checks the computed blocks that a caller gives: they are for a new request, null blocks first (fact 1). */
static int check_given(const shms_kvcache *kv, const shms_kv_request *r, const void *given, const int32_t *counts) {
    int64_t n_given = 0;
    for (int32_t g = 0; counts && g < kv->n_groups; g++) {
        if (counts[g] < 0)
            return SHMS_KV_EARGUMENT;
        n_given += counts[g];
    }
    if (n_given && (r->table || !kv->caching))
        return SHMS_KV_ECOMPUTED;
    for (int64_t g = 0, i = 0, end = 0; n_given && g < kv->n_groups; g++) {
        int32_t id, before = 0;
        for (end += counts[g]; i < end; i++, before = id) {
            memcpy(&id, (const char *)given + 4 * i, 4);
            if (id < 0 || id >= shms_blockpool_len(kv->pool) || (before && !id))
                return SHMS_KV_ERANGE;
        }
    }
    return 0;
}

/* The most blocks that a table of this group needs at a time, if it is given back what the window has passed. */
static int64_t most_blocks(const shms_kvcache *kv, const shms_kv_group *g) {
    int64_t tokens = min64(g->param, LIMIT) + kv->max_in_flight;
    switch (g->kind) {
    case SHMS_KV_WINDOW: /* one more, because a window may begin inside a block */
        return cdiv(min64(tokens - 1, kv->max_model_len), g->size) + 1;
    case SHMS_KV_CHUNK: /* one more if a chunk may begin inside a block */
        return cdiv(min64(tokens, kv->max_model_len), g->size) + (g->param % g->size > 0);
    default:
        return TOO_MANY;
    }
}

/* Returns how many blocks a request that is to have `tokens` takes from the queue: new ones, and computed blocks that
 * are free now. Sets `skip`, `first` and `needed` of each group. whole: as if it had them one step after the other. */
static int64_t count_needed(shms_kvcache *kv, const shms_kv_request *r, const shms_kv_step *s,
                            const shms_kv_table *tables, int64_t tokens, int whole, const void *given,
                            const int32_t *counts) {
    int64_t sum = 0, at = 0;
    for (int32_t g = 0; g < kv->n_groups; g++) {
        shms_kv_group *gr = kv->groups + g;
        int64_t n_given = r->table || !counts ? 0 : counts[g], have = r->table ? tables[g].len : n_given;
        int64_t len = blocks_for(gr, tokens, s->n_encoder);
        if (whole)
            len = min64(len, most_blocks(kv, gr));
        len = max64(len, have);
        /* What a connector brings may end so far ahead that the window has passed computed blocks, too. */
        gr->skip = r->table || !s->external ? 0 : min64(passed_blocks(gr, s->computed + s->external), len);
        gr->first = max64(have, gr->skip);
        gr->needed = len - gr->first;
        sum += gr->needed;
        for (int64_t i = gr->skip; i < n_given; i++) {
            int32_t id;
            memcpy(&id, (const char *)given + 4 * (at + i), 4);
            sum += id && shms_blockpool_ref(kv->pool, id) == 0;
        }
        at += n_given;
    }
    return sum;
}

/* Appends blocks of the pool until a table has `len`; they are free, and the table has room. */
static void grow(const shms_kvcache *kv, shms_kv_table *t, int64_t len) {
    if (len <= t->len)
        return;
    shms_blockpool_get(kv->pool, t->ids.at + t->len, len - t->len);
    t->len = (int32_t)len;
}

/* Are fewer blocks free than so many and those to leave free? */
static int full(const shms_kvcache *kv, shms_kv_request *r, int64_t wanted) {
    int64_t there = shms_blockpool_n_free(kv->pool);
    return wanted > there ? missing(r, SHMS_KV_EFULL, wanted, there) : 0;
}

int64_t shms_kvcache_allocate(shms_kvcache *kv, shms_kv_request *r, const shms_kv_step *s, const shms_hashlist *hashes,
                              const void *given, const int32_t *counts) {
    int is_new = r->table == 0, rc;
    /* or-ed, so that one comparison finds a negative number and one finds a large one */
    int64_t all = s->passed | s->computed | s->external | s->n_new | s->lookahead | s->n_tokens | s->n_encoder |
                  s->whole | s->reserved | s->headroom;
    shms_kv_answer(kv, r, 0);
    if (all < 0 || all >= LIMIT || s->n_new + s->external < 1 || s->computed < s->passed ||
        (!is_new && !is_live(kv, r->table)))
        return SHMS_KV_EARGUMENT;
    int64_t there = s->computed + s->external, total = 0;
    int64_t tokens = min64(there + s->n_new + s->lookahead, kv->max_model_len);
    int64_t to_cache = kv->caching ? min64(there + s->n_new, s->n_tokens) : 0;
    if ((rc = check_given(kv, r, given, counts)) || (is_new && (rc = number_reserve(kv))))
        return rc;
    shms_kv_table *tables = tables_of(kv, is_new ? kv->idle : r->table);
    if (s->whole) {
        int64_t whole = count_needed(kv, r, s, tables, min64(s->whole, kv->max_model_len), 1, given, counts);
        if ((rc = full(kv, r, whole + s->headroom)))
            return rc;
    }
    int64_t wanted = count_needed(kv, r, s, tables, tokens, 0, given, counts);
    for (int32_t g = 0; g < kv->n_groups; g++) {
        const shms_kv_group *gr = kv->groups + g;
        int64_t cached = is_new ? (counts ? counts[g] : 0) : tables[g].cached,
                end = min64(to_cache / gr->size, gr->first + gr->needed);
        if ((rc = may_cache(kv, r, gr, tables + g, cached, end, hashes)))
            return rc;
        total += gr->needed;
    }
    if (total <= shms_blockpool_len(kv->pool)) { /* otherwise it is FULL, and would need absurd amounts of memory */
        for (int32_t g = 0; g < kv->n_groups; g++)
            if ((rc = shms_kv_ids_reserve(&tables[g].ids, kv->groups[g].first + kv->groups[g].needed)))
                return rc;
        if ((rc = shms_kv_ids_reserve(&kv->out, total)) || (rc = shms_blockpool_log_reserve(kv->pool, total)))
            return rc;
    }

    for (int32_t g = 0; g < kv->n_groups; g++)
        skip_passed(kv, tables + g, kv->groups + g, s->passed);
    if ((rc = full(kv, r, wanted + s->reserved + s->headroom)))
        return rc;

    if (is_new) {
        r->table = kv->idle;
        kv->idle = kv->next_idle[r->table];
        kv->next_idle[r->table] = -1;
    }
    for (int64_t g = 0, at = 0; is_new && g < kv->n_groups; g++) {
        shms_kv_table *t = tables + g;
        int32_t n_given = counts ? counts[g] : 0;
        put_ids(t->ids.at, (const char *)given + 4 * at, n_given);
        at += n_given;
        if (kv->groups[g].skip)
            memset(t->ids.at, 0, (size_t)kv->groups[g].skip * sizeof(int32_t));
        t->cached = n_given;
        t->len = (int32_t)kv->groups[g].first;
        for (t->nulls = 0; t->nulls < t->len && t->ids.at[t->nulls] == 0;)
            t->nulls++;
        shms_blockpool_touch(kv->pool, t->ids.at, t->len);
    }
    for (int64_t g = 0; is_new && s->external && g < kv->n_groups;
         g++) /* in all groups before the new tokens' blocks */
        grow(kv, tables + g, min64(kv->groups[g].first + kv->groups[g].needed, cdiv(there, kv->groups[g].size)));
    int64_t n_ids = 0;
    for (int32_t g = 0; g < kv->n_groups; g++) {
        const shms_kv_group *gr = kv->groups + g;
        shms_kv_table *t = tables + g;
        grow(kv, t, gr->first + gr->needed);
        put_ids(kv->out.at + n_ids, t->ids.at + gr->first, gr->needed);
        kv->counts[g] = (int32_t)gr->needed;
        n_ids += gr->needed;
        kv->groups[g].n_holders += (is_new || gr->first == 0) && t->len > 0;
        do_cache(kv, r, g, t, min64(to_cache / gr->size, t->len), hashes);
    }
    shms_kv_answer(kv, r, n_ids);
    r->settled = settled(kv, tables);
    return n_ids;
}

int shms_kvcache_cache(shms_kvcache *kv, shms_kv_request *r, const shms_hashlist *hashes, int64_t n_tokens) {
    int rc;
    shms_kv_answer(kv, r, 0);
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
        do_cache(kv, r, g, tables + g, n_tokens / kv->groups[g].size, hashes);
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
    r->table = r->settled = 0;
    return 0;
}

/* ---- reading ---- */

int shms_kvcache_table(shms_kvcache *kv, shms_kv_request *r) {
    shms_kv_answer(kv, r, 0);
    if (!is_live(kv, r->table))
        return SHMS_KV_EARGUMENT;
    const shms_kv_table *tables = tables_of(kv, r->table);
    int64_t n_ids = 0;
    for (int32_t g = 0; g < kv->n_groups; g++)
        n_ids += kv->counts[g] = tables[g].len;
    int rc = shms_kv_ids_reserve(&kv->out, n_ids);
    if (rc)
        return rc;
    for (int32_t g = 0, at = 0; g < kv->n_groups; at += kv->counts[g++])
        put_ids(kv->out.at + at, tables[g].ids.at, tables[g].len);
    shms_kv_answer(kv, r, n_ids);
    return 0;
}

int64_t shms_kvcache_cached(shms_kvcache *kv, const shms_kv_request *r) {
    int64_t tokens = kv->n_groups ? LIMIT : 0;
    if (!is_live(kv, r->table))
        return SHMS_KV_EARGUMENT;
    for (int32_t g = 0; g < kv->n_groups; g++) {
        const shms_kv_table *t = tables_of(kv, r->table) + g;
        int64_t n = t->cached;
        while (kv->interval >= 0 && n > 0 && !(t->ids.at[n - 1] && shms_blockpool_is_keyed(kv->pool, t->ids.at[n - 1])))
            n--; /* a window has not kept it */
        tokens = min64(tokens, n * kv->groups[g].size);
    }
    return tokens;
}

int shms_kvcache_common(shms_kvcache *kv, shms_kv_request *r) {
    shms_kv_answer(kv, r, 0);
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
    if (shms_blockpool_valid(kv->pool))
        return SHMS_KV_ECORRUPT;
    for (int32_t g = 0; g < kv->n_groups; g++) {
        int32_t holders = 0;
        for (int64_t h = 1; h < kv->n_requests; h++) {
            const shms_kv_table *t = tables_of(kv, h) + g;
            if (!is_live(kv, h)) {
                if (t->len)
                    return SHMS_KV_ECORRUPT;
                continue;
            }
            if (t->len > t->ids.cap || t->cached < 0 || t->cached > t->len || t->nulls < 0 || t->nulls > t->len)
                return SHMS_KV_ECORRUPT;
            for (int32_t i = 0; i < t->len; i++)
                if ((t->ids.at[i] == 0) != (i < t->nulls) ||
                    (t->ids.at[i] && shms_blockpool_ref(kv->pool, t->ids.at[i]) < 1))
                    return SHMS_KV_ECORRUPT;
            holders += t->len > 0;
        }
        if (holders != kv->groups[g].n_holders)
            return SHMS_KV_ECORRUPT;
    }
    return 0;
}
