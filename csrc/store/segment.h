/*
 * segment.h - the file of a store: creation, mapping, locks and closing.
 *
 * A segment is mapped in pieces with different rights:
 * - control (superblock, arenas, reader tables): the creator may write all of it until it is published, but for the
 *   reader tables; a writer may write its own arena; rank r may write only its own table; an inspector may write
 *   nothing.
 * - data: a writer may write its own part; all others may only read.
 *
 * Liveness is an open-file-description lock on one byte for each process: byte w for writer w, byte SHMS_MAX_WRITERS
 * for an owner without an arena, and the byte after it + r for rank r (docs/concepts/protocol.md). What keeps it is in
 * locks.c; another opening, `fd`, probes other processes' locks. A process that writes into an arena's data for its
 * writer, as a tier's client does, locks these bytes first. It ends when the writer dies. Until then nobody takes the
 * arena over.
 *
 * A segment must not move in memory while it is open, because the fork handlers have its address.
 */
#ifndef SHMS_SEGMENT_H
#define SHMS_SEGMENT_H

#include <limits.h>
#include <stdbool.h>
#include <sys/types.h>
#include <time.h>

#include "layout.h"

#define SHMS_ROLE_WRITER (-1) /* of arena 0 */
#define SHMS_ROLE_OF_WRITER(w) (SHMS_ROLE_WRITER - (int)(w))
#define SHMS_OWNER SHMS_MAX_WRITERS /* in the place of an arena: a creator that has none */
#define SHMS_ROLE_INSPECTOR SHMS_ROLE_OF_WRITER(SHMS_OWNER + 1) /* 0 and up: the reader of that rank */

typedef struct shms_segment {
    shms_layout layout;
    shms_superblock *sb;
    uint32_t arena; /* the arena of the next four: a writer's own, else 0; SHMS_OWNER: none of them may be written */
    shms_writer_table *writer;
    shms_slot *slots;
    shms_lease *leases;
    uint8_t *data;
    uint8_t *control;
    uint8_t *all_data; /* of all arenas */
    uint64_t control_size, data_size; /* as mapped */
    int fd;                           /* probes locks, holds none; read-only and above 2; negative: closed */
    int brief;                        /* of shms_file_begin; 0: none */
    void *lock;                       /* the mapped page that keeps this process's lock; NULL: no lock */
    void *name;                       /* the same for the lock of a writer or owner that has the name */
    _Atomic int forked;               /* this process is a child of the one that opened it */
    uint64_t boot;                    /* which start of the host this is, if the file is on a disk */
    uint64_t unit;                    /* of sizes and mappings: a page, or on hugetlbfs one of its own */
    dev_t dev;
    ino_t ino;
    char path[PATH_MAX];
    struct shms_segment *next, *prev; /* the list of open segments, for the fork handlers */
} shms_segment;

/* Sets the path. SHMS_EINVAL: empty, too long, `.` or `..`, or a path that does not start at the root. */
int shms_segment_name(shms_segment *seg, const char *name);

/* Opens the file of that name, and no symbolic link, as a descriptor above 2. -1 and errno */
int shms_segment_open_path(const shms_segment *seg, int flags);
/* Opens the file of that name, or makes memory without one, and notes its device and inode. A forked child does not keep the
 * descriptor. What is opened later, by way of a descriptor, is an opening of its own, so the locks of whoever passed the
 * descriptor and of whoever got it exclude each other. -1 and errno: not opened, and needs no _close; EOPNOTSUPP: no
 * store can be on that file system, though a caller that `looks` may see one there. */
int shms_segment_open_file(shms_segment *seg, int flags, bool memfd, bool looks);

/* Creates a segment, maps it as its writer and takes the writer's lock. No process can open it before _publish. After
 * an error, nothing is left in memory or in the file system. */
int shms_segment_create(shms_segment *seg, const char *name, const shms_options *options);
/* SHMS_ESYS: nothing was published. */
int shms_segment_publish(shms_segment *seg);
/* Prefaults and requests huge pages, as the options say. For the holder of the writer's lock. */
void shms_segment_warm(shms_segment *seg);

/* Bytes of the tables, and of the arenas that have been taken, that are holes: in a sparse copy, or in a file that was
 * never a store. A load from a hole allocates memory, and if there is none, raises SIGBUS: so nobody opens such a file. */
uint64_t shms_segment_lacks(const shms_segment *seg);
/* Reserves the arena's data if it is taken for the first time. For the holder of the arena's lock, before it writes
 * anything. SHMS_ENOSPC: `needed` (or NULL) says how many bytes. */
int shms_segment_reserve(shms_segment *seg, uint64_t *needed);

/* Opens a published segment in a role, without taking a lock. SHMS_EFOREIGN before anything of it is read or mapped, if
 * it is not the expected user's; and if its mode admits others, but not for an inspector. SHMS_EINVAL if the rank is not
 * below n_readers. A writer may write nothing before _take. */
int shms_segment_open(shms_segment *seg, const char *name, int role, const shms_expected *expected);

/* SHMS_EOTHERSTORE, SHMS_ERANKS or SHMS_EOPTIONS if the segment is not what the caller expects. Call it
 * before taking a lock. A rank that attaches briefly and ends counts as dead, and leases no longer expect it. */
int shms_segment_is(const shms_segment *seg, const shms_expected *expected);

/* Maps `size` bytes of the data region, from `at` on, once more: copy-on-write, so a write stays in this process. A page
 * that was not written shows the shared one. Sets *map and *map_size for munmap, and returns where the first byte is,
 * or NULL and errno. */
