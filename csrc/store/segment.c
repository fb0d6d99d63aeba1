/*
 * segment.c - creation, mapping, liveness locks, fork.
 *
 * Creation. The order of the steps protects processes that die during it or open the file early:
 * 1. O_EXCL decides which process creates.
 * 2. The lock is taken before anything else, so that nobody takes the file for a dead process's.
 * 3. Space is reserved before it is written, so that no store raises SIGBUS: all tables and the creator's arena here, and
 *    each other arena when it is first taken. An arena whose epoch is 0 may be a hole, so nobody reads it.
 * 4. The stamp is published last.
 *
 * What keeps the lock. An open-file-description lock lives as long as any descriptor or mapping of its opening. A
 * descriptor is not enough: any code of the process may close it (a daemonizing library closes all). The process would
 * then count as dead while it reads. So one page of that opening is mapped without access, and its descriptor is closed
 * at once. This is the only mapping of that opening; the segment is mapped through other openings.
 *
 * Forks. A child must not keep the lock of its dead parent.
 * - The page has MADV_DONTFORK: the kernel copies it into no child, not even of a clone() that runs no handlers.
 * - The descriptor of that opening exists only inside shms_segment_lock, under the mutex that a pthread_atfork handler
 *   takes. So no child of fork() copies it. A child of vfork() or clone() may, within these microseconds, until it
 *   calls exec.
 * - Every open segment is on a list. In the child, the handlers close the other descriptors and mark the segments.
 * - The child never sees half a list, and starts with an empty one. A segment on the old list may lie on the stack of a
 *   thread that fork did not copy.
 *
 * Core dumps. A process that dumps core is alive until the dump is written. No segment goes into the dump
 * (MADV_DONTDUMP). So the locks are free sooner, and the objects, which other processes share, stay out of the file.
 */
#include "segment.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "step.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define HUGE_PAGE ((uint64_t)2 << 20)
#define HUGETLBFS 0x958458f6 /* of statfs(2) */
/* On hugetlbfs a mapping would else reserve pages for the arenas that nobody has taken. */
#define SHARED (MAP_SHARED | MAP_NORESERVE)
/* smallest step of a reservation that signals interrupt; takes well below a millisecond */
#define SMALLEST_STEP ((uint64_t)1 << 20)
/* how long a writer that joins waits for one that closes, and for processes that write for a dead one; these take some
 * microseconds or milliseconds, unless they are stopped */
#define TURNS 1000
#define TURN_NS 1000000

static pthread_mutex_t open_mutex = PTHREAD_MUTEX_INITIALIZER;
static shms_segment *open_segments;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static bool advice_ignored; /* madvise has no effect (qemu-user): children inherit the pages of the locks */

static uint64_t page_size(void) { return (uint64_t)sysconf(_SC_PAGESIZE); }

/* The unit of sizes and mappings: on hugetlbfs its pages. */
static uint64_t unit_of(const struct statfs *fs) {
    return (uint32_t)fs->f_type == HUGETLBFS ? (uint64_t)fs->f_bsize : page_size();
}

/* Do other hosts have the files, too? Then locks may hold between hosts, and memory does not. */
static bool is_network_fs(const struct statfs *fs) {
    static const uint32_t kinds[] = {
        0x6969,     0x517b,     0xff534d42, 0xfe534d42, 0x00c36400,
        0x0bd00bd0, 0x47504653, 0x01021997, 0x65735546}; /* NFS, SMB, CIFS, SMB2, Ceph, Lustre, GPFS, 9p, FUSE */
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if ((uint32_t)fs->f_type == kinds[i])
            return true;
    return false;
}

/* Does that descriptor name this segment's file? Foreign code may close descriptors, and numbers are reused. */
static bool is_segment_fd(const shms_segment *seg, int fd) {
    struct stat st;
    return fstat(fd, &st) == 0 && st.st_dev == seg->dev && st.st_ino == seg->ino;
}

static void close_fd(shms_segment *seg) {
    if (seg->fd >= 0 && is_segment_fd(seg, seg->fd))
        close(seg->fd);
    seg->fd = -1;
}

