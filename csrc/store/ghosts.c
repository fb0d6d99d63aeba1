/* ghosts.c - see ghosts.h. */
#include "ghosts.h"

#include <string.h>

#define WAYS 8
#define USED (UINT64_C(1) << 16)
#define TAG (~UINT64_C(0) << 17)
#define LINE 64u

/* (f - 1) in halves, largest first: f is 4, 2 and 1.5. */
static const uint64_t more_halves[SHMS_GHOST_FACTORS] = {6, 2, 1};

/* A sample of fewer keys than some hundreds would say little. */
static uint32_t one_in(uint32_t n_slots) { return n_slots < SHMS_GHOST_SAMPLED ? 1 : 16; }

/* Six ghosts for each slot of the sample. Even if slots are what runs out, few buckets overflow before three capacities
 * are in. */
static uint64_t buckets(uint32_t n_slots) { return (uint64_t)n_slots * 6 / one_in(n_slots) / WAYS + 1; }

uint64_t shms_ghosts_memory(uint32_t n_slots) { return buckets(n_slots) * WAYS * sizeof(uint64_t) + LINE; }

void shms_ghosts_init(shms_ghosts *g, void *memory, uint64_t capacity, uint32_t n_slots) {
    *g = (shms_ghosts){
        .n_buckets = buckets(n_slots), .one_in = one_in(n_slots), .capacity = capacity, .n_slots = n_slots};
    g->cells = (uint64_t *)(((uintptr_t)memory + LINE - 1) & ~(uintptr_t)(LINE - 1));
}

static uint64_t *bucket_of(const shms_ghosts *g, uint64_t hash) {
    return g->cells + ((hash >> 32) * g->n_buckets >> 32) * WAYS;
}

static uint64_t tag_of(uint64_t hash) { return hash << 17; }

/* Epochs since the ghost came. After 2^16 of them an old ghost looks young again; a key that comes back just then, after
 * 1,024 capacities, is counted in error. */
static uint16_t age_of(const shms_ghosts *g, uint64_t ghost) { return (uint16_t)(g->epoch - (uint16_t)ghost); }

static bool is_sampled(const shms_ghosts *g, uint64_t hash) { return (hash & (g->one_in - 1)) == 0; }

/* The key's ghost, or NULL. */
static uint64_t *find(const shms_ghosts *g, uint64_t hash) {
    if (!g->any || !is_sampled(g, hash))
        return NULL;
    uint64_t *bucket = bucket_of(g, hash), tag = tag_of(hash);
    for (int i = 0; i < WAYS; i++)
        if (bucket[i] && (bucket[i] & TAG) == tag)
            return &bucket[i];
    return NULL;
}

static shms_ghost_sum *sum_at(shms_ghosts *g, bool used, uint16_t epoch) {
    return &g->sums[used][epoch % SHMS_GHOST_EPOCHS];
}

static void next_epoch(shms_ghosts *g) {
    g->epoch++;
    *sum_at(g, false, g->epoch) = *sum_at(g, true, g->epoch) = (shms_ghost_sum){0};
}

static void remember(shms_ghosts *g, uint64_t hash, uint64_t span, bool used) {
    uint64_t *bucket = bucket_of(g, hash), *cell = find(g, hash); /* another key's, with the same tag */
    if (!cell) {
        cell = bucket;
        for (int i = 0; i < WAYS && *cell; i++)
            if (bucket[i] == 0 || age_of(g, bucket[i]) > age_of(g, *cell))
                cell = &bucket[i];
    }
    *cell = tag_of(hash) | (used ? USED : 0) | g->epoch;
    shms_ghost_sum *sum = sum_at(g, used, g->epoch);
    sum->bytes += (float)span;
    sum->n++;
    g->any = true;
}

void shms_ghosts_add(shms_ghosts *g, uint64_t hash, uint64_t span, bool used) {
    if (is_sampled(g, hash))
        remember(g, hash, span, used);
    g->evicted += 64 * span;
    g->went += 64;
    for (; g->evicted >= g->capacity || g->went >= g->n_slots; next_epoch(g)) {
        g->evicted = g->evicted >= g->capacity ? g->evicted - g->capacity : 0;
        g->went = g->went >= g->n_slots ? g->went - g->n_slots : 0;
    }
}

int shms_ghosts_put(shms_ghosts *g, uint64_t hash, uint64_t span) {
    uint64_t *ghost = find(g, hash), n = 0;
    double bytes = 0;
    if (!ghost)
        return 0;
    uint32_t age = age_of(g, *ghost);
    bool used = (*ghost & USED) != 0;
    uint16_t epoch = (uint16_t)*ghost;
    *ghost = 0;
    if (age >= SHMS_GHOST_EPOCHS)
        return 0;
    shms_ghost_sum *own = sum_at(g, used, epoch);
    own->bytes -= own->bytes < (float)span ? own->bytes : (float)span; /* the value may have another size now */
    own->n -= own->n > 0;
    uint32_t back = used ? age / 2 : age;
    for (uint32_t i = 0; i <= 2 * back + 1 && i < SHMS_GHOST_EPOCHS; i++) {
        const shms_ghost_sum *a = sum_at(g, false, (uint16_t)(g->epoch - i)),
                             *b = sum_at(g, true, (uint16_t)(g->epoch - i));
        bytes += b->bytes + (i <= back ? a->bytes : 0);
        n += b->n + (i <= back ? a->n : 0);
    }
    bytes *= g->one_in;
    n *= g->one_in;
    /* This put has evicted about `span` bytes itself, which a hit would not have done. */
    for (int i = 0; i < SHMS_GHOST_FACTORS; i++)
        if (2 * bytes > more_halves[i] * g->capacity + 2 * span || 2 * n > more_halves[i] * g->n_slots + 2)
            return i;
    return SHMS_GHOST_FACTORS;
}

void shms_ghosts_forget(shms_ghosts *g, uint64_t hash) {
    uint64_t *ghost = find(g, hash);
    if (ghost)
        *ghost = 0;
}

void shms_ghosts_clear(shms_ghosts *g) {
    if (g->any) /* else the cells are untouched, and take no memory */
        memset(g->cells, 0, g->n_buckets * WAYS * sizeof *g->cells);
    memset(g->sums, 0, sizeof g->sums);
    g->any = false;
}
