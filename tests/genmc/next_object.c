/* A slot gets its next object, in other bytes or in the same: a rank has the old reference, another one the new. */
#define RANKS 2
#include "world.h"

static void writer(void) {
    shms_reclaim_slot(&a.w, 0);
    if (a.w.n_free_slots) {
        put(&a, 2, 0, 1);
        send();
    }
}

static void with_new(void) {
    receive();
    int rc = use(&last, 1);
    assert(rc == SHMS_OK && world.ranks[1].acks[0] == sealed[1].lease);
}

RUN(begin, nothing, writer, rank_uses, with_new)
