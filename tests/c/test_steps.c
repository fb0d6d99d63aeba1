/*
 * test_steps.c - a writer is killed before each of its steps, and its successor before each of its own.
 *
 * A child process runs a fixed script on its own store. It is killed with SIGKILL before step k, for every k up to the
 * end. Ids and lease numbers are the same in every run. So a first run, which is not killed, records the contents of
 * the store after each operation. A death within operation i must leave what was there before or after it, and nothing
 * else.
 */
#include "support.h"

enum { SLOTS = 12, CAPACITY = 40 * SHMS_ALIGN, REFS = 26 };

enum what {
    PUT,
    CACHE,
    HIT,
    CANCEL,
    DELETE,
    CLEAR,
    ABORT,
    ATTACH,
    GET,
    UNGET,
    RELEASE,
    DETACH,
    RETIRE,
    RECOVER,
    TOUCH,
    BEGIN,
    COMMIT,
    UNBEGIN
};

struct op {
    enum what what;
    char key;
    uint32_t size;
};

/* No call of the script may fail. */
static const struct op busy[] = {
    {CACHE, 'a', 200},  {PUT, 'b', 300},   {CACHE, 'c', 100}, {ATTACH, 0, 0},    {HIT, 'a', 0},       {GET, 'a', 0},
    {CACHE, 'd', 400},  {CACHE, 'e', 500}, {TOUCH, 'c', 0},   {CACHE, 'f', 600}, {CACHE, 'g', 500},   {UNGET, 0, 0},
    {CANCEL, 'a', 0},   {CACHE, 'h', 900}, {PUT, 'i', 64},    {RELEASE, 'i', 0}, {HIT, 'i', 0},       {CANCEL, 'i', 0},
    {DELETE, 'b', 0},   {PUT, 'b', 70},    {ABORT, 'j', 200}, {CACHE, 'k', 700}, {RECOVER, 'u', 100}, {CACHE, 'l', 800},
    {CACHE, 'm', 10},   {HIT, 'm', 0},     {RETIRE, 1, 0},    {CACHE, 'n', 500}, {DELETE, 'n', 0},    {CACHE, 'n', 450},
    {DETACH, 0, 0},     {CACHE, 'o', 0},   {CACHE, 'p', 0},   {CACHE, 'q', 0},   {CACHE, 'r', 0},     {CACHE, 's', 0},
    {CACHE, 't', 0},    {CACHE, 'v', 0},   {CACHE, 'w', 0},   {PUT, 'x', 100},   {CLEAR, 0, 0},       {CACHE, 'y', 400},
    {RECOVER, 'u', 30}, {CACHE, 'z', 500}, {CACHE, 'a', 300}, {PUT, 'c', 300},   {CANCEL, 'c', 0},    {BEGIN, 'd', 200},
    {BEGIN, 'e', 100},  {CACHE, 'f', 300}, {BEGIN, 'g', 64},  {CACHE, 'h', 300}, {COMMIT, 'e', 0},    {CACHE, 'i', 300},
    {UNBEGIN, 'g', 0},  {HIT, 'e', 0},     {CLEAR, 0, 0},     {COMMIT, 'd', 0},  {CANCEL, 'e', 0},    {BEGIN, 'j', 200},
    {CACHE, 'k', 300},
};
enum { OPS = sizeof busy / sizeof *busy, RANDOM_SCRIPTS = 8 / EACH };
static struct op script[OPS];

/* The contents of a store. */
typedef struct state {
    uint64_t next_id, next_lease;
    struct object {
        uint64_t id, size, deleted;
        char key;
    } objects[SLOTS];
    uint64_t leases[64], lease_of[64]; /* by entry: number, object id */
} state;

/* What a child reports, however it ends. */
static struct shared {
    int done; /* number of operations that have returned */
    uint64_t steps;
    uint64_t evictions;
    state after[OPS + 1]; /* of the run that is not killed; after[i]: when i operations have returned */
    uint8_t refs[REFS][SHMS_REF_SIZE];
    uint64_t ref_lease[REFS];
} *shared;

static const char *name;

