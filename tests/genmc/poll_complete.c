/* Another writer ends a complete lease, while the owner evicts, puts the next object and scans. */
#define WRITERS 2
#include "world.h"

static void before(void) {
    begin();
    lease(&b, 0, 0, 0);
    world.ranks[0].acks[1] = sealed[0].lease;
}

static void owner(void) {
    shms_reclaim_slot(&a.w, 0);
    if (a.w.n_free_slots)
        put(&a, 2, UNIT, UNLEASED);
    survey(&a);
}

static void other(void) { shms_leases_close(&b.w.leases, 0); }

RUN(before, nothing_is_stuck, owner, other)
