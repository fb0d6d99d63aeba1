/*
 * test_expected.c - which ranks a lease expects. When the lease was opened, the rank had attached, or had never
 * attached and was not retired. Since then it has not acknowledged, closed, died or been retired.
 */
#include "fixture.h"

enum { SIZE = 64, SPAN = 128, FITS = 4, CAPACITY = FITS * SPAN };

static uint8_t refs[FITS][SHMS_REF_SIZE];

static void begin(uint32_t attached) {
    open_store("expected", (shms_options){.capacity = CAPACITY, .n_readers = 2, .max_objects = 2 * FITS}, attached);
}

static int put(int i, uint8_t *out) { return put_marked(w, (char[]){(char)('a' + i), 0}, SIZE, (uint64_t)i, out); }

static void store_and_promise(int n) {
    for (int i = 0; i < n; i++)
        CHECK_EQ(SHMS_OK, put(i, refs[i]));
}

static shms_view *get(int r, int i) {
    shms_view *v = view_of(readers[r], refs[i]);
    CHECK(v && filled(v->payload, SIZE, (uint64_t)i));
    return v;
}

/* ---- closing ---- */

static void no_lease_expects_a_closed_reader_even_if_it_has_views(bool properly) {
    begin(2);
    store_and_promise(FITS);
    shms_view *v = get(0, 0);
    for (int i = 0; i < FITS; i++)
        CHECK_EQ(1, shms_reader_release(readers[1], refs[i]));
    CHECK_EQ(SHMS_EFULL, put(FITS, refs[1])); /* the verdict is remembered */
    if (properly)
        CHECK_EQ(SHMS_OK, shms_reader_close(readers[0]));
    else
        shms_reader_free(readers[0]);
    for (int i = FITS; i < 100; i++) { /* earlier promises have ended, and later hand-outs do not expect it */
        CHECK_EQ(SHMS_OK, put(i, refs[1]));
        CHECK_EQ(1, shms_reader_release(readers[1], refs[1]));
    }
    CHECK(filled(v->payload, SIZE, 0)); /* its view holds the object by its pin */
    CHECK_EQ(SHMS_EFULL, put_marked(w, "large", CAPACITY - SHMS_ALIGN, 1, NULL));
    shms_reader *heir;
    CHECK_EQ(SHMS_ERANKINUSE, shms_reader_attach(&heir, name, 0, NULL));
    shms_view_release(v);
    CHECK_EQ(SHMS_OK, put_marked(w, "large", CAPACITY - SHMS_ALIGN, 1, NULL));
    CHECK_EQ(SHMS_OK, shms_writer_clear(w, "", 0));
    if (properly)
        shms_reader_free(readers[0]);
    CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[0], name, 0, NULL));
    store_and_promise(FITS); /* expected again */
    for (int i = 0; i < FITS; i++)
        CHECK_EQ(1, shms_reader_release(readers[1], refs[i]));
    CHECK_EQ(SHMS_EFULL, put(FITS, NULL));
    end();
}

TEST(a_second_close_writes_nothing) {
    begin(2);
    shms_reader *old = readers[0];
    CHECK_EQ(SHMS_OK, shms_reader_close(old));
    CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[0], name, 0, NULL)); /* the rank is another process's now */
    shms_reader_free(old);
    store_and_promise(FITS);
    for (int i = 0; i < FITS; i++)
        CHECK_EQ(1, shms_reader_release(readers[1], refs[i]));
    CHECK_EQ(SHMS_EFULL, put(FITS, NULL));
    end();
}

/* ---- retiring ---- */

TEST(a_retirement_ends_leases_for_good_even_of_a_rank_that_never_attached) {
    begin(1);
    store_and_promise(2);
    CHECK_EQ(SHMS_OK, shms_writer_retire(w, 1));
    CHECK_EQ(SHMS_OK, put(2, refs[2])); /* not for this rank */
    CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[1], name, 1, NULL));
    CHECK_EQ(SHMS_OK, put(3, refs[3])); /* for it */
    for (int i = 0; i < FITS; i++)
        CHECK_EQ(1, shms_reader_release(readers[0], refs[i]));
    for (int i = FITS; i < FITS + 3; i++)
        CHECK_EQ(SHMS_OK, put(i, NULL));
    shms_view_release(get(1, 3));
    end();
}

static const char *at;
static int met;

static void attach_there(const char *label) {
    if (strcmp(label, at) || met++)
        return;
    CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[1], name, 1, NULL));
}

static void retire_there(const char *label) {
    if (strcmp(label, at) || met++)
        return;
    CHECK_EQ(SHMS_OK, shms_writer_retire(w, 1));
}

/* In either order, the earlier promises end for good. */
static void a_retirement_or_a_first_attachment_sees_the_other(const char *label, bool retire_inside) {
    begin(1);
    store_and_promise(FITS);
    at = label;
    met = 0;
    shms_step_hook = retire_inside ? retire_there : attach_there;
    if (retire_inside)
        CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[1], name, 1, NULL));
    else
        CHECK_EQ(SHMS_OK, shms_writer_retire(w, 1));
    shms_step_hook = NULL;
    CHECK(met > 0);
    for (int i = 0; i < FITS; i++)
        CHECK_EQ(1, shms_reader_release(readers[0], refs[i]));
    CHECK_EQ(SHMS_OK, put_marked(w, "large", CAPACITY - SHMS_ALIGN, 1, NULL));
    end();
}

