/* A rank releases an old reference without a pin, while slot and entry go to the next object and its lease. */
#include "world.h"

WORLD private a = PRIVATE(a, 0);
WORLD struct shms_reader reader = READER(0);

static void before(void) {
    begin_private(&a);
    store_first(0, 0, 1, 0);
    shms_index_add(&a.w.index, shms_slot_hash(&a.w, 0), 0);
    everybody();
    lease(&a, 0, 0, 0);
}

static void *writer(void *unused) {
    shms_end_lease(&a.w, 0, 0);
    shms_reclaim_slot(&a.w, 0);
    put(&a, 2, 0, 1);
    return unused;
}

static void *rank(void *unused) {
    int rc = shms_reader_release(&reader, &(uint8_t){0});
    assert(rc == 0 || rc == 1);
    return unused;
}

static void afterwards(void) { assert(!shms_lease_done(&a.w, 0, true)); }

RUN(before, afterwards, writer, rank)
