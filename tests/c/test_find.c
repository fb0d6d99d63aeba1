/*
 * test_find.c - ranks find objects by key: what is found stays as long as its pin, at every interleaving with a put that
 * needs its place; and nobody waits for a rank that only finds.
 */
#include "fixture.h"
#include "store/ref.h"

enum { SIZE = 448, FINDER = 1 };

static uint8_t found_ref[SHMS_REF_SIZE];

static shms_view *find(uint32_t rank, const char *key) {
    shms_view *v;
    int rc = shms_reader_find(readers[rank], key, (uint32_t)strlen(key), found_ref, &v);
    CHECK_EQ(v ? SHMS_OK : SHMS_ENOTFOUND, rc);
    return v;
}
static bool has(uint32_t rank, const char *key) {
    int rc = shms_reader_has(readers[rank], key, (uint32_t)strlen(key));
    CHECK(rc >= 0);
    return rc == 1;
}

/* Rank 0 reads; rank 1 only finds. There is room for two objects. */
static void open_pair(void) {
    name = store_name("find");
    shms_options o = {.capacity = 1024, .n_readers = 3, .max_objects = 4};
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, &o));
    CHECK_EQ(SHMS_OK, shms_writer_retire(w, 2));
    attach(0);
    shms_expected e = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID, .finds = 1};
    CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[FINDER], name, FINDER, &e));
}

/* Puts an object that no lease keeps. */
static int put_cached(const char *key, uint64_t mark) {
    int rc = put_marked(w, key, SIZE, mark, ref);
    if (rc == SHMS_OK)
        CHECK_EQ(1, shms_reader_release(readers[0], ref));
    return rc;
}

TEST(no_lease_waits_for_a_rank_that_only_finds) {
    open_pair();
    CHECK_EQ(SHMS_OK, put_marked(w, "a", 960, 1, ref));
    CHECK_EQ(SHMS_EFULL, put_marked(w, "b", 960, 1, NULL));
    CHECK_EQ(1, shms_reader_release(readers[0], ref));
    CHECK_EQ(SHMS_OK, put_marked(w, "b", 960, 1, NULL));
    end();
}

TEST(a_reference_without_a_lease_is_read_by_others_and_ends_nothing) {
    open_pair();
    CHECK_EQ(SHMS_OK, put_marked(w, "a", SIZE, 1, ref));
    shms_view *mine = find(FINDER, "a"), *theirs = view_of(readers[0], found_ref);
    CHECK(mine && theirs && filled(theirs->payload, SIZE, 1));
    CHECK_EQ(1, shms_get(&w->seg.writer->open_leases)); /* the one of the put */
    CHECK_EQ(0, shms_reader_release(readers[0], found_ref));
    CHECK_EQ(1, shms_reader_validate(readers[0], found_ref));
    CHECK_EQ(1, shms_writer_validate(w, found_ref, "a", 1));
    CHECK_EQ(0, shms_writer_cancel(w, found_ref));
    CHECK_EQ(0, verb_hold(w, found_ref));
    CHECK_EQ(0, shms_writer_assign_group(w, found_ref, 1));
    shms_view_release(mine);
    CHECK_EQ(1, shms_reader_release(readers[0], ref));
    CHECK_EQ(1, shms_writer_cancel_all(w));
    CHECK_EQ(0, shms_writer_cancel(w, found_ref)); /* nor any entry that is free, whose number is 0 */
    found_ref[31] ^= 1; /* a lease number that nobody has sealed */
    CHECK(!view_of(readers[0], found_ref) && errno == -SHMS_ESTALE);
    for (uint64_t i = 0; i < 9; i++)
        CHECK_EQ(SHMS_OK, put_cached(key_of("n", i), i));
    CHECK(filled(theirs->payload, SIZE, 1));
    shms_view_release(theirs);
    end();
}

TEST(a_find_is_a_use_and_so_is_a_get_without_a_lease) {
    open_pair();
    CHECK_EQ(SHMS_OK, put_cached("a", 1));
    for (uint64_t i = 0; i < 3 * SHMS_MARKS; i++) { /* more often than there are marks */
        shms_view *v = i % 2 ? find(FINDER, "a") : view_of(readers[0], found_ref);
        CHECK(v || i == 0);
        shms_view_release(v);
        CHECK_EQ(SHMS_OK, put_cached(key_of("n", i), i));
        CHECK(has(0, "a"));
    }
    for (uint64_t i = 0; i < 3; i++)
        CHECK_EQ(SHMS_OK, put_cached(key_of("m", i), i));
    CHECK(!has(0, "a"));
    CHECK_EQ(SHMS_OK, put_cached("b", 1));
    memcpy(found_ref, ref, sizeof ref);
    CHECK_EQ(SHMS_OK, put_cached("c", 1));
    shms_view_release(view_of(readers[0], found_ref)); /* with a lease: each object is read once by all */
    CHECK_EQ(SHMS_OK, put_cached("d", 1));
    CHECK(!has(0, "b"));
    end();
}

