/*
 * test_interleave.c - runs each whole operation of one side at each step of the other side.
 *
 * The store has 16 units of 64 bytes and four objects. Rank 0 has a view of `held`, and is promised `owed`; `read` and
 * `cold` may go. Whatever happens in between: no byte under a live view changes, an open promise can be taken, and the
 * private bookkeeping is right.
 */
#include <pthread.h>

#include "support.h"

enum { UNIT = SHMS_ALIGN, UNITS = 16, OBJECTS = 4 };
enum { HELD, OWED, READ, COLD };

static const char *const keys[OBJECTS] = {"held", "owed", "read", "cold"};
static const char *name;
static shms_writer *w;
static shms_reader *r, *second;
static shms_view *views[64];
static int n_views;
static uint8_t refs[OBJECTS][SHMS_REF_SIZE];
static uint64_t mark_of[64];
static bool owed; /* its lease is not read, released or cancelled */
static uint64_t at_step, step;
static void (*intruder)(void);
static bool busy; /* no nested operation */
static uint64_t refused_acquires, late_acquires;

static void keep(shms_view *v, uint64_t mark) {
    CHECK(filled(v->payload, v->payload_size, mark));
    mark_of[n_views] = mark;
    views[n_views++] = v;
}

static void views_are_whole(void) {
    for (int i = 0; i < n_views; i++)
        CHECK(!views[i] || filled(views[i]->payload, views[i]->payload_size, mark_of[i]));
}

static void setup(void) {
    shms_options o = {.capacity = UNITS * UNIT, .n_readers = 2, .max_objects = 6};
    n_views = 0;
    step = 0;
    owed = true;
    second = NULL;
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, &o));
    CHECK_EQ(SHMS_OK, shms_reader_attach(&r, name, 0, NULL));
    CHECK_EQ(SHMS_OK, shms_writer_retire(w, 1));
    for (int i = 0; i < OBJECTS; i++)
        CHECK_EQ(SHMS_OK, put_marked(w, keys[i], 3 * UNIT, (uint64_t)i, refs[i]));
    keep(view_of(r, refs[HELD]), HELD);
    shms_view_release(view_of(r, refs[READ]));
    CHECK_EQ(1, shms_reader_release(r, refs[COLD]));
}

/* What must hold after any operation in between. */
static void settle(void) {
    views_are_whole();
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    for (int i = 0; i < 12; i++) {
        int rc = put_marked(w, key_of("n", i), (uint64_t)UNIT * (uint64_t)(i % 4), 99, NULL);
        CHECK(rc == SHMS_OK || rc == SHMS_EFULL);
        views_are_whole();
    }
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    if (owed && r) {
        shms_view *v = view_of(r, refs[OWED]);
        CHECK(v);
        keep(v, OWED);
    }
    for (int i = 0; i < n_views; i++)
        if (views[i])
            shms_view_release(views[i]);
    if (r)
        shms_reader_free(r);
    if (second)
        shms_reader_free(second);
    CHECK_EQ(SHMS_OK, put_marked(w, "all", (UNITS - 1) * UNIT, 5, NULL)); /* nothing is held any more */
    end_writer(w);
}

static void intrude(const char *label) {
    (void)label;
    if (busy || ++step != at_step)
        return;
    busy = true;
    intruder();
    views_are_whole();
    busy = false;
}

/* ---- what a reader does ---- */

static pthread_t late;
static bool late_runs;
static int late_of;
static shms_view *late_view;
static _Atomic int late_done;

static void *acquire_late(void *unused) {
    late_view = view_of(r, refs[late_of]);
    CHECK(late_view || errno == -SHMS_ESTALE);
    atomic_store(&late_done, 1);
    return unused;
}

/* Takes object i. If it is being evicted, the reader waits for the writer. So the reader runs on a thread, and the test
 * waits for its pin: the writer's next step always comes after that. */
