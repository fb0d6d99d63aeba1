/* A writer ends one of its leases on an object and uses its entry for another object, while the owner walks the list. */
#define WRITERS 2
#define SLOTS 2
#define ENTRIES 3
#include "world.h"

static void before(void) {
    begin();
    for (uint8_t ref = 0; ref < ENTRIES; ref++)
        lease(&b, 0, 0, ref);
    world.ranks[0].acks[ENTRIES + 2] = sealed[2].lease; /* the first in the list is complete, the last stays open */
}

static void other(void) {
    shms_leases_close(&b.w.leases, 1);
    shms_hit_remote(&b.w, 1, 3, shms_leases_take(&b.w.leases), 0, false, &(uint8_t){1});
}

static void owner(void) {
    bool evicted = evict_first(&a);
    assert(!evicted);
}

RUN(before, nothing, owner, other)
