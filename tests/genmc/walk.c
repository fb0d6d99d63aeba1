/* A writer ends one of its leases on an object and uses its entry for another object, while the owner walks the list. */
#define WRITERS 2
#define SLOTS 2
#define ENTRIES 2
#include "world.h"

static void before(void) {
    begin();
    lease(&b, 0, 0, 0);
    lease(&b, 0, 0, 1);
}

static void other(void) {
    shms_leases_close(&b.w.leases, 0);
    shms_hit_remote(&b.w, 1, 3, shms_leases_take(&b.w.leases), 0, false, &(uint8_t){0});
}

static void owner(void) {
    bool evicted = evict_first(&a);
    assert(!evicted);
}

RUN(before, nothing, owner, other)
