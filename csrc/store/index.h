/*
 * index.h - the key index: a hash table in the writer's private memory.
 *
 * - Open addressing with linear probing; there are at least twice as many cells as slots.
 * - A cell holds a slot and 32 bits of the hash of its key. The keys themselves stay in the data region.
 * - Deletion shifts the following cells back. So there are no tombstones, and lookups do not slow down with churn.
 * - A random seed keys the hash, because keys may come from the network.
 */
#ifndef SHMS_INDEX_H
#define SHMS_INDEX_H

#include "slots.h"

typedef struct shms_cell {
    uint32_t slot; /* SHMS_NONE: empty */
    uint32_t hash;
} shms_cell;

typedef struct shms_index {
    shms_cell *cells;
    uint32_t mask;
    uint32_t count;
    uint64_t seed;
    const shms_slot *slots;
    const uint8_t *data;
} shms_index;

uint64_t shms_hash_key(uint64_t seed, const char *key, uint32_t len);
uint64_t shms_index_memory(uint32_t n_slots);
void shms_index_init(shms_index *x, void *memory, uint32_t n_slots, uint64_t seed, const shms_slot *slots,
                     const uint8_t *data);
/* The slot that has this key, or SHMS_NONE. */
uint32_t shms_index_find(const shms_index *x, const char *key, uint32_t key_len);
/* Adds a slot. Its key is in the data region, and the index does not have that key yet. */
void shms_index_add(shms_index *x, uint32_t slot);
/* Removes a slot, whose key is still in the data region. False if the slot is not in the index. */
bool shms_index_remove(shms_index *x, uint32_t slot);
int shms_index_valid(const shms_index *x, uint32_t n_slots);

#endif