static void acquire(int i) {
    shms_ref ref;
    shms_ref_unpack(&ref, refs[i]);
    const shms_slot *s = &w->seg.slots[ref.slot];
    if (shms_get(&s->id) == ref.id && shms_get(&s->state) == SHMS_EVICTING) {
        late_of = i;
        late_runs = true;
        late_done = 0;
        CHECK(pthread_create(&late, NULL, acquire_late, NULL) == 0);
        while (!atomic_load(&late_done) && !shms_reader_pins(shms_segment_reader(&w->seg, 0))[ref.slot])
            ;
        return;
    }
    shms_view *v = view_of(r, refs[i]);
    if (v)
        keep(v, (uint64_t)i);
    else
        refused_acquires++;
    CHECK(v || i != OWED || !owed);
    if (i == OWED)
        owed = false;
}
static void join_late(void) {
    if (!late_runs)
        return;
    CHECK(pthread_join(late, NULL) == 0);
    late_runs = false;
    if (late_view) {
        keep(late_view, (uint64_t)late_of);
        late_acquires++;
    }
}

static void r_acquire_owed(void) { acquire(OWED); }
static void r_acquire_read(void) { acquire(READ); }
static void r_acquire_cold(void) { acquire(COLD); }
static void r_acquire_held(void) { acquire(HELD); }
static void r_release_owed(void) {
    bool was = owed;
    int rc = shms_reader_release(r, refs[OWED]);
    CHECK(rc == was || rc == owed); /* may have been cancelled in between */
    owed = false;
}
static void r_release_read(void) { CHECK_EQ(0, shms_reader_release(r, refs[READ])); }
static void r_acquire_and_release(void) {
    acquire(OWED);
    if (views[n_views - 1] && mark_of[n_views - 1] == OWED) {
        shms_view_release(views[n_views - 1]);
        views[--n_views] = NULL;
    }
}
static void r_view_release(void) {
    shms_view_release(views[0]);
    views[0] = NULL;
}
static void r_attach(void) { CHECK_EQ(SHMS_OK, shms_reader_attach(&second, name, 1, NULL)); }
static void r_close(void) { /* with a live view: the rank's lock stays, the promises end */
    CHECK_EQ(SHMS_OK, shms_reader_close(r));
    owed = false;
}
static void r_replace(void) { /* rank 0 detaches and attaches again: older leases do not expect it */
    r_view_release();
    shms_reader_free(r);
    CHECK_EQ(SHMS_OK, shms_reader_attach(&r, name, 0, NULL));
    owed = false;
}

/* ---- what a writer does ---- */

static int cached(const char *key, uint64_t units, uint64_t mark) {
    return put_marked(w, key, units * UNIT, mark, NULL);
}

static void w_small(void) {
    int rc = cached("small", 2, 7); /* one victim */
    CHECK(rc == SHMS_OK || rc == SHMS_EFULL);
}
static void w_evict(void) {
    int rc = cached("put", 6, 8); /* both objects that may go */
    CHECK(rc == SHMS_OK || rc == SHMS_EFULL);
}
static void w_full(void) { /* refused, unless everything has just been released */
    int rc = cached("huge", 15, 8);
    CHECK(rc == SHMS_OK || rc == SHMS_EFULL);
    CHECK(rc == SHMS_EFULL || (!views[0] && !owed));
}
static void w_cancel(void) {
    int rc = shms_writer_cancel(w, refs[OWED]);
    /* a lease that all ranks have acknowledged is open until the writer checks it */
    CHECK(rc == 1 || (rc == 0 && !owed));
    owed = false;
    w_evict();
}
static void w_delete(void) {
    CHECK_EQ(1, shms_writer_delete(w, "held", 4));
    CHECK_EQ(1, shms_writer_delete(w, "owed", 4));
    shms_writer_delete(w, "read", 4);
}
static void w_clear(void) {
    CHECK_EQ(SHMS_OK, shms_writer_clear(w, "", 0));
    w_evict();
}
static void w_hand_out(void) {
    uint8_t ref[SHMS_REF_SIZE];
    CHECK_EQ(SHMS_OK, verb_hit(w, "held", 4, ref));
    w_evict();
    CHECK(shms_writer_cancel(w, ref) >= 0); /* 0: rank 0 was replaced, and the search has closed the lease */
}
static void w_abort(void) {
    shms_ticket t;
    if (verb_begin(w, "t", 1, NULL, 0, 6 * UNIT, &t) == SHMS_OK) {
        memset(t.payload, 0xee, 6 * UNIT);
        CHECK_EQ(SHMS_OK, verb_abort(w, &t));
    }
}
static void w_recover(void) {
    shms_writer_free(w);
    CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
    w_evict();
}

