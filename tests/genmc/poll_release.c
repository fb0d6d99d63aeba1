/* A rank reads what it was promised, while the writer remembers who holds the object. */
#include "world.h"

WORLD private a = PRIVATE(a, 0);
WORLD struct shms_reader reader = READER(0);

static void before(void) {
    begin_private(&a);
    store_first(0, 0, 1, 0);
    shms_ring_stale_slot(&a.w.ring, 0);
    everybody();
    lease(&a, 0, 0, 0);
}

static void *writer(void *unused) {
    survey(&a);
    survey(&a);
    return unused;
}

static void *rank(void *unused) {
    shms_ref ref;
    shms_slot seen;
    int rc = pin_of_rank(&reader, &(uint8_t){0}, &ref, &seen);
    assert(rc == SHMS_OK);
    acknowledge(&reader, &ref);
    shms_reader_table_unpin(reader.table, &reader.seg.layout, 0, 0);
    return unused;
}

static void afterwards(void) { nothing_is_stuck(&a); }

RUN(before, afterwards, writer, rank)
