/*
 * segment.h - the file in /dev/shm: made, mapped, locked, and let go.
 *
 * A segment is mapped in up to three pieces with different rights:
 *   control (superblock, slots, leases, reader tables): the writer may write all but the reader tables, rank r only
 *           its own table, an inspector nothing;
 *   data:   the writer may write, everybody else may read.
 *
 * Liveness is an open-file-description lock on one byte per process: byte 0 the writer's, byte 1 + r rank r's.  The
 * kernel drops it when the last descriptor and the last mapping of that opening have gone, on whatever kind of death.
 * Here no descriptor of that opening stays: one mapped page keeps it, a page that nobody can read and that no child
 * inherits.  So the lock ends with the process, not with its last child, and no stray close() ends it earlier.
 *
 * Another opening, `fd`, asks for others' locks and bears none.  A stranger may close that descriptor, and its number
 * may become another file's.  So an answer "free" counts only if the descriptor is still the segment's; in doubt
 * everybody is alive.
 *
 * A segment must not move in memory while it is open: forks look for it.
 */
#ifndef SHMS_SEGMENT_H
#define SHMS_SEGMENT_H

#include <stdbool.h>
#include <sys/types.h>

#include "layout.h"

#define SHMS_ROLE_WRITER (-1)
#define SHMS_ROLE_INSPECTOR (-2) /* 0 and up: that rank's reader */

typedef struct shms_segment {
    shms_layout layout;
    shms_superblock *sb;
    shms_slot *slots;
    shms_lease *leases;
    uint8_t *control;
    uint8_t *data;
    uint64_t control_size, data_size; /* as mapped */
    int fd;                           /* asks for locks, bears none; -1: closed */
    void *lock;                       /* the page that keeps this process's lock; NULL: none */
    _Atomic int forked;               /* this process is a child of the one that opened it */
    bool borrowed;                    /* the mappings are another segment's */
    dev_t dev;
    ino_t ino;
    char name[SHMS_MAX_NAME + 2]; /* with the slash of shm_open */
    struct shms_segment *next, *prev; /* of the list that forks walk */
} shms_segment;

/* Sets the name.  SHMS_EINVAL: empty, too long, with a slash, `.` or `..`. */
int shms_segment_name(shms_segment *seg, const char *name);

/* Opens the file of that name and notes which file that is; a child that is forked has no descriptor of it.  -1 and
 * errno: neither opened nor in need of _close. */
int shms_segment_open_file(shms_segment *seg, int flags);

/* Makes a segment, maps it as its writer and holds the writer's lock; nobody can open it before _publish.
 * After an error nothing is left, in memory or in the file system. */
int shms_segment_create(shms_segment *seg, const char *name, const shms_options *options);
void shms_segment_publish(shms_segment *seg);
/* Prefaults and asks for huge pages, as the options say.  For the holder of the writer's lock. */
void shms_segment_warm(shms_segment *seg);

/* Bytes of the reservation that are holes: those of a sparse copy, or of a file that was never a store.  A load from a
 * hole allocates memory, a store to one may be SIGBUS.  -1 and errno. */
int64_t shms_segment_lacks(const shms_segment *seg);
/* Reserves them.  For the holder of the writer's lock. */
int shms_segment_reserve_again(const shms_segment *seg);

/* Opens a published segment in a role, without taking a lock.  A rank beyond n_readers: SHMS_EINVAL. */
int shms_segment_open(shms_segment *seg, const char *name, int role);

/* SHMS_EFOREIGN, SHMS_EOTHERSTORE or SHMS_ERANKS if the segment is not what the caller expects.  To be asked before a
 * lock is taken: a rank that attaches for an instant and goes counts as dead from then on, and is expected no longer. */
int shms_segment_is(const shms_segment *seg, const shms_expected *expected);

/* For tests under ThreadSanitizer, which sees no race between two mappings: a second role on `of`'s mapping. */
int shms_segment_borrow(shms_segment *seg, const shms_segment *of);

/* Takes the role's lock: SHMS_EWRITERACTIVE or SHMS_ERANKINUSE where somebody has it.  SHMS_ENOSTORE where the name is
 * not this segment's any more. */
int shms_segment_lock(shms_segment *seg, int role);
/* Does anybody hold the role's lock?  About 0.4 us, and half as much again where nobody does.  In doubt: yes. */
bool shms_segment_held(const shms_segment *seg, int role);
void shms_segment_unlock(shms_segment *seg); /* lets the lock go, and asks for no more of them; idempotent */
/* Is the name still this segment's?  Needs no descriptor. */
bool shms_segment_named(const shms_segment *seg);
/* Removes the name, if it still names this segment. */
void shms_segment_unlink(const shms_segment *seg);
void shms_segment_close(shms_segment *seg); /* unlocks, unmaps */

/* The table of rank r, and its arrays. */
static inline shms_reader_table *shms_segment_reader(const shms_segment *seg, uint32_t rank) {
    return (shms_reader_table *)(seg->control + seg->layout.readers_at + rank * seg->layout.reader_stride);
}

#endif
