/*
 * probe.c - probes or removes a file by its name, without reading it by a mapping: for lists of segments, and for the
 * remains of dead writers and foreign programs.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "inspect.h"
#include "store/file.h"
#include "store/slots.h"
#include "store/step.h"

/* Nobody would ask for a store whose writers have all left their words so. */
static bool is_ephemeral(const shms_segment *seg) {
    const shms_layout *l = &seg->layout;
    for (uint64_t w = 0; w < l->n_writers; w++) {
        shms_word stays = 0;
        uint64_t at = l->writer_at + w * l->arena_stride + offsetof(shms_writer_table, stays);
        if (pread(seg->fd, &stays, sizeof stays, (off_t)at) <= 0 || stays > SHMS_UNTIL_DEATH ||
            (w == 0 && stays != SHMS_UNTIL_DEATH))
            return false;
    }
    return true;
}

static int probe(shms_segment *seg, shms_probe *out) {
    union {
        shms_superblock sb;
        uint8_t bytes[SHMS_PAGE];
    } page = {.bytes = {0}};
    struct stat st;
    if (fstat(seg->fd, &st))
        return SHMS_ESYS;
    if (!S_ISREG(st.st_mode))
        return SHMS_ELAYOUT;
    /* read(2), not a mapping: the file may have any size, and a read does not fill holes. */
    if (pread(seg->fd, page.bytes, sizeof page, 0) < 0)
        return SHMS_ESYS;
    bool ours = page.sb.magic == SHMS_MAGIC;
    uint64_t stamp = ours ? shms_get(&page.sb.stamp) : 0;
    *out = (shms_probe){.size = (uint64_t)st.st_size,
                        .allocated = (uint64_t)st.st_blocks * 512,
                        .device = st.st_dev,
                        .inode = st.st_ino,
                        .modified_ns = (uint64_t)st.st_mtim.tv_sec * 1000000000u + (uint64_t)st.st_mtim.tv_nsec,
                        .uid = st.st_uid,
                        .ours = ours,
                        .published = stamp != 0,
                        .same_version = stamp == shms_layout_stamp(),
                        .blank = 1,
                        .writer_alive = shms_file_is_young(seg) || shms_segment_written(seg)};
    if (out->same_version) {
        int rc = shms_segment_read(seg, &page.sb);
        out->fault = (uint64_t)-(rc == SHMS_OK && shms_segment_lacks(seg) ? SHMS_ESPARSE : rc);
        out->ephemeral = rc == SHMS_OK && is_ephemeral(seg);
    }
    if (out->same_version && !out->fault) {
        out->n_readers = seg->layout.n_readers;
        out->n_writers = seg->layout.n_writers;
        for (uint32_t w = 0; w < out->n_writers; w++)
            out->writers_alive += shms_segment_held(seg, SHMS_ROLE_OF_WRITER(w));
    }
    for (size_t i = 0; i < sizeof page; i++)
        out->blank &= page.bytes[i] == 0;
    for (int r = 0; r < SHMS_MAX_READERS; r++)
        out->ranks_alive += shms_segment_held(seg, r);
    return SHMS_OK;
}

int shms_probe_file(shms_probe *out, const char *name) {
    shms_segment seg = {.fd = -1};
    int rc = shms_segment_name(&seg, name);
    if (rc)
        return rc;
    /* O_NONBLOCK: the open must return whatever kind of file it is, also for a pipe. */
    if (shms_segment_open_file(&seg, 0, false, true) < 0)
        return errno == ENOENT ? SHMS_ENOSTORE : errno == ELOOP ? SHMS_ELAYOUT : SHMS_ESYS;
    rc = probe(&seg, out);
    shms_segment_close(&seg); /* errno stays */
    return rc;
}

/* Is it the file that was probed? SHMS_ENOSTORE: another one, or it has changed since. */
static int as_probed(const shms_segment *seg, uint64_t device, uint64_t inode, uint64_t size) {
    uint64_t now;
    if (seg->dev != device || seg->ino != inode)
        return SHMS_ENOSTORE;
    int rc = shms_file_size(seg, &now);
    return rc == SHMS_OK && now != size ? SHMS_ENOSTORE : rc;
}

static int remove_once(const char *name, uint64_t device, uint64_t inode, uint64_t size, int force) {
    shms_segment seg = {.fd = -1};
    int rc = shms_segment_name(&seg, name);
    if (rc)
        return rc;
    if (shms_segment_open_file(&seg, 0, false, true) < 0)
        return errno == ENOENT ? SHMS_ENOSTORE : SHMS_ESYS;
    SHMS_LOOK("probed");
    if (shms_segment_stop_names(&seg)) {
        rc = as_probed(&seg, device, inode, size); /* it may have been empty, and finished since */
        if (rc == SHMS_OK && (shms_file_is_young(&seg) || shms_segment_written(&seg) || shms_segment_is_had(&seg)))
            rc = SHMS_EWRITERACTIVE;
        SHMS_LOOK("remove");
        for (int r = 0; rc == SHMS_OK && !force && r < SHMS_MAX_READERS; r++)
            rc = shms_segment_held(&seg, r) ? SHMS_ERANKINUSE : SHMS_OK;
        if (rc == SHMS_OK) {
            shms_segment_unlink(&seg); /* only if it still names this file */
            if (shms_segment_named(&seg)) { /* the kernel refused this user */
                errno = EACCES;
                rc = SHMS_ESYS;
            }
        }
        shms_segment_names_go_on(&seg);
    } else {
        rc = errno == EWOULDBLOCK ? SHMS_EWRITERACTIVE : SHMS_ESYS;
    }
    shms_segment_close(&seg);
    return rc;
}

int shms_segment_remove(const char *name, uint64_t device, uint64_t inode, uint64_t size, int force) {
    uint32_t turns = 0;
    int rc;
    do
        rc = remove_once(name, device, inode, size, force);
    while ((rc == SHMS_EWRITERACTIVE || rc == SHMS_ERANKINUSE) && shms_lock_again(&turns));
    return rc;
}
