/*
 * locks.c - liveness locks, and the name that the last writer removes.
 *
 * What keeps a lock. An open-file-description lock lives as long as any descriptor or mapping of its opening. A
 * descriptor is not enough: any code of the process may close it (a daemonizing library closes all). The process would
 * then count as dead while it reads. So one page of that opening is mapped without access, and its descriptor is closed
 * at once. This is the only mapping of that opening; the segment is mapped through other openings.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "file.h"
#include "step.h"

/* How long a process waits for the lock of one that closes or has ended (comes_free), and a writer also for processes
 * that write for a dead one. All take some microseconds or milliseconds, unless they are stopped. */
#define PATIENCE_NS UINT64_C(1000000000)
#define TURN_NS 1000000

static struct flock lock_bytes(uint64_t from, uint64_t n) {
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)from, .l_len = (off_t)n};
}
static struct flock role_byte(int role) {
    return lock_bytes((uint64_t)(role >= 0 ? SHMS_OWNER + 1 + role : SHMS_ROLE_WRITER - role), 1);
}

static void drop_lock(shms_segment *seg) {
    if (seg->lock)
        munmap(seg->lock, seg->unit);
    seg->lock = NULL;
}

/* Takes the lock, and maps a page of the opening that keeps it. */
static int lock_by_page(shms_segment *seg, int fd, int role) {
    struct flock fl = role_byte(role);
    if (fcntl(fd, F_OFD_SETLK, &fl)) {
        if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP) /* as file systems say it */
            errno = ENOLCK;
        if (errno != EAGAIN)
            return SHMS_ESYS;
        return role < 0 ? SHMS_EWRITERACTIVE : SHMS_ERANKINUSE;
    }
    void *page = mmap(NULL, seg->unit, PROT_NONE, SHMS_SHARED, fd, 0);
    if (page == MAP_FAILED)
        return SHMS_ESYS;
    if (madvise(page, seg->unit, MADV_DONTFORK) || madvise(page, seg->unit, MADV_DONTDUMP)) {
        munmap(page, seg->unit);
        return SHMS_ESYS;
    }
    seg->lock = page;
    return SHMS_OK;
}

int shms_segment_lock(shms_segment *seg, int role) {
    shms_forks_stop(); /* no fork may copy the descriptor */
    int fd = shms_file_again(seg, role), rc = fd;
    if (fd >= 0) {
        rc = lock_by_page(seg, fd, role);
        int saved = errno;
        close(fd);
        errno = saved;
        if (rc == SHMS_OK && !shms_segment_held(seg, role)) { /* overlayfs maps the file below it, not this opening */
            drop_lock(seg);
            errno = ENOLCK;
            rc = SHMS_ESYS;
        }
    }
    shms_forks_go_on();
    return rc;
}

/* Has a process ended, perhaps without being reaped? One of another PID namespace seems to have. */
static bool has_ended(pid_t pid) {
    shms_forks_stop(); /* no fork copies the descriptor */
    struct pollfd process = {.fd = (int)syscall(SYS_pidfd_open, pid, 0), .events = POLLIN};
    bool ended = process.fd < 0 ? kill(pid, 0) && errno == ESRCH : poll(&process, 1, 0) == 1;
    if (process.fd >= 0)
        close(process.fd);
    shms_forks_go_on();
    return ended;
}

/* Will a lock that was refused soon be free? Its holder is a writer that closes (shms_segment_unlink_last), or a dead
 * process. A process that reads /proc/PID/smaps keeps the mappings of a dead one alive until it has read them. */
static bool comes_free(const shms_segment *seg, int role) {
    struct flock fl = role_byte(role);
    const shms_word *pid = role >= 0 ? &shms_segment_reader(seg, (uint32_t)role)->pid
                                     : &shms_segment_writer(seg, (uint32_t)(SHMS_ROLE_WRITER - role))->pid;
    if (role < 0 && fcntl(seg->fd, F_OFD_GETLK, &fl) == 0 && fl.l_type != F_WRLCK)
        return true;
    return has_ended((pid_t)atomic_load_explicit(pid, memory_order_relaxed));
}

