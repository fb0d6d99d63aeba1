/* A pin that fails, while an object comes into the slot and the writer remembers who holds it. */
#include "world.h"

static void writer(void) {
    put(&a, 2, UNIT, UNLEASED);
    survey(&a);
}

RUN(begin_empty, nothing_is_stuck, writer, rank_misses)
