/*
 * space.c - the free space of a segment's file system, and reservations, so that no store raises SIGBUS.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "file.h"
#include "step.h"

/* smallest step of a reservation that signals interrupt; takes well below a millisecond */
#define SMALLEST_STEP ((uint64_t)1 << 20)

bool shms_file_is_young(const shms_segment *seg) {
    struct stat st;
    if (fstat(seg->fd, &st))
        return true;
    int64_t age = (int64_t)shms_clock_ns(CLOCK_REALTIME) / 1000000000 - st.st_mtim.tv_sec;
    return st.st_size == 0 && age >= -SHMS_FIRST_SECONDS && age <= SHMS_FIRST_SECONDS; /* the clock may be set back */
}

int shms_options_round(shms_options *options) {
    shms_layout l;
    int rc = shms_layout_compute(&l, options, shms_page_size());
    if (rc)
        return rc;
    l.flags = options->flags;
    shms_layout_options(options, &l);
    return SHMS_OK;
}

uint64_t shms_space_needed(const shms_options *options, const char *folder) {
    shms_layout l;
    struct statfs fs;
    int rc = shms_layout_compute(&l, options, statfs(folder, &fs) ? shms_page_size() : shms_file_unit(&fs));
    return rc ? 0 : l.data_at + (options->flags & SHMS_OWNS ? 0 : l.data_stride);
}

/* Checks first: fallocate would fill the memory before it found that there is not enough. */
bool shms_exceeds_free_space(int fd, uint64_t size) {
    struct statvfs fs;
    return fstatvfs(fd, &fs) == 0 && fs.f_blocks && /* 0: a tmpfs without a limit, which reports no figures */
           (uint64_t)fs.f_bavail * fs.f_frsize < size;
}

bool shms_exceeds_limit(uint64_t size) {
    struct rlimit limit = {.rlim_cur = RLIM_INFINITY};
    getrlimit(RLIMIT_FSIZE, &limit);
    return size > limit.rlim_cur;
}

int shms_file_reserve(int fd, uint64_t at, uint64_t size) {
    uint64_t step = size;
    while (size) {
        uint64_t n = size < step ? size : step;
        int rc = fallocate(fd, 0, (off_t)at, (off_t)n) ? errno : 0; /* posix_fallocate has a substitute for it */
        /* most kernels undo the whole step, so a large step never ends under a periodic signal */
        if (rc == EINTR) {
            step = step > 2 * SMALLEST_STEP ? step / 2 : SMALLEST_STEP;
            continue;
        }
        if (rc) {
            errno = rc;
            return rc == ENOSPC || rc == ENOMEM ? SHMS_ENOSPC : SHMS_ESYS;
        }
        at += n;
        size -= n;
    }
    return SHMS_OK;
}

/* Which arenas have been taken, as bits. By read(2), because the tables of a sparse copy have holes, too. */
static uint64_t taken(const shms_segment *seg) {
    const shms_layout *l = &seg->layout;
    uint64_t bits = 0;
    for (uint64_t w = 0; w < l->n_writers; w++) {
        uint64_t epoch = 0, at = l->writer_at + w * l->arena_stride + offsetof(shms_writer_table, epoch);
        if (pread(seg->fd, &epoch, sizeof epoch, (off_t)at) > 0 && epoch)
            bits |= UINT64_C(1) << w;
    }
    return bits;
}

/* How many bytes the file lacks of its tables and of these arenas. */
static uint64_t lacks(const shms_segment *seg, uint64_t arenas) {
    const shms_layout *l = &seg->layout;
    uint64_t needed =
        l->readers_at + l->n_readers * l->reader_stride + (uint64_t)__builtin_popcountll(arenas) * l->data_stride;
    struct stat st;
    uint64_t there = fstat(seg->fd, &st) ? 0 : (uint64_t)st.st_blocks * 512;
    return there < needed ? needed - there : 0;
}

uint64_t shms_segment_lacks(const shms_segment *seg) {
    uint64_t arenas = taken(seg); /* before the blocks are counted: an arena is reserved before it is taken */
    SHMS_LOOK("taken");
    return lacks(seg, arenas);
}

int shms_segment_reserve(shms_segment *seg, uint64_t *needed) {
    const shms_layout *l = &seg->layout;
    uint64_t arenas = taken(seg), own = UINT64_C(1) << seg->arena;
    if (arenas & own)
        return SHMS_OK;
    if (needed)
        *needed = l->data_stride;
    /* Checks first, as a creation does. A predecessor may have reserved the arena and died: then it takes no space. If
     * other arenas are being reserved, the kernel refuses. */
    if (shms_exceeds_free_space(seg->fd, lacks(seg, arenas | own)))
        return SHMS_ENOSPC;
    int fd = shms_file_begin(seg, SHMS_ROLE_WRITER);
    if (fd < 0)
        return fd;
    int rc = shms_file_reserve(fd, l->data_at + seg->arena * l->data_stride, l->data_stride);
    shms_file_end(seg);
    return rc;
}
