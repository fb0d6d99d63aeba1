/* A rank finds an object by key without a pin, while the slot gets the next one, under another key. */
#include "world.h"

static void writer(void) {
    shms_reclaim_slot(&a.w, 0);
    if (a.w.n_free_slots)
        put(&a, 2, UNIT, UNLEASED);
}

static void rank(void) { find_and_use(&first, 1); }

RUN(begin, nothing, writer, rank)
