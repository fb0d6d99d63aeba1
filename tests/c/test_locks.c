/*
 * test_locks.c - a process's lock: foreign closes do not end it, and no child keeps it.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "store/claims.h"
#include "support.h"

/* qemu-user ignores the advice (support.c). A child has the page until its handler runs; one without handlers keeps it. */
static bool advice_ignored(void) {
    void *page = zeroed(4096);
    bool ignored = madvise(page, 4096, -1) == 0;
    free(page);
    return ignored;
}

static void open_writer(shms_segment *seg, const char *name) {
    shms_options o = {.capacity = 4096, .n_readers = 1};
    CHECK_EQ(SHMS_OK, shms_segment_create(seg, name, &o));
    shms_segment_publish(seg);
}

TEST(a_name_that_leads_to_another_file_system_is_not_the_segment) {
    shms_segment seg;
    struct stat st;
    open_writer(&seg, store_name("device"));
    CHECK(shms_segment_named(&seg) && stat("/proc/self/status", &st) == 0);
    shms_segment moved = {.dev = seg.dev, .ino = st.st_ino, .path = "/proc/self/status"};
    CHECK(st.st_dev != seg.dev && !shms_segment_named(&moved));
    shms_segment_unlink(&seg);
    shms_segment_close(&seg);
}

static bool writer_alive(const char *name) {
    shms_segment seg;
    CHECK_EQ(SHMS_OK, shms_segment_open(&seg, name, SHMS_ROLE_INSPECTOR, NULL));
    bool held = shms_segment_held(&seg, SHMS_ROLE_WRITER);
    shms_segment_close(&seg);
    return held;
}

TEST(every_descriptor_may_be_closed_and_its_number_reused) {
    const char *name = store_name("stranger");
    shms_segment writer, rank;
    open_writer(&writer, name);
    CHECK_EQ(SHMS_OK, shms_segment_open(&rank, name, 0, NULL));
    CHECK_EQ(SHMS_OK, shms_segment_lock(&rank, 0));
    int null = open("/dev/null", O_RDWR), closed = writer.fd, used_again = rank.fd;
    close(closed);
    CHECK(dup2(null, used_again) == used_again);
    CHECK(writer_alive(name));
    CHECK(shms_segment_held(&writer, 0)); /* cannot probe */
    CHECK(shms_segment_held(&rank, SHMS_ROLE_WRITER)); /* probes another file, which no process has locked */
    CHECK(shms_segment_held(&rank, 7));
    CHECK(dup2(null, closed) == closed);
    shms_segment_close(&rank);
    shms_segment_unlink(&writer);
    shms_segment_close(&writer);
    CHECK(close(closed) == 0 && close(used_again) == 0 && close(null) == 0); /* not closed by the store */
}

/* Foreign code has closed the descriptor, and may have opened another file under its number. */
/* Whoever may only read may take them, on all bytes. */
TEST(a_read_lock_is_no_sign_of_life_and_no_claim) {
    const char *name = store_name("read");
    shms_segment seg;
    shms_claims *claims;
    open_writer(&seg, name);
    uint64_t store = seg.sb->store;
    shms_segment_close(&seg);
    int fd = shm_open(name, O_RDONLY, 0);
    CHECK_EQ(0, fcntl(fd, F_OFD_SETLK, &(struct flock){.l_type = F_RDLCK, .l_whence = SEEK_SET}));
    CHECK_EQ(SHMS_OK, shms_segment_open(&seg, name, SHMS_ROLE_INSPECTOR, NULL));
    CHECK(!shms_segment_held(&seg, 0) && !shms_segment_held(&seg, SHMS_ROLE_WRITER) && !shms_segment_written(&seg));
    CHECK_EQ(SHMS_OK, shms_claims_open(&claims, name, store));
    CHECK_EQ(0, shms_claimed(claims, "k", 1));
    shms_claims_drop(&claims);
    shms_segment_unlink(&seg);
    shms_segment_close(&seg);
    close(fd);
}

