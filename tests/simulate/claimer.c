/*
 * claimer.c - claims: who may make what is not stored.
 *
 * Every actor takes some, ends some, and closes or dies with others. A key has one living holder at most. When that has
 * ended its claim, or is dead, the next one gets it at once. Only failures of the system grant a claim that excludes
 * nobody.
 */
#include "simulate.h"

static bool has(const actor *a, uint64_t key) { return a->lives && a->claims[key].page; }
static uint64_t granted;
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
    shms_claim_drop(c);
    alone(false);
}
void end_claims(actor *me) {
    for (uint64_t k = 0; k < KEYS; k++)
        end(&me->claims[k]);
}

static int take(actor *me, const char *key, shms_claim *out) {
    uint32_t thread = (uint32_t)current + 1;
    return me->w ? shms_writer_claim_for(me->w, thread, key, 1, out)
                 : shms_reader_claim_for(me->r, thread, key, 1, out);
}

void claim_once(actor *me) {
    uint64_t k = one_of(keys), n = 0;
    char key = (char)('a' + k);
    shms_claim *c = &me->claims[k], again = {0};
    me->refused = false;
    if (has(me, k) && one_of(2)) {
        int rc = take(me, &key, &again);
        MUST("a claim that it has", true, rc == 0 || me->refused);
    } else if (c->page)
        end(c);
    else {
        bool is_free = !claimed(k);
        uint64_t before = granted;
        int rc = take(me, &key, c);
        if (is_free && granted == before) /* nobody has come in between */
            MUST("claim", true, rc == 1 || me->refused);
        granted += rc == 1;
        MUST("byte of a claim", true, !rc || c->page || me->refused);
    }
    for (uint64_t i = 0; i < KEYS; i++)
        n += has(me, i);
    MUST("claims of a thread", n, shms_claims_of((uint32_t)current + 1));
    int rc = me->w ? shms_writer_claimed(me->w, &key, 1) : shms_reader_claimed(me->r, &key, 1);
    if (!me->refused)
        MUST("claimed", claimed(k), rc);
}
