/*
 * test_room.c - a put that waits for room: what wakes it and what does not, and what ends the wait.
 *
 * The library's calls to the kernel come through syscall() below, which can make each sleep long. Then a put that has not
 * been woken is late by seconds, and a busy machine does not look like it.
 */
#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <time.h>

#include "support.h"

enum { UNIT = 4096, OBJECTS = 4, SLOTS = 8, LATE = 2 };
enum { A, B };

static const char *name;
static shms_writer *writers[2];
static shms_reader *readers[2];
static uint8_t refs[SLOTS][SHMS_REF_SIZE];
static uint32_t kind;

/* ---- the kernel ---- */

static bool slow; /* a sleep takes 2 * LATE seconds */
static _Atomic int sleeps, wakes;
static _Atomic pid_t sleeper;
static long asked; /* how long the last sleep was to be, in nanoseconds */
static void (*before_sleep)(void);

long syscall(long number, ...) {
    static long (*real)(long, ...);
    va_list more;
    va_start(more, number);
    long a[6];
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(more, long);
    va_end(more);
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "syscall");
    struct timespec longer = {.tv_sec = 2 * LATE};
    if (number == SYS_futex && a[1] == FUTEX_WAKE)
        wakes++;
    if (number == SYS_futex && a[1] == FUTEX_WAIT) {
        if (before_sleep)
            before_sleep();
        asked = ((const struct timespec *)a[3])->tv_nsec;
        if (slow)
            a[3] = (long)&longer;
        sleeper = gettid();
        sleeps++;
    }
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* Returns once the thread that was the last to wait sleeps in the kernel. */
static void until_asleep(int nth) {
    char path[64], state = 0;
    while (sleeps < nth)
        sched_yield();
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", sleeper);
    while (state != 'S') {
        FILE *f = fopen(path, "r");
        CHECK(f && fscanf(f, "%*d %*s %c", &state) == 1);
        fclose(f);
    }
}

static double seconds(void) { return (double)shms_clock_ns(CLOCK_MONOTONIC) / 1e9; }

/* ---- the store: a full arena of A, and one of B ---- */

static void setup(uint32_t n_readers, uint32_t attached) {
    wakes = 0;
    shms_options o = {.capacity = OBJECTS * UNIT,
                      .n_readers = n_readers,
                      .max_objects = SLOTS,
                      .n_writers = 2,
                      .n_groups = n_readers};
    for (uint32_t r = 0; r < n_readers; r++)
        o.group_sizes[r] = 1;
    name = store_name("room");
    CHECK_EQ(SHMS_OK, shms_writer_create(&writers[A], name, &o));
    CHECK_EQ(SHMS_OK, shms_writer_join(&writers[B], name, B, NULL));
    for (uint32_t r = 0; r < attached; r++)
        CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[r], name, r, NULL));
    CHECK_EQ(1, kind = (uint32_t)shms_writer_kind(writers[A], "kind", 4));
}

/* A's objects k0 to k3, each with a lease. */
static void fill_up(void) {
    for (int i = 0; i < OBJECTS; i++)
        CHECK_EQ(SHMS_OK, put_marked(writers[A], key_of("k", (uint64_t)i), UNIT - 64, 1, refs[i]));
}

static void end_all(void) {
    before_sleep = NULL;
    slow = false;
    for (int r = 0; r < 2; r++) {
        shms_reader_free(readers[r]);
        readers[r] = NULL;
    }
    for (int i = 0; i < 2; i++)
        if (writers[i]) {
            CHECK_EQ(0, writers[i]->seg.writer->room_wanted);
            CHECK_EQ(0, writers[i]->room_waits);
            end_writer(writers[i]);
        }
}

/* ---- the put that waits ---- */

typedef struct waiter {
    pthread_t thread;
    shms_writer *w;
    const char *key;
    double patience, ended; /* seconds; the moment */
    uint32_t kind;
    bool leased, once; /* once: one call, whatever it says */
    int rc;
    shms_batch b;
} waiter;