TEST(a_call_leaves_a_file_alone_that_has_the_number_of_its_descriptor) {
    static const shms_options two = {.capacity = 4096, .n_readers = 1, .n_writers = 2};
    for (int reused = 0; reused < 2; reused++) {
        const char *name = store_name("closed");
        struct stat before, after;
        shms_segment seg;
        CHECK_EQ(SHMS_OK, shms_segment_create(&seg, name, &two));
        int another = memfd_create("another", 0), fd = seg.fd;
        CHECK(another >= 0 && fstat(another, &before) == 0);
        usleep(20000); /* a tick of the file's clock */
        close(fd);
        CHECK(!reused || dup2(another, fd) == fd);
        CHECK_EQ(SHMS_OK, shms_segment_publish(&seg));
        CHECK(fstat(another, &after) == 0);
        CHECK(before.st_mtim.tv_sec == after.st_mtim.tv_sec && before.st_mtim.tv_nsec == after.st_mtim.tv_nsec);
        CHECK_EQ(SHMS_EWRITERACTIVE, shms_segment_take(&seg, 0, 0));
        CHECK(!shms_segment_unlink_last(&seg, 1)); /* another writer may live */
        CHECK(shms_segment_named(&seg));
        shms_segment_unlink(&seg);
        shms_segment_close(&seg);
        CHECK(close(another) == 0 && close(fd) == (reused ? 0 : -1));
    }
}

