/*
 * test_room.c - a put that waits for room: what wakes it, how often it polls, and what ends the wait.
 *
 * All of it is one thread. Its sleeps come to pthread_cond_timedwait() below, which does there what others do meanwhile,
 * and lets the time pass.
 */
#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>

#include "support.h"

enum { UNIT = 4096, OBJECTS = 4, SLOTS = 8, MS = 1000000 };
enum { A, B };

static const char *name;
static shms_writer *writers[2];
static shms_reader *readers[2];
static uint8_t refs[SLOTS][SHMS_REF_SIZE];
static uint32_t kind;

/* ---- the clock ---- */

static uint64_t now;
static int64_t asked[200]; /* how long each sleep was to be */
static int sleeps, broadcasts, signals;
static void (*once)(void), (*each_time)(void); /* in a sleep */

int clock_gettime(clockid_t clock, struct timespec *out) {
    if (clock != CLOCK_MONOTONIC)
        return (int)syscall(SYS_clock_gettime, clock, out);
    *out = (struct timespec){(time_t)(now / 1000000000), (long)(now % 1000000000)};
    return 0;
}

int pthread_cond_broadcast(pthread_cond_t *cond) { return broadcasts += cond == &writers[A]->room, 0; }
int pthread_cond_signal(pthread_cond_t *cond) { return signals += cond == &writers[A]->room, 0; }
int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *until) {
    uint64_t end = (uint64_t)until->tv_sec * 1000000000 + (uint64_t)until->tv_nsec;
    void (*others)(void) = once ? once : each_time;
    int before = broadcasts;
    if (sleeps == 0)
        writers[A]->released = false; /* what the test has made before */
    CHECK(cond == &writers[A]->room && writers[A]->room_waits && writers[A]->room_looks && sleeps < 200);
    asked[sleeps++] = (int64_t)(end - now);
    once = NULL;
    CHECK_EQ(0, pthread_mutex_unlock(mutex));
    if (others)
        others();
    CHECK_EQ(0, pthread_mutex_lock(mutex));
    if (broadcasts > before)
        return 0;
    now = end;
    return ETIMEDOUT;
}

/* ---- the store: a full arena of A, and one of B ---- */

static shms_batch waits, other;

static void setup(uint32_t n_readers, uint32_t attached) {
    shms_options o = {.capacity = OBJECTS * UNIT,
                      .n_readers = n_readers,
                      .max_objects = SLOTS,
                      .n_writers = 2,
                      .n_groups = n_readers,
                      .group_sizes = {1, n_readers == 2}};
    name = store_name("room");
    CHECK_EQ(SHMS_OK, shms_writer_create(&writers[A], name, &o));
    CHECK_EQ(SHMS_OK, shms_writer_join(&writers[B], name, B, NULL));
    for (uint32_t r = 0; r < attached; r++)
        CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[r], name, r, NULL));
    CHECK_EQ(1, kind = (uint32_t)shms_writer_kind(writers[A], "kind", 4));
    now = UINT64_C(1000000000) * 1000;
    sleeps = broadcasts = signals = 0;
}

static void teardown(void) {
    once = each_time = NULL;
    shms_batch_drop(writers[A], &waits);
    shms_batch_drop(writers[A], &other);
    waits = other = (shms_batch){0};
    for (int i = 0; i < 2; i++) {
        CHECK(!writers[i]->room_waits && !writers[i]->room_looks);
        shms_reader_free(readers[i]);
        readers[i] = NULL;
    }
    for (int i = 0; i < 2; i++)
        (writers[i]->closed ? shms_writer_free : end_writer)(writers[i]);
}

static int calls;

/* Makes the same call again until it is stored, or refused for good. */
static int put_new(uint64_t timeout, uint32_t of_kind, bool leased) {
    static shms_put put = {
        .key = "new", .key_len = 3, .payload_size = UNIT - 64}; /* used again, after a refusal, too */
    put.timeout = timeout;
    put.kind = of_kind;
    put.unleased = !leased;
    int rc = SHMS_AGAIN;
    for (calls = 0; rc == SHMS_AGAIN; calls++)
        rc = shms_batch_begin(writers[A], &waits, &put);
    return rc;
}

