/* A rank attaches for the first time, while the writer retires it: a lease from before waits for it no more. */
#include "world.h"

WORLD private a = PRIVATE(a, 0);

static void before(void) {
    begin_private(&a);
    store_first(0, 0, 1, 0);
    everybody();
    shms_set(&world.ranks[0].table.epoch, 0);
    lease(&a, 0, 0, 0);
}

static void *writer(void *unused) {
    shms_writer_retire(&a.w, 0);
    return unused;
}

static void *rank(void *unused) {
    shms_reader_table_attach(&world.ranks[0].table, &a.w.seg.layout, &world.arenas[0].writer, 0, false, 1, 1);
    return unused;
}

static void afterwards(void) {
    shms_reclaim_begin(&a.w);
    assert(shms_lease_done(&a.w, 0, true));
}

RUN(before, afterwards, writer, rank)
