/* A rank takes the place of one that died with a pin, while the writer remembers who holds the object. */
#include "world.h"

WORLD private a = PRIVATE(a, 0);

static void before(void) {
    begin_private(&a);
    store_first(0, 0, 1, 0);
    shms_ring_stale_slot(&a.w.ring, 0);
    everybody();
    lease(&a, 0, 0, 0);
    atomic_store(&world.ranks[0].pins[0], 1);
}

static void *writer(void *unused) {
    survey(&a);
    survey(&a);
    return unused;
}

static void *rank(void *unused) {
    shms_reader_table_attach(&world.ranks[0].table, &a.w.seg.layout, &world.arenas[0].writer, 0, false, 1, 1);
    return unused;
}

static void afterwards(void) { nothing_is_stuck(&a); }

RUN(before, afterwards, writer, rank)
