/* A writer holds its lease on another's object, which a rank has read, while the owner may evict that. */
#define WRITERS 2
#include "world.h"

WORLD bool evicted, held;

static void before(void) {
    begin();
    lease(&b, 0, 0, 0);
    world.ranks[0].acks[1] = sealed[0].lease;
}

static void owner(void) { evicted = evict_first(&a); }

static void other(void) { held = shms_batch_hold(&b.w, &b.batch, b.batch.ref) == 1; }

static void afterwards(void) { assert(!(evicted && held)); }

RUN(before, afterwards, owner, other)
