/*
 * writer.h - the writer's private state, shared by writer.c (its life), objects.c (what callers do with objects) and
 * reclaim.c (what may go, and how it goes).  Everything here can be made anew from the segment.
 */
#ifndef SHMS_WRITER_H
#define SHMS_WRITER_H

#include <pthread.h>

#include "index.h"
#include "leases.h"
#include "readers.h"
#include "ref.h"
#include "ring.h"
#include "segment.h"

/* What a refusal saw.  As long as none of it has changed, neither has the answer. */
typedef struct shms_refusal {
    bool known;
    int code;
    uint64_t span; /* the smallest refused */
    uint64_t books;
    uint64_t releases[SHMS_MAX_READERS];
    uint64_t epochs[SHMS_MAX_READERS];
    uint64_t bases[SHMS_MAX_READERS];
    bool here[SHMS_MAX_READERS];
} shms_refusal;

typedef struct shms_keylist { /* uint32_t length, bytes; repeated */
    uint8_t *bytes;
    uint64_t size, room;
} shms_keylist;

struct shms_writer {
    shms_segment seg;
    pthread_mutex_t mutex; /* over everything below and every word that the writer writes */
    bool closed;
    shms_ring ring;
    shms_index index;
    shms_leases leases;
    uint32_t *protected; /* per slot: how often */
    uint32_t *free_slots; /* stack */
    uint32_t n_free_slots;
    uint32_t unfinished; /* tickets out, each with a slot in WRITING */
    uint32_t leased;     /* those of them that have a lease entry taken */
    uint8_t verdict[SHMS_MAX_READERS]; /* of this operation: is the rank gone?  See reclaim.c */
    uint64_t books; /* +1 whenever the writer itself may have made room */
    shms_refusal no_space, no_lease;
    uint64_t held[SHMS_MAX_READERS]; /* bytes by rank at the last refusal */
    shms_room room;                  /* what that left */
    bool tracking;
    shms_keylist evicted;
    uint64_t random[32]; /* secrets of the next objects; 256 bytes, which no signal interrupts (getrandom(2)) */
    uint32_t n_random;
    void *memory;
    uint64_t heap_bytes;
};

static inline shms_slot *shms_writer_slot(struct shms_writer *w, uint32_t i) { return &w->seg.slots[i]; }
static inline void shms_count(struct shms_writer *w, enum shms_counter c, uint64_t n) {
    shms_add(&w->seg.sb->counters[c], n);
}

/* ---- reclaim.c; the mutex is held ---- */

/* Liveness is asked anew from here on: at the start of every operation that may reclaim. */
void shms_reclaim_begin(struct shms_writer *w);
/* Makes room for `span` bytes and a slot; SHMS_EFULL and SHMS_ENOSLOT change nothing. */
int shms_reclaim_space(struct shms_writer *w, uint64_t span, shms_place *place);
/* A lease entry, or SHMS_NONE. */
uint32_t shms_reclaim_lease(struct shms_writer *w);
/* Frees the slot at once if nobody holds it. */
void shms_reclaim_slot(struct shms_writer *w, uint32_t slot);
/* Takes a slot out of the writer's books: index, ring, counters. */
void shms_forget(struct shms_writer *w, uint32_t slot);

/* ---- objects.c ---- */

/* Takes the slot's key out of the index and, where evictions are tracked, notes it. */
void shms_forget_key(struct shms_writer *w, uint32_t slot);

/* ---- writer.c ---- */

/* Takes the mutex, or says why the handle is of no use. */
int shms_writer_enter(struct shms_writer *w);
/* The same for whoever ends a ticket: a closed writer stays the writer until its last ticket has ended. */
int shms_writer_enter_to_end(struct shms_writer *w);
/* The ticket's slot is not in WRITING any more; on a closed writer, the last ticket lets the lock go. */
void shms_writer_ticket_ended(struct shms_writer *w);
uint64_t shms_now_ns(void); /* CLOCK_REALTIME, to the tick */

#endif