char *shms_segment_map_private(const shms_segment *seg, const char *at, uint64_t size, void **map, uint64_t *map_size);

/* Locks a byte of the file, on an opening of its own. Returns the page that keeps the lock, until munmap of `unit` bytes,
 * and that no child inherits; or NULL and errno. EAGAIN: a process has it. ENOENT: the name is no longer this segment's. */
void *shms_segment_lock_byte(const shms_segment *seg, uint64_t at);
/* Takes the role's lock. SHMS_EWRITERACTIVE or SHMS_ERANKINUSE if a process holds it. SHMS_ENOSTORE if the name no
 * longer names this segment. */
int shms_segment_lock(shms_segment *seg, int role);
/* Takes the lock of an arena, or of the first that is free (SHMS_ANY_ARENA), and makes the arena writable. Passes by the
 * arenas whose bits are set in `without`. */
int shms_segment_take(shms_segment *seg, int arena, uint64_t without);
/* Does a process hold the role's lock? Takes about 0.4 us, or 0.6 us if the lock is free. In doubt: yes. */
bool shms_segment_held(const shms_segment *seg, int role);
/* Has the name from now on, until _unlock. The last step of a call that makes a writer or an owner. SHMS_ENOSTORE: it was
 * removed meanwhile. SHMS_EWRITERACTIVE: a process that was stopped is removing it, or was killed and has not ended yet. */
int shms_segment_have_name(shms_segment *seg);
/* Does a writer or the owner have the name? */
bool shms_segment_is_had(const shms_segment *seg);
/* Between these two nobody else gets the name, or removes it. False: a process was stopped between them. */
bool shms_segment_stop_names(const shms_segment *seg);
void shms_segment_names_go_on(const shms_segment *seg);
/* Releases the locks, and stops probing others; errno stays. With `unlinks`, not 0, removes the name first, unless a
 * writer or the owner has it; with SHMS_AS_RECORDED in the place of 1, unless a writer's `stays` says so. Idempotent. */
void shms_segment_unlock(shms_segment *seg, int unlinks);
/* Does the name still name this segment? Needs no descriptor. */
bool shms_segment_named(const shms_segment *seg);
/* Removes the name, if it still names this segment. Call it after _stop_names. */
void shms_segment_unlink(const shms_segment *seg);
/* Does any writer, or the owner, hold its lock? */
bool shms_segment_written(const shms_segment *seg);
void shms_segment_close(shms_segment *seg); /* unlocks, unmaps; errno stays */

/* Waits until the owner of an object in EVICTING has decided; the caller has pinned the object. SHMS_OK: it stays.
 * SHMS_ESTALE: it was evicted. SHMS_EBUSY: the owner has not decided for a second, or if the caller is not `patient`, for
 * 1,000 turns: it was stopped. `slot` has its number of all arenas. In wait.c. */
int shms_wait_for_eviction(const shms_segment *seg, uint32_t slot, uint64_t id, bool patient);

static inline uint64_t shms_clock_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Where an arena has what arena 0 has at that offset of the file. */
static inline void *shms_segment_at(const shms_segment *seg, uint64_t offset, uint32_t arena) {
    return seg->control + offset + arena * seg->layout.arena_stride;
}
static inline shms_writer_table *shms_segment_writer(const shms_segment *seg, uint32_t arena) {
    return shms_segment_at(seg, seg->layout.writer_at, arena);
}
/* The row of a writer: what it holds in all arenas. */
static inline shms_holds *shms_segment_holds(const shms_segment *seg, uint32_t writer) {
    return shms_segment_at(seg, seg->layout.holds_at, writer);
}
/* The row of this writer. Only stores with more than one writer have rows. */
static inline shms_holds *shms_holds_row(const shms_segment *seg) { return shms_segment_holds(seg, seg->arena); }
static inline bool shms_is_own(const shms_segment *seg, uint32_t slot) {
    return shms_arena_of(&seg->layout, slot) == seg->arena;
}
/* By numbers that count through all arenas. */
static inline shms_slot *shms_segment_slot(const shms_segment *seg, uint32_t slot) {
    uint32_t arena = shms_arena_of(&seg->layout, slot);
    shms_slot *slots = shms_segment_at(seg, seg->layout.slots_at, arena);
    return &slots[slot - arena * (uint32_t)seg->layout.max_objects];
}
static inline shms_lease *shms_segment_lease(const shms_segment *seg, uint32_t entry) {
    uint32_t arena = seg->layout.n_writers == 1 ? 0 : entry / (uint32_t)seg->layout.max_leases;
    shms_lease *leases = shms_segment_at(seg, seg->layout.leases_at, arena);
    return &leases[entry - arena * (uint32_t)seg->layout.max_leases];
}
/* Sets `arena` and what goes with it. */
static inline void shms_segment_select(shms_segment *seg, uint32_t arena) {
    seg->arena = arena;
    seg->writer = shms_segment_writer(seg, arena);
    seg->slots = shms_segment_at(seg, seg->layout.slots_at, arena);
    seg->leases = shms_segment_at(seg, seg->layout.leases_at, arena);
    seg->data = seg->all_data + arena * seg->layout.data_stride;
}

/* The table of rank r; its arrays follow it. */
static inline shms_reader_table *shms_segment_reader(const shms_segment *seg, uint32_t rank) {
    return (shms_reader_table *)(seg->control + seg->layout.readers_at + rank * seg->layout.reader_stride);
}

#endif
