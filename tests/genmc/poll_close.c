/* A rank closes that was promised an object, while the writer remembers who holds it. */
#include "world.h"

WORLD private a = PRIVATE(a, 0);

static void before(void) {
    begin_private(&a);
    store_first(0, 0, 1, 0);
    shms_ring_stale_slot(&a.w.ring, 0);
    everybody();
    lease(&a, 0, 0, 0);
}

static void *writer(void *unused) {
    survey(&a);
    survey(&a);
    return unused;
}

static void *rank(void *unused) {
    shms_reader_table_close(&world.ranks[0].table, &a.w.seg.layout);
    return unused;
}

static void afterwards(void) { nothing_is_stuck(&a); }

RUN(before, afterwards, writer, rank)
