/* A writer died with a lease on another's object; its successor keeps it, or finds that the owner has evicted that. */
#define WRITERS 2
#include "world.h"

WORLD private a = PRIVATE(a, 0), b = PRIVATE(b, 1), c = PRIVATE(c, 1);
WORLD struct shms_reader reader = READER(0);

static void before(void) {
    begin_private(&a);
    begin_private(&b);
    store_first(0, 0, 1, 0);
    everybody();
    lease(&b, 0, 0, 0);
    locks[1] = 0;
}

static void *owner(void *unused) {
    victims_of(&a.w)[0] = 0;
    if (shms_evictable(&a.w, 0) && vacate(&a.w, 1) == SHMS_OK)
        *payload(0, 0) = 2;
    return unused;
}

static void *successor(void *unused) {
    succeed(SHMS_ROLE_OF_WRITER(1));
    shms_holds_begin(&c.w.seg, true);
    if (shms_get(&world.arenas[1].leases[0].number))
        send();
    return unused;
}

static void *rank(void *unused) {
    shms_ref ref;
    shms_slot seen;
    receive();
    int rc = pin_of_rank(&reader, &(uint8_t){0}, &ref, &seen);
    assert(rc == SHMS_OK || rc == SHMS_EBUSY);
    if (rc == SHMS_OK) {
        assert(*payload(0, 0) == 1);
        acknowledge(&reader, &ref);
        shms_reader_table_unpin(reader.table, &reader.seg.layout, 0, 0);
    }
    return unused;
}

static void afterwards(void) {}

RUN(before, afterwards, owner, successor, rank)
