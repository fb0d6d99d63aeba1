/* A rank finds an object by key without a pin, while the slot gets the next one, under another key. */
#include "world.h"

static void writer(void) {
    shms_reclaim_slot(&a.w, 0);
    if (a.w.n_free_slots)
        put(&a, 2, UNIT, UNLEASED);
}

static void rank(void) {
    shms_slot seen;
    uint32_t slot = look_of_rank(&first, (const char[]){1}, 1, &seen);
    if (slot == SHMS_NONE)
        return;
    const shms_slot *s = shms_segment_slot(&first.seg, slot);
    enum shms_state state = shms_reader_table_pin(first.table, &first.seg.layout, s, slot, shms_get(&seen.id));
    if (state == SHMS_LIVE) {
        assert(shms_get(&seen.id) == 1 && *payload(0, shms_get(&seen.offset)) == 1);
        shms_reader_table_unpin(first.table, &first.seg.layout, slot, 0);
    }
}

RUN(begin, nothing, writer, rank)
