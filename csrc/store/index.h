/*
 * index.h - from a key to its slot: a hash table in the writer's private memory.
 *
 * Open addressing with linear probing over at least twice as many cells as slots; a cell holds a slot and 32 bits of
 * its key's hash.  Keys themselves are in the data region, where the writer put them.  Deletion shifts the following
 * cells back, so there are no tombstones and a table that turns over for ever stays as fast as a new one.
 * The hash is keyed by a random seed: keys may come from the network.
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
/* The slot whose key this is, or SHMS_NONE. */
uint32_t shms_index_find(const shms_index *x, const char *key, uint32_t key_len);
/* Adds a slot whose key is in place; the key must not be there yet. */
void shms_index_add(shms_index *x, uint32_t slot);
/* Removes a slot whose key is still in place; false where it is not in the table. */
bool shms_index_remove(shms_index *x, uint32_t slot);
int shms_index_valid(const shms_index *x, uint32_t n_slots);

#endif
