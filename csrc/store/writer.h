/*
 * writer.h - the writer's private state, shared by writer.c (its life), tickets.c (how objects come in), handouts.c
 * (references and their leases), keys.c (what is known by its key) and reclaim.c (what may go, and how it goes).
 * Everything here can be built from the segment again.
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
#include "zones.h"

/* What the writer has heard of a rank; whatever of it has changed, has changed what may go. */
typedef struct shms_heard {
    uint64_t epoch, base, retired, releases;
    uint8_t verdict; /* 0: searches have since taken it for gone and for here */
} shms_heard;

/* Space that has been cleared for an object, and what the hand of an area does about it. */
typedef struct shms_room_for {
    uint64_t at;
    uint32_t behind; /* the object behind it; SHMS_NONE */
    enum shms_area_name area;
    bool moves; /* behind the object */
    bool lap;   /* having been round once */
} shms_room_for;

typedef struct shms_keylist { /* a log: uint32_t length, bytes; repeated */
    uint8_t *bytes;
    uint64_t start; /* position in the log of the first byte that is still here */
    uint64_t size, room;
    uint64_t promised; /* bytes of `room` that a call in progress will need */
} shms_keylist;

/* A cell: the hash of a protected key, and how often it is.  Another key of the same hash is protected, too. */
typedef struct shms_kept {
    uint64_t hash; /* 0: never used since the table was built */
    uint64_t times;
} shms_kept;

