/*
 * holders.h - who holds an object, and what has changed since that was asked. The mutex is held.
 */
#ifndef SHMS_HOLDERS_H
#define SHMS_HOLDERS_H

#include "writer.h"

/* Forgets which ranks and writers are alive. Every operation that may reclaim starts with this. */
void shms_reclaim_begin(struct shms_writer *w);
/* Yields the mutex to waiting threads, and forgets what was probed of the ranks. After a yield without `placing`, the
 * writer may be closed. Nothing may be stored then. */
bool shms_reclaim_yield(struct shms_writer *w);
/* Is the lease of an entry complete? Only the writer ends a held one. Without `ask`, ranks that have ended count as here. */
bool shms_lease_done(struct shms_writer *w, uint32_t entry, bool ask);
/* Does W1 and a first read of the pins. Closes the leases that it finds complete. The context is the writer. */
shms_pin *shms_pin_of(struct shms_writer *w, uint32_t r, uint32_t slot); /* of rank r, for an own slot */
shms_evictable_fn shms_evictable;
/* W3h, W3, W3f: is one of n slots in EVICTING held? Forgets which ranks are alive, if there are other writers. */
bool shms_still_held(struct shms_writer *w, const uint32_t *slots, uint32_t n);
/* Marks the zones in which ranks and other writers may have released something since the last poll; see zones.h. The verdicts found here
 * hold for the scans that follow. If a rank dies later, the next poll sees a change. False: nothing has changed. */
bool shms_poll(struct shms_writer *w);

#endif
