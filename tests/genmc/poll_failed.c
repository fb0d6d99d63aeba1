/* A pin that fails, while an object comes into the slot and the owner scans. */
#include "world.h"

static void writer(void) {
    put(&a, 2, UNIT, UNLEASED);
    survey(&a);
}

RUN(begin_empty, nothing_is_stuck, writer, rank_misses)
