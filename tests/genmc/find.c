/* A rank finds an object by key without a pin, while the slot gets the next one, under another key. */
#include "world.h"

WORLD private a = PRIVATE(a, 0);
WORLD struct shms_reader reader = READER(0);

static void before(void) {
    begin_private(&a);
    store_first(0, 0, 1, 0);
    shms_index_add(&a.w.index, shms_slot_hash(&a.w, 0), 0);
    reader.index.n_slots = SLOTS; /* one line, and no seed */
    everybody();
}

static void *writer(void *unused) {
    shms_reclaim_slot(&a.w, 0);
    if (a.w.n_free_slots)
        put(&a, 2, UNIT, UNLEASED);
    return unused;
}

static void *rank(void *unused) {
    shms_slot seen;
    uint32_t slot = look_of_rank(&reader, (const char[]){1}, 1, &seen);
    if (slot == SHMS_NONE)
        return unused;
    const shms_slot *s = shms_segment_slot(&reader.seg, slot);
    enum shms_state state = shms_reader_table_pin(reader.table, &reader.seg.layout, s, slot, shms_get(&seen.id));
    if (state == SHMS_LIVE) {
        assert(shms_get(&seen.id) == 1 && *payload(0, shms_get(&seen.offset)) == 1);
        shms_reader_table_unpin(reader.table, &reader.seg.layout, slot, 0);
    }
    return unused;
}

static void afterwards(void) {}

RUN(before, afterwards, writer, rank)
