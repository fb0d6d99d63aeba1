/*
 * remote.h - writer A evicts and is succeeded, writer B hands out A's objects, and a rank reads them.
 *
 * A's arena has 16 units of 64 bytes and four objects. Rank 0 has a view of `held` and is promised `owed`; `read` and
 * `cold` may go. Rank 1 never attaches. Two files do two things with that:
 *
 * 1. test_remote_steps.c: each whole operation of one runs at each step of the others.
 * 2. test_remote_deaths.c: A, B or the rank is a process of its own, which is killed before each of its steps. So is each
 *    successor.
 *
 * Whatever happens: no byte under a view changes, every open promise can be taken, and once nobody holds anything, A
 * can evict everything, B has all its lease entries, and an inspector finds nothing.
 */
#ifndef SHMS_TEST_REMOTE_H
#define SHMS_TEST_REMOTE_H

#include <pthread.h>
#include <sched.h>

#include "inspect/inspect.h"
#include "store/remote.h"
#include "store/hand.h"
#include "support.h"

#pragma GCC diagnostic ignored "-Wunused-function" /* each file uses a part */
#pragma GCC diagnostic ignored "-Wunused-variable"

enum { EACH_RUN = EACH, EACH_DEATH = EACH * EACH };
enum { UNIT = SHMS_ALIGN, UNITS = 16, SLOTS = 6, OBJECTS = 4, PROMISES = 48, OURS = 7, LEASES = 64 };
enum { HELD, OWED, READ, COLD };
enum { A, B };

static const char *const keys[OBJECTS] = {"held", "owed", "read", "cold"};
static const char *name;
static shms_writer *a, *b; /* NULL: dead */
static shms_reader *r;     /* rank 0 */
static uint8_t ref[SHMS_REF_SIZE];
static shms_view *views[64];
static uint64_t mark_of[64];
static int n_views;
static uint32_t half = SHMS_NONE; /* the slot of a half a remote hit */

/* References that rank 0 may count on. Processes share them. */
static struct promises {
    int n;
    struct promise {
        uint8_t ref[SHMS_REF_SIZE];
        uint64_t mark;
        int by;
        bool open, remote;
    } at[PROMISES];
} *promises;

/* ---- views and promises ---- */

static void keep(shms_view *v, uint64_t mark) {
    CHECK(filled(v->payload, v->payload_size, mark));
    CHECK(n_views < 64);
    mark_of[n_views] = mark;
    views[n_views++] = v;
}

static void views_are_whole(void) {
    for (int i = 0; i < n_views; i++)
        CHECK(!views[i] || filled(views[i]->payload, views[i]->payload_size, mark_of[i]));
}

static void release_views(void) {
    views_are_whole();
    for (int i = 0; i < n_views; i++) {
        shms_view_release(views[i]);
        views[i] = NULL;
    }
    n_views = 0;
}

static struct promise *promise(int by, const uint8_t *ref, uint64_t mark, bool remote) {
    CHECK(promises->n < PROMISES);
    struct promise *p = &promises->at[promises->n];
    *p = (struct promise){.mark = mark, .by = by, .remote = remote, .open = true};
    memcpy(p->ref, ref, SHMS_REF_SIZE);
    promises->n++;
    return p;
}

/* The nth last that B has made on an object of A's. */
static struct promise *last_of_b(uint64_t mark, int nth) {
    for (int i = promises->n; i-- > 0;)
        if (promises->at[i].by == B && promises->at[i].remote && promises->at[i].mark == mark && nth-- == 0)
            return &promises->at[i];
    return NULL;
}

static void all_promises_end(void) {
    for (int i = 0; i < promises->n; i++)
        promises->at[i].open = false;
}

static void promises_end(int by, bool remote) {
    for (int i = 0; i < promises->n; i++)
        if (promises->at[i].by == by && promises->at[i].remote == remote)
            promises->at[i].open = false;
}

