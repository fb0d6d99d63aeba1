/*
 * test_lists.c - what the lists of a writer's leases cost the writer whose objects they are on: they stay short, a walk
 * of one ends, and each is read once a look, however many ranks there are.
 */
#include "inspect/inspect.h"
#include "support.h"

enum { A, B, WRITERS = 3, RANKS = 4, KIB = 1024 };

static shms_writer *w[WRITERS];
static shms_reader *ranks[RANKS];

static void setup(uint64_t capacity, uint32_t objects, uint32_t n_ranks) {
    const char *name = store_name("lists");
    shms_options o = {.capacity = capacity, .n_readers = n_ranks, .max_objects = objects, .n_writers = WRITERS};
    CHECK_EQ(SHMS_OK, shms_writer_create(&w[A], name, &o));
    for (int i = B; i < WRITERS; i++)
        CHECK_EQ(SHMS_OK, shms_writer_join(&w[i], name, SHMS_ANY_ARENA, NULL));
    for (uint32_t r = 0; r < RANKS; r++) {
        ranks[r] = NULL;
        if (r < n_ranks)
            CHECK_EQ(SHMS_OK, shms_reader_attach(&ranks[r], name, r, NULL));
    }
}

static void teardown(void) {
    for (uint32_t r = 0; r < RANKS; r++)
        shms_reader_free(ranks[r]);
    for (int i = 0; i < WRITERS; i++) {
        CHECK_EQ(SHMS_OK, shms_writer_valid(w[i]));
        shms_writer_free(w[i]);
    }
    store_names_left();
}

static uint64_t reads[3]; /* W3f: lists read; W3n: entries read; claim: entries that an inspector has read */
static void count(const char *label) {
    reads[0] += strcmp(label, "W3f") == 0;
    reads[1] += strcmp(label, "W3n") == 0;
    reads[2] += strcmp(label, "holds") == 0;
}

/* A puts what only fits if everything else goes. The hook counts the steps of its walks. */
static int put_all_with(void (*hook)(const char *label)) {
    memset(reads, 0, sizeof reads);
    shms_step_hook = hook;
    int rc = put_marked(w[A], "all", w[A]->seg.layout.capacity - SHMS_ALIGN, 9, NULL);
    shms_step_hook = NULL;
    return rc;
}
static int put_all(void) { return put_all_with(count); }

static int64_t inspect(void (*hook)(const char *label)) {
    shms_finding found[4];
    shms_inspector *i;
    CHECK_EQ(SHMS_OK, shms_inspector_open(&i, w[A]->seg.path, SHMS_OWN_UID));
    shms_step_hook = hook;
    int64_t n = shms_inspector_verify(i, found, 4);
    shms_step_hook = NULL;
    shms_inspector_free(i);
    return n;
}

/* A has `n` objects, k0 and so on, each leased if there is a `ref`. No rank awaits what B hands out. */
static void begin(uint32_t n, uint32_t n_ranks, uint8_t *ref) {
    setup(512 * 128, 512, n_ranks);
    for (uint32_t i = 0; i < n; i++)
        CHECK_EQ(SHMS_OK, put_marked(w[A], key_of("k", i), 1, i, ref));
    for (uint32_t r = 0; !ref && r < n_ranks; r++)
        CHECK_EQ(SHMS_OK, shms_writer_retire(w[B], r));
}

/* ---- a list without an end ---- */

/* Slot s of A's begins a list of B's that never ends: `length` entries in a circle, after `tail` others. All leases in
 * it are over. */
static void plant(uint32_t s, uint32_t at, uint32_t tail, uint32_t length) {
    for (uint32_t i = 0; i < tail + length; i++) {
        shms_lease *e = &w[B]->seg.leases[at + i];
        uint32_t next = i + 1 < tail + length ? i + 1 : tail;
        shms_set(&e->what, shms_lease_what(s, false, 0, at + next + 1));
        shms_set(&e->number, 1);
    }
    atomic_store(&shms_segment_holds(&w[B]->seg, B)[s].first, at + 1);
}

/* B dies, and A gets its room. */
static void the_dead_hold_nothing(void) {
    shms_segment_unlock(&w[B]->seg, false);
    CHECK_EQ(SHMS_OK, put_all());
    w[B]->closed = true;
    shms_writer_free(w[B]);
    CHECK_EQ(SHMS_OK, shms_writer_join(&w[B], w[A]->seg.path, B, NULL));
    teardown();
}

static void a_circle_of_leases_costs_a_few_times_its_length(uint32_t tail, uint32_t length) {
    enum { N = 512 };
    begin(N, 2, NULL);
    uint32_t lists = w[B]->leases.n_entries / (tail + length);
    for (uint32_t s = 0; s < lists; s++)
        plant(s, s * (tail + length), tail, length);
    CHECK_EQ(SHMS_EFULL, put_all()); /* B lives, so what cannot be read counts as held */
    uint64_t looks = reads[0] / (N * (WRITERS - 1)) + 1;
    CHECK(reads[1] >= lists && reads[1] <= 4 * looks * lists * (tail + length));
    CHECK(inspect(count) >= 1);
    CHECK(reads[2] >= lists && reads[2] <= SHMS_VERIFY_PASSES * 4 * lists * (tail + length));
    the_dead_hold_nothing();
}

