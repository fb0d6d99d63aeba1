/* A rank reads what it was promised, during scans. */
#include "world.h"

static void before(void) {
    begin();
    lease(&a, 0, 0, 0);
}

RUN(before, nothing_is_stuck, owner_surveys, rank_uses)