/* ---- attaching ---- */

static void a_rank_that_attached_before_the_reference_went_out_is_promised_the_object(const char *label) {
    begin(2);
    shms_reader_free(readers[1]); /* it has attached before, so it is not expected until it attaches again */
    readers[1] = NULL;
    at = label;
    met = 0;
    shms_step_hook = attach_there;
    CHECK_EQ(SHMS_OK, put(0, refs[0]));
    shms_step_hook = NULL;
    CHECK_EQ(1, met);
    CHECK_EQ(1, shms_reader_release(readers[0], refs[0]));
    CHECK_EQ(SHMS_EFULL, put_marked(w, "large", CAPACITY - SHMS_ALIGN, 1, NULL));
    shms_view_release(get(1, 0));
    CHECK_EQ(SHMS_OK, put_marked(w, "large", CAPACITY - SHMS_ALIGN, 1, NULL));
    end();
}

TEST(older_leases_do_not_expect_a_rank_that_attaches_again) {
    begin(2);
    store_and_promise(FITS);
    detach(1);
    attach(1);
    for (int i = 0; i < FITS; i++)
        CHECK_EQ(1, shms_reader_release(readers[0], refs[i]));
    CHECK_EQ(SHMS_OK, put_marked(w, "large", CAPACITY - SHMS_ALIGN, 1, NULL));
    end();
}

TEST(an_unpublished_lease_of_a_dead_writer_expects_no_rank) {
    begin(0);
    shms_writer_free(w);
    pid_t child = fork_child();
    if (child == 0) {
        CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
        die_before("L3", 1);
        put(0, refs[0]);
        _exit(1);
    }
    reap_killed(child);
    CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[0], name, 0, NULL));
    CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
    CHECK_EQ(1, shms_writer_has(w, "a", 1));
    CHECK_EQ(SHMS_OK, put_marked(w, "large", CAPACITY - SHMS_ALIGN, 1, NULL));
    end();
}

/* ---- a forged table ---- */

static void attaching_resets_whatever_is_in_the_table_of_the_rank(bool first) {
    begin(first ? 1 : 2);
    if (!first)
        shms_reader_free(readers[1]);
    const shms_layout *l = &w->seg.layout;
    shms_segment rank;
    CHECK_EQ(SHMS_OK, shms_segment_open(&rank, name, 1, NULL)); /* without holding its lock */
    shms_reader_table *t = shms_segment_reader(&rank, 1);
    for (uint64_t i = 0; i < l->max_objects; i++)
        shms_reader_pins(t)[i] = UINT32_MAX; /* one more pin wraps to 0 */
    for (uint64_t i = 0; i < l->max_leases; i++)
        shms_reader_acks(t, l)[i] = UINT64_MAX;
    shms_set(&t->base[0], SHMS_CLOSED - first);
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    shms_segment_close(&rank);
    CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[1], name, 1, NULL));
    store_and_promise(FITS);
    for (int i = 0; i < FITS; i++)
        CHECK_EQ(1, shms_reader_release(readers[0], refs[i]));
    CHECK_EQ(SHMS_EFULL, put(FITS, NULL)); /* promised */
    shms_view *v = get(1, 0);
    CHECK_EQ(SHMS_EFULL, put_marked(w, "large", CAPACITY - SHMS_ALIGN, 1, NULL)); /* pinned */
    CHECK(filled(v->payload, SIZE, 0));
    shms_view_release(v);
    for (int i = 1; i < FITS; i++)
        CHECK_EQ(1, shms_reader_release(readers[1], refs[i]));
    CHECK_EQ(SHMS_OK, put_marked(w, "large", CAPACITY - SHMS_ALIGN, 1, NULL)); /* neither promised nor pinned */
    end();
}

TEST(each_in_all_its_cases) {
    no_lease_expects_a_closed_reader_even_if_it_has_views(true);
    no_lease_expects_a_closed_reader_even_if_it_has_views(false);
    a_retirement_or_a_first_attachment_sees_the_other("T1", false);
    a_retirement_or_a_first_attachment_sees_the_other("T2", false);
    a_retirement_or_a_first_attachment_sees_the_other("A1", true);
    a_retirement_or_a_first_attachment_sees_the_other("A3", true);
    a_retirement_or_a_first_attachment_sees_the_other("A4", true);
    a_rank_that_attached_before_the_reference_went_out_is_promised_the_object("L1");
    a_rank_that_attached_before_the_reference_went_out_is_promised_the_object("L2");
    a_rank_that_attached_before_the_reference_went_out_is_promised_the_object("L3");
    attaching_resets_whatever_is_in_the_table_of_the_rank(true);
    attaching_resets_whatever_is_in_the_table_of_the_rank(false);
}
