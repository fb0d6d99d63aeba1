/* Another writer ends its lease on an object, during scans. */
#define WRITERS 2
#include "world.h"

static void before(void) {
    begin();
    lease(&b, 0, 0, 0);
}

static void other(void) { shms_leases_close(&b.w.leases, 0); }

RUN(before, nothing_is_stuck, owner_surveys, other)
