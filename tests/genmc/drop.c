/* A writer deletes an object of another one, which looks for that at the same time. */
#define WRITERS 2
#include "world.h"

WORLD private a = PRIVATE(a, 0), b = PRIVATE(b, 1);

static void before(void) {
    begin_private(&a);
    begin_private(&b);
    store_first(0, 0, 1, 0);
    shms_index_add(&a.w.index, shms_slot_hash(&a.w, 0), 0);
    everybody();
}

static void *owner(void *unused) {
    shms_delete_dropped(&a.w);
    return unused;
}

static void *other(void *unused) {
    bool dropped = drop_if(&b.w, 0, (const char[]){1}, 1, true);
    assert(dropped);
    return unused;
}

static void afterwards(void) {
    shms_delete_dropped(&a.w);
    assert(shms_get(&world.arenas[0].slots[0].state) == SHMS_FREE);
}

RUN(before, afterwards, owner, other)
