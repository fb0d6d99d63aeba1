/*
 * ghosts.h - the keys that were evicted lately: would a larger store still have had them?
 *
 * In a store of 4,096 slots or more only one key in 16 is remembered, chosen by its hash, and stands for 16: a sample gives
 * the same figures, within 0.02 of the hit ratio (tests/c/test_ghosts.c), for 3 bytes a slot instead of 48.
 *
 * A *ghost* is 8 bytes: 47 bits of the hash of an evicted key, whether the object was ever used, and when it went. Time
 * is counted in epochs. An epoch ends with each 64th of the capacity (or of the slots) that is evicted.
 *
 *     | tag: 47 | used: 1 | epoch: 16 |        8 ghosts are a bucket: one cache line; a new one replaces the oldest
 *
 * A store of f times the capacity has all that this one has, and (f - 1) times as much of what this one evicted last.
 * So if a key comes back, its ghost answers: how much that went later has not come back either? If that fits into
 * (f - 1) capacities, a store of f times the capacity would have had a hit. This is the stack distance of an LRU cache.
 *
 * The store is a CLOCK: what was used stays for one more lap of the hand. In the larger store each lap is f times as
 * long. So an object that was used once stays 2 (f - 1) laps longer, and one that was never used stays (f - 1). The
 * distance counts the ghosts by this rule: used ones as far back as twice the time of the others.
 *
 * For each epoch there are counts of the ghosts that have not come back, so that no list has to be visited. All of
 * this is private memory of the writer. A hit does not touch it. It needs no repair: a successor starts without ghosts.
 */
#ifndef SHMS_GHOSTS_H
#define SHMS_GHOSTS_H

#include <stdbool.h>
#include <stdint.h>

#define SHMS_GHOST_EPOCHS 1024 /* older ghosts are forgotten: 16 capacities were evicted after them */
#define SHMS_GHOST_FACTORS 3   /* 1.5, 2 and 4; see ghosts.c */
#define SHMS_GHOST_SAMPLED 4096 /* slots from which on there is a sample */

typedef struct shms_ghost_sum {
    float bytes; /* seven digits are enough, and half the memory */
    uint32_t n;
} shms_ghost_sum;

typedef struct shms_ghosts {
    uint64_t *cells;
    uint64_t n_buckets;
    uint32_t one_in; /* of so many keys, one is sampled, and counts for all */
    uint64_t capacity, n_slots;
    uint64_t evicted, went; /* bytes and objects evicted in this epoch */
    uint16_t epoch;
    bool any;
    shms_ghost_sum sums[2][SHMS_GHOST_EPOCHS]; /* [used][epoch]: the ghosts that have not come back */
} shms_ghosts;

uint64_t shms_ghosts_memory(uint32_t n_slots);
/* `memory` is zeroed. */
void shms_ghosts_init(shms_ghosts *g, void *memory, uint64_t capacity, uint32_t n_slots);
/* The key of this hash was evicted; its object had `span` bytes. */
void shms_ghosts_add(shms_ghosts *g, uint64_t hash, uint64_t span, bool used);
/* The key is put again, and is no ghost any more. Returns for how many of the factors, from the largest down, a store of
 * that many times the capacity would still have had it: count it `one_in` times. */
int shms_ghosts_put(shms_ghosts *g, uint64_t hash, uint64_t span);
/* The key was deleted; all keys were. A larger store would not have them either. */
void shms_ghosts_forget(shms_ghosts *g, uint64_t hash);
void shms_ghosts_clear(shms_ghosts *g);

#endif
