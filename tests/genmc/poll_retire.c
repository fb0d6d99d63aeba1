/* Another writer retires the rank that its lease expects, during scans. */
#define WRITERS 2
#include "world.h"

static void before(void) {
    begin();
    lease(&b, 0, 0, 0);
}

static void other(void) { shms_writer_retire(&b.w, 0); }

RUN(before, nothing_is_stuck, owner_surveys, other)