static void take_promises(void) {
    for (int i = 0; r && i < promises->n; i++) {
        struct promise *p = &promises->at[i];
        shms_view *v = p->open ? view_of(r, p->ref) : NULL;
        if (p->open && !v)
            fprintf(stderr, "promise %d of %d, object %d: ", i, p->by, (int)p->mark);
        CHECK(v || !p->open);
        if (v)
            keep(v, p->mark);
        p->open = false;
    }
}

/* ---- the store ---- */

static int put(shms_writer *w, const char *key, uint64_t units, uint64_t mark, uint8_t *ref) {
    return put_marked(w, key, units * UNIT, mark, ref);
}

static int arena_of_a; /* B has the other one */
static void join_a(void) { CHECK_EQ(SHMS_OK, shms_writer_join(&a, name, arena_of_a, NULL)); }
static bool keeps; /* a successor of B keeps the leases */
static void join_b(void) {
    shms_expected e = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID, .end_leases = !keeps};
    CHECK_EQ(SHMS_OK, shms_writer_join(&b, name, !arena_of_a, &e));
    if (!keeps)
        promises_end(B, false);
}

static void setup(void) {
    shms_options o = {.capacity = UNITS * UNIT, .n_readers = 2, .max_objects = SLOTS, .n_writers = 2, .n_groups = 2};
    o.group_sizes[0] = o.group_sizes[1] = 1;
    memset(promises, 0, sizeof *promises);
    CHECK_EQ(SHMS_OK, shms_writer_create(arena_of_a ? &b : &a, name, &o));
    (arena_of_a ? join_a : join_b)();
    CHECK_EQ(LEASES, a->seg.layout.max_leases);
    CHECK_EQ(SHMS_OK, shms_reader_attach(&r, name, 0, NULL));
    CHECK_EQ(SHMS_OK, shms_writer_retire(a, 1));
    for (int i = 0; i < OBJECTS; i++) {
        CHECK_EQ(SHMS_OK, put(a, keys[i], 3, (uint64_t)i, ref));
        promise(A, ref, (uint64_t)i, false)->open = i == OWED;
        if (i == HELD)
            keep(view_of(r, ref), HELD);
        else if (i != OWED)
            CHECK_EQ(1, shms_reader_release(r, ref));
    }
}

static void die(shms_writer **w) { /* without a close: all its words stay as they are */
    shms_segment_unlock(&(*w)->seg, false);
    (*w)->closed = true;
    shms_writer_free(*w);
    *w = NULL;
}

static void all_fits(shms_writer *w, const char *key) {
    CHECK_EQ(SHMS_OK, put(w, key, UNITS - 1, 5, NULL));
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
}

static void nothing_is_found(void) {
    shms_finding found[4];
    shms_inspector *i;
    CHECK_EQ(SHMS_OK, shms_inspector_open(&i, name, SHMS_OWN_UID));
    int64_t n = shms_inspector_verify(i, found, 4);
    if (n > 0)
        fprintf(stderr, "finding %d at %d: %d, expected %d: ", (int)found[0].kind, (int)found[0].where,
                (int)found[0].value, (int)found[0].expected);
    CHECK_EQ(0, n);
    shms_inspector_free(i);
}

/* What must hold after anything. A is alive. */
static void settle(void) {
    views_are_whole();
    for (int i = 0; i < 12; i++) {
        int rc = put(a, key_of("n", i), (uint64_t)(i % 4), 99, NULL);
        CHECK(rc == SHMS_OK || rc == SHMS_EFULL);
        views_are_whole();
    }
    CHECK_EQ(SHMS_OK, shms_writer_valid(a));
    take_promises();
    release_views();
    shms_reader_free(r);
    r = NULL;
    if (b) {
        CHECK_EQ(SHMS_OK, shms_writer_valid(b));
        CHECK_EQ(SHMS_OK, shms_writer_retire(b, 1));
    }
    all_fits(a, "all"); /* nobody holds anything any more */
    if (!b)
        join_b();
    CHECK_EQ(SHMS_OK, shms_writer_retire(b, 1));
    all_fits(a, "again");
    all_fits(b, "every");
    shms_reclaim_begin(b);
    for (uint32_t e = 0; e < LEASES; e++)
        CHECK(shms_get(&b->leases.table[e].number) == 0 || shms_lease_done(b, e, true));
    nothing_is_found();
    end_writer(b);
    b = NULL;
    end_writer(a);
}

