/* prefix.c: the longest cached prefix of a prompt.
 *
 * Look-ups with several groups (the pool's key contains the group): groups of the same attention, size and parameter
 * are one kind and are searched together, all of them at each position. The kinds are asked in turn for the longest
 * prefix within the length so far, full attention first. When all agree on a length, it is the answer. This ends,
 * because a length only becomes shorter. All answers are multiples of the alignment. So a kind of full attention, which
 * has each part of its prefix, need not be asked again.
 *
 * EAGLE: a kind of the draft model leaves its last block out, because the draft model needs the hidden states before
 * the first new token. Blocks left out do not add up, so the largest of them is the gap. A kind leaves a block out when
 * it is asked first, and may look one block further for it (AHEAD). If another kind shortens the length for another
 * reason, it does so again. A Mamba state is whole: it leaves nothing out. */
#include "tables.h"

static void put_null(shms_kvcache *kv, const shms_kv_kind *kind, int64_t from, int64_t to) {
    for (int32_t j = 0; j < kind->n && from < to; j++)
        memset(kv->groups[kind->which[j]].scratch.at + from, 0, (size_t)(to - from) * sizeof(int32_t));
}

/* Searches from the left, from block `at` until the first miss in one of the groups. */
static int64_t find_left(shms_kvcache *kv, const shms_hashlist *hashes, const shms_kv_kind *kind, int64_t at,
                         int64_t end) {
    int64_t stop = end;
    for (int32_t j = 0; j < kind->n && at < stop; j++) {
        int32_t g = kind->which[j];
        stop = at + shms_blockpool_find_run(kv->pool, kv->groups[g].scratch.at + at, hashes, at, stop - at,
                                            kv->groups[g].factor, g);
    }
    return stop;
}

/* Do all groups have the block at position i? Stores their blocks in scratch. */
static int hit(shms_kvcache *kv, const shms_hashlist *hashes, const shms_kv_kind *kind, int64_t i) {
    const uint8_t *hash = hashes->data + ((i + 1) * kv->groups[kind->which[0]].factor - 1) * SHMS_HASH_BYTES;
    int32_t id = 1;
    for (int32_t j = 0; j < kind->n && id; j++) {
        int32_t g = kind->which[j];
        id = kv->groups[g].scratch.at[i] = shms_blockpool_find(kv->pool, hash, hashes->width, g);
    }
    return id;
}

/* The functions below return the blocks of the longest prefix of a kind within `end` blocks, and have them in scratch.
 * drop: 1 if EAGLE leaves the last one out. */

static int64_t cut(const shms_kvcache *kv, int64_t len, int64_t size) {
    while (len * size % kv->alignment)
        len--;
    return len;
}

static int64_t find_full(shms_kvcache *kv, const shms_hashlist *hashes, const shms_kv_kind *kind, int64_t end,
                         int drop) {
    return cut(kv, max64(0, find_left(kv, hashes, kind, 0, end) - drop), kv->groups[kind->which[0]].size);
}

static int64_t find_window(shms_kvcache *kv, const shms_hashlist *hashes, const shms_kv_kind *kind, int64_t end,
                           int drop) {
    const shms_kv_group *g = kv->groups + kind->which[0];
    int64_t need = window_blocks(g, drop), run = 0, len = 0;
    for (int64_t i = end - 1; i >= 0; i--) {
        if (run == 0 && (i + 1 - drop) * g->size % kv->alignment)
            continue; /* the other groups cannot end there */
        if (!hit(kv, hashes, kind, i)) {
            run = 0;
            continue;
        }
        if (run == 0)
            len = i + 1;
        if (++run < need)
            continue;
        put_null(kv, kind, 0, i);
        return len - drop;
    }
    /* No run is long enough, except one that reaches block 0, which has the whole context. */
    return run ? cut(kv, max64(0, cut(kv, len, g->size) - drop), g->size) : 0;
}

static int64_t find_chunk(shms_kvcache *kv, const shms_hashlist *hashes, const shms_kv_kind *kind, int64_t end,
                          int64_t tokens) {
    const shms_kv_group *g = kv->groups + kind->which[0];
    for (int64_t from, len;; tokens = len * g->size, end = len) {
        from = tokens / g->param * g->param / g->size; /* all before it is in chunks that are over */
        put_null(kv, kind, 0, from);
        len = cut(kv, from < end ? find_left(kv, hashes, kind, from, end) : from, g->size);
        if (len >= from)
            return len;
    }
}

