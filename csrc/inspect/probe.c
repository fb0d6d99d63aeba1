/*
 * probe.c - probes or removes a file by its name, without mapping it: for lists of segments, and for the
 * remains of dead writers and foreign programs.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "inspect.h"
#include "store/file.h"
#include "store/slots.h"
#include "store/step.h"

int shms_probe_file(shms_probe *out, const char *name) {
    shms_segment seg = {.fd = -1};
    union {
        shms_superblock sb;
        uint8_t bytes[SHMS_PAGE];
    } page = {.bytes = {0}};
    shms_word stays = 0;
    struct stat st;
    int rc = shms_segment_name(&seg, name);
    if (rc)
        return rc;
    /* O_NONBLOCK: the open must return whatever kind of file it is, also for a pipe. */
    seg.fd = shms_segment_open_path(&seg, O_RDONLY | O_NONBLOCK);
    if (seg.fd < 0)
        return errno == ENOENT ? SHMS_ENOSTORE : errno == ELOOP ? SHMS_ELAYOUT : SHMS_ESYS;
    if (fstat(seg.fd, &st))
        rc = SHMS_ESYS;
    else if (!S_ISREG(st.st_mode))
        rc = SHMS_ELAYOUT;
    /* read(2), not a mapping: the file may have any size, and a read does not fill holes. */
    else if (pread(seg.fd, page.bytes, sizeof page, 0) < 0)
        rc = SHMS_ESYS;
    if (rc == SHMS_OK) {
        seg.dev = st.st_dev;
        seg.ino = st.st_ino;
        *out =
            (shms_probe){.size = (uint64_t)st.st_size,
                         .allocated = (uint64_t)st.st_blocks * 512,
                         .device = st.st_dev,
                         .inode = st.st_ino,
                         .modified_ns = (uint64_t)st.st_mtim.tv_sec * 1000000000u + (uint64_t)st.st_mtim.tv_nsec,
                         .uid = st.st_uid,
                         .ours = page.sb.magic == SHMS_MAGIC,
                         .published = page.sb.magic == SHMS_MAGIC && shms_get(&page.sb.stamp) != 0,
                         .same_version = page.sb.magic == SHMS_MAGIC && shms_get(&page.sb.stamp) == shms_layout_stamp(),
                         .blank = 1,
                         .writer_alive = shms_segment_written(&seg)};
        out->ephemeral = out->same_version && page.sb.layout.n_writers > 0; /* 0: cut off within the superblock */
        for (uint64_t w = 0; out->ephemeral && w < page.sb.layout.n_writers && w < SHMS_MAX_WRITERS; w++) {
            uint64_t at =
                page.sb.layout.writer_at + w * page.sb.layout.arena_stride + offsetof(shms_writer_table, stays);
            if (pread(seg.fd, &stays, sizeof stays, (off_t)at) <= 0 || stays > SHMS_UNTIL_DEATH ||
                (w == 0 && stays != SHMS_UNTIL_DEATH))
                out->ephemeral = 0;
        }
        for (size_t i = 0; i < sizeof page; i++)
            out->blank &= page.bytes[i] == 0;
        for (int r = 0; r < SHMS_MAX_READERS; r++)
            out->ranks_alive += shms_segment_held(&seg, r);
    }
    int saved = errno;
    close(seg.fd);
    errno = saved;
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

int shms_segment_remove(const char *name, uint64_t device, uint64_t inode, uint64_t size, int force) {
    /* The owner's lock, which no joiner takes for a writer's; of an empty file the one that its creator takes first. */
    shms_segment seg = {.fd = -1, .arena = size ? SHMS_OWNER : 0};
    int rc = shms_segment_name(&seg, name);
    if (rc)
        return rc;
    if (shms_segment_open_file(&seg, O_RDONLY | O_NONBLOCK, false) < 0)
        return errno == ENOENT ? SHMS_ENOSTORE : SHMS_ESYS;
    rc = as_probed(&seg, device, inode, size);
    SHMS_LOOK("probed");
    if (rc == SHMS_OK)
        rc = shms_segment_lock(&seg, SHMS_ROLE_OF_WRITER(seg.arena));
    if (rc == SHMS_OK)
        rc = as_probed(&seg, device, inode, size); /* it may have been empty, and finished since */
    SHMS_LOOK("remove");
    for (int r = 0; rc == SHMS_OK && !force && r < SHMS_MAX_READERS; r++)
        rc = shms_segment_held(&seg, r) ? SHMS_ERANKINUSE : SHMS_OK;
    if (rc == SHMS_OK && !shms_segment_unlink_last(&seg, 1)) { /* only if it still names this file */
        SHMS_LOOK("refused");
        shms_segment_unlock(&seg, 1); /* tries again, as writers that close do: one may have closed meanwhile */
        rc = shms_segment_named(&seg) ? SHMS_EWRITERACTIVE : SHMS_OK;
    } else if (rc == SHMS_OK && shms_segment_named(&seg)) { /* nobody has it, and the kernel refused this user */
        errno = EACCES;
        rc = SHMS_ESYS;
    }
    shms_segment_close(&seg);
    return rc;
}
