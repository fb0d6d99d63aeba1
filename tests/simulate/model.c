/* model.c - what is stored and promised, as the calls and what leaves an arena say. */
#include "simulate.h"

promise promises[PROMISES];
uint64_t retired[WRITERS][RANKS];
uint64_t deleted[KEYS];

/* ---- values ---- */

uint64_t size_of(uint64_t mark) { return mark / KEYS % SIZES * unit; }
uint32_t meta_len_of(uint64_t mark) { return (uint32_t)(mark / KEYS / SIZES % 4); }
uint32_t extra_len_of(uint64_t mark) { return mark / KEYS / SIZES % 5 ? 0 : LONGEST_EXTRA; }
char byte_of(uint64_t mark, uint64_t i) { return (char)(mark + i); }

uint64_t mark_of(const shms_view *v) {
    uint64_t mark;
    memcpy(&mark, v->payload, sizeof mark);
    return mark;
}
void are_bytes_of(uint64_t mark, const char *at, uint64_t from, uint64_t size) {
    for (uint64_t i = from; i < size; i += size < unit ? 1 : unit / 8) /* two objects share 64 bytes at least */
        MUST("byte of an object", (uint8_t)byte_of(mark, i), (uint8_t)at[i]);
}
static void whole(const shms_view *v, uint64_t mark) {
    MUST("mark of a view", mark, mark_of(v));
    are_bytes_of(mark, v->payload, 8, v->payload_size);
}
void is_object(const shms_view *v, char key, uint64_t mark) {
    MUST("length of a key", 1, v->key_len);
    MUST("key of a view", key, v->key[0]);
    MUST("key of a mark", key - 'a', mark % KEYS);
    MUST("size of a view", size_of(mark), v->payload_size);
    MUST("size of metadata", meta_len_of(mark), v->meta_len);
    are_bytes_of(mark, v->meta, 0, v->meta_len);
    whole(v, mark);
}

void views_are_whole(void) {
    for (int a = 0; a < ACTORS; a++)
        for (int i = 0; i < VIEWS; i++)
            if (actors[a].lives && actors[a].views[i])
                whole(actors[a].views[i], actors[a].marks[i]);
}

/* ---- promises ---- */

bool counts(const promise *p) { return p->ranks || p->held; }
void forget(promise *p) { p->ranks = 0, p->held = false; }
void promises_end(int by, bool only_remote) {
    for (int i = 0; i < PROMISES; i++)
        if (promises[i].by == by && (promises[i].remote || !only_remote))
            forget(&promises[i]);
}
void rank_forgets(int rank) {
    for (int i = 0; i < PROMISES; i++)
        promises[i].ranks &= ~(1u << rank), promises[i].taking &= ~(1u << rank);
}
/* The ranks that are attached: a lease that is opened from now on expects them. */
uint32_t attached(void) {
    uint32_t ranks = 0;
    for (int r = 0; r < FINDER; r++) {
        const actor *a = &actors[WRITERS + r];
        ranks |= (uint32_t)(a->lives && a->r && !a->closing && retired[current][r] <= a->attached) << r;
    }
    return ranks;
}
uint32_t ranks_of(uint32_t group) { return group == 0 || groups == 1 ? UINT32_MAX : group == 1 ? 1 : ~1u; }
/* Of its writer's arena, and no delete of its key has been under way since its put began? Then it is found. */
bool not_deleted(const promise *p) {
    if (p->remote || p->since <= deleted[p->key - 'a'] || !actors[p->by].lives || !actors[p->by].w)
        return false;
    for (int a = 0; a < WRITERS; a++)
        if (actors[a].deleting >> (p->key - 'a') & 1)
            return false;
    return true;
}

/* ---- the books of a writer ---- */

