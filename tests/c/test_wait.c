/*
 * test_wait.c - a reader meets EVICTING, and the writer dies or decides at the worst moment: when the reader is about to
 * probe its lock (R2p).
 */
#include <sys/resource.h>
#include <sys/syscall.h>

#include "fixture.h"

static shms_word *state; /* of the only object */
static int probes;
static enum shms_state last_word;
static void (*at_probe)(void);

static void count_probes(const char *label) {
    if (strcmp(label, "R2p"))
        return;
    probes++;
    at_probe();
}

/* A store with one object of half its size, whose lease is over. A reader finds the object in EVICTING. */
static shms_view *meet(void (*decide)(void)) {
    open_store("wait", (shms_options){.capacity = 1024, .n_readers = 1}, 1);
    CHECK_EQ(SHMS_OK, put_marked(w, "k", 512, 1, ref));
    shms_view_release(view_of(readers[0], ref));
    state = &w->seg.slots[0].state;
    CHECK_EQ(SHMS_LIVE, atomic_load(state));
    atomic_store(state, SHMS_EVICTING);
    probes = 0;
    at_probe = decide;
    shms_step_hook = count_probes;
    shms_view *v = view_of(readers[0], ref);
    shms_step_hook = NULL;
    CHECK(!v || filled(v->payload, 512, 1));
    return v;
}

static void die(void) {
    atomic_store(state, last_word);
    shms_segment_unlock(&w->seg, false);
}

TEST(a_writer_that_finished_and_then_died_leaves_a_stale_reference) {
    last_word = SHMS_FREE;
    CHECK(!meet(die) && errno == -SHMS_ESTALE && probes == 1);
    succeed();
    end();
}

TEST(an_object_whose_eviction_died_is_whole_and_survives_recovery) {
    last_word = SHMS_EVICTING;
    shms_view *v = meet(die);
    CHECK(v && probes == 1);
    succeed();
    CHECK_EQ(SHMS_EFULL, put_marked(w, "l", 512, 2, ref));
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    shms_view_release(v);
    CHECK_EQ(SHMS_OK, put_marked(w, "l", 512, 2, ref));
    end();
}

static struct rusage before;

static void decide_at_the_third_turn(void) {
    if (probes == 1)
        getrusage(RUSAGE_THREAD, &before);
    if (probes == 3)
        atomic_store(state, SHMS_LIVE);
}

TEST(a_reader_that_waits_sleeps_so_that_a_writer_of_lower_priority_runs) {
    struct rusage after;
    shms_view *v = meet(decide_at_the_third_turn);
    getrusage(RUSAGE_THREAD, &after);
    CHECK(v && after.ru_nvcsw - before.ru_nvcsw >= 2); /* a yield is none */
    shms_view_release(v);
    end();
}

static uint64_t stopped_ns; /* added to the clock */

int clock_gettime(clockid_t clock, struct timespec *out) {
    int rc = (int)syscall(SYS_clock_gettime, clock, out);
    out->tv_sec += (time_t)(stopped_ns / 1000000000);
    return rc;
}

static void be_stopped_while_the_owner_decides(void) {
    if (probes == 1) /* it first notes when it began to wait */
        return;
    stopped_ns += UINT64_C(2000000000);
    atomic_store(state, SHMS_LIVE);
}

TEST(a_reader_that_was_stopped_for_longer_than_it_waits_looks_once_more) {
    shms_view *v = meet(be_stopped_while_the_owner_decides);
    CHECK(v);
    shms_view_release(v);
    end();
}