static void look(shms_writer *w, state *s) {
    memset(s, 0, sizeof *s);
    s->next_id = shms_get(&w->seg.writer->next_id);
    s->next_lease = shms_get(&w->seg.writer->next_lease);
    for (int i = 0; i < SLOTS; i++) {
        const shms_slot *slot = &w->seg.slots[i];
        if (shms_get(&slot->state) != SHMS_LIVE)
            continue;
        uint64_t length = shms_get(&slot->length);
        s->objects[i] = (struct object){.id = shms_get(&slot->id),
                                        .size = length > 1 ? length - SHMS_ALIGN : 0,
                                        .deleted = shms_slot_deleted(slot),
                                        .key = (char)w->seg.data[shms_get(&slot->offset)]};
        CHECK_EQ(1, shms_slot_key_len(slot));
        const char *payload = (char *)w->seg.data + shms_get(&slot->offset) + SHMS_ALIGN;
        CHECK(filled(payload, s->objects[i].size, s->objects[i].id)); /* bit for bit */
    }
    for (uint64_t e = 0; e < w->seg.layout.max_leases; e++)
        if ((s->leases[e] = shms_get(&w->seg.leases[e].number)))
            s->lease_of[e] = shms_get(&w->seg.leases[e].id);
}

/* Tickets that are begun and not ended, by key; slot SHMS_NONE: none. Only one process has them. */
static shms_pending begun[REFS];

static void none_begun(void) {
    for (int k = 0; k < REFS; k++)
        begun[k].slot = SHMS_NONE;
}

static int end_begun(shms_writer *w, char key, int (*how)(shms_writer *, const shms_pending *)) {
    shms_pending *t = &begun[key - 'a'];
    int rc = how(w, t);
    t->slot = SHMS_NONE;
    return rc;
}
static int commit(shms_writer *w, const shms_pending *t) { return verb_commit(w, t, NULL); }

static int put(shms_writer *w, char key, uint32_t size, uint8_t *out, bool abort) {
    shms_pending t;
    int rc = (out ? verb_begin : verb_reserve)(w, &key, 1, NULL, 0, size, &t);
    if (rc)
        return rc;
    fill(t.payload, size, t.id);
    return abort ? verb_abort(w, &t) : verb_commit(w, &t, out);
}

static void handed_out(char key, const uint8_t *ref) {
    shms_ref unpacked;
    shms_ref_unpack(&unpacked, ref);
    memcpy(shared->refs[key - 'a'], ref, SHMS_REF_SIZE);
    shared->ref_lease[key - 'a'] = unpacked.lease;
}

