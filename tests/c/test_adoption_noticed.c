/* test_adoption_noticed.c - what A remembers of a refusal ends when someone lets go of an object; see adoption.h. */
#include "adoption.h"

static uint64_t wanted;
static bool placed;

static void a_wants(void) {
    int rc = placed ? SHMS_OK : put(a, "wanted", wanted, 8, NULL);
    CHECK(rc == SHMS_OK || rc == SHMS_EFULL);
    placed = rc == SHMS_OK;
}

/* In the state that `before` makes, A is refused `units`. `whole` lets go of something, and A may ask again at each of
 * its steps. Behind it, A has its place. */
static uint64_t noticed(void (*before)(void), void (*whole)(void), uint64_t units, bool refused) {
    for (uint64_t i = 1;; i++) {
        setup();
        before();
        wanted = units;
        placed = false;
        if (refused) {
            a_wants();
            CHECK(!placed);
        }
        interrupt(whole, a_wants, i, NULL, 0);
        a_wants();
        CHECK(placed);
        all_promises_end();
        if (b) /* it holds `cold` */
            CHECK(shms_writer_cancel_all(b) >= 0);
        settle();
        if (step < i)
            return i - 1;
    }
}

static void b_holds_cold(void) { CHECK_EQ(SHMS_OK, verb_hit_of(b, "cold", 4, 0, true, ref)); }
static void only_rank_0_is_awaited(void) {
    b_holds_cold();
    b_hit(READ);
    CHECK_EQ(1, shms_writer_assign_group(b, last_of_b(READ, 0)->ref, 1));
}
static void only_rank_1_is_awaited(void) {
    b_holds_cold();
    b_hit(READ);
    CHECK_EQ(1, shms_reader_release(r, last_of_b(READ, 0)->ref));
}
static void b_pins_and_leases(void) {
    shms_ref ref;
    b_hit(READ);
    b_hit(COLD);
    shms_ref_unpack(&ref, last_of_b(COLD, 0)->ref);
    CHECK_EQ(1, shms_writer_cancel(b, last_of_b(COLD, 0)->ref));
    CHECK(shms_holds_pin(&b->seg, ref.slot, ref.id)); /* where it will die */
}
static void b_names_group(void) { CHECK_EQ(1, shms_writer_assign_group(b, last_of_b(READ, 0)->ref, 1)); }
static void b_misses(void) { CHECK_EQ(0, shms_writer_touch(b, "else", 4)); }

static void rank_0_is_promised_all(void) {
    CHECK_EQ(SHMS_OK, shms_writer_retire(b, 1));
    b_hit(READ);
    b_hit(COLD);
}
static void r_closes(void) { CHECK_EQ(SHMS_OK, shms_reader_close(r)); /* `held` has a view */ }

static void rank_0_died(void) {
    rank_0_dies();
    rank_0_is_promised_all();
}

static void what_is_let_go_is_noticed(void) {
    CHECK(noticed(only_rank_0_is_awaited, b_cancel_last, 3, true) >= 4);
    CHECK(noticed(only_rank_0_is_awaited, b_cancel_all, 3, true) >= 4);
    CHECK(noticed(only_rank_0_is_awaited, r_release, 3, true) >= 2);
    CHECK(noticed(only_rank_0_is_awaited, r_acquire_and_release, 3, true) >= 5);
    CHECK(noticed(only_rank_1_is_awaited, b_names_group, 3, true) >= 2);
    CHECK(noticed(only_rank_1_is_awaited, b_retire, 3, true) >= 3);
    CHECK(noticed(b_holds_cold, b_delete, 3, false) >= 3);
    noticed(b_holds_cold, b_misses, 3, false);
    CHECK(noticed(b_pins_and_leases, b_dies, 3, true) == 0);
    CHECK(noticed(b_pins_and_leases, b_is_succeeded, 3, true) >= 4);
    CHECK(noticed(rank_0_is_promised_all, r_closes, 11, true) >= 2);
    CHECK(noticed(rank_0_died, r_attaches, 15, false) >= 5);
}

/* A successor of B settles its own arena, and may prefault it, which takes long: by then A must have its place. */
static void a_wants_at_v1(const char *label) {
    if (strcmp(label, "V1") == 0) {
        shms_step_hook = NULL;
        a_wants();
        CHECK(placed);
    }
}
static void a_holds_cold_and_b_pins_read(void) {
    CHECK_EQ(SHMS_OK, verb_hit_of(a, "cold", 4, 0, true, ref));
    b_pins();
}
static void a_holds_cold_and_b_hits_read(void) {
    CHECK_EQ(SHMS_OK, verb_hit_of(a, "cold", 4, 0, true, ref));
    b_hit(READ);
}
static void what_the_dead_held_is_over_before_anything_slow(void) {
    static void (*const befores[])(void) = {a_holds_cold_and_b_pins_read, a_holds_cold_and_b_hits_read};
    for (int i = 0; i < 2; i++) {
        setup();
        befores[i]();
        shms_ticket ticket;
        CHECK_EQ(SHMS_OK, verb_reserve(b, "open", 4, NULL, 0, UNIT, &ticket));
        wanted = 3;
        placed = false;
        a_wants();
        CHECK(!placed);
        b_dies();
        shms_step_hook = a_wants_at_v1;
        join_b();
        CHECK(!shms_step_hook && placed);
        half = SHMS_NONE;
        all_promises_end();
        CHECK(shms_writer_cancel_all(a) >= 0);
        settle();
    }
}

TEST(a_refused_writer_notices_whatever_is_let_go) {
    open_world("noticed");
    for (arena_of_a = 1; arena_of_a >= 0; arena_of_a--) {
        what_is_let_go_is_noticed();
        what_the_dead_held_is_over_before_anything_slow();
    }
}