static void (*const of_reader[])(void) = {
    r_acquire_owed,        r_acquire_read, r_acquire_cold, r_acquire_held, r_release_owed, r_release_read,
    r_acquire_and_release, r_view_release, r_attach,       r_close,        r_replace};
static void (*const of_writer[])(void) = {w_small, w_evict, w_cancel, w_delete, w_clear, w_abort, w_recover};
static void (*const of_writer_interrupted[])(void) = {w_small,  w_evict, w_full,     w_cancel,
                                                      w_delete, w_clear, w_hand_out, w_abort};

/* Runs `whole`, with `other` at each of its steps. */
static uint64_t interleave(void (*whole)(void), void (*other)(void)) {
    uint64_t n = 0;
    for (at_step = 1;; at_step++, n++) {
        setup();
        intruder = other;
        shms_step_hook = intrude;
        whole();
        shms_step_hook = NULL;
        join_late();
        bool reached = step >= at_step;
        if (whole == r_close || (other == r_close && reached)) {
            views_are_whole();
            shms_reader *closed = r;
            r = NULL;
            settle();
            shms_reader_free(closed);
        } else {
            settle();
        }
        if (!reached)
            return n;
    }
}

/* ---- a rank that attaches for the first time finds all its promises ---- */

static void first_attach(void) { CHECK_EQ(SHMS_OK, shms_reader_attach(&second, name, 0, NULL)); }
static void refused_put(void) { CHECK_EQ(SHMS_EFULL, cached("put", 6, 8)); }

static uint64_t a_first_attachment_is_no_death(void (*whole)(void), void (*other)(void)) {
    uint64_t n = 0;
    for (at_step = 1;; at_step++, n++) {
        shms_options o = {.capacity = UNITS * UNIT, .n_readers = 1, .max_objects = 6};
        CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, &o));
        for (int i = 0; i < OBJECTS; i++)
            CHECK_EQ(SHMS_OK, put_marked(w, keys[i], 3 * UNIT, (uint64_t)i, refs[i]));
        n_views = 0;
        step = 0;
        second = NULL;
        intruder = other;
        shms_step_hook = intrude;
        whole();
        shms_step_hook = NULL;
        refused_put();
        if (!second)
            first_attach();
        for (int i = 0; i < OBJECTS; i++) {
            shms_view *v = view_of(second, refs[i]);
            CHECK(v && filled(v->payload, 3 * UNIT, (uint64_t)i));
            shms_view_release(v);
        }
        CHECK_EQ(SHMS_OK, shms_writer_valid(w));
        shms_reader_free(second);
        end_writer(w);
        if (step < at_step)
            return n;
    }
}

TEST(each_operation_of_one_side_may_come_at_each_step_of_the_other) {
    uint64_t steps = 0;
    name = store_name("interleave");
    for (size_t i = 0; i < sizeof of_writer_interrupted / sizeof *of_writer_interrupted; i++)
        for (size_t k = 0; k < sizeof of_reader / sizeof *of_reader; k++)
            steps += interleave(of_writer_interrupted[i], of_reader[k]);
    CHECK(late_acquires > 0 && refused_acquires > 0); /* both outcomes of the handshake occurred */
    for (size_t i = 0; i < sizeof of_reader / sizeof *of_reader; i++)
        for (size_t k = 0; k < sizeof of_writer / sizeof *of_writer; k++)
            steps += interleave(of_reader[i], of_writer[k]);
    CHECK(steps > 1000);
    CHECK(a_first_attachment_is_no_death(refused_put, first_attach) > 3);
    CHECK(a_first_attachment_is_no_death(first_attach, refused_put) == 4); /* A1 to A4 */
}