static void fork_prepare(void) { pthread_mutex_lock(&open_mutex); }
static void fork_parent(void) { pthread_mutex_unlock(&open_mutex); }
static void fork_child(void) {
    for (shms_segment *s = open_segments, *next; s; s = next) {
        next = s->next;
        s->next = s->prev = NULL;
        atomic_store(&s->forked, 1);
        if (s->lock && advice_ignored)
            munmap(s->lock, s->unit);
        s->lock = NULL; /* the child has no such page, and the address may be another mapping's by now */
        close_fd(s);
    }
    open_segments = NULL;
    pthread_mutex_unlock(&open_mutex);
}
static void fork_register(void) { pthread_atfork(fork_prepare, fork_parent, fork_child); }

/* Is the path a descriptor's? Then it is a link, which leads to the file also where no folder does. */
static bool by_descriptor(const shms_segment *seg) {
    int end = 0;
    if (sscanf(seg->path, "/proc/self/fd/%*u%n", &end) == EOF || !end)
        sscanf(seg->path, "/proc/%*u/fd/%*u%n", &end);
    return end && !seg->path[end];
}

int shms_segment_open_path(const shms_segment *seg, int flags) {
    return open(seg->path, flags | (by_descriptor(seg) ? 0 : O_NOFOLLOW) | O_CLOEXEC, 0600);
}

/* Opens the file and adds the segment to the list. No fork can come between the two. What is opened later, by way of a
 * descriptor, is an opening of its own, so the locks of who passed the descriptor and who got it exclude each other. */
static int open_listed(shms_segment *seg, int flags, bool memfd) {
    struct stat st;
    struct statfs fs;
    pthread_once(&fork_once, fork_register);
    pthread_mutex_lock(&open_mutex);
    seg->fd = memfd ? memfd_create(strrchr(seg->path, '/') + 1, MFD_CLOEXEC | MFD_ALLOW_SEALING)
                    : shms_segment_open_path(seg, flags);
    if (seg->fd >= 0 && fstat(seg->fd, &st) == 0 && fstatfs(seg->fd, &fs) == 0) {
        if (memfd || by_descriptor(seg)) /* its own from now on: the caller may close that one */
            snprintf(seg->path, sizeof seg->path, "/proc/self/fd/%d", seg->fd);
        seg->unit = unit_of(&fs);
        seg->dev = st.st_dev;
        seg->ino = st.st_ino;
        seg->prev = NULL;
        seg->next = open_segments;
        if (open_segments)
            open_segments->prev = seg;
        open_segments = seg;
    } else if (seg->fd >= 0) {
        close(seg->fd);
        seg->fd = -1;
    }
    pthread_mutex_unlock(&open_mutex);
    return seg->fd;
}

int shms_segment_open_file(shms_segment *seg, int flags) { return open_listed(seg, flags, false); }

static void list_remove(shms_segment *seg) {
    pthread_mutex_lock(&open_mutex);
    if (seg->prev)
        seg->prev->next = seg->next;
    else if (open_segments == seg)
        open_segments = seg->next;
    if (seg->next)
        seg->next->prev = seg->prev;
    seg->next = seg->prev = NULL;
    pthread_mutex_unlock(&open_mutex);
}

int shms_segment_name(shms_segment *seg, const char *name) {
    if (!name)
        return SHMS_EINVAL;
    const char *slash = strrchr(name, '/'), *last = slash ? slash + 1 : name;
    size_t n = strlen(last);
    if (n == 0 || n > SHMS_MAX_NAME || !strcmp(last, ".") || !strcmp(last, "..") || (slash && *name != '/'))
        return SHMS_EINVAL;
    int size = snprintf(seg->path, sizeof seg->path, "%s%s", slash ? "" : "/dev/shm/", name);
    return size < (int)sizeof seg->path ? SHMS_OK : SHMS_EINVAL;
}