/* Returns after how many calls it was refused for good. */
static int refused_within(uint64_t timeout) {
    uint64_t from = now;
    CHECK_EQ(SHMS_EFULL, put_new(timeout, 0, true));
    CHECK_EQ(timeout, now - from);
    return calls;
}

/* ---- before the wait ---- */

static shms_view *view;

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
static void hit_remote(void) { /* B leases A's object k0, whose own lease ends */
    fill_up();
    CHECK_EQ(SHMS_OK, verb_hit(writers[B], "k0", 2, refs[SLOTS - 1]));
    CHECK_EQ(1, shms_writer_cancel(writers[A], refs[0]));
}
static void begin_other(void) {
    shms_put put = {.key = "k9", .key_len = 2, .payload_size = OBJECTS * UNIT - 64, .unleased = true};
    CHECK_EQ(SHMS_OK, shms_batch_begin(writers[A], &other, &put));
}
static void protect_one(void) {
    fill_up();
    CHECK_EQ(SHMS_OK, shms_batch_protect(writers[A], &other, (const uint8_t *)"\2\0\0\0k0", 6));
    CHECK_EQ(1, shms_reader_release(readers[0], refs[0]));
}
static void fill_the_quota(void) {
    CHECK_EQ(SHMS_OK, shms_writer_quota(writers[A], kind, UNIT));
    shms_put put = {.key = "k0", .key_len = 2, .payload_size = UNIT - 64, .kind = kind};
    CHECK_EQ(SHMS_OK, shms_batch_put(writers[A], &other, &put));
    other.keep = 1;
}
static void lease_all_of_b(void) { /* every entry of A's is on an object of B's */
    CHECK_EQ(SHMS_OK, put_marked(writers[B], "b", 1, 1, NULL));
    for (uint32_t i = 0; i < writers[A]->leases.n_entries; i++)
        CHECK_EQ(SHMS_OK, verb_hit(writers[A], "b", 1, refs[i ? 1 : 0]));
}

/* ---- what others do meanwhile ---- */

static void unpin(void) { shms_view_release(view); }
static void acknowledge(void) { CHECK_EQ(1, shms_reader_release(readers[0], refs[0])); }
static void acknowledge_and_search(void) { /* as a larger put, which keeps nothing for others */
    acknowledge();
    CHECK(shms_poll(writers[A]));
}
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
static void store_the_key(void) {
    cancel();
    CHECK_EQ(SHMS_OK, put_marked(writers[A], "new", 1, 1, NULL));
}
static void close_a(void) { CHECK_EQ(SHMS_OK, shms_writer_close(writers[A], false)); }
static void read_again(void) { shms_view_release(view_of(readers[0], refs[0])); } /* which makes no room */
static void use(void) {
    if (sleeps > 20) /* as many leases as there are entries */
        return;
    CHECK_EQ(SHMS_OK, verb_hit(writers[A], "k1", 2, refs[SLOTS - 2]));
    CHECK_EQ(1, shms_writer_touch(writers[A], "k1", 2));
    CHECK_EQ(SHMS_ENOTFOUND, verb_hit(writers[A], "none", 4, NULL));
}

/* The put has room, or that code, after its first sleep: at once, or a millisecond later, as it polls. */
static void first_sleep(bool at_once, void (*before)(void), void (*lets_go)(void), uint32_t attached, int code) {
    bool of_kind = before == fill_the_quota;
    setup(before == read_one ? 2 : 1, attached);
    before();
    once = lets_go;
    uint64_t from = now;
    CHECK_EQ(code, put_new(UINT64_C(60000) * MS, of_kind ? kind : 0, !of_kind));
    CHECK(sleeps == 1 && calls == 2 && now == from + !at_once * MS);
    CHECK(at_once || (broadcasts == 1 && !signals)); /* the others that wait */
    if (code == SHMS_ECLOSED)
        undo_other(); /* the last pending put, which releases the lock */
    teardown();
}

