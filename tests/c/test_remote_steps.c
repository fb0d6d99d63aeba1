/* test_remote_steps.c - each whole operation of A, B or the rank runs at each step of the others; see remote.h. */
#include "remote.h"

#define EACH(table)                                                                                                    \
    size_t i_##table = 0;                                                                                              \
    i_##table < sizeof table / sizeof *table;                                                                          \
    i_##table++

static void (*const of_a[])(void) = {a_small, a_evict, a_delete, a_recover};
static void (*const of_a_between[])(void) = {a_evict, a_clear, a_recover};
static void (*const of_b[])(void) = {b_hit_read, b_hit_owed, b_hit_both, b_hit_and_cancel, b_has,
                                     b_touch,    b_forgets,  b_clear,    b_address,        b_retire,
                                     b_put,      b_dies,     b_closes,   b_is_succeeded,   b_hit_chain};
static void (*const of_b_with_leases[])(void) = {b_cancel_last, b_cancel_middle, b_cancel_first, b_reuses,
                                                 b_cancel_all,  b_address,       b_dies,         b_is_succeeded};
static void (*const of_rank[])(void) = {r_acquire, r_release, r_acquire_and_release, r_replace};

static void at_each_step(void) {
    uint64_t steps = 0;
    for (EACH(of_a)) {
        for (EACH(of_b))
            steps += interleave(NULL, of_a[i_of_a], of_b[i_of_b]);
        for (EACH(of_b_with_leases))
            steps += interleave(b_hit_chain, of_a[i_of_a], of_b_with_leases[i_of_b_with_leases]);
        for (EACH(of_rank)) {
            steps += interleave(b_address, of_a[i_of_a], of_rank[i_of_rank]);
            steps += interleave(b_was_read, of_a[i_of_a], of_rank[i_of_rank]);
        }
        kept_leases = 0;
        steps += interleave(b_hit_chain, of_a[i_of_a], b_is_kept);
        steps += interleave(b_hits_all, of_a[i_of_a], b_is_kept);
        CHECK(kept_leases > 20 / EACH_RUN);
    }
    for (EACH(of_a_between)) {
        kept_leases = 0;
        steps += interleave(b_hits_all, b_is_kept_here, of_a_between[i_of_a_between]);
        CHECK(kept_leases > 5 / EACH_RUN);
    }
    for (EACH(of_b))
        for (EACH(of_a_between))
            steps += interleave(NULL, of_b[i_of_b], of_a_between[i_of_a_between]);
    for (EACH(of_b_with_leases))
        for (EACH(of_a_between))
            steps += interleave(b_hit_chain, of_b_with_leases[i_of_b_with_leases], of_a_between[i_of_a_between]);
    for (EACH(of_rank))
        for (EACH(of_a_between))
            steps += interleave(b_address, of_rank[i_of_rank], of_a_between[i_of_a_between]);
    for (EACH(of_a))
        steps += interleave(a_awaits_dead_rank, of_a[i_of_a], r_comes_and_b_hits);
    steps += interleave(NULL, a_evict, b_pins);
    CHECK(steps > 3000 && late_acquires > 0);
}

/* A rank that attaches for the first time finds all its promises. */
static void refused_put(void) { CHECK_EQ(SHMS_EFULL, put(a, "put", 6, 8, NULL)); }

static uint64_t a_first_attachment_is_no_death(void (*whole)(void), void (*other)(void)) {
    for (uint64_t i = 1;; i++) {
        shms_options o = {.capacity = UNITS * UNIT, .n_readers = 1, .max_objects = SLOTS};
        CHECK_EQ(SHMS_OK, shms_writer_create(&a, name, &o));
        memset(promises, 0, sizeof *promises);
        for (int k = 0; k < OBJECTS; k++) {
            CHECK_EQ(SHMS_OK, put(a, keys[k], 3, (uint64_t)k, ref));
            promise(A, ref, (uint64_t)k, false);
        }
        interrupt(whole, other, i);
        refused_put();
        if (!r)
            r_attaches();
        take_promises();
        release_views();
        shms_reader_free(r);
        r = NULL;
        end_writer(a);
        if (step < i)
            return i - 1;
    }
}

TEST(no_promise_is_broken_whatever_one_does_at_a_step_of_another) {
    open_world("remote");
    at_each_step();
}

TEST(a_rank_that_attaches_while_a_put_is_refused_keeps_its_promises) {
    CHECK(a_first_attachment_is_no_death(refused_put, r_attaches) > 3);
    CHECK(a_first_attachment_is_no_death(r_attaches, refused_put) == 5); /* a look for holes, A1 to A4 */
}
