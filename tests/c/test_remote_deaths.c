/* test_remote_deaths.c - A, B or the rank is killed before each of its steps, and so is each successor; see remote.h. */
#include "remote.h"

/* Which arena is whose matters to few steps: if A has the second one, at every 8th of them. */
#define STRIDE (arena_of_a ? 8u * EACH_DEATH : 1u * EACH_DEATH)

static int to_parent[2], to_child[2];

/* In the child: lets the parent act now. */
static void meet(void) {
    char c = 0;
    CHECK(write(to_parent[1], &c, 1) == 1 && read(to_child[0], &c, 1) == 1);
}

/* Runs `script` in a process that dies before its step k. The parent does `act` when the script meets it. Returns
 * whether the script had that many steps. */
static bool killed(void (*script)(void), uint64_t k, void (*act)(void)) {
    char c;
    CHECK(pipe(to_parent) == 0 && pipe(to_child) == 0);
    pid_t child = fork_child();
    if (child == 0) {
        die_at_step(k);
        script();
        _exit(0);
    }
    close(to_parent[1]);
    close(to_child[0]);
    while (read(to_parent[0], &c, 1) == 1) {
        act();
        CHECK(write(to_child[1], &c, 1) == 1);
    }
    close(to_parent[0]);
    close(to_child[1]);
    int how = reap(child);
    CHECK(how == 0 || how == 1000 + SIGKILL);
    return how != 0;
}

static uint64_t die_in_turn(void (*script)(void)) {
    uint64_t j = 1;
    while (killed_at(j, script))
        j++;
    return j - 1;
}

static void all_of_b(void) {
    join_b();
    b_hit_chain();
    b_cancel_middle();
    b_cancel_last();
    b_has();
    b_touch();
    b_hit_owed();
    CHECK_EQ(1, verb_hold(b, last_of_b(OWED, 0)->ref));
    b_address();
    b_put();
    b_delete();
    b_retire();
    b_clear();
    CHECK_EQ(SHMS_EFULL, put(b, "large", 13, 1, NULL));
    CHECK_EQ(SHMS_OK, put(b, "large", 11, 1, NULL));
}

static uint64_t b_dies_anywhere(bool succeeded, bool keep) {
    for (uint64_t k = 1;; k += STRIDE) {
        setup();
        b_dies();
        bool more = killed(all_of_b, k, NULL);
        what_b_promises();
        promises_end(B, true);
        views_are_whole();
        keeps = keep;
        if (succeeded) {
            CHECK(die_in_turn(join_b) >= 2);
            join_b();
        }
        keeps = false;
        if (keep) {
            b_still_promises();
            a_evict();
            take_promises();
            CHECK(shms_writer_cancel_all(b) >= 0); /* some are held */
        }
        settle();
        if (!more)
            return k - 1;
    }
}

static int meetings;
static void (*count_and_die)(const char *label);
static void meet_at_w2(const char *label) {
    count_and_die(label);
    if (label[0] == 'W' && label[1] == '2')
        meet();
}
static void all_of_a(void) {
    join_a();
    count_and_die = shms_step_hook;
    shms_step_hook = meet_at_w2;
    a_small();
    a_evict();
    CHECK(shms_writer_delete(a, "cold", 4) >= 0);
    if (verb_hit(a, "ours", 4, ref) == SHMS_OK)
        CHECK_EQ(1, shms_writer_cancel(a, ref));
    a_puts("later", 3);
    a_clear();
}

static int hit_at;
static void b_hits_before_w2(void) {
    if (++meetings == hit_at)
        b_hit_both();
}
static void b_hits_one_before_w2(void) {
    if (++meetings == hit_at)
        b_hit_read();
}

static uint64_t a_dies_anywhere(void (*act)(void), int at, bool taken) {
    for (uint64_t k = 1;; k += STRIDE) {
        setup();
        b_put();
        die(&a);
        meetings = 0;
        hit_at = at;
        bool more = killed(all_of_a, k, act);
        views_are_whole();
        b_is_kept();
        join_heir();
        if (taken)
            take_promises();
        b_hit_owed();
        CHECK(die_in_turn(join_a) >= 2);
        join_a();
        settle();
        if (!more)
            return k - 1;
    }
}

static void all_of_rank(void) {
    n_views = 0;
    CHECK_EQ(SHMS_OK, shms_reader_attach(&r, name, 0, NULL));
    meet();
    for (int i = 0; i < promises->n; i++)
        if (promises->at[i].remote && i % 2)
            CHECK(shms_reader_release(r, promises->at[i].ref) >= 0);
        else if (promises->at[i].remote)
            keep(view_of(r, promises->at[i].ref), promises->at[i].mark);
    release_views();
    CHECK_EQ(SHMS_OK, shms_reader_close(r));
}

static uint64_t rank_dies_anywhere(bool succeeded) {
    for (uint64_t k = 1;; k += STRIDE) {
        setup();
        release_views();
        shms_reader_free(r);
        all_promises_end();
        bool more = killed(all_of_rank, k, b_hits_all);
        all_promises_end();
        r = NULL;
        if (succeeded)
            r_attaches();
        settle();
        if (!more)
            return k - 1;
    }
}

static void deaths(void) {
    for (int succeeded = 0; succeeded < 2; succeeded++) {
        CHECK(b_dies_anywhere(succeeded, false) > 100);
        CHECK(rank_dies_anywhere(succeeded) > 20);
        for (int at = 0; at < 3; at++) {
            CHECK(a_dies_anywhere(b_hits_before_w2, at, succeeded) > 130);
            CHECK(a_dies_anywhere(b_hits_one_before_w2, at, succeeded) > 130);
            CHECK(meetings > at);
        }
    }
    kept_leases = 0;
    CHECK(b_dies_anywhere(true, true) > 100 && kept_leases > 100 / STRIDE);
}

TEST(no_promise_is_broken_at_whatever_step_one_is_killed) {
    open_world("deaths");
    for (arena_of_a = 1; arena_of_a >= 0; arena_of_a--)
        deaths();
    arena_of_a = 0;
}

static void a_has_room_at_v1(const char *label) {
    if (strcmp(label, "V1"))
        return;
    shms_step_hook = NULL;
    CHECK_EQ(SHMS_OK, put(a, "wanted", 3, 8, NULL));
}

/* A successor of B settles its own arena, and may prefault it, which takes long. */
TEST(what_the_dead_held_is_over_before_anything_slow) {
    setup();
    CHECK_EQ(SHMS_OK, verb_hit_of(a, "cold", 4, 0, true, ref));
    b_hit(READ);
    shms_pending pending;
    CHECK_EQ(SHMS_OK, verb_reserve(b, "open", 4, NULL, 0, UNIT, &pending));
    CHECK_EQ(SHMS_EFULL, put(a, "wanted", 3, 8, NULL));
    b_dies();
    shms_step_hook = a_has_room_at_v1;
    join_b();
    CHECK(!shms_step_hook);
    all_promises_end();
    CHECK(shms_writer_cancel_all(a) >= 0);
    settle();
}