static void *run(void *context) {
    waiter *t = context;
    t->b.until = shms_clock_ns(CLOCK_MONOTONIC) + (uint64_t)(t->patience * 1e9);
    do
        t->rc = shms_batch_begin(t->w, &t->b, t->key, (uint32_t)strlen(t->key), NULL, 0, NULL, 0, UNIT - 64, t->kind,
                                 t->leased);
    while (t->b.until && !t->once);
    t->ended = seconds();
    return NULL;
}

static void start(waiter *t) {
    int nth = sleeps + 1;
    t->w = t->w ? t->w : writers[A];
    t->key = t->key ? t->key : "new";
    t->patience = t->patience ? t->patience : 60;
    CHECK_EQ(0, pthread_create(&t->thread, NULL, run, t));
    until_asleep(nth);
}

static void join(waiter *t, int code, double from) {
    CHECK_EQ(0, pthread_join(t->thread, NULL));
    CHECK_EQ(code, t->rc);
    CHECK(t->ended - from < LATE);
    shms_batch_drop(t->w, &t->b);
}

/* ---- what wakes it ---- */

static shms_view *view;
static shms_batch other;

static void adopt(void) { /* B leases A's object k0, whose own lease ends */
    fill_up();
    CHECK_EQ(SHMS_OK, verb_hit(writers[B], "k0", 2, refs[SLOTS - 1]));
    CHECK_EQ(1, shms_writer_cancel(writers[A], refs[0]));
}

/* Before the wait. */
static void view_one(void) {
    fill_up();
    CHECK((view = view_of(readers[0], refs[0])));
}
static void read_one(void) {
    fill_up();
    CHECK_EQ(1, shms_reader_release(readers[0], refs[0]));
}
static void begin_other(void) {
    CHECK_EQ(SHMS_OK, shms_batch_begin(writers[A], &other, "k9", 2, NULL, 0, NULL, 0, OBJECTS * UNIT - 64, 0, false));
}
static void protect_one(void) {
    fill_up();
    CHECK_EQ(SHMS_OK, shms_batch_protect(writers[A], &other, (const uint8_t *)"\2\0\0\0k0", 6));
    CHECK_EQ(1, shms_reader_release(readers[0], refs[0]));
}
static void fill_the_quota(void) {
    CHECK_EQ(SHMS_OK, shms_writer_quota(writers[A], kind, UNIT));
    CHECK_EQ(SHMS_OK, shms_batch_put(writers[A], &other, "k0", 2, NULL, 0, NULL, 0, UNIT - 64, NULL, 0, kind, 0, 0));
    other.keep = 1;
}
static void lease_all_of_b(void) { /* every entry of A's is on an object of B's */
    CHECK_EQ(SHMS_OK, put_marked(writers[B], "b", 1, 1, NULL));
    for (uint32_t i = 0; i < writers[A]->leases.n_entries; i++)
        CHECK_EQ(SHMS_OK, verb_hit(writers[A], "b", 1, refs[i ? 1 : 0]));
}

/* What lets go. */
static void unpin(void) { shms_view_release(view); }
static void acknowledge(void) { CHECK_EQ(1, shms_reader_release(readers[0], refs[0])); }
static void read_for_b(void) { CHECK_EQ(1, shms_reader_release(readers[0], refs[SLOTS - 1])); }
static void close_reader(void) { CHECK_EQ(SHMS_OK, shms_reader_close(readers[0])); }
static void cancel(void) { CHECK_EQ(1, shms_writer_cancel(writers[A], refs[0])); }
static void cancel_of_b(void) { CHECK_EQ(1, shms_writer_cancel(writers[B], refs[SLOTS - 1])); }
static void cancel_all(void) { CHECK_EQ(OBJECTS, shms_writer_cancel_all(writers[A])); }
static void retire(void) { CHECK_EQ(SHMS_OK, shms_writer_retire(writers[A], 0)); }
static void retire_by_b(void) { CHECK_EQ(SHMS_OK, shms_writer_retire(writers[B], 0)); }
static void assign(void) { CHECK_EQ(1, shms_writer_assign_group(writers[A], refs[0], 1)); }
static void undo_other(void) { shms_batch_undo(writers[A], &other); }
static void commit_other(void) { /* what is committed and not leased may go */
    CHECK_EQ(SHMS_OK, shms_batch_commit(writers[A], &other, 0, 0));
    other.keep = 1;
}
static void raise_quota(void) { CHECK_EQ(SHMS_OK, shms_writer_quota(writers[A], kind, 2 * UNIT)); }