/* B turns each entry elsewhere as A comes to it, always away from where A would notice that it comes round. */
static uint32_t evaded, mark;
static void evade(const char *label) {
    count(label);
    if (strcmp(label, "W3f") == 0)
        evaded = mark = 0;
    if (strcmp(label, "W3n") && strcmp(label, "holds"))
        return;
    CHECK(reads[1] + reads[2] < 1000000);
    uint32_t entries = w[B]->leases.n_entries, at = evaded % entries;
    if ((evaded & (evaded - 1)) == 0)
        mark = at;
    uint32_t next = ++evaded % entries;
    if (next == mark)
        next = ++evaded % entries;
    shms_set(&w[B]->seg.leases[at].what, shms_lease_what(0, false, 0, next + 1));
}

TEST(a_walk_has_at_most_as_many_steps_as_there_are_entries) {
    begin(1, 2, NULL);
    uint32_t n = w[B]->leases.n_entries;
    plant(0, 0, 0, n);
    CHECK_EQ(SHMS_EFULL, put_all_with(evade));
    CHECK(reads[1] >= n && reads[1] <= reads[0] * n);
    plant(0, 0, 0, n);
    evaded = mark = 0;
    CHECK(inspect(evade) >= 0);
    CHECK(reads[2] >= n && reads[2] <= SHMS_VERIFY_PASSES * (n + 1));
    the_dead_hold_nothing();
}

TEST(a_list_that_begins_outside_of_the_table_counts_as_held) {
    begin(1, 2, NULL);
    atomic_store(&shms_segment_holds(&w[B]->seg, B)[0].first, INT32_MAX);
    CHECK_EQ(SHMS_EFULL, put_all());
    the_dead_hold_nothing();
}

/* ---- leases that are over ---- */

/* B leases A's object 2,000 times. `stuck` of these, the first or every 8th, are never read; of the others each is read
 * once `late` more have been opened. With `dead`, rank 1 has died, so that no lease is over before its lock was probed. */
static void a_list_is_at_most_twice_as_long_as_leases_were_open(uint32_t stuck, bool spread, uint32_t late, bool dead) {
    enum { TIMES = 2000 };
    static uint8_t refs[TIMES][SHMS_REF_SIZE];
    setup(4096 * 128, 4096, 2);
    CHECK_EQ(SHMS_OK, put_marked(w[A], "k", 1, 1, NULL));
    if (dead) {
        shms_reader_free(ranks[1]);
        rank_dies(w[A]->seg.path, 1);
        ranks[1] = NULL;
    }
    uint32_t longest = 0, most = 2 * (stuck + late + 2) + (dead ? 2 * 64 : 0);
    for (uint32_t i = 0; i < TIMES + late; i++) {
        if (i < TIMES)
            CHECK_EQ(SHMS_OK, verb_hit(w[B], "k", 1, refs[i]));
        if (i >= late && !(spread ? (i - late) % 8 == 0 && (i - late) / 8 < stuck : i - late < stuck))
            for (uint32_t r = 0; r < (dead ? 1 : 2); r++)
                CHECK_EQ(1, shms_reader_release(ranks[r], refs[i - late]));
        uint32_t length = 0;
        for (uint32_t e = atomic_load(&shms_segment_holds(&w[B]->seg, B)[0].first); e; e = w[B]->leases.next[e - 1] + 1)
            length++;
        longest = length > longest ? length : longest;
        if (i % 97 == 0) /* in the middle of a lap */
            CHECK_EQ(SHMS_OK, shms_writer_valid(w[B]));
    }
    CHECK(longest > stuck && longest <= most);
    uint32_t looked_at = 0;
    if (stuck) {
        CHECK_EQ(SHMS_EFULL, put_all());
        looked_at = (uint32_t)reads[1];
    }
    for (uint32_t i = 0; i < TIMES; i++) /* anywhere in the list; some have ended */
        CHECK(shms_writer_cancel(w[B], refs[(i * 7 + 3) % TIMES]) >= 0);
    CHECK_EQ(w[B]->leases.n_entries, w[B]->leases.n_free);
    CHECK_EQ(SHMS_OK, put_all());
    CHECK(looked_at <= 3 * most);
    teardown();
}

/* ---- many ranks ---- */

TEST(who_holds_what_takes_one_walk_of_each_list_for_any_number_of_ranks) {
    enum { N = 512 };
    uint8_t ref[SHMS_REF_SIZE];
    begin(N - 1, RANKS, ref);
    CHECK_EQ(SHMS_EFULL, put_all());
    CHECK_EQ(0, reads[0]); /* a lease of its own is enough */
    shms_refusal why = {0};
    shms_step_hook = count;
    CHECK_EQ(SHMS_OK, shms_writer_holders(w[A], &why));
    shms_step_hook = NULL;
    CHECK_EQ((N - 1) * (WRITERS - 1), reads[0]);
    CHECK_EQ(N - 1, shms_writer_cancel_all(w[A]));
    CHECK_EQ(SHMS_OK, put_all());
    teardown();
}

TEST(each_in_all_its_cases) {
    a_circle_of_leases_costs_a_few_times_its_length(0, 1);
    a_circle_of_leases_costs_a_few_times_its_length(0, 2);
    a_circle_of_leases_costs_a_few_times_its_length(1, 1);
    a_circle_of_leases_costs_a_few_times_its_length(5, 3);
    a_circle_of_leases_costs_a_few_times_its_length(3, 100);
    a_list_is_at_most_twice_as_long_as_leases_were_open(0, false, 0, false);
    a_list_is_at_most_twice_as_long_as_leases_were_open(0, false, 20, false);
    a_list_is_at_most_twice_as_long_as_leases_were_open(5, false, 0, false);
    a_list_is_at_most_twice_as_long_as_leases_were_open(30, true, 20, false);
    a_list_is_at_most_twice_as_long_as_leases_were_open(0, false, 3, true);
}
