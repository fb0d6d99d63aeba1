/* A writer deletes more of another one's objects than its ring holds, while the owner looks for the first of them. */
#define WRITERS 2
#define SLOTS 3
#include "world.h"

static void drop(uint32_t slot) {
    bool dropped = drop_if(&b.w, slot, (const char[]){(char)(1 + slot * WRITERS)}, 1, true);
    assert(dropped);
}

static void owner(void) {
    receive();
    shms_delete_dropped(&a.w);
    assert(shms_get(&world.arenas[0].slots[0].state) == SHMS_FREE);
}

static void other(void) {
    drop(0);
    send();
    drop(1);
    drop(2);
}

RUN(begin, nothing, owner, other)
