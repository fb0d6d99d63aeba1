/*
 * published.c - opens a segment that is published, or soon will be, and closes it.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "file.h"
#include "step.h"

int shms_segment_read(shms_segment *seg, shms_superblock *sb) {
    uint64_t size, stamp = 0;
    int rc = shms_file_size(seg, &size);
    if (rc)
        return rc;
    /* The stamp first: what was written before it is in the second read. */
    if (pread(seg->fd, &stamp, sizeof stamp, offsetof(shms_superblock, stamp)) != sizeof stamp || !stamp ||
        pread(seg->fd, sb, sizeof *sb, 0) != sizeof *sb)
        return SHMS_ELAYOUT;
    rc = shms_layout_read(&seg->layout, sb, size);
    return rc == SHMS_OK && seg->layout.page % seg->unit ? SHMS_ELAYOUT : rc;
}

bool shms_mode_splits(uint32_t mode) {
    uint32_t group = mode >> 3 & 6, others = mode & 6;
    return (group && group != 6) || (others && others != 6);
}

#define FOREIGN                                                                                                        \
    "the store's file is user %u's and has mode %#o: with SHMS_OWN_UID it must be your own of 0600; else pass "        \
    "allow_uid"

/* May this process map the file? That is decided here alone. It must be the expected user's: nothing in another's counts,
 * and whoever could cut it short could end this process, since each access to the mapping would be a SIGBUS. Who takes
 * part wants to be alone with that user, unless the user was named. Its creator sets the mode before it publishes. */
static int admitted(const shms_segment *seg, const shms_expected *expected, bool takes_part) {
    int64_t uid = expected ? expected->allow_uid : SHMS_OWN_UID;
    struct stat st;
    if (fstat(seg->fd, &st))
        return SHMS_ESYS;
    bool own = uid == SHMS_OWN_UID, closed = !(own && st.st_mode & 077) && !shms_mode_splits(st.st_mode);
    if (st.st_uid == (own ? geteuid() : uid) && (closed || !takes_part))
        return SHMS_OK;
    return shms_fail(SHMS_EFOREIGN, FOREIGN, st.st_uid, st.st_mode & 0777);
}

static int open_mapped(shms_segment *seg, int role, const shms_expected *expected) {
    shms_superblock sb;
    int rc = shms_segment_read(seg, &sb);
    if (rc == SHMS_OK && role != SHMS_ROLE_INSPECTOR)
        rc = sb.boot != seg->boot ? SHMS_ELAYOUT : admitted(seg, expected, true);
    if (rc == SHMS_OK && role >= 0 && (uint64_t)role >= seg->layout.n_readers)
        rc = shms_fail(SHMS_EINVAL, "rank must be below n_readers, %d, not %d", (int)seg->layout.n_readers, role);
    if (rc == SHMS_OK && shms_segment_lacks(seg))
        rc = SHMS_ESPARSE;
    if (rc)
        return rc;
    int fd = shms_file_begin(seg, role);
    if (fd < 0)
        return fd;
    rc = shms_segment_map(seg, fd, role);
    shms_file_end(seg);
    return rc;
}

/* Opens a segment whose creation may not have finished. The creator holds its lock all the time, except for the first
 * instant, in which the file is empty and young. It stores the stamp last. A segment that was published in the meantime
 * is opened. */
static int open_unfinished(shms_segment *seg, int role, const shms_expected *expected) {
    for (bool ended = false;; ended = true) {
        struct {
            uint64_t magic, stamp;
        } seen = {0};
        uint64_t size;
        bool young = shms_file_is_young(seg);
        int rc = shms_file_size(seg, &size);
        if (rc)
            return rc;
        if (pread(seg->fd, &seen, sizeof seen, 0) < 0)
            return SHMS_ESYS;
        rc = open_mapped(seg, role, expected);
        if (rc != SHMS_ELAYOUT || seen.stamp != 0)
            return rc;
        if (shms_segment_written(seg)) /* the creator is writer 0 or the owner */
            return role == SHMS_ROLE_WRITER && shms_segment_held(seg, role) ? SHMS_EWRITERACTIVE : SHMS_ECREATING;
        if (!shms_segment_named(seg)) /* finished, and closed already */
            return SHMS_ENOSTORE;
        if (role >= 0 ? size == 0 || seen.magic == SHMS_MAGIC /* a dead creator's: who opens it next creates it */
                      : size == 0 && young)
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
    if (why == ELOOP || why == ENXIO) /* a symbolic link; a socket */
        return SHMS_ELAYOUT;
    bool foreign = why == EACCES && shms_file_stat(seg, &st) && st.st_uid != geteuid();
    errno = why;
    if (foreign && st.st_size == 0 && expected && st.st_uid == expected->allow_uid) /* not yet open to its group */
        return SHMS_ECREATING;
    return foreign ? shms_fail(SHMS_EFOREIGN, FOREIGN, st.st_uid, st.st_mode & 0777) : SHMS_ESYS;
}

int shms_segment_open(shms_segment *seg, const char *name, int role, const shms_expected *expected) {
    memset(seg, 0, sizeof *seg);
    seg->fd = -1;
    int rc = shms_segment_name(seg, name);
    if (rc)
        return rc;
    if (shms_segment_open_file(seg, 0, false, role == SHMS_ROLE_INSPECTOR) < 0)
        return open_failed(seg, expected);
    rc = admitted(seg, expected, false);
    if (rc == SHMS_OK)
        rc = open_mapped(seg, role, expected);
    if (rc == SHMS_ELAYOUT && role != SHMS_ROLE_INSPECTOR)
        rc = open_unfinished(seg, role, expected);
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
    static const shms_expected any = SHMS_EXPECTED_DEFAULTS;
    const shms_expected *e = expected ? expected : &any;
    if (!shms_is_unused(e->reserved))
        return shms_fail(SHMS_EINVAL, SHMS_RESERVED);
    if (e->store != SHMS_ANY_STORE && (uint64_t)e->store != seg->sb->store)
        return shms_fail(SHMS_EOTHERSTORE,
                         "store must be %llu, or SHMS_ANY_STORE, not %lld: begin with SHMS_EXPECTED_DEFAULTS",
                         (unsigned long long)seg->sb->store, (long long)e->store);
    if (e->n_readers && e->n_readers != seg->layout.n_readers)
        return shms_fail(SHMS_ERANKS, "the store has n_readers=%d, not %u: pass that, or 0 for any",
                         (int)seg->layout.n_readers, e->n_readers);
    const shms_layout *l = &seg->layout;
    if (!e->options || has_options(seg, e->options))
        return SHMS_OK;
    return shms_fail(
        SHMS_EOPTIONS,
        "the store has capacity=%" PRIu64 ", max_object_size=%" PRIu64 ", max_objects=%" PRIu64 ", n_readers=%" PRIu64
        ", n_writers=%" PRIu64 ", n_groups=%" PRIu64 ", flags=%#" PRIx64 ": ask for these, or create another",
        l->capacity, l->max_object_size, l->max_objects, l->n_readers, l->n_writers, l->n_groups, l->flags);
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