/* ---- what B does ---- */

static void b_hit(int object) {
    int rc = verb_hit(b, keys[object], 4, ref);
    CHECK(rc == SHMS_OK || rc == SHMS_ENOTFOUND);
    if (rc == SHMS_OK)
        promise(B, ref, (uint64_t)object, true)->open = r != NULL;
}
static void b_cancels(int object, int nth) {
    struct promise *p = last_of_b((uint64_t)object, nth);
    if (p) {
        int rc = shms_writer_cancel(b, p->ref);
        CHECK(rc == 1 || (rc == 0 && !p->open));
        p->open = false;
    }
}
static void b_hit_read(void) { b_hit(READ); }
static void b_hit_owed(void) { b_hit(OWED); }
static void b_hit_chain(void) {
    for (int i = 0; i < 3; i++)
        b_hit(READ);
}
static void b_hit_both(void) {
    b_hit(COLD);
    b_hit(READ);
}
static void b_cancel_last(void) { b_cancels(READ, 0); }
static void b_cancel_middle(void) { b_cancels(READ, 1); }
static void b_cancel_first(void) { b_cancels(READ, 2); }
static void b_reuses(void) { /* the entry comes into another list, with a lease that is complete */
    CHECK_EQ(SHMS_OK, shms_writer_retire(b, 1));
    b_cancels(READ, 0);
    b_hit(OWED);
    struct promise *p = last_of_b(OWED, 0);
    CHECK(!p || shms_reader_release(r, p->ref) >= 0);
    if (p)
        p->open = false;
}
static void b_hit_and_cancel(void) {
    b_hit(READ);
    b_cancels(READ, 0);
}

/* Half of a remote hit: B stands between B2 and B4. */
static void b_pins(void) {
    shms_slot seen;
    half = shms_look_remote(b, shms_key_hash(b, "read", 4), "read", 4, &seen);
    if (half != SHMS_NONE && !shms_holds_pin(&b->seg, half, shms_get(&seen.id)))
        half = SHMS_NONE;
}
static void b_goes_on(void) {
    if (half == SHMS_NONE)
        return;
    shms_hand_out(b, half, shms_reclaim_lease(b, &(bool){false}), 0, false, ref);
    shms_holds_unpin(&b->seg, half);
    promise(B, ref, READ, true);
    half = SHMS_NONE;
}

static void b_has(void) { CHECK(shms_writer_has(b, "read", 4) >= 0); }
static void b_touch(void) { CHECK(shms_writer_touch(b, "cold", 4) >= 0); }
static void b_delete(void) { CHECK(shms_writer_delete(b, "read", 4) >= 0); }
static void b_forgets(void) { /* and never finds again what it has deleted */
    b_delete();
    CHECK_EQ(SHMS_ENOTFOUND, verb_hit(b, "read", 4, ref));
}
static void b_clear(void) { CHECK_EQ(SHMS_OK, shms_writer_clear(b, "", 0)); }
static void b_address(void) {
    b_hit(READ);
    b_hit(COLD);
    for (int i = READ; i <= COLD; i++)
        if (last_of_b((uint64_t)i, 0)) /* READ: only rank 0 */
            CHECK(shms_writer_assign_group(b, last_of_b((uint64_t)i, 0)->ref, (uint32_t)(i - READ + 1)) >= 0);
    if (last_of_b(COLD, 0))
        last_of_b(COLD, 0)->open = false;
}
static void b_hits_all(void) {
    for (int i = OWED; i < OBJECTS; i++)
        b_hit(i);
    b_address();
}
static void b_retire(void) { CHECK_EQ(SHMS_OK, shms_writer_retire(b, 1)); }
static void b_cancel_all(void) {
    promises_end(B, true);
    promises_end(B, false);
    CHECK(shms_writer_cancel_all(b) >= 0);
}
static void b_put(void) {
    CHECK_EQ(SHMS_OK, put(b, "ours", 3, OURS, ref));
    promise(B, ref, OURS, false);
}
static void b_dies(void) {
    die(&b);
    promises_end(B, true);
}
static void b_is_succeeded(void) {
    b_dies();
    join_b();
}

