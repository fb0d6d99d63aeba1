/* A rank closes that was promised an object, during scans. */
#include "world.h"

static void before(void) {
    begin();
    lease(&a, 0, 0, 0);
}

static void rank(void) { shms_reader_table_close(first.table, &first.seg.layout); }

RUN(before, nothing_is_stuck, owner_surveys, rank)
