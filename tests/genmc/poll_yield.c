/* A pin that fails, while a search yields to a put into the slot, and then scans. */
#include "world.h"

static void put_next(private *p) { put(p, 2, UNIT, UNLEASED); }

static void writer(void) {
    a.other_thread = put_next;
    survey(&a);
}

RUN(begin_empty, nothing_is_stuck, writer, rank_misses)
