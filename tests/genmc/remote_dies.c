/* A writer dies at any step of handing out another's object; its successor ends what it held, and the owner may evict. */
#define WRITERS 2
#define STEPS 12
#include "world.h"

WORLD private a = PRIVATE(a, 0), b = PRIVATE(b, 1), c = PRIVATE(c, 1);
WORLD struct shms_reader reader = READER(0);

static void before(void) {
    begin_private(&a);
    begin_private(&b);
    store_first(0, 0, 1, 0);
    everybody();
}

static void *owner(void *unused) {
    victims_of(&a.w)[0] = 0;
    if (shms_evictable(&a.w, 0) && vacate(&a.w, 1) == SHMS_OK)
        *payload(0, 0) = 2;
    return unused;
}

static void *other(void *unused) {
    be_mortal(SHMS_ROLE_OF_WRITER(1));
    if (shms_hit_remote(&b.w, 0, 1, shms_leases_take(&b.w.leases), 0, false, &(uint8_t){0}))
        send();
    live_through();
    leave_lock();
    return unused;
}

static void *successor(void *unused) {
    succeed(SHMS_ROLE_OF_WRITER(1));
    shms_holds_begin(&c.w.seg, false);
    return unused;
}

static void *rank(void *unused) {
    shms_ref ref;
    shms_slot seen;
    if (!atomic_load_explicit(&channel, memory_order_acquire))
        return unused;
    if (pin_of_rank(&reader, &(uint8_t){0}, &ref, &seen) == SHMS_OK) {
        assert(*payload(0, 0) == 1);
        shms_reader_table_unpin(reader.table, &reader.seg.layout, 0, 0);
    }
    return unused;
}

static void afterwards(void) {
    shms_reclaim_begin(&a.w);
    assert(shms_get(&world.arenas[0].slots[0].state) == SHMS_FREE || shms_evictable(&a.w, 0));
}

RUN(before, afterwards, fates, owner, other, successor, rank)