/* Waits a moment. False: it has waited long enough since `start`, which is 0 at first. */
static bool wait_for_lock(uint64_t *start) {
    uint64_t now = shms_clock_ns(CLOCK_MONOTONIC);
    if (*start == 0)
        *start = now;
    SHMS_LOOK("lock");
    nanosleep(&(struct timespec){.tv_nsec = TURN_NS}, NULL);
    return now - *start < PATIENCE_NS;
}

int shms_segment_take_rank(shms_segment *seg, uint32_t rank, bool at_once) {
    uint64_t start = 0;
    int rc;
    do
        rc = shms_segment_lock(seg, (int)rank);
    while (rc == SHMS_ERANKINUSE && !at_once && comes_free(seg, (int)rank) && wait_for_lock(&start));
    return rc;
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
        return SHMS_EINVAL;
    int rc = SHMS_EWRITERACTIVE;
    uint64_t start = 0;
    bool again;
    do {
        again = false;
        for (int w = from; w < to && rc == SHMS_EWRITERACTIVE; w++) {
            if (without >> w & 1)
                continue;
            if ((rc = shms_segment_lock(seg, SHMS_ROLE_OF_WRITER(w))) == SHMS_OK) {
                if (!is_filled(seg, w))
                    return shms_segment_own(seg, (uint32_t)w);
                shms_forks_stop(); /* no fork comes in between */
                drop_lock(seg);
                shms_forks_go_on();
                rc = SHMS_EWRITERACTIVE;
            }
            again |= comes_free(seg, SHMS_ROLE_OF_WRITER(w));
        }
    } while (rc == SHMS_EWRITERACTIVE && again && wait_for_lock(&start));
    return rc;
}

bool shms_segment_held(const shms_segment *seg, int role) { return held(seg, role_byte(role)); }

bool shms_segment_written(const shms_segment *seg) { return held(seg, lock_bytes(0, SHMS_OWNER + 1)); }

/* Removes the name, unless it is to stay. The caller has the locks of all, so it sees what each has stored before it unlocked. */
static void unlink_as(const shms_segment *seg, int unlinks) {
    for (uint32_t w = 0; unlinks == SHMS_AS_RECORDED && w < seg->layout.n_writers; w++)
        if (atomic_load_explicit(&shms_segment_writer(seg, w)->stays, memory_order_relaxed) == SHMS_BEYOND_CLOSE)
            return;
    shms_segment_unlink(seg);
}

/* Holds the locks of all other writers while it removes the name, so that none joins: as read locks, which tell a joiner
 * that they are no writer's, and which several that close may hold at once. A writer that has unlocked asks for all of
 * them at once, and so holds nothing if it gets none: two that close cannot both find the other alive. The locks are
 * taken on the descriptor that is there, because a process that is out of descriptors closes stores, too. */
static bool unlink_last(shms_segment *seg, int unlinks) {
    uint64_t n = SHMS_OWNER + 1, own_byte = seg->lock ? seg->arena : n;
    struct flock before = lock_bytes(0, own_byte), behind = lock_bytes(own_byte + 1, n - own_byte - 1);
    struct flock all = lock_bytes(0, n);
    before.l_type = behind.l_type = F_RDLCK;
    all.l_type = F_UNLCK;
    if (!shms_file_is(seg, seg->fd))
        return false;
    bool last = (own_byte == 0 || fcntl(seg->fd, F_OFD_SETLK, &before) == 0) &&
                (own_byte + 1 >= n || fcntl(seg->fd, F_OFD_SETLK, &behind) == 0);
    if (last)
        unlink_as(seg, unlinks);
    fcntl(seg->fd, F_OFD_SETLK, &all);
    return last || !shms_segment_named(seg);
}

bool shms_segment_unlink_last(shms_segment *seg, int unlinks) {
    if (seg->layout.n_writers == 1 && !seg->sb->owner) {
        unlink_as(seg, unlinks);
        return true;
    }
    shms_forks_stop(); /* a forked child would share the locks */
    bool last = unlink_last(seg, unlinks);
    shms_forks_go_on();
    return last;
}

void shms_segment_unlock(shms_segment *seg, int unlinks) {
    shms_forks_stop(); /* a forked child sees both or neither */
    drop_lock(seg);
    if (unlinks)
        unlink_last(seg, unlinks);
    shms_file_close(seg);
    shms_forks_go_on();
}
