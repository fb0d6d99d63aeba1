/* Another writer names the group of its lease, which expects no rank then, while the owner remembers who holds the object. */
#define WRITERS 2
#define GROUPS 2
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
    shms_writer_assign_group(&b.w, (const uint8_t[]){0}, 2);
    return unused;
}

static void afterwards(void) { nothing_is_stuck(&a); }

RUN(before, afterwards, owner, other)
