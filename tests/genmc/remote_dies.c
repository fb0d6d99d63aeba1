/* A writer dies at any step of handing out another's object; its successor ends what it held, and the owner may evict. */
#define WRITERS 2
#define STEPS 12
#include "world.h"

static void other(void) {
    be_mortal(SHMS_ROLE_OF_WRITER(1));
    if (shms_hit_remote(&b.w, 0, 1, shms_leases_take(&b.w.leases), 0, false, &(uint8_t){0}))
        send();
    live_through();
    leave_lock();
}

static void next_other(void) {
    succeed(SHMS_ROLE_OF_WRITER(1));
    shms_holds_begin(&successor.w.seg, false);
}

static void rank(void) {
    if (sent())
        use(&first, 0);
}

static void afterwards(void) {
    shms_reclaim_begin(&a.w);
    assert(shms_get(&world.arenas[0].slots[0].state) == SHMS_FREE || shms_evictable(&a.w, 0));
}

RUN(begin, afterwards, fates, owner_evicts, other, next_other, rank)
