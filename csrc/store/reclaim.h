/*
 * reclaim.h - makes room, ends leases that are complete, and deletes objects. The mutex is held.
 */
#ifndef SHMS_RECLAIM_H
#define SHMS_RECLAIM_H

#include "writer.h"

/* Makes room for `span` bytes of a kind and a slot. SHMS_EFULL, SHMS_EQUOTA and SHMS_ENOSLOT change
 * nothing, except that objects of the kind may have been evicted for a place that another holds by now. `placing` is held, too.
 * `waits`: the put has been refused, and waits for room.
 * Other threads may have had the mutex in the meantime. */
int shms_reclaim_space(struct shms_writer *w, uint64_t span, uint32_t kind, bool waits, shms_placement *out);
/* Takes a lease entry, or returns SHMS_NONE; then, or if it sets *others, other threads may have had the mutex. */
uint32_t shms_reclaim_lease(struct shms_writer *w, bool *others);
/* Closes some of the leases that are complete, if few entries are free; for after each hand-out. */
void shms_reclaim_leases(struct shms_writer *w);
/* Leases that are open and not complete; closes none. Other threads may have had the mutex. */
uint64_t shms_reclaim_open(struct shms_writer *w);
/* Before a lease is opened on another writer's slot: looks at two of this writer's leases there, in turn, and closes those
 * that are complete. So the list that the owner walks is at most twice as long as leases were open at once (and 128
 * longer if ranks have died). */
void shms_reclaim_list(struct shms_writer *w, uint32_t slot);
/* Frees the slot at once if nobody holds it. */
void shms_reclaim_slot(struct shms_writer *w, uint32_t slot);
/* Deletes a LIVE object that is not deleted. */
void shms_delete_slot(struct shms_writer *w, uint32_t slot);
/* Reclaims deleted objects whose keys are no longer protected. May yield the mutex. */
void shms_reclaim_unprotected(struct shms_writer *w);

#endif