/* The child. If no step is to be its last, it tells what it has. */
static void run_script(uint64_t kill_at, bool all_succeed) {
    bool tell = kill_at == 0;
    shms_options o = {.capacity = CAPACITY, .n_readers = 2, .max_objects = SLOTS};
    shms_writer *w;
    shms_reader *r = NULL;
    shms_view *v = NULL;
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, &o));
    CHECK_EQ(64, w->seg.layout.max_leases);
    if (tell)
        look(w, &shared->after[0]);
    none_begun();
    die_at_step(kill_at);
    for (int i = 0; i < (int)OPS; i++) {
        const struct op *op = &script[i];
        const uint8_t *ref = op->key >= 'a' ? shared->refs[op->key - 'a'] : NULL;
        uint8_t out[SHMS_REF_SIZE];
        int rc = 0;
        switch (op->what) {
        case PUT:
        case HIT:
            rc = op->what == PUT ? put(w, op->key, op->size, out, false) : verb_hit(w, &op->key, 1, out);
            if (rc == SHMS_OK)
                handed_out(op->key, out);
            break;
        case CACHE:
            rc = put(w, op->key, op->size, NULL, false);
            break;
        case ABORT:
            rc = put(w, op->key, op->size, NULL, true);
            break;
        case CANCEL:
            rc = shms_writer_cancel(w, ref) - 1;
            break;
        case DELETE:
            rc = shms_writer_delete(w, &op->key, 1) - 1;
            break;
        case CLEAR:
            rc = shms_writer_clear(w, "", 0);
            break;
        case TOUCH:
            rc = shms_writer_touch(w, &op->key, 1) - 1;
            break;
        case ATTACH:
            rc = r ? 0 : shms_reader_attach(&r, name, 1, NULL);
            break;
        case GET:
            rc = v || (v = view_of(r, ref)) ? 0 : -errno;
            break;
        case UNGET:
            if (v)
                shms_view_release(v);
            v = NULL;
            break;
        case RELEASE:
            rc = shms_reader_release(r, ref) - 1;
            break;
        case RETIRE:
            rc = shms_writer_retire(w, (uint32_t)op->key);
            break;
        case DETACH:
            rc = shms_reader_close(r);
            if (v)
                shms_view_release(v);
            shms_reader_free(r);
            v = NULL;
            r = NULL;
            break;
        case RECOVER: { /* replaces a half-written object */
            shms_pending t;
            rc = verb_begin(w, &op->key, 1, NULL, 0, op->size, &t);
            shms_writer_free(w);
            none_begun();
            CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
            break;
        }
        case BEGIN: {
            shms_pending t;
            if ((rc = verb_reserve(w, &op->key, 1, NULL, 0, op->size, &t)) == SHMS_OK) {
                fill(t.payload, op->size, t.id);
                begun[op->key - 'a'] = t;
            }
            break;
        }
        case COMMIT:
            rc = end_begun(w, op->key, commit);
            break;
        case UNBEGIN:
            rc = end_begun(w, op->key, verb_abort);
            break;
        }
        if (tell) {
            if (all_succeed && rc)
                fprintf(stderr, "operation %d: ", i);
            CHECK(rc == SHMS_OK || !all_succeed);
            void (*hook)(const char *) = shms_step_hook;
            shms_step_hook = NULL;
            CHECK_EQ(SHMS_OK, shms_writer_valid(w));
            look(w, &shared->after[i + 1]);
            shms_step_hook = hook;
        }
        __atomic_store_n(&shared->done, i + 1, __ATOMIC_RELEASE);
    }
    shared->steps = steps;
    shared->evictions = shms_get(&w->seg.writer->counters[SHMS_C(evictions)]);
    kill(getpid(), SIGKILL); /* dies at the end, too: nothing is closed */
}

static const struct object *object(const state *s, uint64_t id) {
    for (int i = 0; i < SLOTS; i++)
        if (id && s->objects[i].id == id)
            return &s->objects[i];
    return NULL;
}

/* The id of the object of an open lease; 0: there is no such lease. */
static uint64_t lease(const state *s, uint64_t number) {
    for (int e = 0; e < 64; e++)
        if (number && s->leases[e] == number)
            return s->lease_of[e];
    return 0;
}

static void nothing_is_lost(shms_writer *w, const state *before, const state *after) {
    state now;
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    look(w, &now);
    CHECK(now.next_id >= before->next_id && now.next_lease >= before->next_lease); /* numbers continue */
    CHECK(now.next_id <= after->next_id && now.next_lease <= after->next_lease);
    for (int i = 0; i < SLOTS; i++) {
        const struct object *a = &before->objects[i], *b = object(after, a->id), *n = object(&now, a->id);
        if (a->id && b) {
            CHECK(n && n->size == a->size && n->key == a->key && n->deleted >= a->deleted && n->deleted <= b->deleted);
            CHECK(n->deleted || shms_writer_has(w, &a->key, 1) == 1);
        }
        n = &now.objects[i];
        if (n->id)
            CHECK(object(before, n->id) || object(after, n->id));
    }
    for (int e = 0; e < 64; e++) {
        CHECK(!lease(before, before->leases[e]) || !lease(after, before->leases[e]) || lease(&now, before->leases[e]));
        uint64_t number = now.leases[e], id = now.lease_of[e];
        CHECK(!number || lease(before, number) == id || lease(after, number) == id);
    }
    for (int k = 0; k < REFS; k++) { /* each key in the index is the key of one live object */
        char key = (char)('a' + k);
        int found = 0;
        for (int i = 0; i < SLOTS; i++)
            found += now.objects[i].id && now.objects[i].key == key && !now.objects[i].deleted;
        CHECK_EQ(found, shms_writer_has(w, &key, 1));
    }
}