int shms_options_round(shms_options *options) {
    shms_layout l;
    int rc = shms_layout_compute(&l, options, page_size());
    if (rc)
        return rc;
    l.flags = options->flags;
    shms_layout_options(options, &l);
    return SHMS_OK;
}

uint64_t shms_space_needed(const shms_options *options, const char *folder) {
    shms_layout l;
    struct statfs fs;
    int rc = shms_layout_compute(&l, options, statfs(folder, &fs) ? page_size() : unit_of(&fs));
    return rc ? 0 : l.data_at + (options->flags & SHMS_OWNS ? 0 : l.data_stride);
}

/* Checks first: fallocate would fill the memory before it found that there is not enough. */
static bool exceeds_free_space(int fd, uint64_t size) {
    struct statvfs fs;
    return fstatvfs(fd, &fs) == 0 && fs.f_blocks && /* 0: a tmpfs without a limit, which reports no figures */
           (uint64_t)fs.f_bavail * fs.f_frsize < size;
}

static int reserve(int fd, uint64_t at, uint64_t size) {
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

/* Maps the data region at an address that huge pages can use. */
static uint8_t *map_data(int fd, const shms_layout *l, uint64_t size) {
    if (l->capacity < HUGE_PAGE) {
        void *p = mmap(NULL, size, PROT_READ, SHARED, fd, (off_t)l->data_at);
        return p == MAP_FAILED ? NULL : p;
    }
    uint8_t *room = mmap(NULL, size + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED)
        return NULL;
    uint8_t *at = (uint8_t *)shms_align_up((uint64_t)room, HUGE_PAGE);
    if (mmap(at, size, PROT_READ, SHARED | MAP_FIXED, fd, (off_t)l->data_at) == MAP_FAILED) {
        munmap(room, size + HUGE_PAGE);
        return NULL;
    }
    if (at > room)
        munmap(room, (size_t)(at - room));
    if (room + HUGE_PAGE > at)
        munmap(at + size, (size_t)(room + HUGE_PAGE - at));
    return at;
}

/* Opens the segment's file once more, for mappings. */
static int open_again(const shms_segment *seg, int role) {
    int fd = shms_segment_open_path(seg, role == SHMS_ROLE_INSPECTOR ? O_RDONLY : O_RDWR);
    if (fd < 0)
        return errno == ENOENT ? SHMS_ENOSTORE : SHMS_ESYS;
    if (is_segment_fd(seg, fd))
        return fd;
    close(fd); /* the name is another segment's by now */
    return SHMS_ENOSTORE;
}

/* Maps everything read-only, but for a rank its own table. */
static int map(shms_segment *seg, int fd, int role) {
    const shms_layout *l = &seg->layout;
    seg->control_size = l->readers_at + l->n_readers * l->reader_stride;
    seg->data_size = l->n_writers * l->data_stride;
    void *control = mmap(NULL, seg->control_size, PROT_READ, SHARED, fd, 0);
    if (control == MAP_FAILED)
        return SHMS_ESYS;
    seg->control = control;
    seg->sb = control;
    if (role >= 0 && mprotect(shms_segment_reader(seg, (uint32_t)role), l->reader_stride, PROT_READ | PROT_WRITE))
        return SHMS_ESYS;
    seg->all_data = map_data(fd, l, seg->data_size);
    if (!seg->all_data)
        return SHMS_ESYS;
    shms_segment_select(seg, 0);
    return madvise(seg->control, seg->control_size, MADV_DONTDUMP) ||
                   madvise(seg->all_data, seg->data_size, MADV_DONTDUMP)
               ? SHMS_ESYS
               : SHMS_OK;
}

char *shms_segment_map_private(const shms_segment *seg, const char *at, uint64_t size, void **map, uint64_t *map_size) {
    uint64_t page = seg->layout.page; /* of the file: its data begins where a page does */
    uint64_t offset = seg->layout.data_at + (uint64_t)(at - (const char *)seg->all_data), skip = offset % page;
    if (!is_segment_fd(seg, seg->fd)) {
        errno = EBADF;
        return NULL;
    }
    uint64_t n = shms_align_up(skip + size, page);
    void *span = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE, seg->fd, (off_t)(offset - skip));
    if (span == MAP_FAILED)
        return NULL;
    madvise(span, n, MADV_DONTDUMP);
    *map = span;
    *map_size = n;
    return (char *)span + skip;
}

