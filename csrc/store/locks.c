/*
 * locks.c - liveness locks, and the name that the last writer removes.
 *
 * What keeps a lock. An open-file-description lock lives as long as any descriptor or mapping of its opening. A
 * descriptor is not enough: any code of the process may close it (a daemonizing library closes all). The process would
 * then count as dead while it reads. So one page of that opening is mapped without access, and its descriptor is closed
 * at once. This is the only mapping of that opening; the segment is mapped through other openings.
 *
 * Having the name. A writer, or the owner, has a second lock from the moment at which nothing of its call can fail any
 * more until it closes. The last one to give that lock back removes the name. A call that fails never had it, so it
 * leaves the name to nobody. Whoever takes that lock, or removes the name, holds flock(2) of the file meanwhile. So the
 * name is removed by one process at a time, and no writer comes between its look at the locks and the removal. flock
 * needs neither a further descriptor nor one that can be written through.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include "file.h"
#include "slots.h"
#include "step.h"

#define TURNS 100
#define TURN_NS 1000000
#define NAMES (SHMS_OWNER + 1 + SHMS_MAX_READERS) /* after the bytes of the roles: one for each writer and the owner */

static struct flock lock_bytes(uint64_t from, uint64_t n) {
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)from, .l_len = (off_t)n};
}
static struct flock role_byte(int role) {
    return lock_bytes((uint64_t)(role >= 0 ? SHMS_OWNER + 1 + role : SHMS_ROLE_WRITER - role), 1);
}

static void drop(void **lock, uint64_t unit) {
    if (*lock)
        munmap(*lock, unit);
    *lock = NULL;
}

/* Maps a page of that opening, which keeps its locks. NULL and errno */
static void *map_page(int fd, uint64_t unit) {
    void *page = mmap(NULL, unit, PROT_NONE, SHMS_SHARED, fd, 0);
    if (page != MAP_FAILED && madvise(page, unit, MADV_DONTFORK) == 0 && madvise(page, unit, MADV_DONTDUMP) == 0)
        return page;
    if (page != MAP_FAILED)
        munmap(page, unit);
    return NULL;
}

void *shms_segment_lock_byte(const shms_segment *seg, uint64_t at) {
    struct flock fl = lock_bytes(at, 1);
    shms_forks_stop(); /* no fork may copy the descriptor */
    int fd = shms_file_again(seg, SHMS_ROLE_WRITER);
    void *page = fd >= 0 && fcntl(fd, F_OFD_SETLK, &fl) == 0 ? map_page(fd, seg->unit) : NULL;
    int saved = fd == SHMS_ENOSTORE ? ENOENT : errno;
    if (fd >= 0)
        close(fd);
    shms_forks_go_on();
    errno = saved;
    return page;
}

int shms_segment_lock(shms_segment *seg, int role) {
    seg->lock = shms_segment_lock_byte(seg, (uint64_t)role_byte(role).l_start);
    if (seg->lock) {
        if (shms_segment_held(seg, role))
            return SHMS_OK;
        drop(&seg->lock, seg->unit); /* overlayfs maps the file below it, not this opening */
        errno = ENOLCK;
    }
    if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP) /* as file systems say it */
        errno = ENOLCK;
    if (errno == EAGAIN)
        return role < 0 ? SHMS_EWRITERACTIVE : SHMS_ERANKINUSE;
    return errno == ENOENT ? SHMS_ENOSTORE : SHMS_ESYS;
}

int shms_lock_again(uint32_t *turns) {
    SHMS_LOOK("lock");
    nanosleep(&(struct timespec){.tv_nsec = TURN_NS}, NULL);
    return ++*turns <= TURNS;
}

/* Asks as if for a read lock, which only a write lock refuses: no process is alive by a read lock. */
static bool held(const shms_segment *seg, struct flock fl) {
    fl.l_type = F_RDLCK;
    return fcntl(seg->fd, F_OFD_GETLK, &fl) != 0 || fl.l_type != F_UNLCK || !shms_file_is(seg, seg->fd);
}

/* Does a process still write into an arena's data for its last writer, which has ended? It ends in a moment, too. */
static bool is_filled(const shms_segment *seg, int w) {
    const shms_layout *l = &seg->layout;
    return held(seg, lock_bytes(l->data_at + (uint64_t)w * l->data_stride, l->capacity));
}

