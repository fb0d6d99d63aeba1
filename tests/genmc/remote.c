/* A writer hands out an object of another one, which evicts it and reuses its bytes; a rank takes the reference. */
#define WRITERS 2
#include "world.h"

static void before(void) {
    begin();
    lease(&b, 0, 0, 0); /* so the entry has been another lease's, which the rank has acknowledged */
    world.ranks[0].acks[1] = sealed[0].lease;
    shms_leases_close(&b.w.leases, 0);
}

static void other(void) {
    if (shms_hit_remote(&b.w, 0, 1, shms_leases_take(&b.w.leases), 0, false, &(uint8_t){0}))
        send();
}

static void rank(void) {
    receive();
    int rc = use(&first, 0);
    assert(rc == SHMS_OK || rc == SHMS_EBUSY);
}

RUN(before, nothing, owner_evicts, other, rank)
