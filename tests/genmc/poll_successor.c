/* A writer died with a pin and a lease, and its successor ends them, while the owner remembers who holds the objects. */
#define WRITERS 2
#include "world.h"

WORLD private a = PRIVATE(a, 0), b = PRIVATE(b, 1), c = PRIVATE(c, 1);

static void before(void) {
    begin_private(&a);
    begin_private(&b);
    store_first(0, 0, 1, 0);
    shms_ring_stale_slot(&a.w.ring, 0);
    everybody();
    lease(&b, 0, 0, 0);
    shms_set(&world.arenas[1].writer.pinning, 1);
}

static void *owner(void *unused) {
    survey(&a);
    survey(&a);
    return unused;
}

static void *successor(void *unused) {
    shms_holds_begin(&c.w.seg, false);
    return unused;
}

static void afterwards(void) { nothing_is_stuck(&a); }

RUN(before, afterwards, owner, successor)