/* What the predecessors of a writer have left is its model's beginning. */
void begin_model(actor *me) {
    shms_writer *w = me->w;
    alone(true);
    memset(me->own, 0, sizeof me->own);
    memset(me->put, 0, sizeof me->put);
    me->kept = 0;
    me->n_left = 0;
    for (uint32_t i = 0; i < slots; i++) {
        const shms_slot *o = shms_writer_slot(w, i);
        const uint8_t *at = w->seg.data + shms_get(&o->offset);
        if (shms_get(&o->state) == SHMS_LIVE && !shms_slot_deleted(o))
            me->own[*at - 'a'] = (stored){shms_get(&o->id), *(const uint64_t *)(at + SHMS_ALIGN), 0};
    }
    shms_words_read(w->seg.writer->counters, &me->counters, sizeof me->counters);
    me->kind = 0;
    if (quota) {
        MUST("kind", 1, me->kind = (uint32_t)shms_writer_kind(w, "kind", 4));
        MUST("quota", SHMS_OK, shms_writer_quota(w, me->kind, quota * unit));
    }
    alone(false);
}

/* The linker puts it before the core's own: a key leaves an arena. */
void __real_shms_forget_key(shms_writer *w, uint32_t slot, bool evicted);
void __wrap_shms_forget_key(shms_writer *w, uint32_t slot, bool evicted) {
    const shms_slot *o = &w->seg.slots[slot];
    for (int a = 0; a < WRITERS; a++)
        if (actors[a].w == w)
            actors[a].left[actors[a].n_left++ % LEFT] = (leaver){o->id, w->seg.data[o->offset] - 'a', evicted};
    __real_shms_forget_key(w, slot, evicted);
}

static void is_put(actor *me, int key) {
    MUST("key of a put", 0, me->own[key].id);
    me->own[key] = me->put[key];
    me->put[key] = (stored){0};
    me->counters.puts++;
    me->counters.put_bytes += size_of(me->own[key].mark);
}

/* Checks the books, and takes what has come and left into the model. Nobody sees it. */
void books(actor *me) {
    uint64_t open_leases = 0, n = 0;
    shms_counters found;
    alone(true);
    if (one_of(2))
        MUST("the books", SHMS_OK, shms_writer_valid(me->w));
    MUST("what others have dropped", 0, shms_writer_has(me->w, "none", 4));
    MUST("room for what has left", true, me->n_left <= LEFT);
    for (leaver *l = me->left; l < me->left + me->n_left; l++) {
        stored *o = &me->own[l->key];
        if (l->id == me->put[l->key].id)
            is_put(me, l->key);
        MUST("id under a key that has left", o->id, l->id);
        o->id = 0;
        if (l->evicted) {
            MUST("protected", 0, me->kept >> l->key & 1);
            me->counters.evictions++;
            me->counters.evicted_bytes += shms_span(SHMS_ALIGN + size_of(o->mark) + extra_len_of(o->mark));
        } else
            me->counters.deletes++;
    }
    me->n_left = 0;
    for (uint32_t i = 0; i < slots; i++) {
        const shms_slot *o = shms_writer_slot(me->w, i);
        if (shms_get(&o->state) != SHMS_LIVE || shms_slot_deleted(o))
            continue;
        int key = me->w->seg.data[shms_get(&o->offset)] - 'a';
        if (shms_get(&o->id) == me->put[key].id)
            is_put(me, key);
        MUST("id under a key", shms_get(&o->id), me->own[key].id);
    }
    shms_words_read(me->w->seg.writer->counters, &found, sizeof found);
    memcpy(&me->counters.more_hits_at_4x, &found.more_hits_at_4x, 3 * sizeof(uint64_t));
    for (size_t i = 0; i < sizeof found / sizeof(uint64_t); i++)
        MUST("counter", ((uint64_t *)&me->counters)[i], ((uint64_t *)&found)[i]);
    for (uint64_t k = 0; k < keys; k++)
        n += me->own[k].id != 0;
    MUST("keys", n, me->w->index.count - me->w->unfinished);
    for (int i = 0; i < PROMISES; i++)
        open_leases += promises[i].by == current && (promises[i].held || promises[i].ranks & ~promises[i].taking);
    MUST("open leases", true, open_leases <= shms_reclaim_open(me->w));
    alone(false);
}

void are_deleted(actor *me, uint32_t bits) {
    for (int k = 0; k < KEYS; k++)
        if (bits >> k & 1)
            deleted[k] = now;
    me->deleting = bits;
}
