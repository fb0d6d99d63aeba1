/* Two ranks take an object, while the writer tries twice to evict it and reuse its bytes. */
#define RANKS 2
#include "world.h"

static void writer(void) {
    if (!evict_first(&a))
        evict_first(&a);
}

static void last_uses(void) { use(&last, 0); }

RUN(begin, nothing, writer, rank_uses, last_uses)
