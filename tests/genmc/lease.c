/* A rank takes what it was promised, while the writer evicts the object as soon as it may, and reuses its bytes. */
#include "world.h"

static void before(void) {
    begin();
    lease(&a, 0, 0, 0);
}

static void rank(void) {
    int rc = use(&first, 0);
    assert(rc == SHMS_OK);
}

RUN(before, nothing, owner_evicts, rank)
