/*
 * test_groups.c - leases that wait for one group of ranks: named at the hand-out, or once later.
 */
#include "fixture.h"

enum { SIZE = 64, SPAN = 128, FITS = 4, RANKS = 5 };
enum { ALL, FIRST, SECOND, THIRD, NONE }; /* as the calls take groups: all ranks, {0, 1}, {2, 3}, {4}, no group */

static void begin(uint32_t attached) {
    open_store("groups",
               (shms_options){.capacity = FITS * SPAN, .n_readers = RANKS, .n_groups = 3, .group_sizes = {2, 2, 1}},
               attached);
}

static int put_for(const char *key, uint32_t group) {
    int rc = shms_batch_put(w, &b, key, (uint32_t)strlen(key), "m", 1, NULL, 0, SIZE, NULL, 0, 0, group, 0);
    b.keep = 1;
    memcpy(ref, b.ref, sizeof ref);
    return rc;
}

/* Stores as much as there is room for, and leaves nothing. */
static bool all_may_go(void) {
    shms_ticket t;
    if (verb_begin(w, "large", 5, NULL, 0, FITS * SPAN - 64, &t))
        return false;
    CHECK_EQ(SHMS_OK, verb_abort(w, &t));
    CHECK_EQ(0, shms_writer_count(w));
    return true;
}

static void read_by(uint32_t r) {
    shms_view *v = view_of(readers[r], ref);
    CHECK(v);
    shms_view_release(v);
}

static void a_lease_waits_for_the_ranks_of_its_group_and_for_no_other(uint32_t attached) {
    static const uint32_t first[] = {0, 0, 2, 4}, last[] = {4, 1, 3, 4};
    begin(attached); /* the others have never attached */
    for (uint32_t group = ALL; group <= THIRD; group++)
        for (int later = 0; later < 2; later++) {
            CHECK_EQ(SHMS_OK, put_for("k", later ? ALL : group));
            if (later)
                CHECK_EQ(1, shms_writer_assign_group(w, ref, group));
            for (uint32_t r = first[group]; r <= last[group] && r < attached; r++) {
                CHECK(!all_may_go());
                read_by(r);
            }
            CHECK_EQ(last[group] < attached, all_may_go());
            if (shms_writer_cancel(w, ref) == 1)
                CHECK(all_may_go());
        }
    end();
}

TEST(what_the_ranks_of_other_groups_do_does_not_matter) {
    begin(2);
    CHECK_EQ(SHMS_OK, put_for("a", FIRST));
    CHECK_EQ(1, shms_reader_release(readers[0], ref));
    CHECK_EQ(1, shms_reader_release(readers[1], ref));
    CHECK(all_may_go()); /* three others have never attached */
    for (uint32_t r = 2; r < RANKS; r++)
        CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[r], name, r, NULL));
    CHECK_EQ(SHMS_OK, put_for("b", FIRST));
    detach(0);
    CHECK(!all_may_go());
    detach(1);
    CHECK(all_may_go()); /* three others are alive and have not read */
    CHECK_EQ(SHMS_OK, put_for("c", THIRD));
    rank_dies(name, 0);
    CHECK_EQ(SHMS_OK, shms_writer_retire(w, 3));
    CHECK(!all_may_go()); /* the dead and the retired answer for nobody */
    detach(4);
    CHECK(all_may_go());
    rank_dies(name, 4);
    CHECK_EQ(SHMS_OK, put_for("d", THIRD));
    CHECK(all_may_go()); /* its only rank is dead */
    end();
}

TEST(a_rank_of_another_group_may_read_and_then_holds_by_its_pin) {
    begin(RANKS);
    CHECK_EQ(SHMS_OK, put_for("k", THIRD));
    shms_view *v = view_of(readers[0], ref);
    CHECK(v);
    read_by(4);
    CHECK(!all_may_go());
    shms_view_release(v);
    CHECK(all_may_go());
    end();
}

TEST(a_lease_gets_its_group_once) {
    begin(RANKS);
    CHECK_EQ(SHMS_OK, put_for("k", ALL));
    CHECK_EQ(SHMS_EINVAL, shms_writer_assign_group(w, ref, NONE));
    CHECK_EQ(SHMS_EINVAL, shms_writer_assign_group(w, ref, 256)); /* not a group modulo 256 either */
    CHECK_EQ(1, shms_writer_assign_group(w, ref, ALL));
    CHECK_EQ(1, shms_writer_assign_group(w, ref, SECOND));
    CHECK_EQ(1, shms_writer_assign_group(w, ref, SECOND));
    CHECK_EQ(SHMS_EINVAL, shms_writer_assign_group(w, ref, THIRD));
    CHECK_EQ(SHMS_EINVAL, shms_writer_assign_group(w, ref, ALL)); /* wider: the others may have been let down already */
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    uint8_t forged[SHMS_REF_SIZE];
    memcpy(forged, ref, sizeof forged);
    forged[SHMS_REF_SIZE - 1] ^= 1;
    CHECK_EQ(SHMS_ESTALE, shms_writer_assign_group(w, forged, SECOND));
    CHECK_EQ(1, shms_writer_cancel(w, ref));
    CHECK_EQ(0, shms_writer_assign_group(w, ref, SECOND));
    CHECK_EQ(0, shms_writer_assign_group(w, ref, THIRD));
    CHECK(all_may_go());
    CHECK_EQ(0, shms_writer_assign_group(w, ref, SECOND));
    end();
}

