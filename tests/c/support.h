/* support.h - shared helpers: random numbers, names in /dev/shm, and payloads with a mark. */
#ifndef SHMS_TEST_SUPPORT_H
#define SHMS_TEST_SUPPORT_H

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "store/monitor.h"
#include "store/step.h"
#include "verbs.h"

_Atomic uint64_t *shms_reader_live(shms_reader *r);

/* CHECK that prints both values: codes or counts. */
#define CHECK_EQ(expected, actual)                                                                                     \
    do {                                                                                                               \
        long long want_ = (long long)(expected), got_ = (long long)(actual);                                           \
        if (want_ != got_) {                                                                                           \
            fprintf(stderr, "%s:%d: %s: expected %lld, got %lld\n", __FILE__, __LINE__, #actual, want_, got_);         \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* xorshift64*: the same sequence for the same seed, everywhere. */
static inline uint64_t chance(uint64_t *state) {
    *state ^= *state >> 12, *state ^= *state << 25, *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}
static inline uint64_t below(uint64_t *state, uint64_t n) { return (chance(state) >> 16) % n; }

/* Returns a store name of this process. The segment is removed when the process that asked for it exits, even if checks
 * fail. */
const char *store_name(const char *what);
/* Removes all of them now. Returns how many segments were still there. */
int store_names_left(void);

/* Fills the payload with words of one mark. */
static inline void fill(char *at, uint64_t size, uint64_t mark) {
    for (uint64_t i = 0; i < size; i++)
        at[i] = (char)(((mark + i / 8) * UINT64_C(0x9e3779b97f4a7c15)) >> (8 * (i % 8)));
}
static inline bool filled(const char *at, uint64_t size, uint64_t mark) {
    for (uint64_t i = 0; i < size; i++)
        if (at[i] != (char)(((mark + i / 8) * UINT64_C(0x9e3779b97f4a7c15)) >> (8 * (i % 8))))
            return false;
    return true;
}

/* A key: the prefix and the number. It stays until four more were made. */
const char *key_of(const char *prefix, uint64_t number);
/* Does the store have an object of that key? */
static inline bool has_key(shms_writer *w, const char *key) {
    return shms_writer_has(w, key, (uint32_t)strlen(key)) == 1;
}

/* Puts `size` bytes of the mark under a key. `out` may be NULL: no hand-out. */
int put_marked(shms_writer *w, const char *key, uint64_t size, uint64_t mark, uint8_t *out);

/* Creates a store of the objects a to d, of `size` bytes and with marks 0 to 3. Its one reader has read them. Its
 * writer is gone. */
shms_reader *four_read_objects(const char *name, uint64_t capacity, uint64_t size, uint8_t refs[4][SHMS_REF_SIZE]);

/* Ends a store, with its name, whose books must be right. */
void end_writer(shms_writer *w);

/* Zeroed memory with the alignment of a segment. */
void *zeroed(uint64_t size);

/* Forks a child that dies with its parent, so that a failed check leaves no process behind. */
pid_t fork_child(void);
/* Waits for a child. Returns its exit status, or 1000 + the signal. */
int reap(pid_t pid);
/* Waits for a child that is killed. */
static inline void reap_killed(pid_t pid) { CHECK_EQ(1000 + SIGKILL, reap(pid)); }

/* From now on this process counts its steps, and is killed before the one of that number; 0: it lives. */
void die_at_step(uint64_t number);
extern uint64_t steps;
/* Or before the nth step of that label. */
void die_before(const char *label, int nth);
/* Runs a script in a process that is killed before its step `number`. False: it had fewer steps. */
bool killed_at(uint64_t number, void (*script)(void));
/* A process attaches as the rank, and is killed. */
void rank_dies(const char *name, uint32_t rank);

#endif
