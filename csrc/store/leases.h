/*
 * leases.h - open leases: the table in the segment, and the writer's private bookkeeping.
 *
 * A lease promises each expected rank that the object stays until the rank has read or released it. The lease table
 * says which slot and object each open lease is for. The acknowledgements are in the tables of the ranks, so that every
 * shared word has one writing process.
 *
 * The private bookkeeping is a stack of free entries, and a list of open leases for each slot. It makes the table fast,
 * and can be rebuilt from it. An entry goes free -> taken (private only) -> open (L2, L3) -> free (C1).
 */
#ifndef SHMS_LEASES_H
#define SHMS_LEASES_H

#include "segment.h"
#include "slots.h"

typedef struct shms_leases {
    shms_lease *table;
    shms_writer_table *writer;
    const shms_segment *seg; /* NULL: there are no other writers */
    uint32_t base;           /* the number of the first own slot among those of all arenas */
    uint32_t n_entries, n_slots, n_groups;
    uint32_t n_free;
    uint32_t *free;  /* stack */
    uint32_t *slot;  /* per entry: the slot of its lease; a private copy, so that the segment is read only once */
    uint32_t *next;  /* per entry: the next lease of the same slot */
    uint32_t *prev;  /* per entry; of the first in a list: the one that shms_leases_next comes to next */
    uint32_t *first; /* per own slot; for slots of others it is in the row of holds */
} shms_leases;

/* Bytes of private memory that _init needs. */
uint64_t shms_leases_memory(uint32_t n_entries, uint32_t n_slots);
/* Rebuilds the bookkeeping from the table. Closes entries that are not published: their writer died before L3, so
 * nobody has the reference. Closes also entries that do not name a live object of its own (state LIVE, same id), except
 * those on others' objects, which shms_holds_begin has kept and put into their lists. Without `keep`, closes all. `seg`:
 * the writer's own; NULL if there is no other. */
void shms_leases_init(shms_leases *l, void *memory, const shms_layout *layout, shms_writer_table *t, shms_lease *table,
                      const shms_slot *slots, const shms_segment *seg, bool keep);

/* Takes a free entry, in the bookkeeping only. SHMS_NONE if there is no free entry. */
uint32_t shms_leases_take(shms_leases *l);
void shms_leases_untake(shms_leases *l, uint32_t entry); /* SHMS_NONE: nothing */
/* L1, L2, L3: opens a lease for a group (as in slots.h) on a taken entry, and returns its number. The slot has its number
 * of all arenas, and B4 is part of it if the slot is another's. */
uint64_t shms_leases_open(shms_leases *l, uint32_t entry, uint32_t slot, uint64_t id, uint32_t group, uint64_t now_ns);
/* H1: from now on no acknowledgement ends the lease, only the writer does. */
void shms_leases_hold(shms_leases *l, uint32_t entry);
/* G1: from now on only this group is expected. The lease was opened for all. */
void shms_leases_assign_group(shms_leases *l, uint32_t entry, uint32_t group);
/* C1: ends an open lease. */
void shms_leases_close(shms_leases *l, uint32_t entry);

/* Counts that the writer has released another's object, after it has; the owner polls the counts before it scans. */
void shms_holds_count(const shms_segment *seg, uint32_t slot);

/* Goes round the leases on a slot: returns another one with each call, or SHMS_NONE if there is none. */
uint32_t shms_leases_next(shms_leases *l, uint32_t slot);

/* Checks that every entry is free, taken or in exactly the list of its slot. `taken`: the number of entries taken. */
int shms_leases_valid(const shms_leases *l, const shms_slot *slots, uint32_t taken);

#endif