TEST(any_number_of_finds_is_a_use) {
    static const int finds[][2] = {{0, 1}, {0, 64}, {0, 128}, {0, 640}, {32, 32}, {63, 1}, {64, 64}, {0, 512}};
    for (size_t i = 0; i < sizeof finds / sizeof *finds; i++)
        for (int before = 0; before < 64; before += 21) { /* and any number before the last look */
            open_pair();
            for (int look = 0; look < 2; look++) {
                CHECK_EQ(SHMS_OK, put_cached("a", 1));
                CHECK_EQ(SHMS_OK, put_cached("b", 2));
                for (uint32_t rank = 0; rank < 2; rank++)
                    for (int n = look ? finds[i][rank] : before; n > 0; n--)
                        shms_view_release(find(rank, "a"));
                CHECK_EQ(SHMS_OK, put_cached("c", 3));
                CHECK_EQ(!look && before == 0, !has(0, "a"));
                CHECK_EQ(SHMS_OK, shms_writer_clear(w, "", 0));
            }
            end();
        }
}

TEST(what_another_rank_has_pinned_is_busy_and_not_stale_while_its_owner_is_stopped) {
    open_pair();
    CHECK_EQ(SHMS_OK, put_cached("a", 1));
    shms_view *v = find(FINDER, "a");
    atomic_store(&w->seg.slots[0].state, SHMS_EVICTING); /* between W2 and W5 */
    CHECK(!find(0, "a") && !view_of(readers[0], found_ref) && errno == -SHMS_EBUSY);
    atomic_store(&w->seg.slots[0].state, SHMS_LIVE);
    shms_view *other = view_of(readers[0], found_ref);
    CHECK(other);
    shms_view_release(other);
    shms_view_release(v);
    end();
}

static void evict_at_the_pin(const char *label) {
    if (!strcmp(label, "R1"))
        atomic_store(&w->seg.slots[0].state, SHMS_EVICTING); /* W2 */
}

TEST(an_eviction_that_comes_between_the_look_and_the_pin_is_a_miss_and_leaves_no_pin) {
    open_pair();
    CHECK_EQ(SHMS_OK, put_cached("a", 1));
    shms_step_hook = evict_at_the_pin;
    CHECK(!find(FINDER, "a"));
    shms_step_hook = NULL;
    shms_reader_table *t = shms_segment_reader(&w->seg, FINDER);
    CHECK_EQ(0, shms_pin_count(&shms_reader_pins(t)[0], memory_order_relaxed));
    atomic_store(&w->seg.slots[0].state, SHMS_LIVE);
    CHECK(has(FINDER, "a"));
    end();
}

static int left;
static shms_view *met;
static int put_rc;

static void find_now(void) {
    met = find(FINDER, "a");
    CHECK(!met || filled(met->payload, SIZE, 1));
}
static void put_now(void) { put_rc = put_marked(w, "b", 960, 2, NULL); }
static void (*other_side)(void);

static void do_the_other_at_a_step(const char *label) {
    (void)label;
    if (left-- == 0) {
        shms_step_hook = NULL;
        other_side();
        shms_step_hook = do_the_other_at_a_step;
    }
}

/* Does one while the other is at each of its steps. Returns how often the object was found. */
static int beside(void (*first)(void), void (*second)(void)) {
    int found = 0, step = 0;
    bool met_one = false, ended = false;
    for (; !ended; step++) {
        open_pair();
        CHECK_EQ(SHMS_OK, put_cached("a", 1));
        left = step;
        met = NULL;
        other_side = second;
        shms_step_hook = do_the_other_at_a_step;
        first();
        shms_step_hook = NULL;
        ended = left >= 0; /* it has fewer steps */
        if (ended)
            second();
        CHECK((met != NULL) == (put_rc == SHMS_EFULL)); /* one of them: neither both nor none */
        CHECK_EQ(met != NULL, has_key(w, "a"));
        CHECK(!met || filled(met->payload, SIZE, 1));
        found += met != NULL;
        met_one |= met != NULL;
        shms_view_release(met);
        CHECK_EQ(SHMS_OK, put_rc ? put_marked(w, "b", 960, 2, NULL) : SHMS_OK);
        end();
    }
    CHECK(met_one && found < step);
    return found;
}

TEST(a_find_at_each_step_of_a_put_gets_the_object_or_misses_it) { beside(put_now, find_now); }

TEST(a_put_at_each_step_of_a_find_waits_for_no_one_and_frees_nothing_found) { beside(find_now, put_now); }
