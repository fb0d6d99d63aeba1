/* Another writer names the group of its lease, which expects no rank then, during scans. */
#define WRITERS 2
#define GROUPS 2
#include "world.h"

static void before(void) {
    begin();
    lease(&b, 0, 0, 0);
}

static void other(void) { shms_writer_assign_group(&b.w, (const uint8_t[]){0}, 2); }

RUN(before, nothing_is_stuck, owner_surveys, other)
