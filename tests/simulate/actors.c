/* actors.c - what writers, ranks and a finder do, one call after the other; each answer is compared with the model's. */
#include "simulate.h"

#include "support.h"

/* ---- what a writer does ---- */

static void retire(shms_writer *w) {
    uint32_t rank = (uint32_t)one_of(FINDER);
    for (int i = 0; i < PROMISES; i++)
        if (promises[i].by == current)
            promises[i].ranks &= ~(1u << rank);
    retired[current][rank] = UINT64_MAX; /* if it dies there, perhaps for ever */
    MUST("retire", SHMS_OK, shms_writer_retire(w, rank));
    retired[current][rank] = now;
}
static void cancel(shms_writer *w, promise *p) {
    uint32_t owed = p->ranks & ~p->taking;
    bool held = p->held;
    uint64_t lives[RANKS];
    uint8_t ref[SHMS_REF_SIZE];
    memcpy(ref, p->ref, sizeof ref);
    for (int r = 0; r < RANKS; r++)
        lives[r] = actors[WRITERS + r].life;
    forget(p);
    int rc = shms_writer_cancel(w, ref);
    for (int r = 0; r < RANKS; r++)
        owed &= ~((uint32_t)(lives[r] != actors[WRITERS + r].life || actors[WRITERS + r].closing) << r);
    if (owed || held)
        MUST("cancel", 1, rc);
    self()->counters.cancels += rc == 1;
}
static promise *place(shms_writer *w) {
    promise *p = &promises[one_of(PROMISES)];
    for (int i = 0; i < PROMISES; i++)
        if (!counts(&promises[i]))
            p = &promises[i];
    if (counts(p) && p->by == current) /* nobody will ask for this one, so it must not hold the store for ever */
        cancel(w, p);
    return counts(p) ? NULL : p;
}

static void delete(actor *me, shms_writer *w, const char *key) {
    uint32_t bit = 1u << (*key - 'a'), all = one_of(4) ? 0 : one_of(2) ? bit : UINT32_MAX;
    are_deleted(me, all ? all : bit);
    int rc = all ? shms_writer_clear(w, key, all == bit) : shms_writer_delete(w, key, 1);
    are_deleted(me, me->deleting);
    me->deleting = 0;
    books(me);
    MUST("delete", true, rc == SHMS_OK || (rc == 1 && !all));
    for (int k = 0; k < KEYS; k++)
        if ((all ? all : bit) >> k & 1)
            MUST("what was deleted", 0, me->own[k].id);
}

static void protect(actor *me, shms_writer *w, const char *key) {
    uint32_t bit = 1u << (*key - 'a');
    shms_stored s;
    if (me->kept) {
        for (char k = 'a'; k < 'a' + KEYS; k++)
            if (me->kept >> (k - 'a') & 1) {
                me->kept &= ~(1u << (k - 'a'));
                MUST("unprotect", SHMS_OK, verb_unprotect(w, &k, 1));
            }
        return;
    }
    int rc = verb_protect(w, key, 1);
    if (rc != SHMS_ENOMEM)
        MUST("protect", SHMS_OK, rc);
    me->kept = rc == SHMS_OK ? bit : 0;
    books(me);
    stored o = me->own[*key - 'a'];
    alone(true);
    rc = shms_writer_look(w, key, 1, &s);
    alone(false);
    if (o.id && me->kept) {
        MUST("look", SHMS_OK, rc);
        uint64_t mark = *(const uint64_t *)s.payload;
        MUST("mark of what is protected", o.mark, mark);
        MUST("extra bytes of it", extra_len_of(mark), s.extra_len);
        are_bytes_of(mark, s.extra, 0, s.extra_len);
        are_bytes_of(mark, s.payload, 8, s.payload_size);
    }
}

static void write_once(actor *me, shms_writer *w);

