/* A rank attaches where another one has closed, and tells the writer, which promises it an object and may not evict that. */
#include "world.h"

static void before(void) {
    begin();
    lease(&a, 0, 0, 0);
    shms_reader_table_close(first.table, &first.seg.layout);
}

static void writer(void) {
    bool evictable = shms_evictable(&a.w, 0);
    assert(evictable);
    receive();
    lease(&a, 0, 0, 0);
    bool evicted = evict_first(&a);
    assert(!evicted);
}

static void rank(void) {
    attach(&first);
    send();
}

RUN(before, nothing, writer, rank)
