/*
 * test_orphan.c - a reader meets an object that a dead writer was about to evict. It takes the object, and no successor
 * evicts it under the view.
 */
#include "support.h"

enum { UNITS = 16, SIZE = 3 * SHMS_ALIGN };

/* The child's writer dies before the n-th `label` of a put that evicts two objects. */
static void a_view_taken_from_a_dead_writer_stays_valid(const char *label, int n, bool gone) {
    const char *name = store_name("orphan");
    uint8_t refs[4][SHMS_REF_SIZE];
    shms_reader *r = four_read_objects(name, UNITS * SHMS_ALIGN, SIZE, refs);
    shms_writer *w;
    pid_t child = fork_child();
    if (child == 0) {
        CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
        die_before(label, n);
        put_marked(w, "new", 2 * SIZE, 9, NULL);
        _exit(0);
    }
    reap_killed(child);
    shms_view *v = view_of(r, refs[0]);
    CHECK_EQ(gone, v == NULL);
    CHECK_EQ(!gone, shms_reader_validate(r, refs[0]));
    CHECK(gone || filled(v->payload, SIZE, 0));
    CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
    for (int i = 0; i < 20; i++) {
        CHECK_EQ(SHMS_OK, put_marked(w, (char[]){(char)('A' + i), 0}, SIZE, 50, NULL));
        CHECK(gone || filled(v->payload, SIZE, 0));
    }
    CHECK_EQ(!gone, shms_reader_validate(r, refs[0]));
    CHECK_EQ(!gone, shms_writer_has(w, "a", 1));
    if (v)
        shms_view_release(v);
    CHECK_EQ(SHMS_OK, put_marked(w, "all", (UNITS - 1) * SHMS_ALIGN, 1, NULL));
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    shms_reader_free(r);
    end_writer(w);
}

TEST(a_view_is_valid_before_whatever_step_the_writer_died) {
    a_view_taken_from_a_dead_writer_stays_valid("W2", 1, false); /* still LIVE */
    a_view_taken_from_a_dead_writer_stays_valid("W2", 2, false); /* EVICTING from here on */
    a_view_taken_from_a_dead_writer_stays_valid("W3", 1, false);
    a_view_taken_from_a_dead_writer_stays_valid("W4", 1, false);
    a_view_taken_from_a_dead_writer_stays_valid("W4", 2, true); /* FREE */
}
