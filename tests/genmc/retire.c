/* A rank attaches for the first time, while the writer retires it: a lease from before waits for it no more. */
#include "world.h"

static void before(void) {
    begin();
    shms_set(&world.ranks[0].table.epoch, 0);
    lease(&a, 0, 0, 0);
}

static void writer(void) { shms_writer_retire(&a.w, 0); }

static void rank(void) { attach(&first); }

static void afterwards(void) {
    shms_reclaim_begin(&a.w);
    assert(shms_lease_done(&a.w, 0, true));
}

RUN(before, afterwards, writer, rank)
