/* end.c - what must hold when a seed's run ends: everything stored is found, and all that was taken comes back. */
#include "simulate.h"

#include "inspect/inspect.h"
#include "support.h"

static shms_inspector *findings(void) {
    shms_finding found;
    shms_inspector *inspector;
    MUST("inspect", SHMS_OK, shms_inspector_open(&inspector, name, SHMS_OWN_UID));
    MUST("findings", 0, shms_inspector_verify(inspector, &found, 1));
    return inspector;
}

/* Each key of a model, in all that look for it; and no other. */
static void stored_is_found(void) {
    uint8_t ref[SHMS_REF_SIZE];
    for (int a = 0; a < WRITERS; a++) {
        current = a;
        books(self());
    }
    alone(true);
    for (uint64_t k = 0; k < keys; k++) {
        char key = (char)('a' + k);
        const stored *one = &actors[0].own[k], *other = &actors[1].own[k];
        bool there = one->id || other->id;
        for (int a = 0; a < WRITERS; a++) {
            MUST("has what is stored", there, shms_writer_has(actors[a].w, &key, 1) > 0);
            int hit = verb_hit_of(actors[a].w, &key, 1, 0, false, ref);
            if (hit != SHMS_ENOLEASE)
                MUST("hit of what is stored", there ? SHMS_OK : SHMS_ENOTFOUND, hit);
        }
        shms_view *v;
        int rc = shms_reader_find(actors[WRITERS + FINDER].r, &key, 1, ref, &v);
        MUST("finds what is stored", there ? SHMS_OK : SHMS_ENOTFOUND, rc);
        if (!there)
            continue;
        MUST("the object that is stored", true, v->id == one->id || v->id == other->id);
        is_object(v, key, mark_of(v));
        shms_view_release(v);
    }
}

/* Arguments that no caller may pass change nothing. */
static void nonsense_is_refused(void) {
    shms_writer *w = actors[0].w;
    shms_reader *r = actors[WRITERS].r, *out;
    shms_view *v;
    shms_pending t;
    uint8_t ref[SHMS_REF_SIZE] = {1};
    MUST("closed", SHMS_ECLOSED, shms_writer_has(NULL, "a", 1));
    MUST("closed", SHMS_ECLOSED, shms_reader_has(NULL, "a", 1));
    MUST("no key", SHMS_EINVAL, shms_writer_has(w, "", 0));
    MUST("no key", SHMS_EINVAL, shms_writer_touch(w, NULL, 1));
    MUST("no key", SHMS_EINVAL, shms_reader_find(r, "", 0, ref, &v));
    MUST("no such rank", SHMS_EINVAL, shms_writer_retire(w, RANKS));
    MUST("no such rank", SHMS_EINVAL, shms_reader_attach(&out, name, RANKS, NULL));
    MUST("rank in use", SHMS_ERANKINUSE, shms_reader_attach(&out, name, 0, NULL));
    MUST("no such group", SHMS_EINVAL, verb_hit_of(w, "a", 1, groups + 1, false, ref));
    MUST("larger than the arena", SHMS_ETOOLARGE, verb_begin(w, "z", 1, NULL, 0, units * unit, &t));
    MUST("no reference", SHMS_ESTALE, shms_reader_acquire(r, ref, &v));
    MUST("no reference", SHMS_ESTALE, shms_writer_cancel(w, ref));
    MUST("close of nothing", SHMS_OK, shms_reader_close(NULL));
}

/* An inspector agrees, and finds nothing broken. */
static void nothing_is_held(void) {
    shms_rank_record ranks[RANKS];
    shms_slot_record objects[WRITERS * 8];
    shms_finding found;
    uint64_t at = 0;
    shms_inspector *inspector = findings();
    MUST("ranks", SHMS_OK, shms_inspector_ranks(inspector, ranks));
    for (int r = 0; r < RANKS; r++)
        MUST("pins and leases", 0, ranks[r].pins + ranks[r].owed_leases + ranks[r].held_bytes);
    int64_t n = shms_inspector_slots(inspector, &at, objects, WRITERS * 8);
    for (int64_t i = 0; i < n; i++) {
        int rc = shms_inspector_check(inspector, objects[i].slot, objects[i].id, &found);
        MUST("checksum", checksums ? 1 : SHMS_ENOTFOUND, rc);
    }
    shms_inspector_free(inspector);
}

/* So a refusal after this would last longer than its reason. */
static void all_know_what_is_held(void) {
    for (int a = 0; a < WRITERS; a++)
        put_the_longest(&actors[a], actors[a].w);
    alone(true);
}

/* Everything that was taken comes back. */
void end_all(void) {
    ending = true;
    for (int a = 0; a < ACTORS; a++)
        if (!actors[a].lives)
            start(a);
    for (bool again = true; again;) {
        again = false;
        for (int a = 0; a < ACTORS; a++) /* in turn: one may wait for another that was stopped while it evicted */
            if (!actors[a].done) {
                go_on(a);
                views_are_whole();
                again = true;
            }
    }
    shms_step_hook = NULL;
    for (int a = 0; a < ACTORS; a++)
        weak_empty_of(a);
    nonsense_is_refused();
    shms_inspector_free(findings());
    stored_is_found();
    for (int i = 0; i < PROMISES; i++)
        for (int r = 0; r < FINDER; r++)
            if (promises[i].ranks & 1u << r) {
                current = WRITERS + r;
                MUST("valid for a rank", 1, shms_reader_validate(self()->r, promises[i].ref));
                take_promise(self(), &promises[i], 1u << r);
            }
    for (int a = 0; a < WRITERS; a++) {
        shms_writer_cancel_all(actors[a].w);
        all_know_what_is_held();
    }
    for (int r = 0; r < RANKS; r++)
        for (int i = 0; i < VIEWS; i++)
            shms_view_release(actors[WRITERS + r].views[i]);
    nothing_is_held();
    for (int a = 0; a < WRITERS; a++) { /* while all ranks live */
        shms_writer *w = actors[a].w;
        for (char k = 'a'; k < 'a' + KEYS; k++)
            if (actors[a].kept >> (k - 'a') & 1)
                MUST("unprotect", SHMS_OK, verb_unprotect(w, &k, 1));
        for (int i = 0; i < 2; i++) {
            const char *key = key_of("all", (uint64_t)(2 * a + i));
            MUST("all of an arena", SHMS_OK, put_marked(w, key, units * unit - SHMS_ALIGN, 1, NULL));
            MUST("the last of one's own", SHMS_OK, shms_writer_clear(w, "", 0));
        }
        MUST("the books", SHMS_OK, shms_writer_valid(w));
    }
    for (int r = 0; r < RANKS; r++)
        shms_reader_free(actors[WRITERS + r].r);
    for (int a = 0; a < WRITERS; a++) {
        shms_writer_close(actors[a].w, 1);
        shms_writer_free(actors[a].w);
    }
}