/* Makes an arena writable, or of the owner none, and nothing else behind the superblock. The one rule (each word has one
 * writing process), enforced by the MMU. */
static int own(shms_segment *seg, uint32_t arena) {
    const shms_layout *l = &seg->layout;
    int rights = arena == SHMS_OWNER ? PROT_READ : PROT_READ | PROT_WRITE;
    shms_segment_select(seg, arena == SHMS_OWNER ? 0 : arena);
    seg->arena = arena;
    return mprotect(seg->control + l->writer_at, l->readers_at - l->writer_at, PROT_READ) ||
                   mprotect(seg->writer, l->arena_stride, rights) || mprotect(seg->data, l->data_stride, rights)
               ? SHMS_ESYS
               : SHMS_OK;
}

void shms_segment_warm(shms_segment *seg) {
    const shms_layout *l = &seg->layout;
    if (l->flags & SHMS_HUGE_PAGES) { /* best effort: both fail if shared huge pages are off */
        madvise(seg->data, l->data_stride, MADV_HUGEPAGE);
        madvise(seg->data, l->data_stride, MADV_COLLAPSE);
    }
    if ((l->flags & SHMS_PREFAULT) && madvise(seg->data, l->data_stride, MADV_POPULATE_WRITE))
        for (uint64_t i = 0; i < l->data_stride; i += l->page) /* kernels before 5.14 */
            *(volatile uint8_t *)(seg->data + i) = *(volatile uint8_t *)(seg->data + i);
}

static int identify(shms_segment *seg, uint64_t *size) {
    struct stat st;
    if (fstat(seg->fd, &st))
        return SHMS_ESYS;
    if (!S_ISREG(st.st_mode))
        return SHMS_ELAYOUT;
    *size = (uint64_t)st.st_size;
    return SHMS_OK;
}

/* Writes the magic number by a mapping. */
static int mark(const shms_segment *seg) {
    int rc = reserve(seg->fd, 0, seg->unit);
    if (rc)
        return rc;
    shms_superblock *sb = mmap(NULL, seg->unit, PROT_READ | PROT_WRITE, SHARED, seg->fd, 0);
    if (sb == MAP_FAILED)
        return SHMS_ESYS;
    sb->magic = SHMS_MAGIC;
    munmap(sb, seg->unit);
    return SHMS_OK;
}

