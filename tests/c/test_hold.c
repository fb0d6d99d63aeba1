/* test_hold.c - a held lease ends when the writer ends it, and not before. */
#include "fixture.h"

static void begin(void) { open_store("hold", (shms_options){.capacity = 1024, .n_readers = 2}, 2); }

static void detach_all(void) {
    for (uint32_t r = 0; r < 2; r++)
        detach(r);
}

static void attach_all(void) {
    for (uint32_t r = 0; r < 2; r++)
        attach(r);
}

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

TEST(neither_reading_nor_releasing_ends_it) {
    begin();
    CHECK_EQ(SHMS_OK, put_marked(w, "k", 512, 7, ref));
    CHECK_EQ(1, verb_hold(w, ref));
    read_all(ref);
    CHECK_EQ(SHMS_EFULL, put_another());
    CHECK_EQ(SHMS_OK, shms_writer_retire(w, 0));
    detach_all(); /* nobody is expected any more */
    CHECK_EQ(SHMS_EFULL, put_another());
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    attach_all(); /* an attached rank may still read it */
    read_all(ref);
    CHECK_EQ(1, verb_hold(w, ref)); /* twice is once */
    CHECK_EQ(1, shms_writer_cancel(w, ref));
    CHECK_EQ(0, shms_writer_cancel(w, ref));
    CHECK_EQ(0, verb_hold(w, ref));
    CHECK_EQ(SHMS_OK, put_another());
    CHECK_EQ(0, verb_hold(w, ref)); /* the object is gone, too */
    end();
}

TEST(it_can_begin_after_all_have_read) {
    begin();
    CHECK_EQ(SHMS_OK, put_marked(w, "k", 512, 7, ref));
    read_all(ref);
    CHECK_EQ(1, verb_hold(w, ref)); /* the lease is complete, but not ended yet */
    CHECK_EQ(SHMS_EFULL, put_another());
    CHECK_EQ(1, shms_writer_cancel_all(w));
    CHECK_EQ(SHMS_OK, put_another());
    end();
}

TEST(the_next_lease_of_its_entry_is_an_ordinary_one) {
    uint8_t next[SHMS_REF_SIZE];
    begin();
    CHECK_EQ(SHMS_OK, put_marked(w, "k", 512, 7, ref));
    CHECK_EQ(1, verb_hold(w, ref));
    CHECK_EQ(1, shms_writer_cancel(w, ref));
    CHECK_EQ(SHMS_OK, verb_hit(w, "k", 1, next));
    read_all(next);
    CHECK_EQ(SHMS_OK, put_another());
    end();
}

TEST(it_survives_recovery) {
    begin();
    CHECK_EQ(SHMS_OK, put_marked(w, "k", 512, 7, ref));
    CHECK_EQ(1, verb_hold(w, ref));
    shms_writer_free(w); /* like a process that dies */
    CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
    read_all(ref);
    CHECK_EQ(SHMS_EFULL, put_another());
    CHECK_EQ(1, shms_writer_cancel(w, ref));
    CHECK_EQ(SHMS_OK, put_another());
    end();
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
    detach_all(); /* all others are over now, and the next hit finds them */
    CHECK_EQ(SHMS_OK, verb_hit(w, "other", 5, other));
    CHECK_EQ(1, shms_writer_cancel(w, ref));
    end();
}

TEST(a_batch_opens_and_undoes_it) {
    shms_batch b = {0};
    begin();
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
    shms_batch_drop(w, &b);
    end();
}

TEST(a_reference_is_compared_with_its_object) {
    begin();
    CHECK_EQ(SHMS_OK, put_marked(w, "k", 512, 7, ref));
    CHECK_EQ(1, shms_writer_validate(w, ref, NULL, 0));
    CHECK_EQ(1, shms_writer_validate(w, ref, "k", 1));
    CHECK_EQ(0, shms_writer_validate(w, ref, "l", 1));
    CHECK_EQ(0, shms_writer_validate(w, ref, "kk", 2));
    ref[39] ^= 1;
    CHECK_EQ(SHMS_ESTALE, shms_writer_validate(w, ref, "k", 1));
    CHECK_EQ(SHMS_ESTALE, verb_hold(w, ref));
    ref[39] ^= 1;
    CHECK_EQ(1, shms_writer_cancel(w, ref));
    CHECK_EQ(1, shms_writer_validate(w, ref, "k", 1));
    CHECK_EQ(SHMS_OK, put_another());
    CHECK_EQ(0, shms_writer_validate(w, ref, "k", 1));
    end();
}
