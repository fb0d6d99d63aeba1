/*
 * wait.c - how a reader waits for the owner of an object in EVICTING. Why it need not wait for a dead one is point 7
 * in docs/concepts/protocol.md.
 */
#include "segment.h"
#include "slots.h"
#include "step.h"

/* How long a reader waits for a live writer to decide about an object in EVICTING. The writer decides after it has
 * stored the states of all victims of a put and has read their pins. That takes below 1 us for one victim, and for 32,768
 * some 0.1 to 0.2 ms, or with 32 writers 2 to 4 ms. It takes longer only if the writer is descheduled or stopped. */
#define PATIENCE_NS UINT64_C(1000000000)
#define TURNS 1000 /* before the first look at the clock */
#define SLEEP_NS 20000 /* and then between two turns: a yield gives a writer of lower real-time priority no time */

int shms_wait_for_eviction(const shms_segment *seg, uint32_t slot, uint64_t id, bool patient) {
    const shms_slot *s = shms_segment_slot(seg, slot);
    int owner = SHMS_ROLE_OF_WRITER(shms_arena_of(&seg->layout, slot));
    uint64_t start = 0;
    bool orphan = false, late = false; /* in either case it looks once more: the owner may have decided meanwhile */
    for (uint32_t turn = 0;; turn++) {
        /* Until the owner has decided: LIVE, FREE or another id. Pairs with W2, as R2a: to a writer that pins again (B1)
         * it is the first look. */
        SHMS_STEP("R2c");
        uint64_t state = atomic_load_explicit(&s->state, memory_order_seq_cst);
        if (shms_get(&s->id) != id)
            return SHMS_ESTALE;
        if (state != SHMS_EVICTING)
            return state == SHMS_LIVE ? SHMS_OK : SHMS_ESTALE;
        if (orphan || late)
            return orphan ? SHMS_OK : SHMS_EBUSY;
        if (turn < TURNS)
            continue;
        SHMS_STEP("R2p"); /* pairs with the writer's death: nobody else would set the state back */
        orphan = !shms_segment_held(seg, owner);
        if (orphan)
            continue;
        if (!patient)
            return SHMS_EBUSY;
        uint64_t now = shms_clock_ns(CLOCK_MONOTONIC);
        if (start == 0)
            start = now;
        late = now - start > PATIENCE_NS;
        nanosleep(&(struct timespec){.tv_nsec = SLEEP_NS}, NULL);
    }
}
