/* A rank looks for a key without a pin, while the object of that key comes into the bytes of another one. */
#include "world.h"

WORLD private a = PRIVATE(a, 0);
WORLD struct shms_reader reader = READER(0);

static void before(void) {
    begin_private(&a);
    store_first(0, 0, 1, 0);
    shms_index_add(&a.w.index, shms_slot_hash(&a.w, 0), 0);
    reader.index.n_slots = SLOTS;
    everybody();
}

static void *writer(void *unused) {
    shms_reclaim_slot(&a.w, 0);
    put(&a, 2, 0, UNLEASED);
    return unused;
}

static void *rank(void *unused) {
    shms_slot seen;
    uint32_t slot = look_of_rank(&reader, (const char[]){2}, 1, &seen);
    assert(slot == SHMS_NONE || shms_get(&seen.id) == 2);
    return unused;
}

static void afterwards(void) {}

RUN(before, afterwards, writer, rank)