static bool was_open[PROMISES];
static uint64_t kept_leases;
static pthread_t heir;
static bool heir_runs;
static _Atomic int heir_done;

static bool has_lease(const struct promise *p) {
    shms_ref ref;
    shms_ref_unpack(&ref, p->ref);
    return shms_get(&shms_segment_lease(a ? &a->seg : &b->seg, ref.entry)->number) == ref.lease;
}
static void what_b_promises(void) {
    for (int i = 0; i < promises->n; i++) {
        const struct promise *p = &promises->at[i];
        was_open[i] = p->open && p->by == B && p->remote && has_lease(p);
    }
}
/* Of these, all are still good, but for those whose objects have gone. */
static void b_still_promises(void) {
    for (int i = 0; i < promises->n; i++) {
        shms_ref ref;
        shms_ref_unpack(&ref, promises->at[i].ref);
        const shms_slot *s = shms_segment_slot(&b->seg, ref.slot);
        if (!was_open[i])
            continue;
        promises->at[i].open = has_lease(&promises->at[i]);
        kept_leases += promises->at[i].open;
        CHECK(promises->at[i].open || shms_get(&s->id) != ref.id || shms_get(&s->state) == SHMS_FREE);
    }
}
static void *keep_leases(void *unused) {
    keeps = true;
    join_b();
    keeps = false;
    atomic_store(&heir_done, 1);
    return unused;
}
static void join_heir(void) {
    if (!heir_runs)
        return;
    CHECK(pthread_join(heir, NULL) == 0);
    heir_runs = false;
    b_still_promises();
}
static void b_is_kept(void) { /* its successor keeps the leases, on a thread, because it waits where A is evicting */
    bool evicting = false;
    what_b_promises();
    b_dies();
    heir_done = 0;
    heir_runs = true;
    CHECK(pthread_create(&heir, NULL, keep_leases, NULL) == 0);
    for (uint32_t s = 0; a && s < SLOTS; s++)
        evicting |= shms_get(&shms_writer_slot(a, s)->state) == SHMS_EVICTING;
    if (!evicting)
        join_heir();
    while (heir_runs && !atomic_load(&heir_done) &&
           !shms_get(&shms_segment_writer(&a->seg, (uint32_t)!arena_of_a)->pinning))
        sched_yield();
}
static void b_is_kept_here(void) { /* with steps of its own */
    what_b_promises();
    b_dies();
    keeps = true;
    join_b();
    keeps = false;
    b_still_promises();
}
static void b_closes(void) {
    shms_writer_close(b, 0);
    shms_writer_free(b);
    b = NULL;
    promises_end(B, true);
}

/* ---- what A does ---- */

static void a_puts(const char *key, uint64_t units) {
    int rc = put(a, key, units, 8, NULL);
    CHECK(rc == SHMS_OK || rc == SHMS_EFULL);
}
static void a_small(void) { a_puts("small", 2); }
static void a_evict(void) { a_puts("put", 6); }
static void a_delete(void) {
    CHECK(shms_writer_delete(a, "owed", 4) >= 0);
    CHECK(shms_writer_delete(a, "read", 4) >= 0);
}
static void a_clear(void) {
    CHECK_EQ(SHMS_OK, shms_writer_clear(a, "", 0));
    a_evict();
}
static void a_recover(void) {
    die(&a);
    join_a();
    a_evict();
}

/* ---- what rank 0 does ---- */

static pthread_t late;
static bool late_runs;
static const struct promise *late_of;
static shms_view *late_view;
static _Atomic int late_done;
static uint64_t late_acquires;

static void *acquire_late(void *unused) {
    late_view = view_of(r, late_of->ref);
    CHECK(late_view || errno == -SHMS_ESTALE);
    atomic_store(&late_done, 1);
    return unused;
}

/* If the object is being evicted, the reader waits for A. So the reader runs on a thread, and the test waits for its
 * pin: A's next step always comes after that. */
