/* A rank dies at any step of a read; its successor reads, while the writer evicts the object and reuses its bytes. */
#define STEPS 12
#include "world.h"

static void rank(void) {
    be_mortal(0);
    use(&first, 0);
    live_through();
    leave_lock();
}

static void next_rank(void) {
    succeed(0);
    attach(&last);
    use(&last, 0);
}

RUN(begin, nothing, fates, owner_evicts, rank, next_rank)
