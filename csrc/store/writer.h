/*
 * writer.h - the writer's private state. Each part below names the file that has it; writer.c creates, recovers and
 * closes. All of it can be rebuilt from the segment.
 */
#ifndef SHMS_WRITER_H
#define SHMS_WRITER_H

#include <pthread.h>

#include "batch.h"
#include "ghosts.h"
#include "index.h"
#include "kinds.h"
#include "leases.h"
#include "readers.h"
#include "ref.h"
#include "ring.h"
#include "segment.h"
#include "zones.h"

/* What is known of a rank, or of another writer. */
typedef struct shms_peer {
    /* `gone`: the verdict, of operation `asked`. `turned`: it has changed since the last poll, which must see that: a
     * process that died before A3 leaves no other trace, and surveys have used both. */
    uint64_t asked : 61, gone : 1, turned : 1;
    uint64_t blamed : 1; /* it was found alive when it seemed to hold something: each poll asks whether it still is */
    /* What the last poll has found. If any of it changes, other objects may go. */
    uint64_t epoch, releases;
    uint64_t retired; /* of a writer: how many times it has retired ranks */
    uint64_t base;    /* of a rank: the sum of its bases */
} shms_peer;

/* Space that was cleared for an object, and where the hand of its area goes. */
typedef struct shms_placement {
    uint64_t at;
    uint32_t behind; /* the object after it, or SHMS_NONE */
    enum shms_area_name area;
    bool moves; /* the hand moves to the end of the object */
    bool lap;   /* it has gone round once before */
} shms_placement;

/* A cell: the hash of a protected key, and how often it is protected. Another key with the same hash is, too. */
typedef struct shms_kept {
    uint64_t hash; /* 0: never used since the table was built */
    uint64_t times;
} shms_kept;

struct shms_writer {
    shms_segment seg;
    uint64_t damaged; /* arenas passed by; one bit each */
    pthread_mutex_t placing; /* held while looking for a place; taken before the other */
    pthread_mutex_t mutex; /* guards everything below, and every word that the writer writes */
    _Atomic uint32_t waiting; /* threads that wait for the mutex, except those that look for a place */
    _Atomic uint32_t handovers;  /* how many times one of these has taken it */
    _Atomic uint32_t returning; /* puts that have let another thread go first and want the mutex back */
    bool closed;
    int unlinks; /* of shms_segment_unlock, once closed */
    shms_ring ring;
    shms_zones zones;
    shms_peer *peers;       /* the ranks, then the writers */
    uint64_t *polled_zones; /* [peer][zone]: their counts of releases at the last poll */
    uint64_t operation;     /* verdicts of an earlier one are forgotten */
    uint32_t laggard; /* the rank that had the last held object, and probably has the next: a look begins with it */
    shms_index index;
    shms_leases leases;
    shms_kinds kinds;
    shms_kept *kept; /* protected keys: a hash table of 2^n cells */
    uint32_t kept_cells, kept_used, n_kept;
    uint8_t *protected;   /* per slot: is it protected? */
    uint32_t *free_slots; /* stack; the slots that are deleted but protected are listed after it, see reclaim.c */
    uint32_t n_free_slots, n_deleted_but_protected;
    uint32_t unfinished; /* tickets that have not ended, each with a slot in WRITING */
    uint32_t leased; /* those of them that have taken a lease entry */
    bool passing;    /* the search has met a pin of another writer without a lease */
    uint64_t drops_seen[SHMS_MAX_WRITERS]; /* others' `drops` that shms_delete_dropped has settled, but for the next */
    uint32_t scan_left; /* slots below this one may have objects that others have dropped */
    uint32_t sweep_at, to_sweep; /* lease entries: the next to check; how many to check, since the last change */
    uint32_t indexed_free; /* slots that are FREE but still in the index, only during a put that yields */
    shms_refusal refusal; /* the last one */
    uint64_t refused_at; /* ring.changes as of the search that led to it */
    pthread_cond_t room; /* threads that wait for room; see room.c */
    uint32_t room_waits; /* how many */
    bool room_looks; /* one of them looks for all */
    bool released; /* a poll has found a change, of which they have not been told */
    shms_ghosts ghosts;
    uint64_t random[32]; /* secrets of the next objects; no signal interrupts a getrandom(2) of 256 bytes */
    uint32_t n_random;
    void *memory;
    uint64_t heap_bytes;
};

