/* A slot gets its next object, in other bytes or in the same: a rank has the old reference, another one the new. */
#define RANKS 2
#include "world.h"

WORLD private a = PRIVATE(a, 0);
WORLD struct shms_reader old = READER(0), new = READER(1);

static void before(void) {
    begin_private(&a);
    store_first(0, 0, 1, 0);
    shms_index_add(&a.w.index, shms_slot_hash(&a.w, 0), 0);
    refer(0, 0, 1, 0);
    everybody();
}

static void *writer(void *unused) {
    shms_reclaim_slot(&a.w, 0);
    if (a.w.n_free_slots) {
        put(&a, 2, 0, 1);
        send();
    }
    return unused;
}

static void *with_old(void *unused) {
    shms_ref ref;
    shms_slot seen;
    if (pin_of_rank(&old, &(uint8_t){0}, &ref, &seen) == SHMS_OK) {
        assert(*payload(0, shms_get(&seen.offset)) == 1);
        shms_reader_table_unpin(old.table, &old.seg.layout, 0, 0);
    }
    return unused;
}

static void *with_new(void *unused) {
    shms_ref ref;
    shms_slot seen;
    receive();
    int rc = pin_of_rank(&new, &(uint8_t){1}, &ref, &seen);
    assert(rc == SHMS_OK);
    assert(*payload(0, shms_get(&seen.offset)) == ref.id);
    assert(acknowledge(&new, &ref) == 1);
    shms_reader_table_unpin(new.table, &new.seg.layout, 0, 0);
    return unused;
}

static void afterwards(void) {}

RUN(before, afterwards, writer, with_old, with_new)