/* Hands out what is stored, or puts it. */
static void hand_out(actor *me, shms_writer *w, const char *key, bool put) {
    uint32_t ranks = attached(), group = (uint32_t)one_of(groups + 1);
    uint64_t lives[RANKS], began = now, mark = 0, which = (uint64_t)(*key - 'a');
    stored before = me->own[which];
    bool leased = true, held = one_of(16) == 0;
    shms_batch b = {0};
    int rc;
    for (int r = 0; r < RANKS; r++)
        lives[r] = actors[WRITERS + r].life;
    if (put) {
        mark = (serial++ * SIZES + 1 + one_of(6)) * KEYS + which;
        char value[SIZES * LARGEST_UNIT];
        bool unfinished = me->put[which].id;
        for (uint64_t i = 0; i < SIZES * unit; i++)
            value[i] = byte_of(mark, i);
        leased = one_of(2);
        shms_put new = {.key = key,
                        .key_len = 1,
                        .meta = value,
                        .meta_len = meta_len_of(mark),
                        .extra = value,
                        .extra_len = extra_len_of(mark),
                        .payload_size = size_of(mark),
                        .kind = one_of(2) ? me->kind : 0,
                        .group = group,
                        .hold = held,
                        .unleased = !leased,
                        .unless_stored = one_of(4) == 0};
        rc = shms_batch_begin(w, &b, &new);
        me->counters.refusals += shms_is_refusal(rc);
        counted.refused += shms_is_refusal(rc);
        if (rc == SHMS_ETOOLARGE)
            MUST("larger than the quota", true, new.kind && quota);
        else if (rc == SHMS_EEXISTS)
            MUST("already there", true, new.unless_stored || before.id || unfinished);
        else if (!shms_is_refusal(rc))
            MUST("put", SHMS_OK, rc);
        if (rc == SHMS_OK) {
            books(me);
            MUST("key of a put", 0, me->own[which].id);
            me->put[which] = (stored){b.pending.id, mark, began};
            memcpy(value, &mark, sizeof mark);
            memcpy(b.pending.payload, value, size_of(mark));
            if (one_of(8) == 0)
                write_once(me, w);
            if (one_of(8) == 0) {
                shms_batch_undo(w, &b);
                me->put[which].id = 0;
                rc = SHMS_ENOTFOUND;
            } else
                MUST("commit", SHMS_OK, rc = shms_batch_commit(w, &b));
        }
    } else {
        rc = shms_batch_hit(w, &b, key, 1, group, held);
        me->counters.refusals += shms_is_refusal(rc);
        me->counters.misses += rc == SHMS_ENOTFOUND;
        me->counters.hits += rc == SHMS_OK;
        if (rc != SHMS_OK && rc != SHMS_ENOTFOUND)
            MUST("hit", SHMS_ENOLEASE, rc);
    }
    free(b.items);
    shms_ref ref = {0};
    shms_ref_unpack(&ref, b.ref);
    bool remote = ref.slot / slots != w->seg.arena;
    for (int r = 0; r < RANKS; r++)
        ranks &= ~((uint32_t)(lives[r] != actors[WRITERS + r].life) << r);
    if (rc == SHMS_OK && !put) {
        counted.remote += remote;
        me->counters.remote_hits += remote;
        if (!remote)
            MUST("id of a hit", before.id, ref.id);
    }
    promise *p = rc == SHMS_OK && leased ? place(w) : NULL;
    if (p) { /* a rank that has died in the call, and its successor, are not expected */
        *p = (promise){.by = current, .key = *key, .remote = remote, .held = held, .group = group};
        p->ranks = ranks & attached() & ranks_of(group);
        p->mark = put ? mark : remote ? 0 : before.mark;
        p->since = put ? began : remote ? 0 : before.since;
        memcpy(p->ref, b.ref, SHMS_REF_SIZE);
    }
    books(me);
    if (!put && rc == SHMS_ENOTFOUND)
        MUST("what a hit has missed", 0, me->own[which].id);
    if (p && !remote && not_deleted(p)) {
        uint8_t extra[LONGEST_EXTRA];
        uint64_t size = sizeof extra;
        alone(true);
        MUST("has", extra_len_of(p->mark) ? 2 : 1, shms_writer_has(w, key, 1));
        MUST("valid for a writer", 1, counts(p) ? shms_writer_validate(w, b.ref, key, 1) : 1);
        if (counts(p)) {
            MUST("extra", SHMS_OK, shms_writer_extra(w, b.ref, extra, &size));
            MUST("size of extra bytes", extra_len_of(p->mark), size);
            are_bytes_of(p->mark, (const char *)extra, 0, size);
        }
        alone(false);
    }
}

/* A refusal says what has room: if that is refused, too, because it is held by now, then something shorter. */
void put_the_longest(actor *me, shms_writer *w) {
    shms_pending t;
    shms_refusal why;
    uint64_t size = units * unit;
    int rc;
    alone(true);
    do {
        rc = verb_begin_of(w, "z", 1, NULL, 0, size - SHMS_ALIGN, 0, false, &t, &why);
        me->counters.refusals += shms_is_refusal(rc);
        if (rc == SHMS_EFULL)
            MUST("shorter than what was refused", true, why.longest < size);
        size = why.longest;
    } while (rc == SHMS_EFULL && size);
    if (rc == SHMS_OK)
        MUST("abort", SHMS_OK, verb_abort(w, &t));
    else
        MUST("refusal", true, rc == SHMS_ENOSLOT || rc == SHMS_EFULL);
    alone(false);
}

