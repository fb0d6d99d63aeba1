/* A writer died with a lease on another's object; its successor keeps it, or finds that the owner has evicted that. */
#define WRITERS 2
#include "world.h"

static void before(void) {
    begin();
    lease(&b, 0, 0, 0);
    locks[1] = 0;
}

static void other(void) {
    succeed(SHMS_ROLE_OF_WRITER(1));
    shms_holds_begin(&successor.w.seg, true);
    if (shms_get(&world.arenas[1].leases[0].number))
        send();
}

static void rank(void) {
    receive();
    int rc = use(&first, 0);
    assert(rc == SHMS_OK || rc == SHMS_EBUSY);
}

RUN(before, nothing, owner_evicts, other, rank)