static waiter usual = {.leased = true};

TEST(whatever_lets_go_of_something_wakes_the_put) {
    static const struct {
        void (*before)(void), (*lets_go)(void);
        uint32_t n_readers, attached, of_kind;
    } cases[] = {
        {view_one, unpin, 1, 1, 0},
        {fill_up, acknowledge, 1, 1, 0},
        {fill_up, close_reader, 1, 1, 0},
        {fill_up, cancel, 1, 1, 0},
        {fill_up, cancel_all, 1, 1, 0},
        {fill_up, retire, 1, 0, 0},
        {read_one, assign, 2, 1, 0},
        {begin_other, undo_other, 1, 1, 0},
        {begin_other, commit_other, 1, 1, 0},
        {protect_one, undo_other, 1, 1, 0},
        {fill_the_quota, raise_quota, 1, 1, 1},
        {adopt, cancel_of_b, 1, 1, 0},
        {adopt, read_for_b, 1, 1, 0},
        {adopt, retire_by_b, 1, 0, 0},
        {lease_all_of_b, acknowledge, 1, 1, 0},
        {lease_all_of_b, cancel, 1, 1, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        setup(cases[i].n_readers, cases[i].attached);
        cases[i].before();
        waiter t = {.leased = !cases[i].of_kind, .kind = cases[i].of_kind ? kind : 0};
        slow = true;
        start(&t);
        CHECK_EQ(1, writers[A]->seg.writer->room_wanted & 1);
        double from = seconds();
        cases[i].lets_go();
        join(&t, SHMS_OK, from);
        shms_batch_drop(writers[A], &other);
        other = (shms_batch){0};
        end_all();
    }
}

/* ---- between the look and the sleep ---- */

static void cancel_once(void) {
    before_sleep = NULL;
    cancel();
}

static void retire_once(void) {
    before_sleep = NULL;
    retire();
}

static void acknowledge_once(void) {
    before_sleep = NULL;
    acknowledge();
}

/* Puts what has to wait, in this thread. */
static double waited(int calls) {
    waiter t = {.w = writers[A], .key = "new", .patience = 60, .leased = true, .once = true};
    double from = seconds();
    for (int i = 0; i < calls; i++)
        run(&t);
    CHECK_EQ(SHMS_OK, t.rc);
    shms_batch_drop(t.w, &t.b);
    return t.ended - from;
}

TEST(what_the_writer_ends_before_the_sleep_is_not_missed) {
    for (int i = 0; i < 2; i++) {
        setup(1, 0);
        fill_up();
        slow = true;
        before_sleep = i ? retire_once : cancel_once;
        CHECK(waited(1) < LATE);
        end_all();
    }
}

TEST(a_wake_up_of_a_reader_before_the_sleep_costs_one_sleep) {
    setup(1, 1);
    fill_up();
    before_sleep = acknowledge_once;
    int before = sleeps;
    CHECK(waited(1) < LATE);
    CHECK_EQ(before + 1, sleeps);
    end_all();
}

TEST(a_writer_that_was_stopped_with_a_pin_does_not_keep_the_put_busy) {
    setup(1, 1);
    CHECK_EQ(SHMS_OK, put_marked(writers[A], "all", OBJECTS * UNIT - 64, 1, NULL));
    shms_set(&writers[B]->seg.writer->adopting, 1);
    waiter t = {.w = writers[A], .key = "new", .patience = 60, .once = true};
    double from = seconds();
    run(&t);
    CHECK_EQ(SHMS_EFULL, t.rc);
    CHECK(t.ended - from > 0.045); /* the sleep was a whole one */
    shms_batch_drop(t.w, &t.b);
    shms_set(&writers[B]->seg.writer->adopting, 0);
    end_all();
}

static void release_first(const char *label) {
    if (strcmp(label, "F1"))
        return;
    shms_step_hook = NULL;
    acknowledge();
}

TEST(a_release_between_the_refusal_and_the_announcement_is_seen_without_a_sleep) {
    setup(1, 1);
    fill_up();
    int before = sleeps;
    shms_step_hook = release_first;
    waited(1);
    CHECK_EQ(before, sleeps);
    end_all();
}

/* ---- what wakes nobody ---- */

static void hit_often(void) {
    for (int i = 0; i < 20; i++)
        CHECK_EQ(SHMS_OK, verb_hit(writers[A], "k1", 2, refs[i % 2 + 4]));
    CHECK_EQ(1, shms_writer_touch(writers[A], "k1", 2));
    CHECK_EQ(SHMS_ENOTFOUND, verb_hit(writers[A], "none", 4, NULL));
}

TEST(nobody_is_woken_who_does_not_wait_and_hits_wake_nobody) {
    setup(1, 1);
    adopt();
    CHECK_EQ(1, shms_reader_release(readers[0], refs[2]));
    CHECK((view = view_of(readers[0], refs[1])));
    unpin();
    cancel_of_b();
    retire_by_b();
    hit_often();
    CHECK_EQ(0, wakes);
    for (int i = 0; i < 2; i++) /* in place of k0 and k2 */
        CHECK_EQ(SHMS_OK, put_marked(writers[A], key_of("new", (uint64_t)i), UNIT - 64, 1, refs[0]));
    slow = true;
    waiter t = usual;
    start(&t);
    hit_often();
    CHECK_EQ(0, wakes);
    double from = seconds();
    cancel();
    join(&t, SHMS_OK, from);
    CHECK(wakes > 0);
    end_all();
}

static void read_again(void) { shms_view_release(view_of(readers[0], refs[0])); } /* which makes no room */

static uint64_t looks;
static void count_looks(const char *label) {
    if (strcmp(label, "F1"))
        return;
    looks++;
    read_again();
}

static _Atomic bool busy;
static void *read_on(void *none) {
    while (busy)
        read_again();
    return none;
}

TEST(a_put_that_waits_beside_a_busy_reader_looks_twice_a_millisecond_at_most) {
    pthread_t reader;
    setup(1, 1);
    fill_up();
    view = view_of(readers[0], refs[0]);
    waiter t = {.w = writers[A], .key = "new", .patience = 0.2};
    double from = seconds();
    busy = true;
    shms_step_hook = count_looks;
    CHECK_EQ(0, pthread_create(&reader, NULL, read_on, NULL));
    run(&t);
    busy = false;
    pthread_join(reader, NULL);
    shms_step_hook = NULL;
    CHECK_EQ(SHMS_EFULL, t.rc);
    CHECK(looks > 2 && (double)looks < 2000 * (t.ended - from) + 4);
    shms_batch_drop(t.w, &t.b);
    shms_view_release(view);
    end_all();
}

/* ---- the end of a wait ---- */

static uint64_t refusals(void) { return shms_get(&writers[A]->seg.writer->counters[SHMS_C(refusals)]); }

TEST(a_wait_that_is_over_is_one_refusal_and_a_put_that_got_room_is_none) {
    setup(1, 1);
    fill_up();
    waiter t = {.patience = 0.12};
    double from = seconds();
    start(&t);
    join(&t, SHMS_EFULL, from);
    CHECK(t.ended - from >= 0.12);
    CHECK(asked < 45000000); /* the rest */
    CHECK_EQ(OBJECTS * UNIT, t.b.refusal.held[0]);
    CHECK_EQ(1, refusals());
    waiter u = usual;
    start(&u);
    acknowledge();
    join(&u, SHMS_OK, seconds());
    CHECK_EQ(1, refusals());
    end_all();
}

static void *nothing(int number) {
    (void)number;
    return NULL;
}

TEST(a_signal_ends_the_call_but_not_the_wait) {
    struct sigaction quiet = {.sa_handler = (void (*)(int))(void *)nothing};
    CHECK_EQ(0, sigaction(SIGUSR1, &quiet, NULL));
    setup(1, 1);
    fill_up();
    slow = true;
    waiter t = {.once = true};
    start(&t);
    double from = seconds();
    CHECK_EQ(0, pthread_kill(t.thread, SIGUSR1));
    join(&t, SHMS_EFULL, from);
    CHECK(t.b.until);
    CHECK_EQ(0, refusals());
    end_all();
}

TEST(all_that_wait_look_when_one_is_let_in) {
    setup(1, 1);
    fill_up();
    slow = true;
    waiter t = usual, u = {.key = "newer", .leased = true};
    start(&t);
    start(&u);
    double from = seconds();
    for (int i = 0; i < 2; i++)
        CHECK_EQ(1, shms_reader_release(readers[0], refs[i]));
    join(&t, SHMS_OK, from);
    join(&u, SHMS_OK, from);
    end_all();
}

TEST(a_key_that_another_thread_stores_meanwhile_ends_the_wait) {
    setup(1, 1);
    fill_up();
    slow = true;
    waiter t = usual;
    start(&t);
    double from = seconds();
    for (int i = 0; i < 2; i++) /* one for each, if the other thread is as fast */
        CHECK_EQ(1, shms_writer_cancel(writers[A], refs[i]));
    int rc = put_marked(writers[A], "new", 1, 1, NULL);
    CHECK(rc == SHMS_OK || rc == SHMS_EEXISTS);
    join(&t, rc ? SHMS_OK : SHMS_EEXISTS, from);
    end_all();
}

static void close_and_take_over(void) {
    before_sleep = NULL;
    CHECK_EQ(SHMS_OK, shms_writer_close(writers[A], false));
    CHECK_EQ(SHMS_OK, shms_writer_join(&writers[B], name, A, NULL));
    CHECK_EQ(0, writers[B]->seg.writer->room_wanted);
    shms_set(&writers[B]->seg.writer->room_wanted, 7);
}

static void close_writer(void) { CHECK_EQ(SHMS_OK, shms_writer_close(writers[A], false)); }

TEST(a_close_ends_the_wait) {
    setup(1, 1);
    begin_other();
    slow = true;
    waiter t = {.once = true};
    start(&t);
    double from = seconds();
    close_writer();
    join(&t, SHMS_ECLOSED, from);
    undo_other(); /* the last ticket, which releases the lock */
    CHECK_EQ(0, writers[A]->seg.writer->room_wanted);
    shms_writer_free(writers[A]);
    writers[A] = NULL;
    end_all();
}

TEST(a_closed_writer_leaves_the_words_of_its_successor_alone) {
    setup(1, 1);
    fill_up();
    end_writer(writers[B]);
    slow = true;
    before_sleep = close_and_take_over;
    waiter t = {.w = writers[A], .key = "new", .patience = 60, .once = true};
    run(&t);
    CHECK_EQ(SHMS_ECLOSED, t.rc);
    shms_batch_drop(t.w, &t.b);
    shms_writer_free(writers[A]);
    writers[A] = NULL;
    CHECK_EQ(7, writers[B]->seg.writer->room_wanted);
    shms_set(&writers[B]->seg.writer->room_wanted, 0);
    end_all();
}

TEST(a_successor_does_not_inherit_a_wait) {
    setup(1, 1);
    fill_up();
    shms_set(&writers[A]->seg.writer->room_wanted, 1); /* as it was at the death */
    shms_segment_unlock(&writers[A]->seg, false);
    shms_writer *next;
    CHECK_EQ(SHMS_OK, shms_writer_join(&next, name, A, NULL));
    CHECK_EQ(0, next->seg.writer->room_wanted);
    shms_writer_free(next);
    shms_writer_free(writers[A]);
    writers[A] = NULL;
    end_all();
}
