/*
 * test_yields.c - what visits many objects or leases under the mutex lets other threads in, and what they do meanwhile
 * stays; and what need not visit many does not.
 */
#include <pthread.h>

#include "fixture.h"

enum { N = 20000 };

static const char *visit; /* the step of each object, or lease */
static pthread_t other;
static uint64_t visited;
static uint64_t deleted; /* by another thread, before the visitor came to them */
static char coming[16]; /* the key of the object that a clear visits next */
static bool offered; /* entries that the visitor has not come to are taken first */

/* The library's calls come here: how often others would be let in, and what one of them does. */
static uint64_t turns;
static void (*once)(void);
bool __real_shms_writer_yield(struct shms_writer *writer);
bool __wrap_shms_writer_yield(struct shms_writer *writer);
bool __wrap_shms_writer_yield(struct shms_writer *writer) {
    void (*does)(void) = once, (*hook)(const char *label) = shms_step_hook;
    turns++;
    once = NULL;
    if (!does)
        return __real_shms_writer_yield(writer);
    pthread_mutex_unlock(&writer->mutex);
    shms_step_hook = NULL;
    does();
    shms_step_hook = hook;
    pthread_mutex_lock(&writer->mutex);
    return true;
}

static void count(const char *label) {
    if (strcmp(label, visit))
        return;
    visited++;
    uint32_t next = w->ring.next[w->ring.first];
    if (once && next != SHMS_NONE)
        snprintf(coming, sizeof coming, "%.*s", (int)shms_slot_key_len(shms_writer_slot(w, next)),
                 (const char *)w->seg.data + shms_get(&shms_writer_slot(w, next)->offset));
    if (offered) { /* the last entry that is free comes to the top of the stack, in front of what is ended now */
        uint32_t *top = &w->leases.free[w->leases.n_free - 1], *last = &w->leases.free[visited], entry = *top;
        *top = *last;
        *last = entry;
    }
}

/* Visits are counted from here on, and the first turn that is offered is taken. */
static void start(const char *label, void (*does)(void)) {
    visit = label;
    once = does;
    visited = deleted = 0;
    shms_step_hook = count;
}

static void expect(uint64_t n) {
    shms_step_hook = NULL;
    offered = false;
    CHECK(!once);
    CHECK_EQ(n, visited + deleted);
}

static void setup(bool leased) {
    open_store("yields", (shms_options){.capacity = 2 * N * 128, .n_readers = 1, .max_objects = 2 * N}, 0);
    for (int i = 0; i < N; i++)
        CHECK_EQ(SHMS_OK, put_marked(w, key_of("k", i), 1, 1, leased ? ref : NULL));
}

enum { FRESH = 10 };

/* First it takes away what the visitor would come to next, and puts anything else into its slot. */
static void put_fresh(void) {
    deleted = (uint64_t)shms_writer_delete(w, coming, (uint32_t)strlen(coming));
    for (int i = 0; i < FRESH; i++)
        CHECK_EQ(SHMS_OK, put_marked(w, key_of("f", i), 1, 2, NULL));
}

TEST(a_clear_lets_others_in_and_leaves_what_they_put) {
    setup(false);
    start("D1", put_fresh);
    CHECK_EQ(SHMS_OK, shms_writer_clear(w, "", 0));
    expect(N);
    CHECK_EQ(FRESH, shms_writer_count(w));
    for (int i = 0; i < FRESH; i++)
        CHECK_EQ(1, shms_writer_has(w, key_of("f", i), 2));
    end();
}

static void look(void) { CHECK_EQ(0, shms_writer_has(w, "none", 4)); }

TEST(a_clear_that_lets_others_in_at_the_end_of_the_data_is_over) {
    enum { FEW = 64 };
    open_store("last", (shms_options){.capacity = FEW * 128, .n_readers = 1, .max_objects = FEW}, 0);
    for (int i = 0; i < FEW; i++)
        CHECK_EQ(SHMS_OK, put_marked(w, key_of("k", i), 1, 1, NULL));
    start("D1", look);
    CHECK_EQ(SHMS_OK, shms_writer_clear(w, "", 0));
    expect(FEW);
    CHECK_EQ(0, shms_writer_count(w));
    end();
}

enum { GO = 3000 }; /* forgotten with 23 yields, of which a busy machine misses some */

static void *protect_last(void *unused) {
    CHECK_EQ(SHMS_OK, verb_protect(w, "k2999", 5));
    return unused;
}
static void protect_what_goes(const char *label) {
    if (strcmp(label, "W4"))
        return;
    shms_step_hook = NULL;
    CHECK(pthread_create(&other, NULL, protect_last, NULL) == 0);
    while (!atomic_load(&w->waiting))
        sched_yield();
}

