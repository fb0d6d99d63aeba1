/* A writer dies at any step of an eviction or of the next put; its successor evicts what it finds, while a rank reads. */
#define STEPS 24
#include "world.h"

WORLD private a = PRIVATE(a, 0), b = PRIVATE(b, 0);
WORLD struct shms_reader reader = READER(0);

static void before(void) {
    begin_private(&a);
    store_first(0, 0, 1, 0);
    shms_index_add(&a.w.index, shms_slot_hash(&a.w, 0), 0);
    everybody();
    refer(0, 0, 1, 0);
}

static void *writer(void *unused) {
    be_mortal(SHMS_ROLE_WRITER);
    shms_reclaim_slot(&a.w, 0);
    if (a.w.n_free_slots)
        put(&a, 2, 0, 1);
    live_through();
    leave_lock();
    return unused;
}

static void *successor(void *unused) {
    succeed(SHMS_ROLE_WRITER);
    int rc = settle_slots(&b.w);
    assert(rc == SHMS_OK);
    shms_leases_init(&b.w.leases, b.links, &b.w.seg.layout, b.w.seg.writer, b.w.seg.leases, b.w.seg.slots, NULL, true);
    const shms_slot *s = &world.arenas[0].slots[0];
    assert(shms_get(&s->state) == SHMS_FREE || *payload(0, shms_get(&s->offset)) == shms_get(&s->id));
    victims_of(&b.w)[0] = 0;
    if (shms_get(&s->state) == SHMS_FREE || (shms_evictable(&b.w, 0) && vacate(&b.w, 1) == SHMS_OK))
        *payload(0, 0) = 3;
    return unused;
}

static void *rank(void *unused) {
    shms_ref ref;
    shms_slot seen;
    if (pin_of_rank(&reader, &(uint8_t){0}, &ref, &seen) == SHMS_OK) {
        assert(*payload(0, 0) == 1);
        shms_reader_table_unpin(reader.table, &reader.seg.layout, 0, 0);
    }
    return unused;
}

static void afterwards(void) {}

RUN(before, afterwards, fates, writer, successor, rank)
