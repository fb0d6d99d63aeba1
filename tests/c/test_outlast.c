/*
 * test_outlast.c - a reader meets EVICTING, and the writer dies at the worst moment: when the reader is about to probe
 * its lock (R2p).
 */
#include "support.h"

static shms_writer *writer;
static shms_word *state; /* of the only object */
static int deaths;
static enum shms_state last_word;

static void die_before_the_probe(const char *label) {
    if (strcmp(label, "R2p"))
        return;
    deaths++;
    atomic_store(state, last_word);
    shms_segment_unlock(&writer->seg, false);
}

/* A store with one object of half its size. A reader with an earlier reference finds the object in EVICTING. */
static shms_view *meet(const char *name, shms_reader **reader, enum shms_state word, int *code) {
    shms_options options = {.capacity = 1024, .n_readers = 1};
    uint8_t ref[SHMS_REF_SIZE];
    CHECK(shms_writer_create(&writer, name, &options) == SHMS_OK);
    CHECK(verb_put(writer, "k", 1, "m", 1, 512, NULL, 0, ref) == SHMS_OK);
    CHECK(shms_reader_attach(reader, name, 0, NULL) == SHMS_OK);
    shms_view_release(view_of(*reader, ref));
    state = &writer->seg.slots[0].state;
    CHECK(atomic_load(state) == SHMS_LIVE);
    atomic_store(state, SHMS_EVICTING);
    deaths = 0;
    last_word = word;
    shms_step_hook = die_before_the_probe;
    shms_view *v = view_of(*reader, ref);
    *code = v ? 0 : -errno;
    shms_step_hook = NULL;
    CHECK(deaths == 1);
    return v;
}

static void a_writer_that_finished_and_then_died_leaves_a_stale_reference(const char *name) {
    shms_reader *reader;
    int code;
    shms_view *v = meet(name, &reader, SHMS_FREE, &code);
    CHECK(v == NULL);
    CHECK(code == SHMS_ESTALE);
    shms_reader_free(reader);
    shms_segment_unlink(&writer->seg);
    shms_writer_free(writer);
}

static void an_object_whose_eviction_died_is_whole_and_survives_recovery(const char *name) {
    shms_reader *reader;
    shms_writer *successor;
    uint8_t ref[SHMS_REF_SIZE];
    int code;
    shms_view *v = meet(name, &reader, SHMS_EVICTING, &code);
    CHECK(v != NULL);
    CHECK(v->payload_size == 512);
    CHECK(shms_writer_recover(&successor, name, NULL) == SHMS_OK);
    CHECK(verb_put(successor, "l", 1, "m", 1, 512, NULL, 0, ref) == SHMS_EFULL);
    CHECK(shms_writer_valid(successor) == SHMS_OK);
    shms_view_release(v);
    CHECK(verb_put(successor, "l", 1, "m", 1, 512, NULL, 0, ref) == SHMS_OK);
    CHECK(shms_writer_valid(successor) == SHMS_OK);
    shms_reader_free(reader);
    shms_writer_free(writer);
    end_writer(successor);
}

TEST(a_reader_outlasts_a_writer_that_dies_as_it_is_probed) {
    char name[64];
    snprintf(name, sizeof name, "shmstore-outlast-%ld", (long)getpid());
    a_writer_that_finished_and_then_died_leaves_a_stale_reference(name);
    an_object_whose_eviction_died_is_whole_and_survives_recovery(name);
}
