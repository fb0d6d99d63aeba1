/*
 * test_room.c - a put that waits for room: what wakes it, who looks for it and how often, and what ends the wait.
 *
 * The waits of the library come through pthread_cond_timedwait() below, which can make each last for seconds. Then a put
 * that nobody has woken is late, and a busy machine does not look like it.
 */
#include <pthread.h>
#include <time.h>

#include "support.h"

enum { UNIT = 4096, OBJECTS = 4, SLOTS = 8, LATE = 2, MS = 1000000, LONG = 10 * MS };
enum { A, B };

static const char *name;
static shms_writer *writers[2];
static shms_reader *readers[2];
static uint8_t refs[SLOTS][SHMS_REF_SIZE];
static uint32_t kind;

/* ---- the clock ---- */

static int64_t slow_from; /* a sleep of so many nanoseconds or more takes 2 * LATE seconds; 0: none */
static int64_t asked[4096]; /* how long each sleep was to be */
static _Atomic int sleeps, sleepers, looking, most_looking;
static _Thread_local bool slept;
static void (*once)(void), (*each_time)(void); /* before a sleep */

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
    struct timespec then = *until;
    int64_t left = then.tv_sec * INT64_C(1000000000) + then.tv_nsec - (int64_t)shms_clock_ns(CLOCK_MONOTONIC);
    void (*now)(void) = once ? once : each_time;
    once = NULL;
    if (sleeps == 0)
        writers[A]->released = false; /* what the test has made before */
    asked[sleeps++ % 4096] = left;
    sleepers += !slept;
    slept = true;
    if (now)
        now();
    looking += left < LONG;
    most_looking = looking > most_looking ? looking : most_looking;
    then.tv_sec += slow_from && left >= slow_from ? 2 * LATE : 0;
    int rc = pthread_cond_clockwait(cond, mutex, CLOCK_MONOTONIC, &then);
    looking -= left < LONG;
    return rc;
}

static double seconds(void) { return (double)shms_clock_ns(CLOCK_MONOTONIC) / 1e9; }

/* ---- the store: a full arena of A, and one of B ---- */

