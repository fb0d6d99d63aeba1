/* Another writer ends a lease that is complete, while the owner evicts, puts the next object and remembers its holders. */
#define WRITERS 2
#include "world.h"

WORLD private a = PRIVATE(a, 0), b = PRIVATE(b, 1);

static void before(void) {
    begin_private(&a);
    begin_private(&b);
    store_first(0, 0, 1, 0);
    shms_index_add(&a.w.index, shms_slot_hash(&a.w, 0), 0);
    everybody();
    lease(&b, 0, 0, 0);
    world.ranks[0].acks[1] = sealed[0].lease;
}

static void *owner(void *unused) {
    shms_reclaim_slot(&a.w, 0);
    if (a.w.n_free_slots) {
        put(&a, 2, UNIT, UNLEASED);
        survey(&a);
    }
    return unused;
}

static void *other(void *unused) {
    shms_leases_close(&b.w.leases, 0);
    return unused;
}

static void afterwards(void) { nothing_is_stuck(&a); }

RUN(before, afterwards, owner, other)
