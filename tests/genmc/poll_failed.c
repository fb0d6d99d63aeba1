/* A pin that fails, while an object comes into the slot and the writer remembers who holds it. */
#include "world.h"

WORLD private a = PRIVATE(a, 0);
WORLD struct shms_reader reader = READER(0);

static void before(void) {
    begin_private(&a);
    store_first(0, 0, 1, 0);
    shms_set(&world.arenas[0].slots[0].state, SHMS_FREE);
    a.w.free_slots[a.w.n_free_slots++] = 0;
    refer(0, 0, 1, 0);
    everybody();
}

static void *writer(void *unused) {
    put(&a, 2, UNIT, UNLEASED);
    survey(&a);
    return unused;
}

static void *rank(void *unused) {
    shms_ref ref;
    shms_slot seen;
    int rc = pin_of_rank(&reader, &(uint8_t){0}, &ref, &seen);
    assert(rc == SHMS_ESTALE);
    return unused;
}

static void afterwards(void) { nothing_is_stuck(&a); }

RUN(before, afterwards, writer, rank)
