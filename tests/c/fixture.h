/* fixture.h - a store of one writer, for tests that need no more. */
#ifndef SHMS_TEST_FIXTURE_H
#define SHMS_TEST_FIXTURE_H

#include "support.h"

#define MOST_READERS 5

static shms_writer *w;
static shms_reader *readers[MOST_READERS];
static const char *name;
static shms_batch b __attribute__((unused));
static uint8_t ref[SHMS_REF_SIZE] __attribute__((unused)); /* of the last hand-out */

static inline void attach(uint32_t rank) { CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[rank], name, rank, NULL)); }

static inline void detach(uint32_t rank) {
    shms_reader_free(readers[rank]);
    readers[rank] = NULL;
}

/* Creates the store, and attaches its first ranks. */
static inline void open_store(const char *what, shms_options o, uint32_t attached) {
    name = store_name(what);
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, &o));
    for (uint32_t r = 0; r < attached; r++)
        attach(r);
}

/* The writer has let go of the store, or dies now without a close, and another one takes it over. */
static inline void succeed(void) {
    if (!w->closed)
        shms_segment_unlock(&w->seg, false);
    w->closed = true;
    shms_writer_free(w);
    CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
}

static inline void end(void) {
    shms_step_hook = NULL;
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    for (uint32_t r = 0; r < MOST_READERS; r++)
        detach(r);
    shms_batch_drop(w, &b);
    b = (shms_batch){0};
    end_writer(w);
}

#endif
