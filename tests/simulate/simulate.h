/*
 * simulate.h - what the files of the simulator share: the actors, what is promised, and the seed's store.
 *
 * schedule.c  who goes on, who dies and who is stopped, from the seed
 * system.c    what an actor has of the system: segments with locks, calls that fail, a clock
 * weak.c      when others see its stores
 * model.c     what is stored and promised
 * actors.c    what writers, ranks and a finder do
 * claimer.c   the claims that each of them takes
 * end.c       what must hold when a seed's run ends
 */
#ifndef SHMS_TEST_SIMULATE_H
#define SHMS_TEST_SIMULATE_H

#include <inttypes.h>
#include <stdbool.h>
#include <stdint.h>
#include <ucontext.h>

#include "store/claims.h"
#include "store/monitor.h"
#include "store/reclaim.h"
#include "weak.h"

enum { UNITS = 24, WRITERS = 2, RANKS = 3, ACTORS = WRITERS + RANKS, FINDER = RANKS - 1 };
enum { KEYS = 10, VIEWS = 4, PROMISES = 64, LEFT = 64 };
enum { SIZES = 8, LONGEST_EXTRA = 3, LARGEST_UNIT = 1024 };

/* What a writer has handed out, and the ranks that may count on it: bit r. Free if nobody may, and it is not held. */
typedef struct promise {
    uint8_t ref[SHMS_REF_SIZE];
    uint64_t mark;  /* 0: not known, since the object is another's */
    uint64_t since; /* when its object's put began; 0: not known */
    int by;
    char key;
    bool remote, held;
    uint32_t group;
    uint32_t ranks, taking; /* those that are reading it */
} promise;

/* What an arena has under a key. */
typedef struct stored {
    uint64_t id; /* 0: nothing */
    uint64_t mark, since;
} stored;

/* A key that has left an arena since its books were checked. */
typedef struct leaver {
    uint64_t id;
    int key;
    bool evicted;
} leaver;

typedef struct actor {
    ucontext_t at;
    char *stack;
    bool lives, done;
    bool refused; /* a call of the system, since the flag was last cleared */
    bool closing;
    uint64_t life;       /* how many there were before */
    uint64_t stopped;    /* until that step */
    uint64_t since;      /* step at which its call began */
    uint64_t attached;   /* step at which it began to attach */
    shms_writer *w;
    shms_reader *r;
    shms_view *views[VIEWS];
    uint64_t marks[VIEWS];
    stored own[KEYS], put[KEYS]; /* what is stored, and what is being put */
    uint32_t kind, kept, deleting; /* the number of its kind; protected keys, and those being deleted: bits */
    leaver left[LEFT];
    uint64_t n_left;
    shms_counters counters; /* as they must be */
    shms_claim claims[KEYS];
} actor;

/* ---- schedule.c ---- */

extern actor actors[ACTORS];
extern int current;
extern uint64_t now, serial; /* the step, and the number of the next value */
extern uint64_t unit, units; /* of an arena */
extern uint64_t keys; /* that there are in this seed's run: a small store is contested more */
extern uint64_t quota; /* of the kind, in units; 0: there is no kind */
extern uint32_t slots, groups;
extern bool checksums;
extern uint64_t calls[WRITERS]; /* which this seed makes, as bits; fewer reach deeper */
extern bool acting; /* an actor goes on, and not the simulator */
extern bool ending; /* nobody dies or stops any more; each ends after its call */
extern const char *name;
extern struct counted {
    uint64_t steps, calls, deaths, stops, reads, finds, remote, refused, failed;
} counted;

static inline actor *self(void) { return &actors[current]; }
uint64_t one_of(uint64_t n);
void step(const char *label);
void alone(bool now_on); /* what cannot be seen by an actor takes no step */
void start(int number);
void go_on(int number);
_Noreturn void fail(const char *what, uint64_t expected, uint64_t found);
#define MUST(what, expected, found)                                                                                    \
    do {                                                                                                               \
        uint64_t want_ = (uint64_t)(expected), got_ = (uint64_t)(found);                                               \
        if (want_ != got_)                                                                                             \
            fail(what, want_, got_);                                                                                   \
    } while (0)

/* ---- system.c ---- */

extern bool at_each_access;
extern uint64_t one_fails_of; /* an actor's calls of the system, on average; 0: none fails */

void note_opened(int by); /* or closed, since the actor went on */
void close_all_of(int number);
void none_is_open(void);

/* ---- model.c ---- */

extern promise promises[PROMISES];
extern uint64_t retired[WRITERS][RANKS]; /* at which step an arena's writer retired the rank, or 0 */
extern uint64_t deleted[KEYS]; /* when a delete of the key was last under way */

/* Values: their first word is the mark: serial number, payload in units, key. */
uint64_t size_of(uint64_t mark);
uint32_t meta_len_of(uint64_t mark);
uint32_t extra_len_of(uint64_t mark);
char byte_of(uint64_t mark, uint64_t i);
uint64_t mark_of(const shms_view *v);
void are_bytes_of(uint64_t mark, const char *at, uint64_t from, uint64_t size);
void is_object(const shms_view *v, char key, uint64_t mark);
void views_are_whole(void);

bool counts(const promise *p);
void forget(promise *p);
void promises_end(int by, bool only_remote);
void rank_forgets(int rank);
uint32_t attached(void);
uint32_t ranks_of(uint32_t group);
bool not_deleted(const promise *p);
void are_deleted(actor *me, uint32_t bits);

void begin_model(actor *me);
void books(actor *me);

/* ---- actors.c ---- */

void live(void);
void put_the_longest(actor *me, shms_writer *w);
void take_promise(actor *me, promise *p, uint32_t bit);

/* ---- claimer.c ---- */

void claim_once(actor *me);
void end_claims(actor *me);

/* ---- end.c ---- */

void end_all(void);

#endif