static int create_locked(shms_segment *seg, const shms_options *options) {
    const shms_layout *l = &seg->layout;
    bool owns = options->flags & SHMS_OWNS;
    uint64_t size, control_end = l->readers_at + l->n_readers * l->reader_stride, data = owns ? 0 : l->data_stride;
    struct statfs fs;
    int rc;
    if (fstatfs(seg->fd, &fs))
        return SHMS_ESYS;
    if (is_network_fs(&fs)) {
        errno = EREMOTE;
        return SHMS_ESYS;
    }
    if ((rc = identify(seg, &size)) ||
        (rc = shms_segment_lock(seg, owns ? SHMS_ROLE_OF_WRITER(SHMS_OWNER) : SHMS_ROLE_WRITER)))
        return rc;
    /* The group first, so that no other gets rights. Until both are done the file is empty; see open_failed. */
    if ((options->group && fchown(seg->fd, (uid_t)-1, options->group - 1)) ||
        fchmod(seg->fd, options->mode ? options->mode : 0600))
        return SHMS_ESYS;
    /* Before space is taken, so that a file that a dead creator has left is known as ours, or is empty. */
    bool writes = seg->unit == page_size(); /* hugetlbfs has no write(2) */
    if (writes && pwrite(seg->fd, &(uint64_t){SHMS_MAGIC}, sizeof(uint64_t), offsetof(shms_superblock, magic)) < 0)
        return errno == ENOSPC ? SHMS_ENOSPC : SHMS_ESYS;
    if (!writes &&
        (rc = mark(seg))) /* no file has a size before it has this page, since a look at a hole is a SIGBUS */
        return rc;
    if (ftruncate(seg->fd, (off_t)l->file_size))
        return SHMS_ESYS; /* EFBIG: RLIMIT_FSIZE */
    if ((options->flags & SHMS_MEMFD) && fcntl(seg->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
        return SHMS_ESYS;
    /* The part between the tables and a data region aligned for huge pages stays a hole. */
    if (exceeds_free_space(seg->fd, control_end + data))
        return SHMS_ENOSPC;
    int fd = open_again(seg, SHMS_ROLE_WRITER);
    if (fd < 0)
        return fd;
    rc = map(seg, fd, SHMS_ROLE_WRITER);
    close(fd);
    uint64_t node = l->flags >> SHMS_NODE_SHIFT;
    if (rc || (node && (rc = shms_prefer_node(seg->all_data, seg->data_size, node - 1))) ||
        (rc = reserve(seg->fd, l->data_at, data)) || (rc = reserve(seg->fd, 0, control_end)))
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

int shms_segment_create(shms_segment *seg, const char *name, const shms_options *options) {
    memset(seg, 0, sizeof *seg);
    seg->fd = -1;
    int rc;
    if ((rc = shms_segment_name(seg, name)) || (rc = shms_layout_compute(&seg->layout, options, page_size())))
        return rc;
    if (open_listed(seg, O_RDWR | O_CREAT | O_EXCL, options->flags & SHMS_MEMFD) < 0)
        return errno == EEXIST ? SHMS_ESTOREEXISTS : SHMS_ESYS;
    /* again, in the units of that file system */
    if ((rc = shms_layout_compute(&seg->layout, options, seg->unit)) || (rc = create_locked(seg, options))) {
        if (rc != SHMS_EWRITERACTIVE) /* else a process removes the empty file, and the name may soon be another's */
            shms_segment_unlink(seg);
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
    int rc = own(seg, seg->sb->owner ? SHMS_OWNER : 0);
    if (rc) /* the process has too many mappings */
        return rc;
    atomic_store_explicit(&seg->sb->stamp, shms_layout_stamp(), memory_order_release);
    mprotect(seg->control, seg->layout.writer_at, PROT_READ); /* joins the mapping behind it, or stays writable */
    if (is_segment_fd(seg, seg->fd))
        futimens(seg->fd, NULL); /* wakes shms_watch, which sees no store to memory */
    return SHMS_OK;
}

static int read_and_map(shms_segment *seg, int fd, uint64_t size, int role) {
    shms_superblock *sb = mmap(NULL, SHMS_PAGE, PROT_READ, SHARED, fd, 0);
    if (sb == MAP_FAILED)
        return SHMS_ESYS;
    int rc = shms_layout_read(&seg->layout, sb, size);
    if (rc == SHMS_OK && seg->layout.page % seg->unit)
        rc = SHMS_ELAYOUT;
    munmap(sb, seg->unit);
    if (rc)
        return rc;
    if (role >= 0 && (uint64_t)role >= seg->layout.n_readers)
        return SHMS_EINVAL;
    return map(seg, fd, role);
}

static int open_mapped(shms_segment *seg, int role) {
    uint64_t size;
    int rc = identify(seg, &size);
    if (rc)
        return rc;
    uint64_t stamp = 0; /* read, since a mapping of a hole would have the kernel fill it, which may fail */
    if (size < sizeof(shms_superblock) ||
        pread(seg->fd, &stamp, sizeof stamp, offsetof(shms_superblock, stamp)) != sizeof stamp || !stamp)
        return SHMS_ELAYOUT;
    int fd = open_again(seg, role);
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
        int rc = identify(seg, &size);
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
        if (size == 0 && (role >= 0 || role == SHMS_ROLE_INSPECTOR))
            return SHMS_ECREATING;
        if (ended) /* checked again after the lock was found free: nobody will finish it */
            return SHMS_ELAYOUT;
    }
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

static uint64_t lacks(const shms_segment *seg, uint64_t arenas) {
    uint64_t needed = seg->control_size + (uint64_t)__builtin_popcountll(arenas) * seg->layout.data_stride;
    struct stat st;
    uint64_t there = fstat(seg->fd, &st) ? 0 : (uint64_t)st.st_blocks * 512;
    return there < needed ? needed - there : 0;
}

uint64_t shms_segment_lacks(const shms_segment *seg) {
    uint64_t arenas = taken(seg); /* before the blocks are counted: an arena is reserved before it is taken */
    SHMS_LOOK("taken");
    return lacks(seg, arenas);
}

int shms_segment_reserve(const shms_segment *seg, uint64_t *needed) {
    const shms_layout *l = &seg->layout;
    uint64_t before = taken(seg);
    bool first = !(before >> seg->arena & 1);
    uint64_t torn = lacks(seg, before);
    if (needed)
        *needed = torn + (first ? l->data_stride : 0);
    /* A predecessor may have reserved the arena and died. If other arenas are being reserved, the kernel refuses. */
    if (exceeds_free_space(seg->fd, lacks(seg, before | UINT64_C(1) << seg->arena)))
        return SHMS_ENOSPC;
    int rc = torn ? reserve(seg->fd, 0, seg->control_size) : SHMS_OK;
    for (uint64_t w = 0; rc == SHMS_OK && torn && w < l->n_writers; w++)
        if (before >> w & 1)
            rc = reserve(seg->fd, l->data_at + w * l->data_stride, l->data_stride);
    /* last, because its bytes would count for those that a sparse copy still lacks */
    return rc == SHMS_OK && first ? reserve(seg->fd, l->data_at + seg->arena * l->data_stride, l->data_stride) : rc;
}

/* Stats the file that has the name, without a descriptor. So it works also for a file that may not be opened. */
static bool stat_name(const shms_segment *seg, struct stat *st) {
    return (by_descriptor(seg) ? stat : lstat)(seg->path, st) == 0;
}

/* Returns the code for an open that failed. */
static int open_failed(const shms_segment *seg, const shms_expected *expected) {
    struct stat st;
    int why = errno;
    if (why == ENOENT)
        return SHMS_ENOSTORE;
    if (why == ELOOP || why == EISDIR || why == ENXIO) /* a symbolic link; a directory; a socket */
        return SHMS_ELAYOUT;
    bool foreign = why == EACCES && stat_name(seg, &st) && st.st_uid != geteuid();
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
    if (shms_segment_open_file(seg, (role == SHMS_ROLE_INSPECTOR ? O_RDONLY : O_RDWR) | O_NONBLOCK) < 0)
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

int shms_segment_borrow(shms_segment *seg, const shms_segment *of) {
    *seg = *of;
    seg->borrowed = true;
    seg->lock = NULL;
    if (shms_segment_open_file(seg, O_RDWR) < 0)
        return SHMS_ESYS;
    return mprotect(seg->control, seg->control_size, PROT_READ | PROT_WRITE) ? SHMS_ESYS : SHMS_OK;
}

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
        if (errno != EAGAIN && errno != EACCES)
            return SHMS_ESYS;
        return role < 0 ? SHMS_EWRITERACTIVE : SHMS_ERANKINUSE;
    }
    void *page = mmap(NULL, seg->unit, PROT_NONE, SHARED, fd, 0);
    if (page == MAP_FAILED)
        return SHMS_ESYS;
    if (madvise(page, seg->unit, MADV_DONTFORK) || madvise(page, seg->unit, MADV_DONTDUMP)) {
        munmap(page, seg->unit);
        return SHMS_ESYS;
    }
    advice_ignored = madvise(page, seg->unit, -1) == 0; /* no kernel accepts that advice */
    seg->lock = page;
    return SHMS_OK;
}

int shms_segment_lock(shms_segment *seg, int role) {
    pthread_mutex_lock(&open_mutex); /* no fork may copy the descriptor */
    int fd = open_again(seg, role), rc = fd;
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
    pthread_mutex_unlock(&open_mutex);
    return rc;
}

/* Was the lock refused for a writer that closes (shms_segment_unlink_last)? Then it is free by now or in a moment, or the
 * name has gone. */
static bool is_closing(const shms_segment *seg, int w) {
    struct flock fl = role_byte(SHMS_ROLE_OF_WRITER(w));
    return fcntl(seg->fd, F_OFD_GETLK, &fl) == 0 && fl.l_type != F_WRLCK;
}

static bool held(const shms_segment *seg, struct flock fl) {
    return fcntl(seg->fd, F_OFD_GETLK, &fl) != 0 || fl.l_type != F_UNLCK || !is_segment_fd(seg, seg->fd);
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
    bool closing = true;
    for (int turn = 0; rc == SHMS_EWRITERACTIVE && closing && turn < TURNS; turn++) {
        if (turn)
            nanosleep(&(struct timespec){.tv_nsec = TURN_NS}, NULL);
        closing = false;
        for (int w = from; w < to && rc == SHMS_EWRITERACTIVE; w++) {
            if (without >> w & 1)
                continue;
            if ((rc = shms_segment_lock(seg, SHMS_ROLE_OF_WRITER(w))) == SHMS_OK) {
                if (!is_filled(seg, w))
                    return own(seg, (uint32_t)w);
                pthread_mutex_lock(&open_mutex); /* no fork comes in between */
                drop_lock(seg);
                pthread_mutex_unlock(&open_mutex);
                rc = SHMS_EWRITERACTIVE;
            }
            closing |= is_closing(seg, w);
        }
    }
    return rc;
}

bool shms_segment_held(const shms_segment *seg, int role) { return held(seg, role_byte(role)); }

bool shms_segment_written(const shms_segment *seg) { return held(seg, lock_bytes(0, SHMS_OWNER + 1)); }

bool shms_segment_named(const shms_segment *seg) {
    struct stat st;
    return stat_name(seg, &st) && st.st_dev == seg->dev && st.st_ino == seg->ino;
}

void shms_segment_unlink(const shms_segment *seg) {
    int saved = errno;
    if (shms_segment_named(seg))
        unlink(seg->path);
    errno = saved;
}

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
    if (!is_segment_fd(seg, seg->fd))
        return false;
    bool last = (own_byte == 0 || fcntl(seg->fd, F_OFD_SETLK, &before) == 0) &&
                (own_byte + 1 >= n || fcntl(seg->fd, F_OFD_SETLK, &behind) == 0);
    if (last)
        unlink_as(seg, unlinks);
    fcntl(seg->fd, F_OFD_SETLK, &all);
    return last || !shms_segment_named(seg);
}

bool shms_segment_unlink_last(shms_segment *seg, int unlinks) {
    if (seg->layout.n_writers == 1 && seg->lock && !seg->sb->owner) {
        unlink_as(seg, unlinks);
        return true;
    }
    pthread_mutex_lock(&open_mutex); /* a forked child would share the locks */
    bool last = unlink_last(seg, unlinks);
    pthread_mutex_unlock(&open_mutex);
    return last;
}

void shms_segment_unlock(shms_segment *seg, int unlinks) {
    pthread_mutex_lock(&open_mutex); /* a forked child sees both or neither */
    drop_lock(seg);
    if (unlinks)
        unlink_last(seg, unlinks);
    close_fd(seg);
    pthread_mutex_unlock(&open_mutex);
}

void shms_segment_close(shms_segment *seg) {
    int saved = errno;
    shms_segment_unlock(seg, 0);
    list_remove(seg);
    if (seg->all_data && !seg->borrowed)
        munmap(seg->all_data, seg->data_size);
    if (seg->control && !seg->borrowed)
        munmap(seg->control, seg->control_size);
    seg->control = seg->data = seg->all_data = NULL;
    errno = saved;
}
