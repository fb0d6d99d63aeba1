/* Another writer ends its lease on an object, while the owner remembers who holds it. */
#define WRITERS 2
#include "world.h"

WORLD private a = PRIVATE(a, 0), b = PRIVATE(b, 1);

static void before(void) {
    begin_private(&a);
    begin_private(&b);
    store_first(0, 0, 1, 0);
    shms_ring_stale_slot(&a.w.ring, 0);
    everybody();
    lease(&b, 0, 0, 0);
}

static void *owner(void *unused) {
    survey(&a);
    survey(&a);
    return unused;
}

static void *other(void *unused) {
    shms_leases_close(&b.w.leases, 0);
    return unused;
}

static void afterwards(void) { nothing_is_stuck(&a); }

RUN(before, afterwards, owner, other)
