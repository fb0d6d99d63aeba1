/* Another writer pins what has left the slot, while the owner puts the next object and scans. */
#define WRITERS 2
#include "world.h"

static void owner(void) {
    put(&a, 2, UNIT, UNLEASED);
    owner_surveys();
}

static void other(void) {
    bool pinned = shms_holds_pin(&b.w.seg, 0, 1);
    assert(!pinned);
}

RUN(begin_empty, nothing_is_stuck, owner, other)
