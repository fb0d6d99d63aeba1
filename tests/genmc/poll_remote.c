/* Another writer pins what has left the slot, while the owner puts the next object and remembers who holds it. */
#define WRITERS 2
#include "world.h"

WORLD private a = PRIVATE(a, 0), b = PRIVATE(b, 1);

static void before(void) {
    begin_private(&a);
    begin_private(&b);
    store_first(0, 0, 1, 0);
    everybody();
    shms_set(&world.arenas[0].slots[0].state, SHMS_FREE);
    a.w.free_slots[a.w.n_free_slots++] = 0;
}

static void *owner(void *unused) {
    put(&a, 2, UNIT, UNLEASED);
    survey(&a);
    survey(&a);
    return unused;
}

static void *other(void *unused) {
    bool pinned = shms_holds_pin(&b.w.seg, 0, 1);
    assert(!pinned);
    return unused;
}

static void afterwards(void) { nothing_is_stuck(&a); }

RUN(before, afterwards, owner, other)