static void setup(uint32_t n_readers, uint32_t attached) {
    sleeps = most_looking = 0;
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

/* ---- the put that waits ---- */

typedef struct waiter {
    pthread_t thread;
    double patience, ended; /* seconds; the moment */
    const char *key;
    uint32_t kind;
    bool leased, calls_once;
    int rc, calls;
    shms_batch b;
} waiter;

static waiter *started[4]; /* in other threads */
static int n_started;

static void end_all(void) {
    once = each_time = NULL;
    slow_from = 0;
    while (n_started)
        shms_batch_drop(writers[A], &started[--n_started]->b);
    for (int r = 0; r < 2; r++) {
        shms_reader_free(readers[r]);
        readers[r] = NULL;
    }
    for (int i = 0; i < 2; i++)
        if (writers[i]) {
            CHECK(!writers[i]->room_waits && !writers[i]->room_looks);
            end_writer(writers[i]);
        }
}

static void *run(void *context) {
    waiter *t = context;
    t->key = t->key ? t->key : "new";
    shms_put options = {
        .kind = t->kind, .unleased = !t->leased, .timeout = (uint64_t)((t->patience ? t->patience : 60) * 1e9)};
    do {
        t->rc = shms_batch_put_lent(writers[A], &t->b, &options, t->key, (uint32_t)strlen(t->key), NULL, 0, NULL, 0,
                                    UNIT - 64, NULL, 0);
        t->calls++;
    } while (t->rc == SHMS_AGAIN && !t->calls_once);
    t->ended = seconds();
    return NULL;
}

/* Starts it in another thread. Returns when it sleeps. */
static void start(waiter *t) {
    int before = sleepers;
    started[n_started++] = t;
    CHECK_EQ(0, pthread_create(&t->thread, NULL, run, t));
    while (sleepers == before)
        sched_yield();
    pthread_mutex_lock(&writers[A]->mutex); /* which it has until it sleeps */
    pthread_mutex_unlock(&writers[A]->mutex);
}

static void join(waiter *t, int code, double from) {
    CHECK_EQ(0, pthread_join(t->thread, NULL));
    CHECK_EQ(code, t->rc);
    CHECK(t->ended - from < LATE);
}

/* In this thread. Returns how long it took. */
static double wait_here(waiter t, int code) {
    double from = seconds();
    run(&t);
    CHECK_EQ(code, t.rc);
    shms_batch_drop(writers[A], &t.b);
    return t.ended - from;
}

/* ---- before the wait ---- */

static shms_view *view;
static shms_batch other;

/* A's objects k0 to k3, each with a lease. */
static void fill_up(void) {
    for (int i = 0; i < OBJECTS; i++)
        CHECK_EQ(SHMS_OK, put_marked(writers[A], key_of("k", (uint64_t)i), UNIT - 64, 1, refs[i]));
}
static void view_one(void) {
    fill_up();
    CHECK((view = view_of(readers[0], refs[0])));
}
static void read_one(void) {
    fill_up();
    CHECK_EQ(1, shms_reader_release(readers[0], refs[0]));
}
static void adopt(void) { /* B leases A's object k0, whose own lease ends */
    fill_up();
    CHECK_EQ(SHMS_OK, verb_hit(writers[B], "k0", 2, refs[SLOTS - 1]));
    CHECK_EQ(1, shms_writer_cancel(writers[A], refs[0]));
}
static void begin_other(void) {
    shms_put all = {.key = "k9", .key_len = 2, .payload_size = OBJECTS * UNIT - 64, .unleased = 1};
    CHECK_EQ(SHMS_OK, shms_batch_begin(writers[A], &other, &all));
}
static void protect_one(void) {
    fill_up();
    CHECK_EQ(SHMS_OK, shms_batch_protect(writers[A], &other, (const uint8_t *)"\2\0\0\0k0", 6));
    CHECK_EQ(1, shms_reader_release(readers[0], refs[0]));
}
static void fill_the_quota(void) {
    CHECK_EQ(SHMS_OK, shms_writer_quota(writers[A], kind, UNIT));
    shms_put one = {.key = "k0", .key_len = 2, .payload_size = UNIT - 64, .kind = kind};
    CHECK_EQ(SHMS_OK, shms_batch_put(writers[A], &other, &one));
    other.keep = 1;
}
static void lease_all_of_b(void) { /* every entry of A's is on an object of B's */
    CHECK_EQ(SHMS_OK, put_marked(writers[B], "b", 1, 1, NULL));
    for (uint32_t i = 0; i < writers[A]->leases.n_entries; i++)
        CHECK_EQ(SHMS_OK, verb_hit(writers[A], "b", 1, refs[i ? 1 : 0]));
}

/* ---- what lets go ---- */

static void unpin(void) { shms_view_release(view); }
static void acknowledge(void) { CHECK_EQ(1, shms_reader_release(readers[0], refs[0])); }
static void read_for_b(void) { CHECK_EQ(1, shms_reader_release(readers[0], refs[SLOTS - 1])); }
static void close_reader(void) { CHECK_EQ(SHMS_OK, shms_reader_close(readers[0])); }
static void die(void) { rank_dies(name, 0); }
static void cancel(void) { CHECK_EQ(1, shms_writer_cancel(writers[A], refs[0])); }
static void cancel_of_b(void) { CHECK_EQ(1, shms_writer_cancel(writers[B], refs[SLOTS - 1])); }
static void cancel_all(void) { CHECK_EQ(OBJECTS, shms_writer_cancel_all(writers[A])); }
static void retire(void) { CHECK_EQ(SHMS_OK, shms_writer_retire(writers[A], 0)); }
static void retire_by_b(void) { CHECK_EQ(SHMS_OK, shms_writer_retire(writers[B], 0)); }
static void assign(void) { CHECK_EQ(1, shms_writer_assign_group(writers[A], refs[0], 1)); }
static void undo_other(void) { shms_batch_undo(writers[A], &other); }
static void commit_other(void) { /* what is committed and not leased may go */
    CHECK_EQ(SHMS_OK, shms_batch_commit(writers[A], &other));
    other.keep = 1;
}
static void raise_quota(void) { CHECK_EQ(SHMS_OK, shms_writer_quota(writers[A], kind, 2 * UNIT)); }

typedef struct release {
    void (*before)(void), (*lets_go)(void);
    uint32_t n_readers, attached, of_kind;
} release;

TEST(whatever_this_process_lets_go_of_wakes_the_put) {
    static const release cases[] = {{fill_up, cancel, 1, 1, 0},         {fill_up, cancel_all, 1, 1, 0},
                                    {fill_up, retire, 1, 0, 0},         {read_one, assign, 2, 1, 0},
                                    {begin_other, undo_other, 1, 1, 0}, {begin_other, commit_other, 1, 1, 0},
                                    {protect_one, undo_other, 1, 1, 0}, {fill_the_quota, raise_quota, 1, 1, 1},
                                    {lease_all_of_b, cancel, 1, 1, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        setup(cases[i].n_readers, cases[i].attached);
        cases[i].before();
        waiter t = {.leased = !cases[i].of_kind, .kind = cases[i].of_kind ? kind : 0};
        slow_from = 1;
        start(&t);
        double from = seconds();
        cases[i].lets_go();
        join(&t, SHMS_OK, from);
        shms_batch_drop(writers[A], &other);
        other = (shms_batch){0};
        end_all();
    }
}

TEST(what_others_let_go_of_is_found_by_the_next_look) {
    static const release cases[] = {{view_one, unpin, 1, 1, 0},       {fill_up, acknowledge, 1, 1, 0},
                                    {fill_up, close_reader, 1, 1, 0}, {fill_up, die, 1, 0, 0},
                                    {adopt, cancel_of_b, 1, 1, 0},    {adopt, read_for_b, 1, 1, 0},
                                    {adopt, retire_by_b, 1, 0, 0},    {lease_all_of_b, acknowledge, 1, 1, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        setup(cases[i].n_readers, cases[i].attached);
        cases[i].before();
        once = cases[i].lets_go;
        wait_here((waiter){.leased = true}, SHMS_OK);
        CHECK_EQ(1, sleeps);
        end_all();
    }
}

/* ---- who looks, and how often ---- */

static void read_again(void) { shms_view_release(view_of(readers[0], refs[0])); } /* which makes no room */

TEST(a_put_looks_every_millisecond_then_every_five_whatever_others_do) {
    void (*const theirs[])(void) = {NULL, read_again, NULL};
    for (int i = 0; i < 3; i++) {
        setup(1, 1);
        view_one();
        once = read_again;
        each_time = theirs[i];
        shms_set(&writers[B]->seg.writer->adopting, i == 2); /* it was stopped with a pin, which each look finds */
        waiter t = {.patience = 0.3};
        double from = seconds();
        run(&t);
        double took = t.ended - from;
        CHECK_EQ(SHMS_EFULL, t.rc);
        CHECK(i || t.calls <= took / 0.05 + 4); /* without a release, no look is a try */
        shms_batch_drop(writers[A], &t.b);
        CHECK(sleeps > 3 && sleeps <= 50 + 4 + (took - 0.05) * 200);
        int64_t longest = 0;
        for (int s = 0; s < sleeps; s++)
            longest = asked[s] > longest ? asked[s] : longest;
        CHECK(asked[0] <= MS && longest > MS && longest <= 5 * MS);
        shms_set(&writers[B]->seg.writer->adopting, 0);
        unpin();
        end_all();
    }
}

static void acknowledge_three(void) {
    for (int i = 0; i < 3; i++)
        CHECK_EQ(1, shms_reader_release(readers[0], refs[i]));
}

TEST(one_thread_looks_for_all_and_another_one_when_it_has_left) {
    setup(1, 1);
    fill_up();
    slow_from = LONG;
    waiter first = {.leased = true, .calls_once = true}, t = {.leased = true}, u = {.key = "newer", .leased = true},
           v = {.key = "newest", .leased = true};
    start(&first);
    start(&t);
    start(&u);
    start(&v);
    join(&first, SHMS_AGAIN, seconds());
    double from = seconds();
    pthread_mutex_lock(&writers[A]->mutex);
    once = acknowledge_three; /* before the next look */
    pthread_mutex_unlock(&writers[A]->mutex);
    join(&t, SHMS_OK, from);
    join(&u, SHMS_OK, from);
    join(&v, SHMS_OK, from);
    CHECK_EQ(1, most_looking);
    end_all();
}

static int probes;
static void count_probes(const char *label) { probes += strcmp(label, "W1c") == 0; }

TEST(a_put_that_is_tried_again_asks_no_rank_while_another_thread_looks) {
    setup(1, 1);
    fill_up();
    slow_from = 1;
    waiter looks = {.leased = true};
    start(&looks);
    slow_from = 0;
    shms_step_hook = count_probes;
    wait_here((waiter){.key = "newer", .patience = 0.12}, SHMS_EFULL);
    shms_step_hook = NULL;
    CHECK_EQ(1, probes); /* by the first try */
    cancel();
    join(&looks, SHMS_OK, seconds());
    end_all();
}

static void acknowledge_and_search(void) {
    acknowledge();
    CHECK(shms_poll(writers[A])); /* as the search of a larger put, which keeps nothing for others */
}

TEST(what_the_search_of_another_put_has_found_is_told_to_those_that_wait) {
    setup(1, 1);
    fill_up();
    once = acknowledge_and_search;
    wait_here((waiter){.leased = true}, SHMS_OK);
    CHECK_EQ(1, sleeps);
    end_all();
}

TEST(hits_wake_nobody) {
    setup(1, 1);
    fill_up();
    slow_from = 1;
    waiter t = {.leased = true};
    start(&t);
    for (int i = 0; i < 20; i++)
        CHECK_EQ(SHMS_OK, verb_hit(writers[A], "k1", 2, refs[i % 2 + 4]));
    CHECK_EQ(1, shms_writer_touch(writers[A], "k1", 2));
    CHECK_EQ(SHMS_ENOTFOUND, verb_hit(writers[A], "none", 4, NULL));
    cancel();
    join(&t, SHMS_OK, seconds());
    CHECK_EQ(1, sleeps);
    end_all();
}

/* ---- the end of a wait ---- */

TEST(a_wait_that_is_over_is_one_refusal_and_a_put_that_got_room_is_none) {
    const shms_word *refusals = NULL;
    setup(1, 1);
    fill_up();
    refusals = &writers[A]->seg.writer->counters[SHMS_C(refusals)];
    waiter t = {.patience = 0.12};
    double from = seconds();
    run(&t);
    CHECK(t.ended - from >= 0.12 && t.ended - from < LATE);
    CHECK_EQ(SHMS_EFULL, t.rc);
    CHECK_EQ(SHMS_OK, shms_writer_holders(writers[A], &t.b.refusal));
    CHECK_EQ(OBJECTS * UNIT, t.b.refusal.held[0]);
    CHECK_EQ(1, shms_get(refusals));
    shms_batch_drop(writers[A], &t.b);
    once = acknowledge;
    wait_here((waiter){.leased = true}, SHMS_OK);
    CHECK_EQ(1, shms_get(refusals));
    end_all();
}

TEST(a_key_that_another_thread_stores_meanwhile_ends_the_wait) {
    setup(1, 1);
    fill_up();
    slow_from = 1;
    waiter t = {.leased = true};
    start(&t);
    double from = seconds();
    for (int i = 0; i < 2; i++) /* one for each, if the other thread is as fast */
        CHECK_EQ(1, shms_writer_cancel(writers[A], refs[i]));
    int rc = put_marked(writers[A], "new", 1, 1, NULL);
    CHECK(rc == SHMS_OK || rc == SHMS_EEXISTS);
    join(&t, rc ? SHMS_OK : SHMS_EEXISTS, from);
    end_all();
}

TEST(a_close_ends_the_wait) {
    setup(1, 1);
    begin_other();
    slow_from = 1;
    waiter t = {0};
    start(&t);
    double from = seconds();
    CHECK_EQ(SHMS_OK, shms_writer_close(writers[A], false));
    join(&t, SHMS_ECLOSED, from);
    undo_other(); /* the last ticket, which releases the lock */
    n_started = 0;
    shms_batch_drop(writers[A], &t.b);
    shms_writer_free(writers[A]);
    writers[A] = NULL;
    end_all();
}
