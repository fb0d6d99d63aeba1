/*
 * leases.h - open hand-outs: the writer's table in the segment, and its books in private memory.
 *
 * A lease is a promise to every rank that the object stays until the rank has read or released it.  The table says
 * which slot and object each open lease is for; who has acknowledged is in the readers' tables, so that here, too,
 * every word has one writer.
 *
 * The books are what makes the table fast and can be made anew from it: a stack of free entries and, per slot, a
 * list of its open leases.  Entries move: free -> taken (books only) -> open (L2, L3) -> free (C1).
 */
#ifndef SHMS_LEASES_H
#define SHMS_LEASES_H

#include "slots.h"

typedef struct shms_leases {
    shms_lease *table;
    shms_word *next_lease; /* the superblock's */
    shms_word *published;  /* likewise */
    shms_word *open;       /* likewise: statistics */
    uint32_t n_entries, n_slots;
    uint32_t n_free;
    uint32_t *free;  /* stack */
    uint32_t *slot;  /* per entry: whose lease it is; what the segment says is not believed twice */
    uint32_t *next;  /* per entry: of the same slot */
    uint32_t *prev;  /* per entry */
    uint32_t *first; /* per slot */
} shms_leases;

/* Bytes of private memory that _init lays its arrays over. */
uint64_t shms_leases_memory(uint32_t n_entries, uint32_t n_slots);
/* Reads the books off the table.  Two kinds of entries are closed.  Those that are not published: the writer died before
 * L3, and nobody has their reference.  And those that name no live object (state LIVE, same id). */
void shms_leases_init(shms_leases *l, void *memory, const shms_layout *layout, shms_superblock *sb, shms_lease *table,
                      const shms_slot *slots);

/* Takes a free entry, in the books only; SHMS_NONE where there is none. */
uint32_t shms_leases_take(shms_leases *l);
void shms_leases_untake(shms_leases *l, uint32_t entry);
/* L1, L2, L3: opens a lease on a taken entry; returns its number. */
uint64_t shms_leases_open(shms_leases *l, uint32_t entry, uint32_t slot, uint64_t id, uint64_t now_ns);
/* C1: ends an open lease. */
void shms_leases_close(shms_leases *l, uint32_t entry);

/* Every entry is free, taken or in exactly the list of its slot; `taken` are in flight. */
int shms_leases_valid(const shms_leases *l, const shms_slot *slots, uint32_t taken);

#endif
