/* A rank takes the place of one that died with a pin, during scans. */
#include "world.h"

static void before(void) {
    begin();
    lease(&a, 0, 0, 0);
    atomic_store(&world.ranks[0].pins[0], 1);
}

static void rank(void) { attach(&first); }

RUN(before, nothing_is_stuck, owner_surveys, rank)