/* A child made by the system call itself, which runs no handler. It waits until the parent is dead. */
static void no_child_keeps_the_lock_of_a_dead_parent(bool bare) {
    const char *name = store_name(bare ? "clone" : "fork");
    int waiting[2], living[2];
    char byte;
    CHECK(pipe(waiting) == 0 && pipe(living) == 0);
    pid_t parent = fork_child();
    if (parent == 0) {
        shms_segment seg;
        open_writer(&seg, name);
        pid_t child = bare ? (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : fork();
        if (child == 0) {
            close(waiting[1]);
            CHECK(write(living[1], "x", 1) == 1);
            _exit((int)read(waiting[0], &byte, 1));
        }
        pause();
    }
    close(living[1]);
    CHECK(read(living[0], &byte, 1) == 1);
    CHECK(writer_alive(name));
    CHECK(kill(parent, SIGKILL) == 0);
    reap_killed(parent);
    CHECK(!writer_alive(name));
    close(waiting[0]), close(waiting[1]), close(living[0]); /* the child ends */
}

static int ends[2];

static void no_wait(const char *label) { CHECK(strcmp(label, "lock")); }

static void let_it_end(const char *label) {
    if (strcmp(label, "lock") == 0)
        close(ends[1]), shms_step_hook = NULL;
}

/* The library's calls come here: of a kernel that has no pidfd, where processes are this user's (1) or another's (2); and a
 * clock that jumps. */
static int without_pidfd;
static bool jumps;

long syscall(long number, ...) {
    va_list more;
    static long (*real)(long, ...);
    long a[6];
    if (without_pidfd && number == SYS_pidfd_open) {
        errno = ENOSYS;
        return -1;
    }
    va_start(more, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(more, long);
    va_end(more);
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "syscall");
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
int kill(pid_t pid, int signal) {
    int rc = (int)syscall(SYS_kill, pid, signal);
    if (signal == 0 && rc == 0 && without_pidfd == 2) {
        errno = EPERM;
        rc = -1;
    }
    return rc;
}
int clock_gettime(clockid_t clock, struct timespec *out) {
    static time_t jumped;
    int rc = (int)syscall(SYS_clock_gettime, clock, out);
    if (jumps)
        out->tv_sec += jumped += 2;
    return rc;
}

/* A process that keeps the lock of another, as the kernel does while someone reads a dead process's mappings. */
static pid_t leaver(const char *name, int role, pid_t dead) {
    int taken[2];
    char byte;
    CHECK(pipe(ends) == 0 && pipe(taken) == 0);
    pid_t pid = fork_child();
    if (pid == 0) {
        shms_segment seg;
        close(ends[1]);
        CHECK_EQ(SHMS_OK, shms_segment_open(&seg, name, role, NULL));
        if (role >= 0) {
            CHECK_EQ(SHMS_OK, shms_segment_lock(&seg, role));
            shms_set(&shms_segment_reader(&seg, (uint32_t)role)->pid, (uint64_t)dead);
        } else {
            CHECK_EQ(SHMS_OK, shms_segment_take(&seg, 0, 0));
            shms_set(&seg.writer->pid, (uint64_t)dead);
        }
        CHECK(write(taken[1], "x", 1) == 1);
        _exit((int)read(ends[0], &byte, 1));
    }
    CHECK(read(taken[0], &byte, 1) == 1);
    close(taken[0]), close(taken[1]), close(ends[0]);
    return pid;
}

static void what_a_dead_process_leaves_is_waited_for(int role, bool reaped) {
    const char *name = store_name("leaves");
    shms_segment seg;
    open_writer(&seg, name);
    shms_segment_close(&seg);
    pid_t dead = fork_child();
    if (dead == 0)
        _exit(0);
    siginfo_t ended;
    CHECK(waitid(P_PID, (id_t)dead, &ended, WEXITED | WNOWAIT) == 0);
    if (reaped)
        CHECK(reap(dead) == 0);
    CHECK_EQ(SHMS_OK, shms_segment_open(&seg, name, role, NULL));
    pid_t alive = leaver(name, role, getpid());
    shms_step_hook = no_wait;
    CHECK(role >= 0 ? shms_segment_take_rank(&seg, 0, false) == SHMS_ERANKINUSE
                    : shms_segment_take(&seg, 0, 0) == SHMS_EWRITERACTIVE);
    shms_step_hook = NULL;
    close(ends[1]);
    CHECK_EQ(0, reap(alive));
    pid_t left = leaver(name, role, dead);
    if (role >= 0)
        CHECK_EQ(SHMS_ERANKINUSE, shms_segment_take_rank(&seg, 0, true));
    jumps = true; /* it has no patience left */
    CHECK(role >= 0 ? shms_segment_take_rank(&seg, 0, false) == SHMS_ERANKINUSE
                    : shms_segment_take(&seg, 0, 0) == SHMS_EWRITERACTIVE);
    jumps = false;
    shms_step_hook = let_it_end;
    CHECK_EQ(SHMS_OK, role >= 0 ? shms_segment_take_rank(&seg, 0, false) : shms_segment_take(&seg, 0, 0));
    CHECK_EQ(0, reap(left));
    if (!reaped)
        CHECK(reap(dead) == 0);
    shms_segment_unlink(&seg);
    shms_segment_close(&seg);
}

TEST(the_lock_of_a_process_that_has_ended_is_waited_for) {
    for (without_pidfd = 0; without_pidfd < 3; without_pidfd++) {
        what_a_dead_process_leaves_is_waited_for(0, true);
        what_a_dead_process_leaves_is_waited_for(SHMS_ROLE_WRITER, true);
    }
    without_pidfd = 0;
    int fd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (fd >= 0) { /* a kernel, or an emulator, that has it */
        close(fd);
        what_a_dead_process_leaves_is_waited_for(0, false);
        what_a_dead_process_leaves_is_waited_for(SHMS_ROLE_WRITER, false);
    }
}

static _Atomic int done;

static void *lock_and_unlock(void *name) {
    shms_segment seg;
    for (int i = 0; i < 3000; i++) {
        CHECK_EQ(SHMS_OK, shms_segment_open(&seg, name, 0, NULL));
        CHECK_EQ(SHMS_OK, shms_segment_lock(&seg, 0));
        shms_segment_close(&seg);
        CHECK_EQ(SHMS_OK, shms_segment_open(&seg, name, SHMS_ROLE_INSPECTOR, NULL));
        CHECK(!shms_segment_held(&seg, 0)); /* no child has it, whenever it was forked */
        shms_segment_close(&seg);
    }
    done = 1;
    return NULL;
}

static void children_forked_during_a_lock_call_do_not_hold_the_lock(void) {
    const char *name = store_name("moment");
    shms_segment writer;
    pthread_t thread;
    pid_t children[100];
    int n = 0;
    open_writer(&writer, name);
    CHECK(pthread_create(&thread, NULL, lock_and_unlock, (void *)name) == 0);
    while (!done) {
        if (n == 100)
            while (n)
                CHECK(kill(children[--n], SIGKILL) == 0 && reap(children[n]) == 1000 + SIGKILL);
        if ((children[n++] = fork_child()) == 0)
            for (;;)
                pause();
    }
    pthread_join(thread, NULL);
    while (n)
        CHECK(kill(children[--n], SIGKILL) == 0 && reap(children[n]) == 1000 + SIGKILL);
    shms_segment_unlink(&writer);
    shms_segment_close(&writer);
}

TEST(each_in_all_its_cases) {
    no_child_keeps_the_lock_of_a_dead_parent(false);
    if (!advice_ignored()) {
        no_child_keeps_the_lock_of_a_dead_parent(true);
        children_forked_during_a_lock_call_do_not_hold_the_lock();
    }
    store_names_left(); /* a parent that was killed removes nothing */
}
