/*
 * kinds.h - kinds of objects: their counts, their quotas, and which object of a kind is evicted next.
 *
 * The writer table has a table of up to 15 kinds: a name, counts and perhaps a quota (layout.h). The flags of a slot have
 * the number of its kind, and 0 is no kind. The counts follow from the slots, so a successor computes them again.
 *
 * A kind with a quota also has a list of its objects, the oldest first. A put that would exceed the quota visits them from
 * the first one on. One that was used is skipped once: it moves to the end, and is visited again. One that is held moves to
 * the end, too. The others are chosen, until there are enough: they are the first n of the list. The choice stays valid
 * over a yield, as far as it goes: the next call visits the chosen objects again and goes on after them.
 *
 * The lists are private memory of the writer, and exist only if some kind has a quota.
 */
#ifndef SHMS_KINDS_H
#define SHMS_KINDS_H

#include "zones.h"

typedef struct shms_kind_list {
    uint32_t first, last, count; /* SHMS_NONE, SHMS_NONE, 0: empty */
} shms_kind_list;

typedef struct shms_kinds {
    shms_kind *table; /* in the writer table */
    const shms_slot *slots;
    shms_ring *ring;      /* which objects were used */
    uint32_t *next, *prev; /* per slot; NULL before the first quota */
    shms_kind_list lists[SHMS_KINDS];
} shms_kinds;

/* A choice in progress. */
typedef struct shms_kind_choice {
    uint32_t kind;
    uint64_t span; /* of the new object */
    uint32_t n;    /* the first n objects of the list are chosen */
    uint32_t left; /* objects that have not been found held, these among them */
    uint32_t skips; /* how many may still be skipped */
    uint64_t changes; /* ring.changes at the start, and those of skips */
    uint64_t found; /* bytes of the objects chosen */
} shms_kind_choice;

/* How many bytes of the kind must go before an object of `span` bytes comes. */
static inline uint64_t shms_kinds_over(const shms_kinds *k, uint32_t kind, uint64_t span) {
    uint64_t quota = shms_get(&k->table[kind].quota), need = shms_get(&k->table[kind].bytes) + span;
    return quota && need > quota ? need - quota : 0;
}

/* Counts the occupied slots, and lists those of kinds with a quota in order of age. SHMS_ENOMEM changes nothing.
 * SHMS_ECORRUPT: a slot has a kind without a name. `allocated` grows by the bytes allocated. */
int shms_kinds_build(shms_kinds *k, uint32_t n_slots, uint64_t *allocated);
/* An object gets its slot, whose flags and length are set; and leaves it. */
void shms_kinds_enter(shms_kinds *k, uint32_t slot);
void shms_kinds_leave(shms_kinds *k, uint32_t slot);

void shms_kinds_begin(const shms_kinds *k, shms_kind_choice *c, uint32_t kind, uint64_t span);
/* Chooses objects that bring the kind within its quota. 1: the first c->n of its list. 0: all others are held. -1: the
 * budget is used up, call again after a yield. Each object visited reduces *budget by n_ranks. */
int shms_kinds_choose(shms_kinds *k, shms_kind_choice *c, shms_evictable_fn *evictable, void *context, uint32_t n_ranks,
                      int64_t *budget);

int shms_kinds_valid(const shms_kinds *k, uint32_t n_slots);

#endif
