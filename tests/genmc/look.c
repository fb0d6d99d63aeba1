/* A rank looks for a key without a pin, while the object of that key comes into the bytes of another one. */
#include "world.h"

static void writer(void) {
    shms_reclaim_slot(&a.w, 0);
    put(&a, 2, 0, UNLEASED);
}

static void rank(void) {
    shms_slot seen;
    uint32_t slot = look_of_rank(&first, (const char[]){2}, 1, &seen);
    assert(slot == SHMS_NONE || shms_get(&seen.id) == 2);
}

RUN(begin, nothing, writer, rank)