TEST(a_key_that_is_protected_as_its_object_goes_protects_no_other_object) {
    open_store("going", (shms_options){.capacity = GO * 128, .n_readers = 1, .max_objects = GO}, 0);
    for (int i = 0; i < GO; i++)
        CHECK_EQ(SHMS_OK, put_marked(w, key_of("k", i), 1, 1, NULL));
    shms_step_hook = protect_what_goes;
    CHECK_EQ(SHMS_OK, put_marked(w, "all", GO * 128 - SHMS_ALIGN, 1, NULL));
    CHECK(pthread_join(other, NULL) == 0);
    for (int i = 0; i < GO; i++)
        CHECK_EQ(SHMS_OK, put_marked(w, key_of("f", i), 1, 1, NULL));
    CHECK_EQ(SHMS_OK, put_marked(w, "all", GO * 128 - SHMS_ALIGN, 1, NULL));
    CHECK_EQ(SHMS_OK, put_marked(w, "k2999", 1, 1, NULL)); /* and protects the next one of that key */
    CHECK_EQ(SHMS_EFULL, put_marked(w, "all", GO * 128 - SHMS_ALIGN, 1, NULL));
    CHECK_EQ(SHMS_OK, verb_unprotect(w, "k2999", 5));
    end();
}

static uint8_t late[2][SHMS_REF_SIZE]; /* the first may take an entry that has just been ended, the second does not */

static void hand_out(void) {
    for (int i = 0; i < 2; i++)
        CHECK_EQ(SHMS_OK, verb_hit(w, "k1", 2, late[i]));
}

TEST(the_end_of_all_leases_lets_others_in_and_leaves_what_they_open) {
    setup(true);
    offered = true;
    start("C1", hand_out);
    CHECK_EQ(N, shms_writer_cancel_all(w));
    expect(N);
    for (int i = 0; i < 2; i++)
        CHECK_EQ(1, shms_writer_cancel(w, late[i]));
    end();
}

TEST(a_count_of_open_leases_lets_others_in) {
    shms_stats stats;
    setup(true);
    turns = 0;
    CHECK_EQ(SHMS_OK, shms_writer_stats(w, &stats));
    CHECK(stats.open_leases == N && turns >= N / 256);
    end();
}

TEST(a_list_of_keys_lets_others_in) {
    uint8_t keys[N * 24];
    uint64_t size = sizeof keys;
    setup(false);
    turns = 0;
    CHECK_EQ(SHMS_OK, shms_writer_keys(w, "", 0, keys, &size));
    CHECK(size > N * 14 && size <= sizeof keys && turns >= N / 64);
    end();
}

static void take_all_entries(void) {
    setup(true);
    while (w->leases.n_free)
        CHECK_EQ(SHMS_OK, verb_hit(w, "k1", 2, ref));
}

static uint32_t all_entries(void) { return w->leases.n_entries; }

TEST(a_sweep_for_a_lease_entry_lets_others_in) {
    take_all_entries();
    turns = 0;
    CHECK_EQ(SHMS_ENOLEASE, verb_hit(w, "k1", 2, ref));
    CHECK(turns >= all_entries() / 4096);
    end();
}

static void delete_k2(void) { CHECK_EQ(1, shms_writer_delete(w, "k2", 2)); }

TEST(what_is_deleted_during_a_sweep_for_its_lease_is_not_found) {
    take_all_entries();
    attach(0);
    CHECK_EQ(1, shms_reader_release(readers[0], ref));
    shms_ref parts;
    shms_ref_unpack(&parts, ref);
    w->sweep_at = (parts.entry + 1) % all_entries(); /* so it comes to that one last */
    once = delete_k2;
    CHECK_EQ(SHMS_ENOTFOUND, verb_hit(w, "k2", 2, ref));
    CHECK(!once);
    CHECK_EQ(1, w->leases.n_free);
    end();
}

enum { LEASED = 2000, IMAGE = 1 };

/* Each is refused, after a scan of all. */
TEST(a_search_for_a_place_or_within_a_quota_lets_others_in) {
    open_store("search", (shms_options){.capacity = LEASED * 256, .n_readers = 1, .max_objects = 2 * LEASED}, 1);
    CHECK_EQ(IMAGE, shms_writer_kind(w, "image", 5));
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, IMAGE, LEASED * 128));
    for (int i = 0; i < 2; i++) {
        uint32_t kind = i ? 0 : IMAGE;
        for (int k = 0; k < LEASED; k++) {
            const char *key = key_of(i ? "k" : "i", k);
            shms_pending t;
            CHECK_EQ(SHMS_OK, verb_begin_of(w, key, (uint32_t)strlen(key), NULL, 0, 64, kind, true, &t, NULL));
            CHECK_EQ(SHMS_OK, verb_commit(w, &t, ref));
        }
        shms_zones_stale_all(&w->zones); /* as after a death */
        turns = 0;
        shms_pending none;
        CHECK_EQ(i ? SHMS_EFULL : SHMS_EQUOTA, verb_begin_of(w, "x", 1, NULL, 0, 64, kind, false, &none, NULL));
        CHECK(turns >= (i ? 1 : LEASED / 256));
    }
    end();
}