TEST(a_group_that_does_not_exist_changes_nothing) {
    begin(RANKS);
    CHECK_EQ(SHMS_EINVAL, put_for("k", NONE));
    CHECK_EQ(SHMS_ECLOSED, shms_batch_put(NULL, &b, "k", 1, NULL, 0, NULL, 0, 0, NULL, 0, 0, FIRST, 0));
    CHECK_EQ(0, shms_writer_has(w, "k", 1));
    CHECK_EQ(SHMS_OK, put_for("k", FIRST));
    CHECK_EQ(SHMS_EINVAL, shms_batch_hit(w, &b, "k", 1, NONE, 0));
    CHECK_EQ(SHMS_EINVAL, shms_batch_hit(w, &b, "absent", 6, NONE, 0));
    CHECK_EQ(SHMS_OK, shms_batch_begin(w, &b, "l", 1, NULL, 0, NULL, 0, SIZE, 0, 1));
    CHECK_EQ(SHMS_EINVAL, shms_batch_commit(w, &b, NONE, 0));
    CHECK_EQ(0, shms_writer_has(w, "l", 1));
    CHECK_EQ(SHMS_OK, shms_batch_commit(w, &b, SECOND, 0)); /* the ticket has not ended */
    CHECK_EQ(2, w->seg.writer->open_leases);
    CHECK_EQ(0, w->seg.writer->counters[SHMS_C(hits)] + w->seg.writer->counters[SHMS_C(misses)]);
    shms_batch_undo(w, &b);
    CHECK_EQ(1, w->seg.writer->open_leases);
    end();
}

TEST(every_way_to_hand_out_takes_a_group) {
    begin(RANKS);
    CHECK_EQ(SHMS_OK, put_for("k", THIRD));
    read_by(4);
    CHECK_EQ(SHMS_OK, shms_batch_hit(w, &b, "k", 1, SECOND, 0));
    b.keep = 1;
    memcpy(ref, b.ref, sizeof ref);
    read_by(2);
    CHECK(!all_may_go());
    read_by(3);
    CHECK(all_may_go());
    CHECK_EQ(SHMS_OK, shms_batch_begin(w, &b, "l", 1, NULL, 0, NULL, 0, SIZE, 0, 1));
    CHECK_EQ(SHMS_OK, shms_batch_commit(w, &b, THIRD, 0));
    b.keep = 1;
    memcpy(ref, b.ref, sizeof ref);
    CHECK(!all_may_go());
    read_by(4);
    CHECK(all_may_go());
    end();
}

/* Reads that came before the lease got its group count. */
TEST(an_address_may_release) {
    begin(RANKS);
    CHECK_EQ(SHMS_OK, put_for("k", ALL));
    read_by(2);
    read_by(3);
    CHECK(!all_may_go()); /* and a search remembers it */
    CHECK_EQ(1, shms_writer_assign_group(w, ref, SECOND));
    CHECK(all_may_go());
    CHECK_EQ(SHMS_OK, put_for("k", ALL));
    read_by(0);
    CHECK(!all_may_go());
    CHECK_EQ(1, shms_writer_assign_group(w, ref, FIRST));
    CHECK(!all_may_go());
    read_by(1);
    CHECK(all_may_go());
    end();
}

TEST(an_address_may_free_a_lease_entry) {
    begin(RANKS);
    CHECK_EQ(SHMS_OK, put_for("k", ALL));
    uint32_t n = 1;
    for (; verb_hit(w, "k", 1, ref) == SHMS_OK; n++)
        read_by(4);
    CHECK_EQ(w->leases.n_entries, n);
    CHECK_EQ(SHMS_ENOLEASE, verb_hit(w, "k", 1, ref)); /* all entries are swept, and remembered as open */
    CHECK_EQ(SHMS_ENOLEASE, verb_hit(w, "k", 1, ref));
    CHECK_EQ(1, shms_writer_assign_group(w, ref, THIRD)); /* of the last hand-out */
    CHECK_EQ(SHMS_OK, verb_hit(w, "k", 1, ref));
    CHECK_EQ(SHMS_ENOLEASE, verb_hit(w, "k", 1, ref));
    end();
}

TEST(a_held_lease_stays_held_and_keeps_its_group) {
    begin(RANKS);
    for (int held_first = 0; held_first < 2; held_first++) {
        CHECK_EQ(SHMS_OK, put_for("k", ALL));
        for (int i = 0; i < 2; i++)
            CHECK_EQ(1, i == held_first ? shms_writer_assign_group(w, ref, THIRD) : verb_hold(w, ref));
        CHECK_EQ(SHMS_EINVAL, shms_writer_assign_group(w, ref, FIRST));
        read_by(4);
        CHECK(!all_may_go());
        CHECK_EQ(1, shms_writer_cancel(w, ref));
        CHECK(all_may_go());
    }
    end();
}

