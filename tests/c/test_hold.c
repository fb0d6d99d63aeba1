/* test_hold.c - a held lease ends when the writer ends it, and not before. */
#include "fixture.h"

/* Each rank reads the object, twice. */
static void read_all(const uint8_t *ref) {
    for (int i = 0; i < 4; i++) {
        shms_view *v = view_of(readers[i % 2], ref);
        CHECK(v && filled(v->payload, 512, 7));
        shms_view_release(v);
    }
}

/* A put that needs the room of the only object. */
static int put_another(void) {
    int rc = put_marked(w, "other", 900, 8, ref);
    if (rc == SHMS_OK)
        CHECK_EQ(1, shms_writer_cancel(w, ref));
    return rc;
}

TEST(no_sweep_for_free_entries_ends_it) {
    uint8_t other[SHMS_REF_SIZE];
    open_store("sweep", (shms_options){.capacity = 1 << 14, .n_readers = 2, .max_objects = 16}, 2);
    CHECK_EQ(SHMS_OK, put_marked(w, "k", 512, 7, ref));
    CHECK_EQ(1, verb_hold(w, ref));
    read_all(ref);
    CHECK_EQ(SHMS_OK, put_marked(w, "other", 512, 8, NULL));
    while (verb_hit(w, "other", 5, other) == SHMS_OK)
        continue;
    detach(0);
    detach(1); /* all others are over now, and the next hit finds them */
    CHECK_EQ(SHMS_OK, verb_hit(w, "other", 5, other));
    CHECK_EQ(1, shms_writer_cancel(w, ref));
    end();
}

TEST(a_batch_opens_and_undoes_it) {
    open_store("hold", (shms_options){.capacity = 1024, .n_readers = 2}, 2);
    CHECK_EQ(SHMS_OK, put_marked(w, "k", 512, 7, NULL));
    CHECK_EQ(SHMS_OK, shms_batch_hit(w, &b, "k", 1, 0, 1));
    read_all(b.ref);
    CHECK_EQ(SHMS_EFULL, put_another());
    shms_batch_undo(w, &b);
    CHECK_EQ(SHMS_OK, verb_hit(w, "k", 1, ref));
    CHECK_EQ(1, shms_batch_hold(w, &b, ref));
    read_all(ref);
    CHECK_EQ(SHMS_EFULL, put_another());
    shms_batch_undo(w, &b);
    CHECK_EQ(SHMS_OK, put_another());
    end();
}