static void change(shms_writer *w, promise *p) {
    if (p->by != current || !counts(p))
        return;
    uint8_t ref[SHMS_REF_SIZE];
    memcpy(ref, p->ref, sizeof ref);
    uint32_t group = 1 + (uint32_t)one_of(2);
    if (one_of(2))
        cancel(w, p);
    else if (one_of(2)) {
        if (verb_hold(w, ref) == 1) {
            if (counts(p) && !memcmp(ref, p->ref, sizeof ref))
                p->held = true;
            else /* all have read it meanwhile */
                self()->counters.cancels += shms_writer_cancel(w, ref) == 1;
        }
    } else if (p->group == 0 && groups > 1) {
        p->ranks &= ranks_of(group), p->group = group;
        shms_writer_assign_group(w, ref, group);
    }
}

static void write_once(actor *me, shms_writer *w) {
    char key[2] = {(char)('a' + one_of(keys)), 0};
    int rc;
    uint64_t which = one_of(16);
    while (!(calls[current] >> which & 1))
        which = one_of(16);
    switch (which) {
    case 0:
        if (one_of(4) == 0) {
            promises_end(current, false);
            me->counters.cancels += (uint64_t)shms_writer_cancel_all(w);
        } else if (one_of(4) == 0)
            retire(w);
        else if (one_of(2))
            protect(me, w, key);
        else
            put_the_longest(me, w);
        break;
    case 1:
        rc = shms_writer_touch(w, key, 1);
        books(me);
        MUST("touch", true, rc == 1 || (rc == 0 && !me->own[key[0] - 'a'].id));
        break;
    case 2:
        delete(me, w, key);
        break;
    case 3:
        change(w, &promises[one_of(PROMISES)]);
        break;
    case 4:
        rc = shms_writer_has(w, key, 1);
        books(me);
        MUST("has", true, rc == 1 || rc == 2 || (rc == 0 && !me->own[key[0] - 'a'].id));
        break;
    case 5:
    case 6:
    case 7:
    case 8:
    case 9:
        hand_out(me, w, key, false);
        break;
    default:
        hand_out(me, w, key, true);
    }
    books(me);
}

/* ---- what a rank does ---- */

static void keep(actor *me, shms_view *v, char key, uint64_t mark) {
    is_object(v, key, mark);
    int i = (int)one_of(VIEWS);
    shms_view *old = me->views[i];
    me->views[i] = v, me->marks[i] = mark;
    shms_view_release(old);
}

void take_promise(actor *me, promise *p, uint32_t bit) {
    shms_view *v;
    shms_ref ref;
    promise before = *p;
    if (!(p->ranks & bit))
        return;
    weak_empty_of(p->by); /* the message with the reference came after its stores */
    shms_ref_unpack(&ref, before.ref);
    uint64_t mark = p->mark;
    bool found = not_deleted(p), is_private = one_of(8) == 0;
    uint64_t life = actors[p->by].life;
    int rc = one_of(4) ? 1 : shms_reader_has(me->r, &before.key, 1);
#define SAME (!memcmp(p->ref, before.ref, SHMS_REF_SIZE) && p->ranks & bit)
    if (found && SAME && not_deleted(p) && life == actors[p->by].life)
        MUST("has what was promised", 1, rc);
    if (!SAME)
        return;
    p->taking |= bit;
    if (!p->held && one_of(4) == 0) {
        rc = shms_reader_release(me->r, before.ref);
        MUST("release", true, rc == 1 || !SAME);
        p->ranks &= SAME ? ~bit : UINT32_MAX;
        p->taking &= ~bit;
        return;
    }
    me->refused = false;
    rc = (is_private ? shms_reader_acquire_private : shms_reader_acquire)(me->r, before.ref, &v);
    p->taking &= ~bit;
    if (rc == SHMS_OK) {
        counted.reads++;
        if (SAME && !p->held)
            p->ranks &= ~bit;
        MUST("id of a view", ref.id, v->id);
        mark = mark ? mark : mark_of(v);
        if (is_private) { /* what is written there is nobody else's */
            is_object(v, before.key, mark);
            memset((char *)v->payload, 0, v->payload_size);
            shms_view_release(v);
        } else
            keep(me, v, before.key, mark);
    } else if (rc == SHMS_EMAP)
        MUST("a private view without a failure of the system", true, me->refused);
    else if (rc == SHMS_ESTALE) /* then its writer has ended it, or died with it, meanwhile */
        MUST("a promised object", 0, SAME);
    else
        MUST("a read of a stopped writer's", SHMS_EBUSY, rc);
#undef SAME
}

