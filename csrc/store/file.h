/*
 * file.h - what the parts of a segment's file share: filesystem.c, descriptors.c, space.c, mapping.c,
 * locks.c, create.c and published.c.
 */
#ifndef SHMS_FILE_H
#define SHMS_FILE_H

#include <sys/stat.h>
#include <sys/statfs.h>

#include "segment.h"

#define SHMS_FIRST_SECONDS 2 /* how long an empty file counts as being created */

/* On hugetlbfs a mapping would else reserve pages for the arenas that nobody has taken. */
#define SHMS_SHARED (MAP_SHARED | MAP_NORESERVE)

/* ---- descriptors.c ---- */

/* No fork comes between these two. */
void shms_forks_stop(void);
void shms_forks_go_on(void);
/* How many times this process is the child of another; what it knows of locks is void when that has changed. */
uint32_t shms_forks(void);
/* Does that descriptor name this segment's file? Foreign code may close descriptors, and numbers are reused. */
bool shms_file_is(const shms_segment *seg, int fd);
/* Opens the segment's file once more: for an inspector to read, else to write. A descriptor above 2, or SHMS_ENOSTORE or
 * ESYS. Call it between the two above, or a forked child may keep the descriptor. */
int shms_file_again(const shms_segment *seg, int role);
/* The same for a descriptor that serves until _end, and that no forked child keeps. One at a time. */
int shms_file_begin(shms_segment *seg, int role);
void shms_file_end(shms_segment *seg); /* errno stays */
/* Stats the file that has the name, without a descriptor. So it works also for a file that may not be opened. */
bool shms_file_stat(const shms_segment *seg, struct stat *st);
int shms_file_size(const shms_segment *seg, uint64_t *size); /* SHMS_ELAYOUT: it is no regular file */
void shms_file_close(shms_segment *seg);
void shms_file_unlist(shms_segment *seg); /* for the handlers of forks, it is closed */

/* ---- filesystem.c ---- */

uint64_t shms_page_size(void);
uint64_t shms_file_unit(const struct statfs *fs); /* of sizes and mappings: on hugetlbfs its pages */
/* Can a store be there? A list of what is known to: on a network or over FUSE memory and locks are not shared, and where a
 * write goes to another place (btrfs, ZFS) what is reserved may be missing in the end, which is a SIGBUS. */
bool shms_file_serves(const struct statfs *fs);
bool shms_file_is_on_disk(const struct statfs *fs); /* so it is there after a power cut, in part */

/* ---- space.c ---- */

bool shms_exceeds_free_space(int fd, uint64_t size);
bool shms_exceeds_limit(uint64_t size); /* RLIMIT_FSIZE: the kernel would send SIGXFSZ, which ends most programs */
int shms_file_reserve(int fd, uint64_t at, uint64_t size); /* SHMS_ENOSPC, ESYS */

/* Is the file empty, and so new that its creator may be about to lock it? That takes microseconds, but the creator may
 * have been interrupted. In doubt: yes. */
bool shms_file_is_young(const shms_segment *seg);

/* ---- published.c ---- */

/* Reads superblock and layout, without a mapping: for anybody's file, whatever it is. SHMS_ELAYOUT, ECORRUPT or ESYS. */
int shms_segment_read(shms_segment *seg, shms_superblock *sb);
/* Does that mode let the group or others only read, or only write? Whoever may only read could lock bytes against all
 * others, and attaching and joining would fail. */
bool shms_mode_splits(uint32_t mode);

/* ---- mapping.c ---- */

/* Maps everything read-only, but for a rank its own table. */
int shms_segment_map(shms_segment *seg, int fd, int role);
/* Makes an arena writable, or of the owner none, and nothing else after the superblock. The one rule (each word has one
 * writing process), enforced by the MMU. */
int shms_segment_own(shms_segment *seg, uint32_t arena);

#endif
