/* index.c - see index.h. */
#include "index.h"

#include <string.h>

#define TAG_ONE (UINT64_C(1) << 24) /* the lowest bit of a tag; always set, so that no cell of a key is 0 */
#define SLOT_MASK (TAG_ONE - 1)

static uint32_t lines_for(uint32_t n_slots) {
    uint32_t n = 1;
    while (n * (uint64_t)SHMS_INDEX_CELLS < 2 * (uint64_t)n_slots)
        n *= 2;
    return n;
}

uint64_t shms_index_memory(uint32_t n_slots) { return (uint64_t)lines_for(n_slots) * sizeof(shms_index_line); }

shms_index shms_index_shape(uint32_t n_slots, uint64_t seed) {
    return (shms_index){.mask = lines_for(n_slots) - 1, .n_slots = n_slots, .seed = seed};
}

void shms_index_init(shms_index *x, void *memory, uint32_t n_slots, uint64_t seed, const shms_slot *slots,
                     const uint8_t *data) {
    *x = shms_index_shape(n_slots, seed);
    x->lines = memory;
    x->slots = slots;
    x->data = data;
    shms_word *words = memory;
    for (uint64_t i = 0; i < shms_index_memory(n_slots) / sizeof *words; i++)
        shms_set(&words[i], 0);
}

static uint64_t mix(uint64_t h) { /* finalizer of MurmurHash3 (public domain, A. Appleby) */
    h = (h ^ (h >> 33)) * UINT64_C(0xff51afd7ed558ccd);
    h = (h ^ (h >> 33)) * UINT64_C(0xc4ceb9fe1a85ec53);
    return h ^ (h >> 33);
}

uint64_t shms_hash_key(uint64_t seed, const char *key, uint32_t len) {
    uint64_t h = seed ^ len;
    for (; len >= 8; key += 8, len -= 8) {
        uint64_t w;
        memcpy(&w, key, 8);
        h = mix(h ^ w) + UINT64_C(0x9e3779b97f4a7c15);
    }
    uint64_t w = 0;
    memcpy(&w, key, len);
    return mix(h ^ w);
}

static uint64_t tag_of(uint64_t hash) { return (hash | TAG_ONE) & ~SLOT_MASK; }

static shms_index_line *line_at(const shms_index *x, uint64_t at) { return &x->lines[at & x->mask]; }

static shms_candidates look(const shms_index *x, const shms_index_line *lines, uint64_t hash, uint32_t reach) {
    return (shms_candidates){
        .lines = lines, .tag = tag_of(hash), .at = hash, .left = reach, .mask = x->mask, .n_slots = x->n_slots};
}

shms_candidates shms_index_look(const shms_index *x, const shms_index_line *lines, uint64_t hash) {
    return look(x, lines, hash, x->mask < SHMS_INDEX_REACH ? x->mask + 1 : SHMS_INDEX_REACH);
}

static inline uint32_t next_candidate(shms_candidates *c) {
    for (;;) {
        while (c->fit) {
            uint64_t slot = shms_get(&c->line->cells[__builtin_ctz(c->fit)]) ^ c->tag;
            c->fit &= c->fit - 1;
            if (slot < c->n_slots) /* still, so the tags are equal */
                return (uint32_t)slot;
        }
        if (c->left == 0)
            return SHMS_NONE;
        c->line = &c->lines[c->at++ & c->mask];
        for (uint32_t i = 0; i < SHMS_INDEX_CELLS; i++) /* no branches: a key may be in any cell */
            c->fit |= (uint32_t)((shms_get(&c->line->cells[i]) ^ c->tag) < c->n_slots) << i;
        c->left = shms_get(&c->line->passed) ? c->left - 1 : 0;
    }
}

uint32_t shms_candidates_next(shms_candidates *c) { return next_candidate(c); }

static const char *key_of(const shms_index *x, uint32_t slot) {
    return (const char *)x->data + shms_get(&x->slots[slot].offset);
}

uint32_t shms_index_find(const shms_index *x, uint64_t hash, const char *key, uint32_t key_len) {
    shms_candidates c = look(x, x->lines, hash, x->mask + 1);
    uint32_t slot;
    do
        slot = next_candidate(&c);
    while (slot != SHMS_NONE &&
           (shms_slot_key_len(&x->slots[slot]) != key_len || memcmp(key_of(x, slot), key, key_len) != 0));
    return slot;
}

void shms_index_add(shms_index *x, uint64_t hash, uint32_t slot) {
    for (uint64_t at = hash;; at++) {
        shms_index_line *line = line_at(x, at);
        for (uint32_t i = 0; i < SHMS_INDEX_CELLS; i++)
            if (shms_get(&line->cells[i]) == 0) {
                shms_set(&line->cells[i], tag_of(hash) | slot);
                x->count++;
                return;
            }
        shms_add(&line->passed, 1);
    }
}

bool shms_index_remove(shms_index *x, uint64_t hash, uint32_t slot) {
    for (uint64_t at = hash; at - hash <= x->mask; at++) {
        shms_index_line *line = line_at(x, at);
        for (uint32_t i = 0; i < SHMS_INDEX_CELLS; i++)
            if (shms_get(&line->cells[i]) == (tag_of(hash) | slot)) {
                shms_set(&line->cells[i], 0);
                x->count--;
                while (at != hash)
                    shms_add(&line_at(x, --at)->passed, UINT64_MAX);
                return true;
            }
    }
    return false;
}

int shms_index_valid(const shms_index *x) {
    uint32_t count = 0;
    uint64_t passed = 0;
    for (uint64_t at = 0; at <= x->mask; at++) {
        const shms_index_line *line = line_at(x, at);
        passed -= shms_get(&line->passed);
        for (uint32_t i = 0; i < SHMS_INDEX_CELLS; i++) {
            uint64_t cell = shms_get(&line->cells[i]), slot = cell & SLOT_MASK;
            if (cell == 0)
                continue;
            if (slot >= x->n_slots || shms_get(&x->slots[slot].state) == SHMS_FREE)
                return SHMS_ECORRUPT;
            const char *key = key_of(x, (uint32_t)slot);
            uint32_t key_len = shms_slot_key_len(&x->slots[slot]);
            uint64_t hash = shms_hash_key(x->seed, key, key_len);
            if (shms_index_find(x, hash, key, key_len) != slot)
                return SHMS_ECORRUPT;
            count++;
            passed += (at - hash) & x->mask;
        }
    }
    return count == x->count && passed == 0 ? SHMS_OK : SHMS_ECORRUPT;
}