int shms_segment_take(shms_segment *seg, int arena, uint64_t without) {
    int from = arena == SHMS_ANY_ARENA ? 0 : arena,
        to = arena == SHMS_ANY_ARENA ? (int)seg->layout.n_writers : from + 1;
    if (from < 0 || to > (int)seg->layout.n_writers)
        return shms_fail(SHMS_EINVAL, "arena must be below n_writers, %d, or SHMS_ANY_ARENA, not %d",
                         (int)seg->layout.n_writers, arena);
    int rc = SHMS_EWRITERACTIVE;
    for (int w = from; w < to && rc == SHMS_EWRITERACTIVE; w++) {
        if (without >> w & 1)
            continue;
        if ((rc = shms_segment_lock(seg, SHMS_ROLE_OF_WRITER(w))) == SHMS_OK) {
            if (!is_filled(seg, w))
                return shms_segment_own(seg, (uint32_t)w);
            drop(&seg->lock, seg->unit);
            rc = SHMS_EWRITERACTIVE;
        }
    }
    return rc;
}

bool shms_segment_held(const shms_segment *seg, int role) { return held(seg, role_byte(role)); }

bool shms_segment_written(const shms_segment *seg) { return held(seg, lock_bytes(0, SHMS_OWNER + 1)); }

bool shms_segment_is_had(const shms_segment *seg) { return held(seg, lock_bytes(NAMES, SHMS_OWNER + 1)); }

bool shms_segment_stop_names(const shms_segment *seg) {
    for (uint32_t turns = 0; flock(seg->fd, LOCK_EX | LOCK_NB);)
        if (errno != EWOULDBLOCK || !shms_lock_again(&turns))
            return false;
    return true;
}
void shms_segment_names_go_on(const shms_segment *seg) { flock(seg->fd, LOCK_UN); }

int shms_segment_have_name(shms_segment *seg) {
    uint32_t turns = 0;
    int rc;
    do { /* again while a predecessor that was killed has that byte: its two pages go one after the other */
        if (!shms_segment_stop_names(seg))
            return errno == EWOULDBLOCK ? SHMS_EWRITERACTIVE : SHMS_ESYS;
        rc = SHMS_ENOSTORE;
        if (shms_segment_named(seg)) {
            seg->name = shms_segment_lock_byte(seg, NAMES + seg->arena);
            rc = seg->name ? SHMS_OK : errno == EAGAIN ? SHMS_EWRITERACTIVE : SHMS_ESYS;
        }
        int saved = errno;
        shms_segment_names_go_on(seg);
        errno = saved;
    } while (rc == SHMS_EWRITERACTIVE && shms_lock_again(&turns));
    return rc;
}

/* Removes the name, unless a writer or the owner has it, or it is to stay. */
static void leave_name(shms_segment *seg, int unlinks) {
    bool last = false, stays = false;
    if (!shms_file_is(seg, seg->fd)) { /* foreign code has closed it */
        shms_forks_stop();
        seg->fd = shms_file_again(seg, SHMS_ROLE_INSPECTOR);
        shms_forks_go_on();
    }
    /* Again if another has left it meanwhile, and could not look: this process may have been stopped for long. */
    while (!last && !shms_segment_is_had(seg) && shms_segment_stop_names(seg)) {
        last = !shms_segment_is_had(seg);
        for (uint32_t w = 0; unlinks == SHMS_AS_RECORDED && w < seg->layout.n_writers; w++)
            stays |= shms_get(&shms_segment_writer(seg, w)->stays) == SHMS_BEYOND_CLOSE;
        if (last && !stays)
            shms_segment_unlink(seg);
        shms_segment_names_go_on(seg);
    }
}

void shms_segment_unlock(shms_segment *seg, int unlinks) {
    int saved = errno;
    drop(&seg->name, seg->unit);
    if (unlinks)
        leave_name(seg, unlinks);
    shms_forks_stop(); /* a forked child sees both or neither */
    drop(&seg->lock, seg->unit);
    shms_file_close(seg);
    shms_forks_go_on();
    errno = saved;
}