TEST(an_eviction_of_many_objects_lets_others_in) {
    setup(false);
    turns = 0;
    CHECK_EQ(SHMS_OK, put_marked(w, "all", w->seg.layout.capacity - SHMS_ALIGN, 1, NULL));
    CHECK(turns >= N / 256);
    end();
}

/* ---- deleted objects that are protected ---- */

TEST(one_deleted_object_that_stays_makes_no_other_call_visit_all) {
    setup(false);
    CHECK_EQ(SHMS_OK, verb_protect(w, "k7", 2));
    CHECK_EQ(1, shms_writer_delete(w, "k7", 2));
    CHECK_EQ(SHMS_OK, verb_protect(w, "k1", 2));
    turns = 0;
    CHECK_EQ(SHMS_OK, verb_unprotect(w, "k1", 2));
    CHECK_EQ(0, turns); /* a visit to all would let others in */
    end();
}

TEST(deleted_objects_stay_until_the_protection_of_their_keys_ends) {
    enum { KEPT = 300 }; /* more than are visited between two yields */
    setup(false);
    for (int i = 0; i < KEPT; i++)
        CHECK_EQ(SHMS_OK, verb_protect(w, key_of("k", i), (uint32_t)strlen(key_of("k", i))));
    CHECK_EQ(SHMS_OK, shms_writer_clear(w, "", 0));
    CHECK_EQ(KEPT, w->ring.count);
    for (int i = 0; i < KEPT; i++) {
        int k = i % 2 ? i : KEPT - 2 - i; /* from within */
        CHECK_EQ(SHMS_OK, verb_unprotect(w, key_of("k", k), (uint32_t)strlen(key_of("k", k))));
        CHECK_EQ(KEPT - 1 - i, w->ring.count);
        CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    }
    CHECK_EQ(SHMS_OK, put_marked(w, "all", w->seg.layout.capacity - SHMS_ALIGN, 9, NULL));
    end();
}

/* ---- a close by another thread ---- */

enum { ALL = 2000, PROTECTED = 1500 }; /* many yields: the writer that closes may miss some */

static shms_writer *joined, *closing;

static pthread_t asker;

static void *close_it(void *unused) {
    CHECK_EQ(SHMS_OK, shms_writer_close(closing, SHMS_AS_IT_WAS));
    return unused;
}
static void *ask(void *unused) {
    while (shms_writer_has(closing, "none", 4) == 0)
        ;
    return unused;
}

static void stop_when_closed(const char *label) { CHECK(strcmp(label, visit) || !closing->closed); }

/* At the first visit, two threads wait for the mutex: a call yields to the one, and the one that closes comes first. */
static void close_at_once(const char *label) {
    if (strcmp(label, visit))
        return;
    shms_step_hook = stop_when_closed;
    CHECK(pthread_create(&other, NULL, close_it, NULL) == 0 && pthread_create(&asker, NULL, ask, NULL) == 0);
    while (!atomic_load(&closing->returning) || !atomic_load(&closing->waiting))
        sched_yield();
}

static int64_t clear_all(void) { return shms_writer_clear(closing, "", 0); }
static int64_t end_all_leases(void) { return shms_writer_cancel_all(w) < ALL ? SHMS_ECLOSED : SHMS_OK; }
static int64_t count_all(void) { return shms_writer_count(w); }
static int64_t count_open(void) { return shms_writer_stats(w, &(shms_stats){0}); }
static int64_t ask_holders(void) { return shms_writer_holders(w, &(shms_refusal){0}); }
static int64_t list_all(void) { return shms_writer_keys(w, "", 0, NULL, &(uint64_t){0}); }
static int64_t unprotect_all(void) {
    uint32_t before = w->n_deleted_but_protected;
    shms_batch_drop(w, &b);
    return before == PROTECTED && w->n_deleted_but_protected ? SHMS_ECLOSED : SHMS_OK;
}