/* A reference that is not the rank's, or no more: it gets the object, or nothing. */
static void take_any(actor *me, const promise *p) {
    shms_view *v;
    promise before = *p;
    weak_empty_of(p->by);
    int rc = shms_reader_acquire(me->r, before.ref, &v);
    if (rc == SHMS_OK)
        keep(me, v, before.key, before.mark ? before.mark : mark_of(v));
    else
        MUST("no promise", true, rc == SHMS_ESTALE || rc == SHMS_EBUSY);
}

static void read_once(actor *me, uint32_t rank) {
    uint8_t ref[SHMS_REF_SIZE];
    shms_view *v, *again;
    if (one_of(5) == 0) {
        int i = (int)one_of(VIEWS);
        v = me->views[i];
        me->views[i] = NULL;
        shms_view_release(v);
    } else if (rank == FINDER || one_of(4) == 0) {
        char key = (char)('a' + one_of(keys));
        int rc = shms_reader_find(me->r, &key, 1, ref, &v);
        if (rc == SHMS_OK) {
            counted.finds++;
            uint64_t mark = mark_of(v);
            is_object(v, key, mark);
            MUST("valid while it is held", 1, one_of(8) ? 1 : shms_reader_validate(me->r, ref));
            rc = one_of(8) ? SHMS_EBUSY : shms_reader_acquire(me->r, ref, &again);
            if (rc == SHMS_OK) {
                MUST("the same object", (uintptr_t)v->payload, (uintptr_t)again->payload);
                shms_view_release(again);
            } else
                MUST("what is held already", SHMS_EBUSY, rc);
            keep(me, v, key, mark);
        } else
            MUST("find", SHMS_ENOTFOUND, rc);
    } else {
        promise *p = &promises[one_of(PROMISES)];
        for (int i = one_of(8) ? 0 : PROMISES; i < PROMISES && !(p->ranks & 1u << rank); i++)
            p = &promises[one_of(PROMISES)];
        p->ranks & 1u << rank ? take_promise(me, p, 1u << rank) : take_any(me, p);
    }
}

static bool begin_again(actor *me) {
    step("");
    me->since = me->attached = now;
    me->refused = false;
    return true;
}

static void join(actor *me, int number) {
    shms_expected e = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID, .end_leases = (uint32_t)one_of(2)};
    if (e.end_leases)
        promises_end(number, false);
    shms_writer *w;
    while (begin_again(me) && shms_writer_join(&w, name, number, &e) != SHMS_OK)
        MUST("join without a failure of the system", true, me->refused);
    me->w = w;
    begin_model(me);
}
static void leave_arena(actor *me, int number) {
    promises_end(number, true);
    me->life++;
    shms_writer *w = me->w;
    me->w = NULL;
    MUST("close", SHMS_OK, shms_writer_close(w, one_of(2) ? 0 : SHMS_AS_IT_WAS));
    shms_writer_free(w);
}

static void attach(actor *me, int rank) {
    shms_expected e = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID, .finds = rank == FINDER};
    shms_reader *r;
    while (begin_again(me) && shms_reader_attach(&r, name, (uint32_t)rank, &e) != SHMS_OK)
        MUST("attach without a failure of the system", true, me->refused);
    me->closing = false;
    me->r = r;
}
/* Its views stay for a while. */
static void detach(actor *me, int rank) {
    me->closing = true;
    me->life++;
    rank_forgets(rank);
    MUST("close", SHMS_OK, shms_reader_close(me->r));
    for (int i = 0; i < VIEWS; i++) {
        shms_view *v = me->views[i];
        me->views[i] = NULL;
        shms_view_release(v);
    }
    shms_reader_free(me->r);
    me->r = NULL;
}

void live(void) {
    actor *me = self();
    int number = current, rank = number - WRITERS;
    do {
        if (rank < 0 && !me->w)
            join(me, number);
        else if (rank >= 0 && !me->r)
            attach(me, rank);
        weak_empty(); /* as others learn of it */
        step("");
        me->since = now;
        counted.calls++;
        bool ends = !ending && one_of(256) == 0;
        if (one_of(8) == 0)
            claim_once(me);
        else if (rank < 0)
            ends ? leave_arena(me, number) : write_once(me, me->w);
        else
            ends ? detach(me, rank) : read_once(me, (uint32_t)rank);
    } while (!ending || !(me->w || me->r));
    end_claims(me);
    me->done = true;
    step("");
}
