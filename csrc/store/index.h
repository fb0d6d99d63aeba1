/*
 * index.h - the key index: lines of memory in which a writer finds its objects by key, and in which others may look.
 *
 *     +--------+--------+- - - - - - -+--------+--------+
 *     | cell 0 | cell 1 |             | cell 6 | passed |      a line of 64 bytes; their number is a power of two
 *     +--------+--------+- - - - - - -+--------+--------+
 *
 *     cell: tag (bits 24 to 63 of the key's hash, the lowest of them set) << 24 | slot      0: empty
 *
 * - The home of a key is the line that the low bits of its hash name. The key is in the first line from there on that
 *   had an empty cell when it was added.
 * - `passed` counts the keys that are past the line, but have their home in it or before it. A look-up goes on past
 *   a line only if the count is not 0.
 * - At most half of the cells are used if all slots are. So nearly every look-up ends in its first cache line.
 * - The keys themselves stay in the data region. A random seed keys the hash, because keys may come from the network.
 *
 * One process writes the lines: the writer. Other processes may look into them at any time, also while the lines are
 * cleared. All loads and stores are relaxed, and that is enough:
 *
 * 1. A key stays in its cell until it is removed: nothing moves, and there are no tombstones. Until then every `passed`
 *    before its line is at least 1. A process sees the values of one word in their order. So it finds a key that was
 *    added before it looks and is removed after, whatever other keys are added or removed meanwhile.
 * 2. A look-up during the add or the removal of its own key finds it or misses it. Both are right: the key comes before
 *    its object is LIVE (P3, P4) and is removed after it has been deleted or evicted (D1, W4).
 * 3. What a look-up finds is a candidate. Another key may have the same tag, and the slot may have another object by
 *    now. So the caller reads its id and its state, and then compares its key (find.c). These loads order the object's
 *    words and bytes (R2a with P4), so the load of the cell need not.
 * 4. Add stores the counts before the cell, and remove clears the cell before the counts. Because of 2 the order does
 *    not matter to who looks. A death in between leaves a count that is too high, which costs others one more line,
 *    until the successor builds the index again.
 */
#ifndef SHMS_INDEX_H
#define SHMS_INDEX_H

#include "slots.h"

#define SHMS_INDEX_CELLS 7
#define SHMS_INDEX_LINE 64u /* bytes; the memory of an index has this alignment */
/* Lines that a look-up in others' visits at most, whatever they contain. No key is that far from its home, and to miss
 * one would be harmless. */
#define SHMS_INDEX_REACH 64u

typedef struct shms_index_line {
    shms_word cells[SHMS_INDEX_CELLS];
    shms_word passed;
} shms_index_line;

_Static_assert(sizeof(shms_index_line) == SHMS_INDEX_LINE, "one cache line");
_Static_assert(SHMS_MAX_OBJECTS <= 1 << 24, "a slot has 24 bits in a cell");

typedef struct shms_index {
    shms_index_line *lines;
    uint32_t mask; /* number of lines - 1 */
    uint32_t n_slots;
    uint32_t count; /* keys */
    uint64_t seed;
    const shms_slot *slots;
    const uint8_t *data;
} shms_index;

/* A look-up that has not ended. */
typedef struct shms_candidates {
    const shms_index_line *lines, *line; /* the last one visited */
    uint64_t tag;
    uint64_t at;   /* the next line, modulo their number */
    uint32_t left; /* how many more to visit at most */
    uint32_t fit;  /* bits: the cells of `line` whose tags fit and that have not been returned */
    uint32_t mask, n_slots;
} shms_candidates;

uint64_t shms_hash_key(uint64_t seed, const char *key, uint32_t len);
uint64_t shms_index_memory(uint32_t n_slots);
/* For _look alone: the shape of the indexes of a store. */
shms_index shms_index_shape(uint32_t n_slots, uint64_t seed);
/* Clears the memory. Others may look at it meanwhile. */
void shms_index_init(shms_index *x, void *memory, uint32_t n_slots, uint64_t seed, const shms_slot *slots,
                     const uint8_t *data);
/* The slot that has this key, or SHMS_NONE. Here and below, `hash` is shms_hash_key() of the key. */
uint32_t shms_index_find(const shms_index *x, uint64_t hash, const char *key, uint32_t key_len);
/* Adds a slot. The index does not have its key yet. */
void shms_index_add(shms_index *x, uint64_t hash, uint32_t slot);
/* Removes a slot. False if it is not in the index under this hash. */
bool shms_index_remove(shms_index *x, uint64_t hash, uint32_t slot);
/* Checks the lines against the slots, whose keys are in the data region. */
int shms_index_valid(const shms_index *x);

/* Begins to load the line that a look-up visits first. Call it for every arena first when looking in several. */
static inline void shms_index_prefetch(const shms_index *x, const shms_index_line *lines, uint64_t hash) {
    __builtin_prefetch(&lines[hash & x->mask]);
}
/* Begins a look-up in another writer's lines. Its seed and its number of slots are those of `x`. */
shms_candidates shms_index_look(const shms_index *x, const shms_index_line *lines, uint64_t hash);
/* The next slot whose tag fits, or SHMS_NONE. It is below n_slots, whatever the lines contain. */
uint32_t shms_candidates_next(shms_candidates *c);

#endif
