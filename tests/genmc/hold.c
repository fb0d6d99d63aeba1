/* A writer holds its lease on another's object, which a rank has read, while the owner may evict that. */
#define WRITERS 2
#include "world.h"

WORLD private a = PRIVATE(a, 0), b = PRIVATE(b, 1);
WORLD bool evicted, held;

static void before(void) {
    begin_private(&a);
    begin_private(&b);
    store_first(0, 0, 1, 0);
    everybody();
    lease(&b, 0, 0, 0);
    world.ranks[0].acks[1] = sealed[0].lease;
}

static void *owner(void *unused) {
    victims_of(&a.w)[0] = 0;
    evicted = shms_evictable(&a.w, 0) && vacate(&a.w, 1) == SHMS_OK;
    return unused;
}

static void *other(void *unused) {
    held = shms_batch_hold(&b.w, &b.batch, b.batch.ref) == 1;
    return unused;
}

static void afterwards(void) { assert(!(evicted && held)); }

RUN(before, afterwards, owner, other)
