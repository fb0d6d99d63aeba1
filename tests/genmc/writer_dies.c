/* A writer dies at any step of an eviction or of the next put; its successor evicts what it finds, while a rank reads. */
#define STEPS 24
#include "world.h"

static void writer(void) {
    be_mortal(SHMS_ROLE_WRITER);
    shms_reclaim_slot(&a.w, 0);
    if (a.w.n_free_slots)
        put(&a, 2, 0, 1);
    live_through();
    leave_lock();
}

static void next_writer(void) {
    private *p = &successor;
    succeed(SHMS_ROLE_WRITER);
    int rc = settle_slots(&p->w);
    assert(rc == SHMS_OK);
    shms_leases_init(&p->w.leases, p->links, &p->w.seg.layout, p->w.seg.writer, p->w.seg.leases, p->w.seg.slots, NULL,
                     true);
    const shms_slot *s = &world.arenas[0].slots[0];
    assert(shms_get(&s->state) == SHMS_FREE || *payload(0, shms_get(&s->offset)) == shms_get(&s->id));
    if (shms_get(&s->state) == SHMS_FREE)
        *payload(0, 0) = 0;
    else
        evict_first(p);
}

RUN(begin, nothing, fates, writer, next_writer, rank_uses)
