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
    int rc = shms_batch_put(
        w, &b, &(shms_put){.key = key, .key_len = (uint32_t)strlen(key), .payload_size = SIZE, .group = group});
    b.keep = 1;
    memcpy(ref, b.ref, sizeof ref);
    return rc;
}

/* Stores as much as there is room for, and leaves nothing. */
static bool all_evictable(void) {
    shms_pending t;
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
            CHECK_EQ(SHMS_EINVAL, shms_writer_assign_group(w, ref, NONE));
            for (uint32_t r = first[group]; r <= last[group] && r < attached; r++) {
                CHECK(!all_evictable());
                read_by(r);
            }
            CHECK_EQ(last[group] < attached, all_evictable());
            if (shms_writer_cancel(w, ref) == 1)
                CHECK(all_evictable());
        }
    end();
}

TEST(a_rank_of_another_group_may_read_and_then_holds_by_its_pin) {
    begin(RANKS);
    CHECK_EQ(SHMS_OK, put_for("k", THIRD));
    shms_view *v = view_of(readers[0], ref);
    CHECK(v);
    read_by(4);
    CHECK(!all_evictable());
    shms_view_release(v);
    CHECK(all_evictable());
    end();
}

TEST(nothing_is_handed_out_for_a_group_that_does_not_exist) {
    begin(RANKS);
    shms_put put = {.key = "l", .key_len = 1, .payload_size = SIZE, .group = NONE};
    CHECK_EQ(SHMS_EINVAL, shms_batch_begin(w, &b, &put));
    CHECK_EQ(SHMS_EINVAL, put_for("l", NONE));
    CHECK_EQ(SHMS_OK, put_for("l", SECOND));
    CHECK_EQ(SHMS_EINVAL, shms_batch_hit(w, &b, "l", 1, NONE, 0));
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

TEST(a_refusal_blames_only_the_ranks_of_the_group) {
    begin(RANKS);
    CHECK_EQ(SHMS_OK, put_for("k", SECOND));
    read_by(2);
    CHECK(!all_evictable());
    shms_refusal why = {0};
    CHECK_EQ(SHMS_OK, shms_writer_holders(w, &why));
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
    CHECK(!all_evictable()); /* nobody has said whom the first is for */
    CHECK_EQ(1, shms_writer_assign_group(w, all, FIRST));
    CHECK(!all_evictable());
    memcpy(ref, all, sizeof ref);
    read_by(0);
    read_by(1);
    CHECK(all_evictable());
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

TEST(each_rank_may_be_a_group) {
    shms_options o = {.capacity = FITS * SPAN, .n_readers = SHMS_MAX_GROUPS, .n_groups = SHMS_MAX_GROUPS};
    for (uint32_t g = 0; g < SHMS_MAX_GROUPS; g++)
        o.group_sizes[g] = 1;
    name = store_name("many");
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, &o));
    CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[0], name, SHMS_MAX_GROUPS - 1, NULL));
    CHECK_EQ(SHMS_EINVAL, put_for("k", SHMS_MAX_GROUPS + 1));
    CHECK_EQ(SHMS_OK, put_for("k", SHMS_MAX_GROUPS));
    CHECK(!all_evictable());
    read_by(0);
    CHECK(all_evictable());
    end();
}

TEST(each_in_all_its_cases) {
    for (uint32_t attached = 0; attached <= RANKS; attached++)
        a_lease_waits_for_the_ranks_of_its_group_and_for_no_other(attached);
    store_names_left();
}
