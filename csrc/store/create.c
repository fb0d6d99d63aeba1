/*
 * create.c - how a segment comes into being.
 *
 * The order of the steps protects processes that die during it or open the file early:
 * 1. O_EXCL decides which process creates.
 * 2. The lock is taken before anything else, so that nobody takes the file for a dead process's.
 * 3. Space is reserved before it is written, so that no store raises SIGBUS: all tables and the creator's arena here, and
 *    each other arena when it is first taken. An arena whose epoch is 0 may be a hole, so nobody reads it.
 * 4. The stamp is published last.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "file.h"

/* Writes the magic number by a mapping. */
static int mark(const shms_segment *seg, int fd) {
    int rc = shms_file_reserve(fd, 0, seg->unit);
    if (rc)
        return rc;
    shms_superblock *sb = mmap(NULL, seg->unit, PROT_READ | PROT_WRITE, SHMS_SHARED, fd, 0);
    if (sb == MAP_FAILED)
        return SHMS_ESYS;
    sb->magic = SHMS_MAGIC;
    munmap(sb, seg->unit);
    return SHMS_OK;
}

static int fill(shms_segment *seg, int fd, const shms_options *options) {
    const shms_layout *l = &seg->layout;
    bool owns = options->flags & SHMS_OWNS;
    uint64_t control_end = l->readers_at + l->n_readers * l->reader_stride, data = owns ? 0 : l->data_stride;
    int rc;
    /* The group first, so that no other gets rights. Until both are done the file is empty; see open_failed. */
    if ((options->group && fchown(fd, (uid_t)-1, options->group - 1)) ||
        fchmod(fd, options->mode ? options->mode : 0600))
        return SHMS_ESYS;
    if (shms_exceeds_limit(l->file_size)) {
        errno = EFBIG;
        return SHMS_ESYS;
    }
    /* Before space is taken, so that a file that a dead creator has left is known as ours, or is empty. */
    bool writes = seg->unit == shms_page_size(); /* hugetlbfs has no write(2) */
    if (writes && pwrite(fd, &(uint64_t){SHMS_MAGIC}, sizeof(uint64_t), offsetof(shms_superblock, magic)) < 0)
        return errno == ENOSPC ? SHMS_ENOSPC : SHMS_ESYS;
    if (!writes &&
        (rc = mark(seg, fd))) /* no file has a size before it has this page, since a look at a hole is a SIGBUS */
        return rc;
    if (ftruncate(fd, (off_t)l->file_size))
        return SHMS_ESYS;
    if ((options->flags & SHMS_MEMFD) && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        return SHMS_ESYS;
    /* The part between the tables and a data region aligned for huge pages stays a hole. */
    if (shms_exceeds_free_space(fd, control_end + data))
        return SHMS_ENOSPC;
    rc = shms_segment_map(seg, fd, SHMS_ROLE_WRITER);
    if (rc || (rc = shms_file_reserve(fd, l->data_at, data)) || (rc = shms_file_reserve(fd, 0, control_end)))
        return rc;
    /* all arenas, until it is published */
    if (mprotect(seg->control, l->readers_at, PROT_READ | PROT_WRITE) ||
        mprotect(seg->data, l->data_stride, PROT_READ | PROT_WRITE))
        return SHMS_ESYS;
    uint64_t random[2];
    if (getrandom(random, sizeof random, 0) != sizeof random)
        return SHMS_ESYS;
    shms_superblock *sb = seg->sb;
    sb->magic = SHMS_MAGIC;
    sb->layout = *l;
    sb->store = (uint32_t)random[0];
    sb->secret = random[1];
    sb->owner = owns ? (uint64_t)getpid() : 0;
    sb->boot = seg->boot;
    sb->created_ns = shms_clock_ns(CLOCK_REALTIME);
    sb->check = shms_layout_check(sb);
    for (uint32_t w = 0; w < l->n_writers; w++) {
        shms_writer_table *t = shms_segment_writer(seg, w);
        atomic_store_explicit(&t->next_id, w + 1, memory_order_relaxed);
        atomic_store_explicit(&t->next_lease, 1, memory_order_relaxed);
        atomic_store_explicit(&t->published, 1, memory_order_relaxed);
    }
    if (!owns)
        shms_segment_warm(seg);
    return SHMS_OK;
}

static int create_locked(shms_segment *seg, const shms_options *options) {
    seg->arena = options->flags & SHMS_OWNS ? SHMS_OWNER : 0;
    int rc = shms_segment_lock(seg, SHMS_ROLE_OF_WRITER(seg->arena));
    if (rc == SHMS_OK)
        rc = shms_segment_have_name(seg);
    if (rc)
        return rc == SHMS_ENOSTORE ? SHMS_EWRITERACTIVE : rc;
    int fd = shms_file_begin(seg, SHMS_ROLE_WRITER);
    if (fd < 0)
        return fd;
    rc = fill(seg, fd, options);
    shms_file_end(seg);
    return rc;
}

int shms_segment_create(shms_segment *seg, const char *name, const shms_options *options) {
    memset(seg, 0, sizeof *seg);
    seg->fd = -1;
    int rc;
    if ((rc = shms_segment_name(seg, name)) || (rc = shms_layout_compute(&seg->layout, options, shms_page_size())))
        return rc;
    if (shms_segment_open_file(seg, O_CREAT | O_EXCL, options->flags & SHMS_MEMFD, false) < 0)
        return errno == EEXIST ? SHMS_ESTOREEXISTS : SHMS_ESYS;
    /* again, in the units of that file system */
    if ((rc = shms_layout_compute(&seg->layout, options, seg->unit)) || (rc = create_locked(seg, options))) {
        shms_segment_unlock(seg, rc != SHMS_EWRITERACTIVE); /* else a process removes the empty file */
        shms_segment_close(seg);
        return rc;
    }
    if (options->flags & (SHMS_EPHEMERAL | SHMS_OUTLIVES)) /* also for an owner: no writer is there yet */
        atomic_store_explicit(&seg->writer->stays,
                              options->flags & SHMS_OUTLIVES ? SHMS_BEYOND_CLOSE : SHMS_UNTIL_DEATH,
                              memory_order_relaxed);
    return SHMS_OK;
}

int shms_segment_publish(shms_segment *seg) {
    int rc = shms_segment_own(seg, seg->sb->owner ? SHMS_OWNER : 0);
    if (rc) /* the process has too many mappings */
        return rc;
    atomic_store_explicit(&seg->sb->stamp, shms_layout_stamp(), memory_order_release);
    mprotect(seg->control, seg->layout.writer_at, PROT_READ); /* joins the mapping after it, or stays writable */
    return SHMS_OK;
}
