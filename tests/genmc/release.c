/* A rank releases an old reference without a pin, while slot and entry go to the next object and its lease. */
#include "world.h"

static void before(void) {
    begin();
    lease(&a, 0, 0, 0);
}

static void writer(void) {
    shms_end_lease(&a.w, 0, 0);
    shms_reclaim_slot(&a.w, 0);
    put(&a, 2, 0, 1);
}

static void rank(void) {
    int rc = shms_reader_release(&first, &(uint8_t){0});
    assert(rc == 0 || rc == 1);
}

static void afterwards(void) { assert(!shms_lease_done(&a.w, 0, true)); }

RUN(before, afterwards, writer, rank)