TEST(a_refusal_blames_only_the_ranks_of_the_group) {
    begin(RANKS);
    CHECK_EQ(SHMS_OK, put_for("k", SECOND));
    read_by(2);
    CHECK(!all_may_go());
    shms_refusal why;
    why = w->refusal;
    for (uint32_t r = 0; r < RANKS; r++)
        CHECK_EQ(r == 3 ? SPAN : 0, why.held[r]);
    end();
}

TEST(another_lease_of_the_object_still_holds_it) {
    begin(RANKS);
    uint8_t all[SHMS_REF_SIZE];
    CHECK_EQ(SHMS_OK, put_for("k", ALL));
    memcpy(all, ref, sizeof all);
    CHECK_EQ(SHMS_OK, shms_batch_hit(w, &b, "k", 1, THIRD, 0));
    b.keep = 1;
    memcpy(ref, b.ref, sizeof ref);
    read_by(4);
    CHECK(!all_may_go()); /* nobody has said whom the first is for */
    CHECK_EQ(1, shms_writer_assign_group(w, all, FIRST));
    CHECK(!all_may_go());
    memcpy(ref, all, sizeof ref);
    read_by(0);
    read_by(1);
    CHECK(all_may_go());
    end();
}

TEST(a_successor_keeps_the_groups) {
    begin(0);
    CHECK_EQ(SHMS_OK, put_for("k", ALL));
    CHECK_EQ(SHMS_OK, shms_writer_close(w, 0));
    shms_writer_free(w);
    for (int killed = 0; killed < 2; killed++) {
        pid_t child = fork_child();
        if (child == 0) {
            CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
            die_before("G1", !killed);
            CHECK_EQ(1, shms_writer_assign_group(w, ref, THIRD));
            kill(getpid(), SIGKILL);
        }
        reap_killed(child);
        CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
        CHECK_EQ(killed ? SHMS_EINVAL : 1, shms_writer_assign_group(w, ref, killed ? FIRST : ALL));
        if (!killed) {
            CHECK_EQ(SHMS_OK, shms_writer_close(w, 0));
            shms_writer_free(w);
        }
    }
    CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[4], name, 4, NULL));
    CHECK(!all_may_go());
    read_by(4);
    CHECK(all_may_go());
    end();
}

TEST(a_lease_for_a_group_that_does_not_exist_is_damage) {
    begin(0);
    CHECK_EQ(SHMS_OK, put_for("k", ALL));
    shms_ref r;
    shms_ref_unpack(&r, ref);
    shms_word *what = &w->seg.leases[r.entry].what;
    CHECK_EQ(SHMS_OK, shms_writer_close(w, 0)); /* its mapping stays */
    for (uint32_t group = 0; group < 256; group++) {
        shms_writer *successor;
        shms_set(what, shms_lease_what(r.slot, false, group, 0));
        CHECK_EQ(group < NONE ? SHMS_OK : SHMS_ECORRUPT, shms_writer_recover(&successor, name, NULL));
        if (group < NONE)
            shms_writer_free(successor);
    }
    shms_writer_free(w);
}

TEST(the_groups_are_options_of_the_store) {
    begin(0);
    shms_options o, other;
    shms_expected expected = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID, .options = &other};
    shms_writer_options(w, &o);
    CHECK(o.n_groups == 3 && o.group_sizes[0] == 2 && o.group_sizes[1] == 2 && o.group_sizes[2] == 1);
    CHECK_EQ(SHMS_OK, shms_writer_close(w, 0));
    shms_writer_free(w);
    static const uint16_t sizes[][4] = {{0}, {1, 5}, {2, 2, 3}, {3, 1, 2, 2}, {3, 2, 1, 2}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        other = o;
        other.n_groups = sizes[i][0];
        memcpy(other.group_sizes, sizes[i] + 1, 3 * sizeof **sizes);
        CHECK_EQ(SHMS_EOPTIONS, shms_writer_recover(&w, name, &expected));
    }
    other = o;
    CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, &expected));
    CHECK_EQ(SHMS_OK, shms_options_round(&other));
    CHECK_EQ(0, memcmp(&o, &other, sizeof o));
    end();
}

TEST(each_rank_may_be_a_group) {
    shms_options o = {.capacity = FITS * SPAN, .n_readers = SHMS_MAX_GROUPS, .n_groups = SHMS_MAX_GROUPS};
    for (uint32_t g = 0; g < SHMS_MAX_GROUPS; g++)
        o.group_sizes[g] = 1;
    name = store_name("many");
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, &o));
    CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[0], name, SHMS_MAX_GROUPS - 1, NULL));
    CHECK_EQ(SHMS_EINVAL, put_for("k", SHMS_MAX_GROUPS + 1));
    CHECK_EQ(SHMS_OK, put_for("k", SHMS_MAX_GROUPS));
    CHECK(!all_may_go());
    read_by(0);
    CHECK(all_may_go());
    end();
}

TEST(each_in_all_its_cases) {
    for (uint32_t attached = 0; attached <= RANKS; attached++)
        a_lease_waits_for_the_ranks_of_its_group_and_for_no_other(attached);
    store_names_left();
}