struct shms_writer {
    shms_segment seg;
    pthread_mutex_t placing; /* for whoever looks for a place; taken before the other */
    pthread_mutex_t mutex; /* over everything below and every word that the writer writes */
    _Atomic uint32_t waiting; /* threads that wait for the mutex, but those that look for a place */
    _Atomic uint32_t let_in;  /* +1 whenever one of these has got it */
    _Atomic uint32_t returning; /* puts that have let others go first */
    bool closed;
    shms_ring ring;
    shms_zones zones;
    shms_heard *heard;     /* [rank] */
    uint64_t *heard_zones; /* [rank][zone]: their counts of releases */
    shms_index index;
    shms_leases leases;
    shms_kept *kept; /* protected keys: a hash table of 2^n cells */
    uint32_t kept_cells, kept_used, n_kept;
    uint8_t *protected;   /* per slot: is it protected? */
    uint32_t lingering;   /* protected slots whose objects are deleted */
    uint32_t *free_slots; /* stack */
    uint32_t n_free_slots;
    uint32_t unfinished; /* tickets out, each with a slot in WRITING */
    uint32_t leased;     /* those of them that have a lease entry taken */
    uint8_t verdict[SHMS_MAX_READERS]; /* of this operation: is the rank gone?  See reclaim.c */
    uint32_t sweep_at, unswept; /* lease entries: the next to look at; those not looked at since the last news */
    uint32_t leaving;           /* slots that are FREE and still in the index, only in a put that breathes */
    shms_refusal refusal;       /* the last one */
    uint64_t longest;                /* stretch that the last search in vain has found; see ring.news */
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
/* Makes room for `span` bytes and a slot.  SHMS_EFULL, SHMS_ENOSLOT and SHMS_ENOMEM change nothing.  `placing` is held,
 * too; the mutex may have been others' in the meantime. */
int shms_reclaim_space(struct shms_writer *w, uint64_t span, shms_room_for *out);
/* A lease entry, or SHMS_NONE: then the mutex may have been others', too. */
uint32_t shms_reclaim_lease(struct shms_writer *w);
/* After each hand-out: closes some of the leases that are complete, if few entries are free. */
void shms_reclaim_leases(struct shms_writer *w);
/* Frees the slot at once if nobody holds it. */
void shms_reclaim_slot(struct shms_writer *w, uint32_t slot);
/* As zones.h wants it; the context is the writer. */
shms_look shms_reclaim_look;

/* ---- tickets.c ---- */

/* As shms_writer_begin or _reserve, and _put.  Where that has run out of something, `why`, if there is one, is filled before
 * anybody else has the mutex. */
int shms_begin(struct shms_writer *w, const char *key, uint32_t key_len, const char *meta, uint32_t meta_len,
               uint64_t payload_size, bool leased, shms_ticket *out, shms_refusal *why);
int shms_put(struct shms_writer *w, const char *key, uint32_t key_len, const char *meta, uint32_t meta_len,
             uint64_t payload_size, const shms_piece *pieces, uint32_t n_pieces, uint8_t *out, shms_refusal *why);
/* Ends the ticket of a slot in WRITING, and of the lease entry that it has taken; the mutex is held. */
void shms_end_unborn(struct shms_writer *w, uint32_t slot, uint32_t entry);

/* ---- handouts.c ---- */

int shms_hit(struct shms_writer *w, const char *key, uint32_t key_len, uint8_t *out, shms_refusal *why);
/* Opens a lease on a taken entry and packs the reference to it; the mutex is held, as in the next one. */
void shms_hand_out(struct shms_writer *w, uint32_t slot, uint32_t entry, uint8_t *out);
/* Ends an open lease on the object in `slot`. */
void shms_end_lease(struct shms_writer *w, uint32_t slot, uint32_t entry);

/* ---- keys.c; the mutex is held but for the first two ---- */

int shms_key_ok(const char *key, uint32_t key_len);
int shms_writer_enter_with_key(struct shms_writer *w, const char *key, uint32_t key_len);
/* The slot of an object that may be handed out, or SHMS_NONE. */
uint32_t shms_find_live(struct shms_writer *w, const char *key, uint32_t key_len);
/* Takes the slot's key out of the index and, where evictions are tracked, notes it; there is room for the note. */
void shms_forget_key(struct shms_writer *w, uint32_t slot);
/* Sets room aside for the notes of n keys of so many bytes together, for _forget_key; false: there is no memory. */
bool shms_room_for_keys(struct shms_writer *w, uint64_t n, uint64_t bytes);
/* Deletes a LIVE object that is not deleted; SHMS_ENOMEM changes nothing. */
int shms_delete_slot(struct shms_writer *w, uint32_t slot);
/* Is it protected? */
bool shms_key_kept(const struct shms_writer *w, const char *key, uint32_t key_len);
/* Protects what is stored under the key, or will be; false: there is no memory. */
bool shms_protect_key(struct shms_writer *w, const char *key, uint32_t key_len);
/* Ends one protection of the key; true.  shms_reclaim_lingering comes after it, or after several. */
bool shms_unprotect_key(struct shms_writer *w, const char *key, uint32_t key_len);
/* Lets deleted objects go whose keys are no longer protected; looks at all objects if there is one. */
void shms_reclaim_lingering(struct shms_writer *w);

/* ---- writer.c ---- */

/* Takes the mutex, or says why the handle is of no use. */
int shms_writer_enter(struct shms_writer *w);
/* Gives the mutex back, and returns `rc`. */
int shms_writer_leave(struct shms_writer *w, int rc);
/* Copies the last refusal to `why`, if `rc` is one. */
void shms_writer_refused(const struct shms_writer *w, int rc, shms_refusal *why);
/* Takes `placing` before it. */
int shms_writer_enter_to_place(struct shms_writer *w);
/* For whoever ends a ticket: a closed writer stays the writer until its last ticket has ended. */
int shms_writer_enter_to_end(struct shms_writer *w);
/* The ticket's slot is not in WRITING any more; on a closed writer, the last ticket lets the lock go. */
void shms_writer_ticket_ended(struct shms_writer *w);
/* Gives the mutex away, if somebody waits for it, and takes it again; false: nobody waits. */
bool shms_writer_let_in(struct shms_writer *w);
/* Is there a number for one more object and one more lease?  Where there is none, SHMS_ECORRUPT: a successor would refuse
 * what came behind it. */
bool shms_writer_has_numbers(const struct shms_writer *w);
uint64_t shms_now_ns(void); /* CLOCK_REALTIME, to the tick */

#endif
