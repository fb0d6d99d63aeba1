/*
 * descriptors.c - the name of a segment and the descriptors of its file, which no forked child keeps.
 *
 * Forks. A child must not keep the lock of its dead parent.
 * - The page that keeps the lock has MADV_DONTFORK: the kernel copies it into no child, not even of a clone() that runs no
 *   handlers.
 * - The descriptor of that opening exists only inside shms_segment_lock_byte, between shms_forks_stop and
 *   shms_forks_go_on, which is the mutex that a pthread_atfork handler takes. So no child of fork() copies it. A child of
 *   vfork() or clone() may, within these microseconds, until it calls exec.
 * - Every open segment is on a list. In the child, the handlers close the other descriptors and mark the segments. One
 *   is there only for the moment in which a call writes (shms_file_begin), and that may be long: a creation takes memory.
 * - The child never sees half a list, and starts with an empty one. A segment on the old list may lie on the stack of a
 *   thread that fork did not copy.
 *
 * Foreign writes. A process may have closed its standard streams, and what prints to one writes into the file that has its
 * number. So no descriptor of a store has a number below 3, and the one that is kept is read-only: a number that foreign
 * code has closed, and uses on, may be any. What needs to write opens the file for that moment.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "file.h"

#define NAME "a name must have 1 to %d bytes, not be . or .., and have a slash only as a path from the root, not %.40s"

static pthread_mutex_t open_mutex = PTHREAD_MUTEX_INITIALIZER;
static shms_segment *open_segments;
static _Atomic uint32_t n_forks; /* between this process and the first */
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

int shms_segment_name(shms_segment *seg, const char *name) {
    if (!name)
        return shms_fail(SHMS_EINVAL, "the name is NULL: pass that of a store");
    const char *slash = strrchr(name, '/'), *last = slash ? slash + 1 : name;
    size_t n = strlen(last);
    if (n == 0 || n > SHMS_MAX_NAME || !strcmp(last, ".") || !strcmp(last, "..") || (slash && *name != '/'))
        return shms_fail(SHMS_EINVAL, NAME, SHMS_MAX_NAME, name);
    int size = snprintf(seg->path, sizeof seg->path, "%s%s", slash ? "" : "/dev/shm/", name);
    return size < (int)sizeof seg->path
               ? SHMS_OK
               : shms_fail(SHMS_EINVAL, "the path of a store must have less than %d bytes, not %d",
                           (int)sizeof seg->path, size);
}

bool shms_file_is(const shms_segment *seg, int fd) {
    struct stat st;
    return fstat(fd, &st) == 0 && st.st_dev == seg->dev && st.st_ino == seg->ino;
}

void shms_file_close(shms_segment *seg) {
    if (seg->fd >= 0 && shms_file_is(seg, seg->fd))
        close(seg->fd);
    seg->fd = -1;
}

static void close_brief(shms_segment *seg) {
    if (seg->brief && shms_file_is(seg, seg->brief))
        close(seg->brief);
    seg->brief = 0;
}

void shms_forks_stop(void) { pthread_mutex_lock(&open_mutex); }
void shms_forks_go_on(void) { pthread_mutex_unlock(&open_mutex); }
uint32_t shms_forks(void) { return n_forks; }
static void fork_child(void) {
    n_forks++;
    for (shms_segment *s = open_segments, *next; s; s = next) {
        next = s->next;
        s->next = s->prev = NULL;
        atomic_store(&s->forked, 1);
        s->lock = s->name = NULL; /* the child has no such page, and the address may be another mapping's by now */
        shms_file_close(s);
        close_brief(s);
    }
    open_segments = NULL;
    shms_forks_go_on();
}
static void fork_register(void) { pthread_atfork(shms_forks_stop, shms_forks_go_on, fork_child); }

/* Is the path a descriptor's? Then it is a link, which leads to the file also where no folder does. */
static bool by_descriptor(const shms_segment *seg) {
    int end = 0;
    sscanf(seg->path, "/proc/self/fd/%*u%n", &end);
    if (!end)
        sscanf(seg->path, "/proc/%*u/fd/%*u%n", &end);
    return end && !seg->path[end];
}

/* Takes the numbers of closed standard streams, and returns how many. */
static int take_low(int *low) {
    int n = 0;
    for (int i = 0; i < 3; i++)
        if (fcntl(i, F_GETFD) < 0 && (low[n] = open("/", O_PATH | O_CLOEXEC)) >= 0)
            n++;
    return n;
}

static int open_high(const char *path, int flags) {
    int low[3], n = take_low(low), fd = open(path, flags | O_CLOEXEC, 0600), saved = errno;
    while (n)
        close(low[--n]);
    errno = saved;
    return fd;
}

