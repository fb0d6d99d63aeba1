/*
 * published.c - opens a segment that is published, or soon will be, and closes it.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "file.h"
#include "step.h"

static int read_and_map(shms_segment *seg, int fd, uint64_t size, int role) {
    shms_superblock *sb = mmap(NULL, seg->unit, PROT_READ, SHMS_SHARED, fd, 0);
    if (sb == MAP_FAILED)
        return SHMS_ESYS;
    int rc = shms_layout_read(&seg->layout, sb, size);
    if (rc == SHMS_OK && (seg->layout.page % seg->unit || (role != SHMS_ROLE_INSPECTOR && sb->boot != seg->boot)))
        rc = SHMS_ELAYOUT;
    munmap(sb, seg->unit);
    if (rc)
        return rc;
    if (role >= 0 && (uint64_t)role >= seg->layout.n_readers)
        return SHMS_EINVAL;
    return shms_segment_map(seg, fd, role);
}

static int open_mapped(shms_segment *seg, int role) {
    uint64_t size;
    int rc = shms_file_size(seg, &size);
    if (rc)
        return rc;
    uint64_t stamp = 0; /* read, since a mapping of a hole would have the kernel fill it, which may fail */
    if (size < sizeof(shms_superblock) ||
        pread(seg->fd, &stamp, sizeof stamp, offsetof(shms_superblock, stamp)) != sizeof stamp || !stamp)
        return SHMS_ELAYOUT;
    int fd = shms_file_again(seg, role);
    if (fd < 0)
        return fd;
    rc = read_and_map(seg, fd, size, role);
    close(fd);
    return rc;
}

/* Opens a segment whose creation may not have finished. The creator holds its lock all the time, except for the first
 * instant, in which the file is empty. It stores the stamp last. A segment that was published in the meantime is
 * opened. */
static int open_unfinished(shms_segment *seg, int role) {
    for (bool ended = false;; ended = true) {
        uint64_t stamp = 0, size;
        int rc = shms_file_size(seg, &size);
        if (rc)
            return rc;
        if (pread(seg->fd, &stamp, sizeof stamp, offsetof(shms_superblock, stamp)) < 0)
            return SHMS_ESYS;
        rc = open_mapped(seg, role);
        if (rc != SHMS_ELAYOUT || stamp != 0)
            return rc;
        if (shms_segment_written(seg)) /* the creator is writer 0 or the owner */
            return role == SHMS_ROLE_WRITER && shms_segment_held(seg, role) ? SHMS_EWRITERACTIVE : SHMS_ECREATING;
        if (!shms_segment_named(seg)) /* finished, and closed already */
            return SHMS_ENOSTORE;
        if (size == 0 && role >= 0)
            return SHMS_ECREATING;
        if (ended) /* checked again after the lock was found free: nobody will finish it */
            return SHMS_ELAYOUT;
    }
}

/* Returns the code for an open that failed. */
static int open_failed(const shms_segment *seg, const shms_expected *expected) {
    struct stat st;
    int why = errno;
    if (why == ENOENT)
        return SHMS_ENOSTORE;
    if (why == ELOOP || why == EISDIR || why == ENXIO) /* a symbolic link; a directory; a socket */
        return SHMS_ELAYOUT;
    bool foreign = why == EACCES && shms_file_stat(seg, &st) && st.st_uid != geteuid();
    errno = why;
    if (foreign && st.st_size == 0 && expected && st.st_uid == expected->allow_uid) /* not yet open to its group */
        return SHMS_ECREATING;
    return foreign ? SHMS_EFOREIGN : SHMS_ESYS;
}

int shms_segment_open(shms_segment *seg, const char *name, int role, const shms_expected *expected) {
    memset(seg, 0, sizeof *seg);
    seg->fd = -1;
    int rc = shms_segment_name(seg, name);
    if (rc)
        return rc;
    /* O_NONBLOCK: the open must return whatever kind of file has that name, also for a pipe. */
    if (shms_segment_open_file(seg, (role == SHMS_ROLE_INSPECTOR ? O_RDONLY : O_RDWR) | O_NONBLOCK, false) < 0)
        return open_failed(seg, expected);
    rc = open_mapped(seg, role);
    if (rc == SHMS_ELAYOUT && role != SHMS_ROLE_INSPECTOR)
        rc = open_unfinished(seg, role);
    if (rc)
        shms_segment_close(seg);
    return rc;
}

static bool has_options(const shms_segment *seg, const shms_options *options) {
    shms_layout l;
    shms_options stored = *options;
    /* whether to prefault is the process's own matter */
    stored.flags = (stored.flags & ~(uint32_t)SHMS_PREFAULT) | (uint32_t)(seg->layout.flags & SHMS_PREFAULT);
    return shms_layout_compute(&l, &stored, seg->layout.page) == SHMS_OK && memcmp(&l, &seg->layout, sizeof l) == 0;
}

int shms_segment_is(const shms_segment *seg, const shms_expected *expected) {
    static const shms_expected any = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID};
    const shms_expected *e = expected ? expected : &any;
    struct stat st;
    if (!shms_is_unused(e->reserved))
        return SHMS_EINVAL;
    if (fstat(seg->fd, &st))
        return SHMS_ESYS;
    if (e->allow_uid == SHMS_OWN_UID ? st.st_uid != geteuid() || st.st_mode & 077 : st.st_uid != e->allow_uid)
        return SHMS_EFOREIGN;
    if (e->store != SHMS_ANY_STORE && (uint64_t)e->store != seg->sb->store)
        return SHMS_EOTHERSTORE;
    if (e->n_readers && e->n_readers != seg->layout.n_readers)
        return SHMS_ERANKS;
    return e->options && !has_options(seg, e->options) ? SHMS_EOPTIONS : SHMS_OK;
}

void shms_segment_close(shms_segment *seg) {
    int saved = errno;
    shms_segment_unlock(seg, 0);
    shms_file_unlist(seg);
    if (seg->all_data)
        munmap(seg->all_data, seg->data_size);
    if (seg->control)
        munmap(seg->control, seg->control_size);
    seg->control = seg->data = seg->all_data = NULL;
    errno = saved;
}