static void acquire(struct promise *p) {
    shms_ref parts;
    shms_ref_unpack(&parts, p->ref);
    const shms_segment *seg = b ? &b->seg : &a->seg;
    const shms_slot *s = shms_segment_slot(seg, parts.slot);
    if (shms_get(&s->id) == parts.id && shms_get(&s->state) == SHMS_EVICTING) {
        CHECK(!late_runs);
        late_of = p;
        late_runs = true;
        late_done = 0;
        CHECK(pthread_create(&late, NULL, acquire_late, NULL) == 0);
        while (!atomic_load(&late_done) && !shms_reader_pins(shms_segment_reader(seg, 0))[parts.slot])
            sched_yield();
        return;
    }
    shms_view *v = view_of(r, p->ref);
    CHECK(v || !p->open);
    if (v)
        keep(v, p->mark);
    p->open = false;
}
static void join_late(void) {
    if (!late_runs)
        return;
    CHECK(pthread_join(late, NULL) == 0);
    late_runs = false;
    CHECK(late_view || !late_of->open);
    if (late_view) {
        keep(late_view, late_of->mark);
        late_acquires++;
    }
    promises->at[late_of - promises->at].open = false;
}
static void r_acquire(void) { acquire(last_of_b(READ, 0)); }
static void r_release(void) {
    struct promise *p = last_of_b(READ, 0);
    CHECK(shms_reader_release(r, p->ref) >= 0);
    p->open = false;
}
static void release_new(void (*acquires)(void)) {
    int before = n_views;
    acquires();
    if (n_views > before)
        shms_view_release(views[--n_views]);
}
static void r_acquire_and_release(void) { release_new(r_acquire); }
static void b_was_read(void) { /* A may evict it, and the reference is good as long as A does not */
    b_hit(READ);
    CHECK_EQ(1, shms_writer_assign_group(b, last_of_b(READ, 0)->ref, 1));
    r_acquire_and_release();
}
static void r_replace(void) {
    release_views();
    shms_reader_free(r);
    CHECK_EQ(SHMS_OK, shms_reader_attach(&r, name, 0, NULL));
    all_promises_end();
}

/* ---- whole operations at each step ---- */

static uint64_t at_step, step;
static void (*intruder)(void);

static void intrude(const char *label) {
    (void)label;
    if (++step != at_step)
        return;
    shms_step_hook = NULL; /* no nested operation */
    intruder();
    views_are_whole();
    shms_step_hook = intrude;
}

/* Runs `whole` with `other` at step i. */
static void interrupt(void (*whole)(void), void (*other)(void), uint64_t i) {
    step = 0;
    at_step = i;
    intruder = other;
    shms_step_hook = intrude;
    whole();
    shms_step_hook = NULL;
}

static void rank_0_dies(void) {
    release_views();
    shms_reader_free(r);
    r = NULL;
    all_promises_end();
    rank_dies(name, 0);
}
static void r_attaches(void) { CHECK_EQ(SHMS_OK, shms_reader_attach(&r, name, 0, NULL)); }
static void r_comes_and_b_hits(void) {
    CHECK_EQ(SHMS_OK, shms_writer_retire(b, 1));
    r_attaches();
    for (int i = 0; i < OBJECTS; i++)
        b_hit(i);
}
static void a_awaits_dead_rank(void) { /* so it asks whether the rank is gone */
    rank_0_dies();
    for (int i = 0; i < OBJECTS; i++)
        CHECK_EQ(SHMS_OK, verb_hit(a, keys[i], 4, ref));
}

/* From the state that `before` makes, `other` runs at each step of `whole`. Returns how many steps that has. */
static uint64_t interleave(void (*before)(void), void (*whole)(void), void (*other)(void)) {
    for (uint64_t i = 1;; i += EACH_RUN) {
        setup();
        if (before)
            before();
        interrupt(whole, other, i);
        join_late();
        join_heir();
        b_goes_on();
        settle();
        if (step < i)
            return i - 1;
    }
}

/* What a file's tests begin with. */
static void open_world(const char *what) {
    promises = mmap(NULL, sizeof *promises, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(promises != MAP_FAILED);
    name = store_name(what);
}

#endif
