/*
 * writer.h - the writer's private state. All of it can be rebuilt from the segment.
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
     * process that died before A3 leaves no other trace, and scans have used both. */
    uint64_t asked : 61, gone : 1, turned : 1;
    uint64_t blamed : 1; /* it was found alive when it seemed to hold something: each poll asks whether it still is */
    /* What the last poll has found. If any of it changes, other objects may be evictable. */
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
    uint32_t unfinished; /* pending puts that have not ended, each with a slot in WRITING */
    uint32_t leased; /* those of them that have taken a lease entry */
    bool transient_pin;    /* the search has met a pin of another writer without a lease */
    uint64_t drops_seen[SHMS_MAX_WRITERS]; /* others' `drops` that shms_delete_dropped has settled, but for the next */
    uint32_t scan_left; /* slots below this one may have objects that others have dropped */
    uint32_t sweep_at, to_sweep; /* lease entries: the next to check; how many to check, since the last change */
    uint32_t indexed_free; /* slots that are FREE but still in the index, only during a put that yields */
    shms_refusal refusal; /* the last one */
    uint64_t refused_at; /* ring.changes as of the search that led to it */
    uint64_t summed_at, summed_kind; /* the same, and the kind, of the shms_writer_holders whose sums it has */
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
/* Is it an owner's, which has no arena? */
static inline bool shms_has_no_arena(const struct shms_writer *w) { return w && w->seg.arena == SHMS_OWNER; }
static inline uint64_t shms_now_ns(void) { return shms_clock_ns(CLOCK_REALTIME_COARSE); } /* to the tick */

#endif