int shms_segment_open_path(const shms_segment *seg, int flags) {
    return open_high(seg->path, flags | O_NONBLOCK | (by_descriptor(seg) ? 0 : O_NOFOLLOW));
}

/* Makes memory without a name. */
static int open_memory(const char *name) {
    int low[3], n = take_low(low), memory = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING), fd = memory;
    char path[32];
    if (memory >= 0) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", memory);
        fd = open_high(path, O_RDONLY);
        close(memory);
    }
    while (n)
        close(low[--n]);
    return fd;
}

/* Reads which start of the host this is: 32 random bits of the kernel. Without /proc, or in a container that masks that
 * file: 0. Such a process takes stores on a disk for its own start's if others like it have made them, and no others. A
 * store in memory needs none. */
static bool read_boot(uint64_t *boot) {
    char id[9] = {0};
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    bool known = fd < 0 ? errno == ENOENT : read(fd, id, sizeof id - 1) >= 0;
    if (fd >= 0)
        close(fd);
    *boot = strtoul(id, NULL, 16);
    return known;
}

/* Opens the file and adds the segment to the list. No fork can come between the two. */
int shms_segment_open_file(shms_segment *seg, int flags, bool memfd, bool looks) {
    struct stat st = {0};
    struct statfs fs;
    pthread_once(&fork_once, fork_register);
    shms_forks_stop();
    seg->fd = memfd ? open_memory(strrchr(seg->path, '/') + 1) : shms_segment_open_path(seg, O_RDONLY | flags);
    bool known = seg->fd >= 0 && fstat(seg->fd, &st) == 0 && fstatfs(seg->fd, &fs) == 0 &&
                 (looks || !shms_file_is_on_disk(&fs) || read_boot(&seg->boot));
    seg->dev = st.st_dev;
    seg->ino = st.st_ino;
    if (known && (looks || !S_ISREG(st.st_mode) || shms_file_serves(&fs))) {
        if (memfd || by_descriptor(seg)) /* its own from now on: the caller may close that one */
            snprintf(seg->path, sizeof seg->path, "/proc/self/fd/%d", seg->fd);
        seg->unit = shms_file_unit(&fs);
        seg->prev = NULL;
        seg->next = open_segments;
        if (open_segments)
            open_segments->prev = seg;
        open_segments = seg;
    } else if (seg->fd >= 0) {
        int why = known ? EOPNOTSUPP : errno;
        if (flags & O_EXCL)
            shms_segment_unlink(seg);
        close(seg->fd);
        seg->fd = -1;
        errno = why;
    }
    shms_forks_go_on();
    return seg->fd;
}

void shms_file_unlist(shms_segment *seg) {
    shms_forks_stop();
    if (seg->prev)
        seg->prev->next = seg->next;
    else if (open_segments == seg)
        open_segments = seg->next;
    if (seg->next)
        seg->next->prev = seg->prev;
    seg->next = seg->prev = NULL;
    shms_forks_go_on();
}

int shms_file_again(const shms_segment *seg, int role) {
    int fd = shms_segment_open_path(seg, role == SHMS_ROLE_INSPECTOR ? O_RDONLY : O_RDWR);
    if (fd < 0)
        return errno == ENOENT ? SHMS_ENOSTORE : SHMS_ESYS;
    if (shms_file_is(seg, fd))
        return fd;
    close(fd); /* the name is another segment's by now */
    return SHMS_ENOSTORE;
}

int shms_file_begin(shms_segment *seg, int role) {
    shms_forks_stop();
    int fd = shms_file_again(seg, role);
    seg->brief = fd < 0 ? 0 : fd;
    shms_forks_go_on();
    return fd;
}

void shms_file_end(shms_segment *seg) {
    int saved = errno;
    shms_forks_stop();
    close_brief(seg);
    shms_forks_go_on();
    errno = saved;
}

int shms_file_size(const shms_segment *seg, uint64_t *size) {
    struct stat st;
    if (fstat(seg->fd, &st))
        return SHMS_ESYS;
    if (!S_ISREG(st.st_mode))
        return SHMS_ELAYOUT;
    *size = (uint64_t)st.st_size;
    return SHMS_OK;
}

bool shms_file_stat(const shms_segment *seg, struct stat *st) {
    return (by_descriptor(seg) ? stat : lstat)(seg->path, st) == 0;
}

bool shms_segment_named(const shms_segment *seg) {
    struct stat st;
    return shms_file_stat(seg, &st) && st.st_dev == seg->dev && st.st_ino == seg->ino;
}

void shms_segment_unlink(const shms_segment *seg) {
    int saved = errno;
    if (shms_segment_named(seg))
        unlink(seg->path);
    errno = saved;
}