/* Rank 0 has never attached, so every open lease still expects it. New puts must not evict what it is promised. */
static void promises_are_kept(shms_writer *w, const state *before, const state *after) {
    for (int i = 0; i < 60; i++) {
        int rc = put_marked(w, key_of("new", i), 64 * (uint64_t)(1 + i % 7), 1, NULL);
        CHECK(rc == SHMS_OK || rc == SHMS_EFULL);
    }
    shms_reader *r;
    CHECK_EQ(SHMS_OK, shms_reader_attach(&r, name, 0, NULL));
    for (int k = 0; k < REFS; k++)
        if (lease(before, shared->ref_lease[k]) && lease(after, shared->ref_lease[k])) {
            shms_view *v = view_of(r, shared->refs[k]);
            CHECK(v && v->key_len == 1 && v->key[0] == 'a' + k && filled(v->payload, v->payload_size, v->id));
            shms_view_release(v);
        }
    CHECK_EQ(SHMS_OK, shms_writer_retire(w, 1));
    shms_reader_close(r); /* now there are no promises left */
    shms_reader_free(r);
    CHECK_EQ(SHMS_OK, put_marked(w, "all", CAPACITY - SHMS_ALIGN, 1, NULL));
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
}

static void recover(void) {
    shms_writer *w;
    CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
}

static void run(uint64_t k, bool all_succeed, uint64_t *recoveries) {
    memset(shared->refs, 0, sizeof shared->refs);
    memset(shared->ref_lease, 0, sizeof shared->ref_lease);
    shared->done = 0;
    pid_t child = fork_child();
    if (child == 0) {
        run_script(k, all_succeed);
        _exit(1);
    }
    reap_killed(child);
    for (uint64_t j = 1; killed_at(j, recover); j++)
        ++*recoveries;
    const state *before = &shared->after[shared->done],
                *after = &shared->after[shared->done + (shared->done < (int)OPS)];
    shms_writer *w;
    CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
    nothing_is_lost(w, before, after);
    promises_are_kept(w, before, after);
    end_writer(w);
}

/* Kills at every k of the script, or every EACHth. Returns how many steps it had. */
static uint64_t run_every_step(bool all_succeed, uint64_t *recoveries) {
    run(0, all_succeed, recoveries);
    CHECK_EQ(OPS, shared->done);
    uint64_t all = shared->steps;
    for (uint64_t k = 1; k <= all; k += EACH)
        run(k, all_succeed, recoveries);
    return all;
}

static void draw_script(uint64_t *seed) {
    static const enum what likely[] = {PUT,    PUT,    CACHE,   CACHE, CACHE,  CACHE, HIT,    HIT,    CANCEL,  CANCEL,
                                       CANCEL, DELETE, CLEAR,   ABORT, ATTACH, GET,   GET,    UNGET,  RELEASE, RELEASE,
                                       DETACH, RETIRE, RECOVER, TOUCH, BEGIN,  BEGIN, COMMIT, COMMIT, UNBEGIN};
    for (int i = 0; i < (int)OPS; i++) {
        script[i] = (struct op){.what = likely[below(seed, sizeof likely / sizeof *likely)],
                                .key = (char)('a' + below(seed, 8)),
                                .size = (uint32_t)below(seed, below(seed, 4) ? 500 : 1200)};
        if (script[i].what == RETIRE)
            script[i].key = 1;
    }
}

TEST(a_death_before_any_step_loses_nothing) {
    uint64_t recoveries = 0, seed = 10;
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    name = store_name("steps");
    memcpy(script, busy, sizeof script);
    CHECK(run_every_step(true, &recoveries) >= 300);
    CHECK(shared->evictions >= 10 && recoveries > 100); /* half-written and half-evicted objects were recovered */
    for (int i = 0; i < RANDOM_SCRIPTS; i++) {
        draw_script(&seed);
        run_every_step(false, &recoveries);
    }
}
