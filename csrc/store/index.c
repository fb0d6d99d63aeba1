/* index.c - see index.h. */
#include "index.h"

#include <string.h>

static uint32_t cells_for(uint32_t n_slots) {
    uint32_t n = 16;
    while (n < 2 * (uint64_t)n_slots)
        n *= 2;
    return n;
}

uint64_t shms_index_memory(uint32_t n_slots) { return (uint64_t)cells_for(n_slots) * sizeof(shms_cell); }

void shms_index_init(shms_index *x, void *memory, uint32_t n_slots, uint64_t seed, const shms_slot *slots,
                     const uint8_t *data) {
    *x = (shms_index){.cells = memory, .mask = cells_for(n_slots) - 1, .seed = seed, .slots = slots, .data = data};
    memset(memory, 0xff, shms_index_memory(n_slots)); /* SHMS_NONE */
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

static const char *key_of(const shms_index *x, uint32_t slot) {
    return (const char *)x->data + shms_get(&x->slots[slot].offset);
}

uint32_t shms_index_find(const shms_index *x, const char *key, uint32_t key_len) {
    uint32_t hash = (uint32_t)(shms_hash_key(x->seed, key, key_len) >> 16);
    for (uint32_t i = hash & x->mask; x->cells[i].slot != SHMS_NONE; i = (i + 1) & x->mask) {
        uint32_t slot = x->cells[i].slot;
        if (x->cells[i].hash == hash && shms_slot_key_len(&x->slots[slot]) == key_len &&
            memcmp(key_of(x, slot), key, key_len) == 0)
            return slot;
    }
    return SHMS_NONE;
}

void shms_index_add(shms_index *x, uint32_t slot) {
    uint32_t hash = (uint32_t)(shms_hash_key(x->seed, key_of(x, slot), shms_slot_key_len(&x->slots[slot])) >> 16);
    uint32_t i = hash & x->mask;
    while (x->cells[i].slot != SHMS_NONE)
        i = (i + 1) & x->mask;
    x->cells[i] = (shms_cell){slot, hash};
    x->count++;
}

bool shms_index_remove(shms_index *x, uint32_t slot) {
    uint32_t hash = (uint32_t)(shms_hash_key(x->seed, key_of(x, slot), shms_slot_key_len(&x->slots[slot])) >> 16);
    uint32_t i = hash & x->mask;
    while (x->cells[i].slot != slot) {
        if (x->cells[i].slot == SHMS_NONE)
            return false;
        i = (i + 1) & x->mask;
    }
    /* Shift back every later cell of the run whose home is not between the hole and the cell. */
    for (uint32_t j = (i + 1) & x->mask; x->cells[j].slot != SHMS_NONE; j = (j + 1) & x->mask) {
        uint32_t home = x->cells[j].hash & x->mask;
        if (((j - home) & x->mask) >= ((j - i) & x->mask)) {
            x->cells[i] = x->cells[j];
            i = j;
        }
    }
    x->cells[i].slot = SHMS_NONE;
    x->count--;
    return true;
}

int shms_index_valid(const shms_index *x, uint32_t n_slots) {
    uint32_t count = 0;
    for (uint64_t i = 0; i <= x->mask; i++) {
        uint32_t slot = x->cells[i].slot;
        if (slot == SHMS_NONE)
            continue;
        count++;
        if (slot >= n_slots || shms_get(&x->slots[slot].state) == SHMS_FREE ||
            shms_index_find(x, key_of(x, slot), shms_slot_key_len(&x->slots[slot])) != slot)
            return SHMS_ECORRUPT;
    }
    return count == x->count ? SHMS_OK : SHMS_ECORRUPT;
}