static void protect_all(void) {
    static uint8_t keys[PROTECTED * 16];
    uint64_t size = 0;
    for (int i = 0; i < PROTECTED; i++) {
        const char *key = key_of("k", (uint64_t)i);
        uint32_t len = (uint32_t)strlen(key);
        memcpy(keys + size, &len, 4);
        memcpy(keys + size + 4, key, len);
        size += 4 + len;
    }
    CHECK_EQ(SHMS_OK, shms_batch_protect(w, &b, keys, size));
    CHECK_EQ(SHMS_OK, shms_writer_clear(w, "", 0));
}

/* A hit that finds no entry, and scans all for its refusal. */
static void use_all_entries(void) {
    while (verb_hit(w, "k1", 2, ref) == SHMS_OK)
        continue;
    shms_zones_stale_all(&w->zones);
    w->to_sweep = 0;
}
static int64_t hit(void) { return verb_hit(w, "k1", 2, ref); }

static void lease_all_there(void) {
    for (uint64_t k = 0; k < ALL; k++)
        CHECK_EQ(SHMS_OK, put_marked(joined, key_of("j", k), 1, 1, NULL));
    while (joined->leases.n_free)
        CHECK_EQ(SHMS_OK, verb_hit(joined, "k0", 2, ref));
}
static int64_t protect_one(void) {
    shms_batch there = {0};
    int rc = shms_batch_protect(joined, &there, (const uint8_t *)"\2\0\0\0k1", 6);
    shms_batch_drop(joined, &there);
    return rc;
}

static char extra[SHMS_MAX_EXTRA]; /* of many yields: the writer that closes is not always the first */
static void put_extra(void) {
    CHECK_EQ(SHMS_OK,
             shms_batch_put(w, &b, &(shms_put){.key = "e", .key_len = 1, .extra = extra, .extra_len = sizeof extra}));
}
static int64_t copy_extra(void) {
    uint64_t size = sizeof extra;
    return shms_writer_extra(w, b.ref, (uint8_t *)extra, &size);
}

static void put_payload(void) {
    shms_piece all = {0, sizeof extra, (uint64_t)(uintptr_t)extra};
    CHECK_EQ(SHMS_OK, verb_put(w, "p", 1, "m", 1, sizeof extra, &all, 1, b.ref));
}
static int64_t compare_payload(void) {
    shms_piece all = {0, sizeof extra, (uint64_t)(uintptr_t)extra};
    return shms_writer_equals(w, b.ref, "m", 1, sizeof extra, &all, 1);
}

static void drop_all(void) { CHECK_EQ(SHMS_OK, shms_writer_clear(joined, "", 0)); }

typedef struct long_call {
    const char *visit;
    bool joined; /* the writer that closes */
    void (*before)(void);
    int64_t (*call)(void);
} long_call;

/* Did the close come to its turn within the call? */
static bool is_ended_by_a_close(const long_call *c) {
    open_store("closes",
               (shms_options){.capacity = strcmp(c->visit, "copy") == 0 ? 2 * SHMS_MAX_EXTRA : 2 * ALL * 128,
                              .n_readers = 1,
                              .max_objects = 2 * ALL,
                              .n_writers = 2},
               0);
    CHECK_EQ(SHMS_OK, shms_writer_join(&joined, name, 1, NULL));
    for (uint64_t k = 0; k < ALL; k++)
        CHECK_EQ(SHMS_OK, put_marked(w, key_of("k", k), 1, 1,
                                     c->call == end_all_leases || c->call == count_open || c->call == ask_holders ||
                                             c->call == hit
                                         ? ref
                                         : NULL));
    if (c->before)
        c->before();
    visit = c->visit;
    closing = c->joined ? joined : w;
    shms_step_hook = close_at_once;
    bool ended = c->call() == SHMS_ECLOSED;
    CHECK(pthread_join(other, NULL) == 0 && pthread_join(asker, NULL) == 0);
    shms_step_hook = NULL;
    shms_writer_free(joined);
    shms_writer_free(w);
    CHECK_EQ(SHMS_OK, shms_writer_join(&w, name, 0, NULL));
    end();
    return ended;
}

TEST(a_close_by_another_thread_ends_a_long_call_at_its_next_yield) {
    static const long_call calls[] = {
        {"D1", false, NULL, clear_all},         {"D2", true, NULL, clear_all},
        {"C1", false, NULL, end_all_leases},    {"D1", false, drop_all, count_all},
        {"W1a", false, NULL, count_open},       {"W1a", false, NULL, ask_holders},
        {"list", false, NULL, list_all},        {"W2", false, protect_all, unprotect_all},
        {"W1a", false, use_all_entries, hit},   {"W1a", true, lease_all_there, protect_one},
        {"copy", false, put_extra, copy_extra}, {"copy", false, put_payload, compare_payload}};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        for (int tries = 1; !is_ended_by_a_close(&calls[i]); tries++)
            CHECK(tries < 10); /* on a busy machine another thread may have each turn */
}