static inline shms_slot *shms_writer_slot(struct shms_writer *w, uint32_t i) { return &w->seg.slots[i]; }
/* Its number among those of all arenas. */
static inline uint32_t shms_writer_global(const struct shms_writer *w, uint32_t i) {
    return w->seg.arena * (uint32_t)w->seg.layout.max_objects + i;
}
static inline void shms_count(struct shms_writer *w, size_t c, uint64_t n) { shms_add(&w->seg.writer->counters[c], n); }
static inline bool shms_has_others(const struct shms_writer *w) { return w->seg.layout.n_writers > 1; }

/* ---- holders.c; the mutex is held ---- */

/* Forgets which ranks and writers are alive. Every operation that may reclaim starts with this. */
void shms_reclaim_begin(struct shms_writer *w);
/* Yields the mutex to waiting threads, and forgets what was probed of the ranks. After a yield without `placing`, the
 * writer may be closed. Nothing may be stored then. */
bool shms_reclaim_yield(struct shms_writer *w);
/* Is the lease of an entry complete? Only the writer ends a held one. Without `ask`, ranks that are gone count as here. */
bool shms_lease_done(struct shms_writer *w, uint32_t entry, bool ask);
/* Does W1 and a first read of the pins. Closes the leases that it finds complete. The context is the writer. */
shms_pin *shms_pin_of(struct shms_writer *w, uint32_t r, uint32_t slot); /* of rank r, for an own slot */
shms_may_go_fn shms_may_go;
/* W3h, W3, W3f: is one of n slots in EVICTING held? Forgets which ranks are alive, if there are other writers. */
bool shms_held_after_all(struct shms_writer *w, const uint32_t *slots, uint32_t n);
/* Marks the zones in which ranks and other writers may have released something since the last poll; see zones.h. The verdicts found here
 * hold for the surveys that follow. If a rank dies later, the next poll sees a change. False: nothing has changed. */
bool shms_poll(struct shms_writer *w);

/* ---- reclaim.c; the mutex is held ---- */

/* Makes room for `span` bytes of a kind and a slot. SHMS_EFULL, SHMS_EQUOTA and SHMS_ENOSLOT change
 * nothing, except that objects of the kind may have gone for a place that another holds by now. `placing` is held, too.
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

/* ---- room.c; the mutex is held ---- */

void shms_room_init(struct shms_writer *w);
/* Waits for room after a refusal, until b->until (CLOCK_MONOTONIC), but for 50 ms at most. `placing` is held, too; it and
 * the mutex are released meanwhile. 1: something was released, so try again. 0: nothing was; once the time is over,
 * b->until = 0. SHMS_ECLOSED: neither is held. */
int shms_room_await(struct shms_writer *w, shms_batch *b);

/* ---- directory.c; the mutex is held ---- */

/* Removes the slot's key from the index, and counts it: evicted, or deleted. */
void shms_forget_key(struct shms_writer *w, uint32_t slot, bool evicted);
/* The hash of a key, as in index.h, and of the slot's key. */
uint64_t shms_key_hash(const struct shms_writer *w, const char *key, uint32_t key_len);
uint64_t shms_slot_hash(struct shms_writer *w, uint32_t slot);
/* Is the key of this hash protected? */
bool shms_key_kept(const struct shms_writer *w, uint64_t hash);
/* Protects the object that is, or will be, stored under the key. False: there is no memory. */
bool shms_protect_key(struct shms_writer *w, const char *key, uint32_t key_len);
/* Ends one protection of the key, and returns true. shms_reclaim_unprotected must follow, once for several calls. */
bool shms_unprotect_key(struct shms_writer *w, const char *key, uint32_t key_len);
/* Marks protected slots, so that a search need not look up keys. A slot is protected if its key is, or if it was
 * deleted while its key was: the caller may have handed the object out. */
void shms_protect_slot(struct shms_writer *w, uint32_t slot, bool on);

/* Is it an owner's, which has no arena? */
static inline bool shms_has_no_arena(const struct shms_writer *w) { return w && w->seg.arena == SHMS_OWNER; }
static inline uint64_t shms_now_ns(void) { return shms_clock_ns(CLOCK_REALTIME_COARSE); } /* to the tick */

#endif
