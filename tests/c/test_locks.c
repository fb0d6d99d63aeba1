/*
 * test_locks.c - a process's lock: foreign closes do not end it, and no child keeps it.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>

#include "support.h"

/* qemu-user ignores the advice. A child then has the page until its handler runs; a child without handlers keeps it. */
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
