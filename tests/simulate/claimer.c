/*
 * claimer.c - claims: who may make what is not stored.
 *
 * Every actor takes some, ends some, and closes or dies with others. A key has one living holder at most. When that has
 * ended its claim, or is dead, the next one gets it at once. Only failures of the system grant a claim that excludes
 * nobody.
 */
#include "simulate.h"

static bool has(const actor *a, uint64_t key) { return a->lives && a->claims[key].of && a->claims[key].byte; }
static bool claimed(uint64_t key) {
    int n = 0;
    for (int a = 0; a < ACTORS; a++)
        n += has(&actors[a], key);
    MUST("holders of a claim", true, n <= 1);
    return n;
}

/* The system never refuses to unlock a byte. */
static void end(shms_claim *c) {
    alone(true);
    shms_claim_end(c);
    alone(false);
}
/* Claims go on when their handle is dropped, and are ended here. */
void end_claims(actor *me) {
    shms_claims_drop(&me->claimer);
    for (uint64_t k = 0; k < KEYS; k++)
        end(&me->claims[k]);
}

static void begin_claims(actor *me) {
    end_claims(me);
    me->refused = false;
    if (shms_claims_open(&me->claimer, name, me->w ? me->w->seg.sb->store : shms_reader_store(me->r)) != SHMS_OK)
        MUST("claims without a failure of the system", true, me->refused);
    me->blind = me->refused;
}

void claim_once(actor *me) {
    uint64_t k = one_of(keys), n = 0;
    char key = (char)('a' + k);
    shms_claim *c = &me->claims[k], again = {0};
    if (!me->claimer)
        begin_claims(me);
    else if (one_of(64) == 0)
        shms_claims_drop(&me->claimer);
    if (!me->claimer)
        return;
    me->refused = false;
    if (has(me, k) && one_of(2))
        MUST("a claim that it has", 0, shms_claim_take(me->claimer, (uint64_t)current, &key, 1, &again));
    else if (c->of)
        end(c);
    else {
        bool is_free = !claimed(k);
        int rc = shms_claim_take(me->claimer, (uint64_t)current, &key, 1, c);
        MUST("claim", is_free || me->refused || me->blind, rc);
        MUST("byte of a claim", true, !rc || c->byte || me->refused || me->blind);
    }
    for (uint64_t i = 0; i < KEYS; i++)
        n += has(me, i);
    MUST("claims of a thread", n, shms_claims_of(me->claimer, (uint64_t)current));
    int rc = shms_claimed(me->claimer, &key, 1);
    if (!me->refused && !me->blind)
        MUST("claimed", claimed(k), rc);
}
