/* A rank looks for a key and takes the object, while that is put, evicted, and put again elsewhere. */
#include "world.h"

static void writer(void) {
    put(&a, 2, UNIT, UNLEASED);
    shms_reclaim_slot(&a.w, 0);
    if (a.w.n_free_slots)
        put(&a, 2, 0, UNLEASED);
}

static void rank(void) { find_and_use(&first, 2); }

RUN(begin_empty, nothing, writer, rank)
