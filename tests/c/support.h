/* support.h - what several of these tests share: chance, names in /dev/shm, payloads that can be told apart. */
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
#include "store/step.h"
#include "store/writer.h"

int shms_reader_attach_borrowed(shms_reader **out, const shms_segment *of, uint32_t rank);

/* CHECK with both values in the message: they are codes or counts. */
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

/* A store name of this process's; the segment is removed when the process that asked for it exits, however its checks
 * came out. */
const char *store_name(const char *what);
/* Removes all of them now, and says how many segments were still there. */
int store_names_left(void);

/* Words that say whose they are. */
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

/* Puts `size` bytes of the mark under a key; `out` may be NULL (no hand-out). */
int put_marked(shms_writer *w, const char *key, uint64_t size, uint64_t mark, uint8_t *out);

/* A store of the objects a to d, of `size` bytes and marks 0 to 3, that its one reader has read; its writer is gone. */
shms_reader *four_read_objects(const char *name, uint64_t capacity, uint64_t size, uint8_t refs[4][SHMS_REF_SIZE]);

/* Zeroed memory with the alignment of a segment. */
void *zeroed(uint64_t size);

/* fork, of a child that dies with its parent, so that a check that fails leaves no process behind. */
pid_t fork_child(void);
/* Waits for a child and says how it ended: its exit status, or 1000 + the signal. */
int reap(pid_t pid);

#endif
