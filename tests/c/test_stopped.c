/*
 * test_stopped.c - a writer is stopped (a debugger, a frozen container) in the middle of an eviction. A reader that
 * asks for the object gets its answer when the writer continues. If it does not continue, the reader does not wait
 * without limit.
 */
#include <time.h>

#include "support.h"

enum { UNITS = 16, SIZE = 3 * SHMS_ALIGN };

static const char *stop_before;
static pid_t writer_pid;
static shms_word *state; /* of the object that the reader wants */

static void stop(const char *label) {
    if (strcmp(label, stop_before))
        return;
    if (strcmp(label, "W2"))
        shms_step_hook = NULL;
    stop_before = "W5";
    raise(SIGSTOP);
}

/* The reader has found EVICTING and has not yet given up. Now the writer continues, and decides. */
static void go_on(const char *label) {
    if (strcmp(label, "R2p"))
        return;
    shms_step_hook = NULL;
    CHECK_EQ(0, kill(writer_pid, SIGCONT));
    while (atomic_load(state) == SHMS_EVICTING)
        ;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void a_reader_meets_a_stopped_writer(const char *label, bool goes_on, bool there) {
    const char *name = store_name("stopped");
    uint8_t refs[4][SHMS_REF_SIZE];
    shms_reader *r = four_read_objects(name, UNITS * SHMS_ALIGN, SIZE, refs);
    shms_writer *w;
    shms_segment look;
    CHECK_EQ(SHMS_OK, shms_segment_open(&look, name, SHMS_ROLE_INSPECTOR, NULL));
    state = &look.slots[0].state; /* 'a', the first victim */
    writer_pid = fork_child();
    if (writer_pid == 0) {
        CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
        stop_before = label;
        shms_step_hook = stop;
        CHECK_EQ(SHMS_OK, put_marked(w, "new", SIZE, 9, NULL));
        _exit(0);
    }
    int status;
    CHECK_EQ(writer_pid, waitpid(writer_pid, &status, WUNTRACED));
    CHECK(WIFSTOPPED(status));
    CHECK_EQ(SHMS_EVICTING, atomic_load(state));
    shms_step_hook = goes_on ? go_on : NULL;
    double start = seconds();
    shms_view *v = view_of(r, refs[0]);
    int code = v ? SHMS_OK : -errno;
    double waited = seconds() - start;
    CHECK_EQ(there ? SHMS_OK : SHMS_ESTALE, code);
    CHECK(goes_on || (waited >= 1 && waited < 30));
    CHECK(!v || filled(v->payload, SIZE, 0));
    shms_step_hook = NULL;
    CHECK_EQ(0, kill(writer_pid, SIGCONT)); /* again, or for the first time */
    CHECK_EQ(0, reap(writer_pid));
    CHECK(!v || filled(v->payload, SIZE, 0));
    CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
    CHECK_EQ(1, shms_writer_has(w, "new", 3));
    CHECK_EQ(there, shms_writer_has(w, "a", 1));
    if (v)
        shms_view_release(v);
    CHECK_EQ(SHMS_OK, put_marked(w, "all", (UNITS - 1) * SHMS_ALIGN, 1, NULL)); /* no pin was left */
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    shms_segment_close(&look);
    shms_reader_free(r);
    end_writer(w);
}

/* The same for an owner that is stopped before W5: it has found the lease of another writer. */
static void a_promised_reader_is_told_that_the_owner_is_busy(bool promised) {
    const char *name = store_name("busy");
    shms_options o = {.capacity = UNITS * SHMS_ALIGN, .n_readers = 1, .max_objects = 8, .n_writers = 2};
    uint8_t ref[SHMS_REF_SIZE];
    shms_writer *owner, *other;
    shms_reader *r;
    int status;
    CHECK_EQ(SHMS_OK, shms_writer_create(&other, name, &o));
    CHECK_EQ(SHMS_OK, shms_writer_join(&owner, name, 1, NULL));
    CHECK_EQ(SHMS_OK, shms_reader_attach(&r, name, 0, NULL));
    CHECK_EQ(SHMS_OK, put_marked(owner, "a", 9 * SHMS_ALIGN, 0, NULL));
    shms_writer_free(owner);
    writer_pid = fork_child();
    if (writer_pid == 0) {
        CHECK_EQ(SHMS_OK, shms_writer_join(&owner, name, 1, NULL));
        stop_before = "W2";
        shms_step_hook = stop;
        CHECK_EQ(promised ? SHMS_EFULL : SHMS_OK, put_marked(owner, "new", 9 * SHMS_ALIGN, 9, NULL));
        _exit(0);
    }
    CHECK_EQ(writer_pid, waitpid(writer_pid, &status, WUNTRACED));
    CHECK_EQ(SHMS_OK, verb_hit(other, "a", 1, ref));
    CHECK_EQ(0, kill(writer_pid, SIGCONT));
    CHECK_EQ(writer_pid, waitpid(writer_pid, &status, WUNTRACED));
    CHECK(WIFSTOPPED(status));
    if (!promised)
        CHECK_EQ(1, shms_writer_cancel(other, ref));
    double start = seconds();
    CHECK_EQ(promised ? SHMS_EBUSY : 0, verb_hold(other, ref));
    CHECK(seconds() - start < 0.5); /* it has the mutex of its writer meanwhile */
    CHECK(!view_of(r, ref));
    CHECK_EQ(promised ? SHMS_EBUSY : SHMS_ESTALE, -errno);
    CHECK_EQ(0, kill(writer_pid, SIGCONT));
    CHECK_EQ(0, reap(writer_pid));
    CHECK_EQ(promised ? 1 : 0, verb_hold(other, ref)); /* the owner has decided */
    shms_view *v = view_of(r, ref);
    CHECK(promised ? v && filled(v->payload, v->payload_size, 0) : !v);
    shms_view_release(v);
    shms_reader_free(r);
    end_writer(other);
}

TEST(nobody_waits_for_a_stopped_writer_without_limit) {
    alarm(60); /* a reader that waits without limit would fail the test */
    /* it sees the pin when it continues, and keeps the object */
    a_reader_meets_a_stopped_writer("W3", true, true);
    a_reader_meets_a_stopped_writer("W4", true, false);  /* it has read the pins already */
    a_reader_meets_a_stopped_writer("W3", false, false); /* the reader gives up */
    a_reader_meets_a_stopped_writer("W4", false, false);
    a_promised_reader_is_told_that_the_owner_is_busy(true);
    a_promised_reader_is_told_that_the_owner_is_busy(false);
}
