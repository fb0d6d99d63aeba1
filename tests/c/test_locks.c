/*
 * test_locks.c - a process's lock: foreign closes do not end it, and no child keeps it.
 */
#include <fcntl.h>
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

/* Whoever may only read may take them, on all bytes. */
TEST(a_read_lock_is_no_sign_of_life_and_no_claim) {
    const char *name = store_name("read");
    shms_segment seg;
    open_writer(&seg, name);
    shms_segment_close(&seg);
    int fd = shm_open(name, O_RDONLY, 0);
    CHECK_EQ(0, fcntl(fd, F_OFD_SETLK, &(struct flock){.l_type = F_RDLCK, .l_whence = SEEK_SET}));
    CHECK_EQ(SHMS_OK, shms_segment_open(&seg, name, SHMS_ROLE_INSPECTOR, NULL));
    CHECK(!shms_segment_held(&seg, 0) && !shms_segment_held(&seg, SHMS_ROLE_WRITER) && !shms_segment_written(&seg));
    CHECK(!shms_claimed(&seg, "k", 1));
    close(seg.fd); /* as foreign code may */
    CHECK(!shms_claimed(&seg, "k", 1));
    shms_segment_unlink(&seg);
    CHECK(!shms_claimed(&seg, "k", 1));
    shms_segment_close(&seg);
    close(fd);
}

/* Foreign code has closed the descriptor, and may have opened another file under its number. */
TEST(a_call_leaves_a_file_alone_that_has_the_number_of_its_descriptor) {
    static const shms_options two = {.capacity = 4096, .n_readers = 1, .n_writers = 2};
    for (int reused = 0; reused < 2; reused++) {
        const char *name = store_name("closed");
        struct stat before, after;
        shms_segment seg;
        CHECK_EQ(SHMS_OK, shms_segment_create(&seg, name, &two));
        int another = memfd_create("another", 0), fd = seg.fd;
        CHECK(another >= 0 && fstat(another, &before) == 0);
        close(fd);
        CHECK(!reused || dup2(another, fd) == fd);
        CHECK_EQ(SHMS_OK, shms_segment_publish(&seg));
        CHECK(fstat(another, &after) == 0 && before.st_size == after.st_size);
        CHECK_EQ(SHMS_EWRITERACTIVE, shms_segment_take(&seg, 0, 0));
        shms_segment_unlock(&seg, 1);
        CHECK(!shms_segment_named(&seg));
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

static pid_t holder;
static const char *held_store;

static void end_holder(const char *label) {
    if (strcmp(label, "lock") == 0 && holder) {
        CHECK(kill(holder, SIGKILL) == 0 && reap(holder) == 1000 + SIGKILL);
        holder = 0;
    }
}
static int take(int role, bool at_once) {
    shms_expected e = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID, .at_once = at_once};
    shms_writer *w;
    shms_reader *r;
    int rc = role < 0 ? shms_writer_recover(&w, held_store, &e) : shms_reader_attach(&r, held_store, 0, &e);
    if (rc == SHMS_OK) {
        if (role < 0)
            shms_writer_free(w);
        else
            shms_reader_free(r);
    }
    return rc;
}

/* Whatever the state of the process that has it. */
TEST(a_lock_that_is_taken_is_tried_again_for_a_hundred_milliseconds) {
    for (int role = SHMS_ROLE_WRITER; role <= 0; role++) {
        shms_segment seg;
        int taken[2], refused = role < 0 ? SHMS_EWRITERACTIVE : SHMS_ERANKINUSE;
        char byte;
        held_store = store_name("held");
        shms_writer *w;
        CHECK_EQ(SHMS_OK, shms_writer_create(&w, held_store, &(shms_options){.capacity = 4096, .n_readers = 1}));
        shms_writer_free(w);
        CHECK(pipe(taken) == 0);
        if ((holder = fork_child()) == 0) {
            CHECK_EQ(SHMS_OK, shms_segment_open(&seg, held_store, role, NULL));
            CHECK_EQ(SHMS_OK, shms_segment_lock(&seg, role));
            CHECK(write(taken[1], "x", 1) == 1);
            for (;;)
                pause();
        }
        CHECK(read(taken[0], &byte, 1) == 1);
        uint64_t before = shms_clock_ns(CLOCK_MONOTONIC);
        CHECK_EQ(refused, take(role, false));
        CHECK(shms_clock_ns(CLOCK_MONOTONIC) - before >= 100000000);
        CHECK_EQ(refused, take(role, true));
        shms_step_hook = end_holder;
        CHECK_EQ(SHMS_OK, take(role, false));
        shms_step_hook = NULL;
        close(taken[0]), close(taken[1]);
        CHECK_EQ(0, shm_unlink(held_store));
    }
}

static int name_holder;

static void end_name_holder(const char *label) {
    if (strcmp(label, "lock") == 0 && name_holder) {
        close(name_holder);
        name_holder = 0;
    }
}

/* The kernel takes the two pages of a process that was killed one after the other. */
TEST(a_name_that_a_killed_writer_still_has_is_tried_again) {
    shms_writer *w;
    held_store = store_name("name");
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, held_store, &(shms_options){.capacity = 4096, .n_readers = 1}));
    shms_writer_free(w);
    name_holder = shm_open(held_store, O_RDWR, 0);
    struct flock fl = {.l_type = F_WRLCK, .l_start = SHMS_OWNER + 1 + SHMS_MAX_READERS, .l_len = 1};
    CHECK(name_holder > 0 && fcntl(name_holder, F_OFD_SETLK, &fl) == 0);
    CHECK_EQ(SHMS_EWRITERACTIVE, take(SHMS_ROLE_WRITER, false));
    shms_step_hook = end_name_holder;
    CHECK_EQ(SHMS_OK, take(SHMS_ROLE_WRITER, false));
    shms_step_hook = NULL;
    CHECK_EQ(0, shm_unlink(held_store));
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
