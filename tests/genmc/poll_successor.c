/* A writer died with a pin and a lease, and its successor ends them, during scans. */
#define WRITERS 2
#include "world.h"

static void before(void) {
    begin();
    lease(&b, 0, 0, 0);
    shms_set(&world.arenas[1].writer.pinning, 1);
}

static void other(void) { shms_holds_begin(&successor.w.seg, false); }

RUN(before, nothing_is_stuck, owner_surveys, other)
