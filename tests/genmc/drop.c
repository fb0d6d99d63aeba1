/* A writer deletes an object of another one, which looks for that at the same time. */
#define WRITERS 2
#include "world.h"

static void owner(void) { shms_delete_dropped(&a.w); }

static void other(void) {
    bool dropped = drop_if(&b.w, 0, (const char[]){1}, 1, true);
    assert(dropped);
}

static void afterwards(void) {
    owner();
    assert(shms_get(&world.arenas[0].slots[0].state) == SHMS_FREE);
}

RUN(begin, afterwards, owner, other)
