/* A rank with a reference, while the writer evicts the object and reuses its bytes. */
#include "world.h"

WORLD private a = PRIVATE(a, 0);
WORLD struct {
    shms_segment seg;
} rank = {{.layout = LAYOUT, .sb = &world.sb, .control = (uint8_t *)&world, .all_data = (uint8_t *)world.data}};

static void before(void) {
    begin_private(&a);
    store_first(0, 0, 1, 0);
    everybody();
}

static void *writer(void *unused) {
    victims_of(&a.w)[0] = 0;
    if (shms_evictable(&a.w, 0) && vacate(&a.w, 1) == SHMS_OK)
        *payload(0, 0) = 2;
    return unused;
}

static void *reader(void *unused) {
    shms_reader_table *t = &world.ranks[0].table;
    const shms_slot *s = shms_segment_slot(&rank.seg, 0);
    enum shms_state state = shms_reader_table_pin(t, &rank.seg.layout, s, 0, 1);
    if (state == SHMS_FREE)
        return unused;
    if (state == SHMS_EVICTING && shms_wait_for_eviction(&rank.seg, 0, 1, true) != SHMS_OK) {
        shms_reader_table_unpin_failed(t, &rank.seg.layout, s, 0);
        return unused;
    }
    assert(*payload(0, 0) == 1);
    shms_reader_table_unpin(t, &rank.seg.layout, 0, 0);
    return unused;
}

static void afterwards(void) {}

RUN(before, afterwards, writer, reader)