static int64_t find_mamba(shms_kvcache *kv, const shms_hashlist *hashes, const shms_kv_kind *kind, int64_t end) {
    for (int64_t i = end - 1; i >= 0; i--) {
        if ((i + 1) * kv->groups[kind->which[0]].size % kv->alignment || !hit(kv, hashes, kind, i))
            continue;
        put_null(kv, kind, 0, i);
        return i + 1;
    }
    return 0;
}

/* Returns the tokens of the kind's longest prefix within `tokens` tokens. MEMORY. */
static int64_t find_kind(shms_kvcache *kv, const shms_hashlist *hashes, const shms_kv_kind *kind, int64_t tokens,
                         int drop) {
    const shms_kv_group *g = kv->groups + kind->which[0];
    int64_t within = tokens / g->size, hashed = hashes->n / g->factor, len, rc;
    int64_t end = min64(within + (drop && kv->ahead), hashed), most = g->kind == SHMS_KV_CHUNK ? within : end;
    for (int32_t j = 0; j < kind->n; j++)
        if ((rc = shms_kv_ids_reserve(&kv->groups[kind->which[j]].scratch, most)))
            return rc;
    switch (g->kind) {
    case SHMS_KV_WINDOW:
        len = find_window(kv, hashes, kind, end, drop);
        break;
    case SHMS_KV_CHUNK:
        len = find_chunk(kv, hashes, kind, end, tokens);
        break;
    case SHMS_KV_MAMBA:
        len = find_mamba(kv, hashes, kind, min64(within, hashed));
        break;
    default:
        len = find_full(kv, hashes, kind, end, drop);
    }
    return len * g->size;
}

/* Returns the tokens on which all kinds agree, and in `longest` the most that one of them has found. MEMORY. */
static int64_t find_agreed(shms_kvcache *kv, const shms_hashlist *hashes, int64_t tokens, int64_t *longest) {
    int32_t n = kv->n_kinds;
    for (int32_t i = 0; i < n; i++) {
        kv->kinds[i].tokens = -1;
        kv->kinds[i].dropped = 0;
    }
    for (int32_t i = 0, agree = 0; agree < n; i = (i + 1) % n) {
        shms_kv_kind *kind = kv->kinds + i;
        const shms_kv_group *g = kv->groups + kind->which[0];
        int drop = g->eagle && !kind->dropped;
        agree++;
        if (g->kind == SHMS_KV_FULL ? kind->tokens >= tokens : kind->tokens == tokens && !drop)
            continue;
        kind->tokens = find_kind(kv, hashes, kind, tokens, drop);
        kind->dropped |= drop;
        *longest = max64(*longest, kind->tokens);
        if (kind->tokens == tokens)
            continue;
        if (kind->tokens < 0)
            return kind->tokens;
        for (int32_t j = 0; j < n && !drop; j++)
            kv->kinds[j].dropped = 0;
        tokens = kind->tokens;
        agree = 0;
    }
    return tokens;
}

int64_t shms_kvcache_find(shms_kvcache *kv, shms_kv_request *r, const shms_hashlist *hashes, int64_t max_tokens) {
    int64_t tokens = max64(0, max_tokens), longest = 0, rc, n_ids = 0;
    shms_kv_answer(kv, r, 0);
    memset(kv->counts, 0, (size_t)kv->n_groups * sizeof *kv->counts);
    if (max_tokens < -1 || max_tokens >= LIMIT)
        return SHMS_KV_EARGUMENT;
    for (int32_t g = 0; g < kv->n_groups; g++)
        if (tokens / kv->groups[g].size >= TOO_MANY)
            return SHMS_KV_EARGUMENT;
    tokens = find_agreed(kv, hashes, tokens, &longest);
    if (tokens < 0)
        return tokens;
    for (int32_t g = 0; g < kv->n_groups; g++)
        n_ids += kv->counts[g] = (int32_t)(tokens / kv->groups[g].size);
    if ((rc = shms_kv_ids_reserve(&kv->out, n_ids)))
        return rc;
    for (int32_t g = 0, at = 0; g < kv->n_groups; at += kv->counts[g++])
        put_ids(kv->out.at + at, kv->groups[g].scratch.at, kv->counts[g]);
    shms_kv_answer(kv, r, n_ids);
    r->longest = longest;
    return tokens;
}