TEST(whatever_this_process_lets_go_of_wakes_the_put) {
    first_sleep(true, fill_up, cancel, 1, SHMS_OK);
    first_sleep(true, fill_up, cancel_all, 1, SHMS_OK);
    first_sleep(true, fill_up, retire, 0, SHMS_OK);
    first_sleep(true, read_one, assign, 1, SHMS_OK);
    first_sleep(true, begin_other, undo_other, 1, SHMS_OK);
    first_sleep(true, begin_other, commit_other, 1, SHMS_OK);
    first_sleep(true, protect_one, undo_other, 1, SHMS_OK);
    first_sleep(true, fill_the_quota, raise_quota, 1, SHMS_OK);
    first_sleep(true, lease_all_of_b, cancel, 1, SHMS_OK);
    first_sleep(true, fill_up, store_the_key, 1, SHMS_EEXISTS);
    first_sleep(true, begin_other, close_a, 1, SHMS_ECLOSED);
}

TEST(what_others_let_go_of_is_found_by_the_next_look) {
    first_sleep(false, view_one, unpin, 1, SHMS_OK);
    first_sleep(false, fill_up, acknowledge, 1, SHMS_OK);
    first_sleep(false, fill_up, acknowledge_and_search, 1, SHMS_OK);
    first_sleep(false, fill_up, close_reader, 1, SHMS_OK);
    first_sleep(false, fill_up, die, 0, SHMS_OK);
    first_sleep(false, hit_remote, cancel_of_b, 1, SHMS_OK);
    first_sleep(false, hit_remote, read_for_b, 1, SHMS_OK);
    first_sleep(false, hit_remote, retire_by_b, 0, SHMS_OK);
    first_sleep(false, lease_all_of_b, acknowledge, 1, SHMS_OK);
}

/* ---- how often it polls ---- */

TEST(a_put_looks_every_millisecond_then_every_five_whatever_others_do) {
    void (*const theirs[])(void) = {NULL, read_again, use, NULL};
    for (int i = 0; i < 4; i++) {
        setup(1, 1);
        view_one();
        once = i ? NULL : read_again;
        each_time = theirs[i];
        shms_set(&writers[B]->seg.writer->pinning, i == 3); /* it was stopped with a pin, which each look finds */
        refused_within(300 * MS);
        CHECK(i % 2 || calls == 7 + !i); /* without a release, no look is a try */
        CHECK(sleeps >= 100 && sleeps <= 102 && asked[0] == MS && asked[60] == 5 * MS);
        for (int s = 0; s < sleeps; s++)
            CHECK(asked[s] <= (s < 50 ? MS : 5 * MS));
        shms_set(&writers[B]->seg.writer->pinning, 0);
        unpin();
        teardown();
    }
}

static int probes;
static void count_probes(const char *label) { probes += strcmp(label, "W1c") == 0; }

TEST(a_put_neither_polls_nor_asks_a_rank_while_another_thread_looks) {
    setup(1, 1);
    fill_up();
    CHECK_EQ(SHMS_EFULL, put_marked(writers[A], "newer", UNIT - 64, 1, NULL));
    writers[A]->room_looks = true;
    shms_step_hook = count_probes;
    CHECK_EQ(4, refused_within(120 * MS));
    shms_step_hook = NULL;
    CHECK_EQ(1, probes); /* by the first try */
    CHECK(sleeps == 3 && asked[0] == 50 * MS && asked[2] == 20 * MS && !signals);
    writers[A]->room_looks = false;
    teardown();
}

/* ---- the end of a wait ---- */

TEST(a_wait_that_is_over_is_one_refusal_and_a_put_that_got_room_is_none) {
    setup(1, 1);
    fill_up();
    const shms_word *refusals = &writers[A]->seg.writer->counters[SHMS_C(refusals)];
    CHECK_EQ(4, refused_within(120 * MS));
    CHECK_EQ(3, signals); /* after each call, another thread looks */
    CHECK_EQ(SHMS_OK, shms_writer_holders(writers[A], &waits.refusal));
    CHECK_EQ(OBJECTS * UNIT, waits.refusal.held[0]);
    CHECK_EQ(1, shms_get(refusals));
    once = acknowledge;
    CHECK_EQ(SHMS_OK, put_new(120 * MS, 0, true));
    CHECK_EQ(1, shms_get(refusals));
    teardown();
}
