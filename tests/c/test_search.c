/*
 * test_search.c - where objects are placed, and what the search does under the mutex.
 */
#include <pthread.h>

#include "fixture.h"

#define MIB (UINT64_C(1) << 20)

static void begin(uint64_t capacity, uint32_t max_objects) {
    open_store("search", (shms_options){.capacity = capacity, .n_readers = 1, .max_objects = max_objects}, 1);
}

/* Puts an object whose bytes are not written: only its place matters. */
static int put_sized(const char *prefix, uint64_t i, uint64_t size) {
    const char *key = key_of(prefix, i);
    shms_pending t;
    int rc = verb_begin(w, key, (uint32_t)strlen(key), NULL, 0, size, &t);
    return rc ? rc : verb_commit(w, &t, ref);
}

static void put_and_release(const char *prefix, uint64_t i, uint64_t size) {
    CHECK_EQ(SHMS_OK, put_sized(prefix, i, size));
    CHECK_EQ(1, shms_reader_release(readers[0], ref));
}

/* ---- where objects are placed ---- */

/* Puts `n` small objects, each held from its put on, among large ones that are not held; then a larger one. */
static void small_held_objects_do_not_keep_a_large_one_out(uint32_t n, uint64_t large) {
    uint64_t capacity = 64 * MIB;
    begin(capacity, 4096);
    for (uint32_t i = 0; i < n; i++) {
        CHECK_EQ(SHMS_OK, put_sized("small", i, 1024));
        for (uint64_t bytes = 0; bytes < 2 * capacity / n; bytes += MIB)
            put_and_release("filler", i * 1000 + bytes / MIB, MIB - 1000 + i);
    }
    for (uint64_t i = 0; i < 3 * capacity / large; i++)
        put_and_release("large", i, large);
    CHECK_EQ(0, w->seg.writer->counters[SHMS_C(refusals)]);
    for (uint32_t i = 0; i < n; i++) /* the small ones are still there */
        CHECK(has_key(w, key_of("small", i)));
    end();
}

TEST(a_store_of_small_objects_alone_is_filled_with_them) {
    uint64_t n = 0;
    begin(4 * MIB, 65536);
    while (w->seg.writer->counters[SHMS_C(evictions)] == 0) {
        CHECK(w->ring.small >= 64 + 256);
        put_and_release("k", n++, 256);
    }
    CHECK(n * 320 > 4 * MIB * 98 / 100);
    for (uint64_t i = 0; i < 3 * n; i++) { /* all of it is evicted in order of age */
        put_and_release("more", i, 256);
        if (i == n)
            for (uint64_t k = 0; k < n / 2; k++)
                CHECK(!has_key(w, key_of("k", k)));
    }
    CHECK(w->seg.writer->used_bytes > 4 * MIB * 98 / 100);
    end();
}

TEST(an_object_as_large_as_the_store_replaces_small_ones) {
    begin(4 * MIB, 4096);
    for (uint64_t round = 0; round < 3; round++) {
        for (uint64_t i = 0; i < 500; i++)
            put_and_release("small", round * 1000 + i, 200);
        put_and_release("all", round, 4 * MIB - 64);
        CHECK_EQ(1, w->seg.writer->objects);
    }
    end();
}

TEST(a_gap_away_from_the_hands_is_filled_before_an_eviction) {
    begin(4 * MIB, 64);
    for (uint64_t i = 0; i < 9; i++) /* the last one takes the place of the first */
        put_and_release("k", i, MIB / 2 - 64);
    CHECK_EQ(1, shms_writer_delete(w, "k5", 2));
    put_and_release("new", 0, MIB / 2 - 64);
    CHECK_EQ(1, shms_writer_has(w, "k1", 2));
    put_and_release("new", 1, MIB / 2 - 64);
    CHECK_EQ(0, shms_writer_has(w, "k1", 2));
    end();
}

/* The hand has gone round once. Half a megabyte is free, right at the hand or after the next object. */
static void small_objects_fill_a_large_gap_before_an_eviction(bool at_hand) {
    begin(4 * MIB, 8192);
    put_and_release("small", 0, 900);
    for (uint64_t i = 0; i < 9; i++) /* eight leave no gap; the last one takes the place of k0 */
        put_and_release("k", i, w->ring.areas[SHMS_LARGE].to / 8 - 64);
    if (at_hand)
        put_and_release("medium", 0, 2000); /* in the place of k1 */
    else
        CHECK_EQ(1, shms_writer_delete(w, "k2", 2));
    uint64_t before = w->seg.writer->counters[SHMS_C(evictions)];
    for (uint64_t i = 1; i < 500; i++)
        put_and_release("small", i, 900);
    CHECK_EQ(before, w->seg.writer->counters[SHMS_C(evictions)]);
    end();
}

static uint64_t evictions(void) { return shms_get(&w->seg.writer->counters[SHMS_C(evictions)]); }

TEST(small_objects_fill_small_gaps_of_either_area_before_an_eviction) {
    for (int large = 0; large < 2; large++) {
        begin(4 * MIB, 8192);
        put_and_release("small", 0, 900);
        uint64_t to = w->ring.areas[SHMS_LARGE].to, n = (4 * MIB - to) / shms_span(900 + SHMS_ALIGN);
        for (uint64_t i = 0; i < 9;
             i++) /* eight may leave a gap at the end, which the hand has passed with the ninth */
            put_and_release("k", i, to / 8 - (large ? 2048 : 64));
        for (uint64_t i = 1; i < n; i++)
            put_and_release("small", i, 900);
        for (uint64_t i = 0; !large && i < n; i++) /* nine tenths of their area are free */
            CHECK(i % 10 == 0 || shms_writer_delete(w, key_of("small", i), (uint32_t)strlen(key_of("small", i))) == 1);
        uint64_t before = evictions();
        for (uint64_t i = n; i < n + 12; i++)
            put_and_release("small", i, 900);
        CHECK_EQ(before, evictions());
        end();
    }
}

/* However many held objects the hand passes, the oldest unheld object goes. */
TEST(the_hand_passes_many_held_objects) {
    for (uint64_t held = 0; held <= 200; held += 100) {
        uint64_t n = 4000;
        begin(4 * MIB, 4096);
        for (uint64_t i = 0; i < held; i++)
            CHECK_EQ(SHMS_OK, put_sized("held", i, 2000));
        for (uint64_t i = 0; i < n; i++)
            put_and_release("k", i, 3000);
        for (uint64_t i = 0; i < n; i++)
            CHECK(i < n - 1000 ? i >= n - 1400 || !has_key(w, key_of("k", i)) : has_key(w, key_of("k", i)));
        end();
    }
}

/* One use is worth one lap: objects that are not used again leave. The hand starts in the middle of a zone, and the only
 * object that was not used is right after it. */
static void used_objects_leave_after_a_lap(uint64_t capacity, uint32_t max_objects, uint64_t size) {
    uint64_t last = 0, puts = 0;
    begin(capacity, max_objects);
    for (; w->seg.writer->counters[SHMS_C(evictions)] < 2; last++)
        put_and_release("old", last, size);
    for (uint64_t i = 0; i + 1 < last; i++) {
        const char *key = key_of("old", i);
        shms_writer_touch(w, key, (uint32_t)strlen(key));
    }
    for (; puts < 2 * last; puts++)
        put_and_release("new", puts, size);
    for (uint64_t i = 0; i < last; i++)
        CHECK(!has_key(w, key_of("old", i)));
    end();
}

TEST(what_is_protected_after_a_scan_stays) {
    begin(4 * MIB, 4096);
    put_and_release("k", 0, 4000);
    uint64_t each = shms_get(&w->seg.writer->used_bytes), *counters = (uint64_t *)w->seg.writer->counters;
    for (uint64_t i = 1; i < 1020; i++)
        put_and_release("k", i, 4000);
    CHECK_EQ(SHMS_OK, put_sized("held", 0, 4000));
    CHECK_EQ(SHMS_EFULL, put_sized("large", 0, 4 * MIB - 200)); /* scans all zones */
    uint64_t longest = w->refusal.longest;
    CHECK_EQ(SHMS_OK, verb_protect(w, "k500", 4));
    CHECK_EQ(SHMS_EFULL, put_sized("large", 0, longest - 200));
    CHECK(has_key(w, "k500") && w->refusal.longest < longest);
    CHECK_EQ(SHMS_OK, verb_unprotect(w, "k500", 4));
    CHECK_EQ(SHMS_OK, put_sized("large", 0, longest - 200));
    CHECK_EQ(counters[SHMS_C(evictions)] * each, counters[SHMS_C(evicted_bytes)]);
    end();
}

TEST(the_first_small_object_takes_its_area_from_a_hand_that_is_in_it) {
    begin(4 * MIB, 65536);
    for (uint64_t i = 0; i < 4; i++)
        put_and_release("large", i, MIB - 2000); /* the last 1/128 is the area */
    put_and_release("small", 0, 100);
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    end();
}

TEST(small_objects_fill_an_empty_store_whatever_was_in_it) {
    shms_pending t;
    begin(4 * MIB, 65536);
    put_and_release("small", 0, 100);
    CHECK_EQ(SHMS_OK, verb_begin(w, "all", 3, NULL, 0, 4 * MIB - 64, &t));
    CHECK_EQ(SHMS_OK, verb_abort(w, &t));
    for (uint64_t i = 0; i < 4; i++)
        put_and_release("large", i, MIB - 40000);
    CHECK_EQ(SHMS_OK, shms_writer_clear(w, "", 0));
    uint64_t before = w->seg.writer->counters[SHMS_C(evictions)];
    for (uint64_t i = 0; i < 13000; i++)
        put_and_release("k", i, 256);
    CHECK_EQ(before, w->seg.writer->counters[SHMS_C(evictions)]);
    end();
}

/* The scan of many slots takes more than a thousand yields. */
TEST(a_slot_is_found_however_long_it_takes) {
    enum { N = 320000, KEPT = 80 };
    shms_options o = {.capacity = N * UINT64_C(192), .n_readers = 8, .max_objects = N};
    shms_pending t;
    name = store_name("slots");
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, &o));
    for (uint32_t rank = 0; rank < 8; rank++)
        CHECK_EQ(SHMS_OK, shms_writer_retire(w, rank));
    for (uint32_t i = 0; i < N; i++) {
        const char *key = key_of("k", i);
        CHECK_EQ(SHMS_OK, verb_reserve(w, key, (uint32_t)strlen(key), NULL, 0, 64, &t));
        CHECK_EQ(SHMS_OK, verb_commit(w, &t, NULL));
        if (i < KEPT)
            CHECK_EQ(SHMS_OK, verb_protect(w, key, (uint32_t)strlen(key)));
    }
    CHECK_EQ(SHMS_OK, verb_reserve(w, "new", 3, NULL, 0, 64, &t));
    CHECK_EQ(SHMS_OK, verb_abort(w, &t));
    readers[0] = NULL;
    end();
}

/* ---- what is done under the mutex ---- */

static int others_waited; /* counts the steps while the mutex is held */
static uint32_t victims, seen_objects;
static bool in_order;

static void evicting_lasts_only_for_its_stores(const char *label) {
    if (!strcmp(label, "W2"))
        victims++;
    if (!strcmp(label, "W2") || !strcmp(label, "W3") || !strcmp(label, "W4"))
        in_order &= w->seg.writer->objects == seen_objects && w->ring.count == seen_objects && w->indexed_free == 0;
}

TEST(nothing_but_states_changes_between_w2_and_w4) {
    begin(MIB, 8192);
    for (uint64_t i = 0; i < 5000; i++)
        put_and_release("k", i, 64);
    seen_objects = (uint32_t)w->seg.writer->objects;
    victims = 0;
    in_order = true;
    shms_step_hook = evicting_lasts_only_for_its_stores;
    CHECK_EQ(SHMS_OK, put_sized("large", 0, MIB - 4096));
    shms_step_hook = NULL;
    CHECK(in_order);
    CHECK(victims > 4000);
    end();
}

static void metadata_is_not_copied_under_the_mutex(const char *label) {
    if (strcmp(label, "P3c"))
        return;
    CHECK_EQ(0, pthread_mutex_trylock(&w->mutex));
    pthread_mutex_unlock(&w->mutex);
    CHECK_EQ(0, pthread_mutex_trylock(&w->placing));
    pthread_mutex_unlock(&w->placing);
    others_waited++;
}

TEST(the_copy_of_metadata_does_not_hold_the_mutex) {
    static char meta[300000];
    memset(meta, 'm', sizeof meta);
    begin(MIB, 64);
    shms_step_hook = metadata_is_not_copied_under_the_mutex;
    CHECK_EQ(SHMS_OK, verb_put(w, "k", 1, meta, sizeof meta, 0, NULL, 0, ref));
    shms_step_hook = NULL;
    CHECK_EQ(2, others_waited); /* the metadata, and the empty payload */
    shms_view *v = view_of(readers[0], ref);
    CHECK(v && v->meta_len == sizeof meta && !memcmp(v->meta, meta, sizeof meta));
    shms_view_release(v);
    end();
}

static uint64_t looks;
static void count_looks(const char *label) { looks += !strcmp(label, "W1a"); }

TEST(a_sweep_of_lease_entries_finds_the_one_that_has_ended_and_stops) {
    uint8_t first[SHMS_REF_SIZE];
    uint64_t n = 0;
    begin(MIB, 60000);
    CHECK_EQ(SHMS_OK, put_sized("k", 0, 64));
    for (int rc; (rc = verb_hit(w, "k0", 2, ref)) != SHMS_ENOLEASE; n++) {
        CHECK_EQ(SHMS_OK, rc);
        if (n == 20000)
            memcpy(first, ref, sizeof first);
    }
    CHECK(n > 50000);
    CHECK_EQ(1, shms_reader_release(readers[0], first)); /* one of them all has ended */
    looks = 0;
    shms_step_hook = count_looks;
    CHECK_EQ(SHMS_OK, verb_hit(w, "k0", 2, ref));
    CHECK(looks < 50000);
    end();
}

TEST(a_sweep_does_not_end_a_held_lease) {
    uint8_t held[SHMS_REF_SIZE];
    begin(1 << 14, 16);
    CHECK_EQ(SHMS_OK, put_sized("held", 0, 512));
    memcpy(held, ref, sizeof held);
    CHECK_EQ(1, verb_hold(w, held));
    CHECK_EQ(1, shms_reader_release(readers[0], held));
    CHECK_EQ(SHMS_OK, put_sized("other", 0, 512));
    while (verb_hit(w, "other0", 6, ref) == SHMS_OK)
        continue;
    detach(0); /* all others are over now, and the next hit finds them */
    CHECK_EQ(SHMS_OK, verb_hit(w, "other0", 6, ref));
    CHECK_EQ(1, shms_writer_cancel(w, held));
    end();
}

TEST(entries_of_complete_leases_are_found_before_none_is_free) {
    begin(MIB, 8192);
    CHECK_EQ(SHMS_OK, put_sized("k", 0, 64));
    for (uint64_t i = 0; i < w->leases.n_entries - 100; i++)
        CHECK_EQ(SHMS_OK, verb_hit(w, "k0", 2, ref)); /* never read */
    for (uint64_t i = 0; i < 20000; i++) {
        CHECK_EQ(SHMS_OK, verb_hit(w, "k0", 2, ref));
        CHECK_EQ(1, shms_reader_release(readers[0], ref));
    }
    end();
}

/* What a zone remembers of an object that begins before it may be old. So the object is checked before it goes. */
TEST(a_hand_out_after_the_scan_keeps_a_large_object) {
    uint8_t large[SHMS_REF_SIZE];
    begin(MIB, 8192);
    for (uint64_t i = 0; i < 100; i++)
        CHECK_EQ(SHMS_OK, put_sized("before", i, 4000));
    CHECK_EQ(SHMS_OK, put_sized("large", 0, 200000));
    memcpy(large, ref, sizeof large);
    for (uint64_t i = 0; put_sized("after", i, 4000) == SHMS_OK; i++) {
    }
    CHECK_EQ(1, shms_reader_release(readers[0], large));
    CHECK_EQ(SHMS_EFULL, put_sized("larger", 0, 300000)); /* scans: 200,000 bytes may go */
    CHECK_EQ(SHMS_OK, verb_hit(w, "large0", 6, large));
    CHECK_EQ(SHMS_EFULL, put_sized("new", 0, 100000));
    shms_view *v = view_of(readers[0], large);
    CHECK(v);
    CHECK_EQ(SHMS_EFULL, put_sized("new", 0, 100000));
    shms_view_release(v);
    CHECK_EQ(SHMS_OK, put_sized("new", 0, 100000));
    end();
}

/* Objects of one zone each. The hand is past the first half; all are held but ten, far from it. */
enum { HALF = 128, FREED = 10 };
static uint8_t refs[2 * HALF][SHMS_REF_SIZE];
static void free_from(uint64_t at) {
    for (uint64_t i = at; i < at + FREED; i++)
        CHECK_EQ(1, shms_reader_release(readers[0], refs[i]));
}
static void begin_far_from_the_hand(uint64_t freed_at) {
    begin(MIB, 8192);
    CHECK_EQ(2 * HALF, w->ring.n_zones);
    for (uint64_t i = 0; i < HALF; i++)
        put_and_release("early", i, 4000);
    for (uint64_t i = HALF; i < 3 * HALF; i++) {
        CHECK_EQ(SHMS_OK, put_sized("k", i % (2 * HALF), 4000));
        memcpy(refs[i % (2 * HALF)], ref, sizeof ref);
    }
    free_from(freed_at);
}

TEST(a_search_that_yields_at_each_scan_finds_and_reports_the_same) {
    begin_far_from_the_hand(0);
    free_from(2 * HALF - 50); /* next in the order of the hand */
    w->waiting = 1; /* for no turn */
    CHECK_EQ(SHMS_OK, put_sized("new", 0, 30000));
    CHECK(has_key(w, "k0") && !has_key(w, key_of("k", 2 * HALF - 50)));
    for (uint64_t released = 0; released < 2; released++) {
        if (released)
            CHECK_EQ(1, shms_reader_release(readers[0], refs[2 * HALF - 1]));
        while (verb_hit(w, "new0", 4, ref) == SHMS_OK)
            continue;
        shms_zones_stale_all(&w->zones);
        CHECK_EQ(SHMS_ENOLEASE, verb_hit(w, "new0", 4, ref));
        CHECK_EQ(SHMS_OK, shms_writer_holders(w, &w->refusal));
        CHECK_EQ((2 * (HALF - FREED) - released) * 4096 + shms_span(30000 + SHMS_ALIGN), w->refusal.held[0]);
    }
    w->waiting = 0;
    end();
}

/* As if a mark were lost: what a scan has found is no answer, and the object is looked at before it goes. */
TEST(what_is_promised_or_written_after_a_scan_stays_even_without_a_mark) {
    shms_pending t;
    for (int written = 0; written < 2; written++) {
        begin_far_from_the_hand(20);
        CHECK_EQ(SHMS_EFULL, put_sized("large", 0, MIB / 2));
        if (written) {
            CHECK_EQ(1, shms_writer_delete(w, "k23", 3));
            CHECK_EQ(SHMS_OK, verb_begin(w, "half", 4, NULL, 0, 4000, &t));
            CHECK_EQ(23 * 4096, shms_ring_start(&w->ring, t.slot));
        } else {
            CHECK_EQ(SHMS_OK, verb_hit(w, "k23", 3, ref));
        }
        for (uint32_t z = 0; z < w->ring.n_zones; z++)
            w->ring.zones[z].stale = 0;
        CHECK_EQ(SHMS_EFULL, put_sized("new", 0, 30000));
        CHECK(has_key(w, "k20") && has_key(w, "k22") && has_key(w, "k24"));
        CHECK_EQ(6 * 4096, w->refusal.longest); /* it has looked again */
        if (written)
            CHECK_EQ(SHMS_OK, verb_commit(w, &t, NULL));
        end();
    }
}

TEST(a_slot_whose_object_was_pinned_after_the_scan_is_not_reclaimable) {
    enum { N = 200, ALONE = 150 }; /* far from the hand */
    uint8_t found[SHMS_REF_SIZE];
    shms_view *v[2];
    begin(MIB, N);
    for (uint64_t i = 0; i < N; i++) {
        CHECK_EQ(SHMS_OK, put_sized("k", i, 900));
        memcpy(refs[i], ref, sizeof ref);
    }
    CHECK_EQ(1, shms_reader_release(readers[0], refs[ALONE])); /* others of its zone are held, and follow it */
    CHECK_EQ(1, shms_reader_release(readers[0], refs[N - 1]));
    CHECK_EQ(SHMS_EFULL, put_sized("large", 0, MIB - 64));
    CHECK_EQ(2 * shms_span(900 + SHMS_ALIGN), w->refusal.reclaimable);
    CHECK_EQ(SHMS_OK, shms_reader_find(readers[0], "k150", 4, found, &v[0]));
    CHECK_EQ(SHMS_OK, shms_reader_find(readers[0], "k199", 4, found, &v[1]));
    CHECK_EQ(SHMS_ENOSLOT, put_sized("new", 0, 900));
    CHECK_EQ(0, w->refusal.reclaimable);
    shms_view_release(v[0]);
    shms_zones_stale_all(&w->zones);
    w->waiting = 1; /* for no turn, so that it yields on its way */
    CHECK_EQ(SHMS_OK, put_sized("new", 0, 900));
    w->waiting = 0;
    CHECK(!has_key(w, "k150") && has_key(w, "k199"));
    shms_view_release(v[1]);
    end();
}

/* ---- ranks that die, and a writer that is closed, during a search ---- */

static int told[2];
static void tell(void) { CHECK_EQ(1, write(told[1], "", 1)); }

static void stop_before_a2(const char *label) {
    if (strcmp(label, "A2"))
        return;
    tell();
    pause();
}

/* A process of rank 0 that pins the object of `ref`, or that stops after it has the lock. */
static pid_t a_process(bool attaches) {
    char c;
    CHECK_EQ(0, pipe(told));
    pid_t child = fork_child();
    if (child == 0) {
        shms_reader *own;
        shms_step_hook = attaches ? NULL : stop_before_a2;
        CHECK_EQ(SHMS_OK, shms_reader_attach(&own, name, 0, NULL));
        CHECK(view_of(own, ref) != NULL);
        tell();
        pause();
        _exit(1);
    }
    CHECK_EQ(1, read(told[0], &c, 1));
    close(told[0]);
    close(told[1]);
    return child;
}

static void dies(pid_t child) {
    kill(child, SIGKILL);
    reap_killed(child);
}

/* Between two calls that find the rank dead, a scan finds its lock held, and its predecessor's pin. */
TEST(a_process_that_dies_before_it_has_attached_holds_nothing) {
    enum { N = 128, PINNED = 100, GAP = 110 };
    uint8_t pinned[SHMS_REF_SIZE];
    const uint64_t size = 32768 - 64;
    begin(N * UINT64_C(32768), 4096);
    for (uint64_t i = 0; i < N; i++) {
        CHECK_EQ(SHMS_OK, put_sized("k", i, size));
        if (i == PINNED)
            memcpy(pinned, ref, sizeof pinned);
        const char *key = key_of("k", i);
        if (i != PINNED && i != GAP)
            CHECK_EQ(SHMS_OK, verb_protect(w, key, (uint32_t)strlen(key)));
    }
    shms_reader_close(readers[0]);
    CHECK_EQ(1, shms_writer_delete(w, "k110", 4));
    memcpy(ref, pinned, sizeof ref);
    dies(a_process(true));
    CHECK_EQ(SHMS_EFULL, put_sized("too large", 0, 2 * size)); /* finds the rank dead */
    CHECK_EQ(1, shms_writer_touch(w, "k100", 4));
    pid_t child = a_process(false);
    CHECK_EQ(SHMS_OK, put_sized("fills the gap", 0, size)); /* finds its lock held */
    CHECK_EQ(SHMS_OK, verb_protect(w, "fills the gap0", 14));
    dies(child);
    CHECK_EQ(SHMS_OK, put_sized("new", 0, size));
    CHECK_EQ(0, shms_writer_has(w, "k100", 4));
    end();
}

TEST(leases_without_a_live_rank_do_not_exhaust_the_entries) {
    begin(MIB, 64);
    CHECK_EQ(SHMS_OK, put_sized("k", 0, 64));
    shms_reader_close(readers[0]);
    dies(a_process(true));
    for (uint64_t i = 0; i < 5 * w->leases.n_entries; i++)
        CHECK_EQ(SHMS_OK, verb_hit(w, "k0", 2, ref));
    end();
}

/* Tickets hold every entry. Their leases are complete as soon as they are opened, without a count by a rank. */
TEST(leases_that_are_complete_at_their_commit_are_found) {
    static shms_pending pending[4000];
    uint32_t n = 0;
    shms_options o = {        /* with so many ranks there are more slots than entries */
                      .capacity = MIB,
                      .n_readers = 64,
                      .max_objects = 4000};
    name = store_name("search");
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, &o));
    for (uint32_t rank = 1; rank < 64; rank++)
        CHECK_EQ(SHMS_OK, shms_writer_retire(w, rank));
    CHECK_EQ(SHMS_OK, put_sized("k", 0, 64));
    CHECK_EQ(SHMS_OK, verb_protect(w, "k0", 2));
    dies(a_process(true));
    readers[0] = NULL;
    CHECK_EQ(SHMS_OK, verb_hit(w, "k0", 2, ref)); /* a poll has seen it */
    for (;; n++) {
        const char *key = key_of("t", n);
        if (verb_begin(w, key, (uint32_t)strlen(key), NULL, 0, 64, &pending[n]) != SHMS_OK)
            break;
        CHECK_EQ(SHMS_OK, verb_protect(w, key, (uint32_t)strlen(key)));
    }
    CHECK(n >= 1000 && w->leases.n_free == 0);
    CHECK_EQ(SHMS_ENOLEASE, verb_hit(w, "k0", 2, ref));
    for (uint32_t i = 0; i < n; i++)
        CHECK_EQ(SHMS_OK, verb_commit(w, &pending[i], ref));
    CHECK_EQ(SHMS_OK, verb_hit(w, "k0", 2, ref));
    end();
}

static pthread_t closer;
static bool closing;

static void *close_it(void *arg) {
    (void)arg;
    CHECK_EQ(SHMS_OK, shms_writer_close(w, 1));
    return NULL;
}

/* Starts to close the writer during a scan. If the close waited only for the mutex, a yield of the put would let it
 * through. */
static void close_meanwhile(const char *label) {
    if (!strcmp(label, "W1a") && !closing) {
        closing = true;
        CHECK_EQ(0, pthread_create(&closer, NULL, close_it, NULL));
        for (int i = 0; i < 20 && atomic_load(&w->waiting) == 0; i++)
            usleep(100);
    }
    if (!strcmp(label, "W2") || !strcmp(label, "W4") || !strcmp(label, "C1") || !strcmp(label, "P1"))
        CHECK(!w->closed);
}

TEST(a_close_waits_for_the_end_of_a_search) {
    uint8_t middle[SHMS_REF_SIZE];
    for (int round = 0; round < 5; round++) {
        begin(MIB, 8192);
        for (uint64_t i = 0; i < 7000; i++) {
            CHECK_EQ(SHMS_OK, put_sized("k", i, 64));
            if (i == 3500)
                memcpy(middle, ref, sizeof middle);
            else
                CHECK_EQ(1, shms_reader_release(readers[0], ref));
        }
        CHECK_EQ(SHMS_EFULL, put_sized("large", 0, MIB - 16384)); /* every zone is scanned now */
        CHECK_EQ(1, shms_reader_release(readers[0], middle));
        closing = false;
        shms_step_hook = close_meanwhile;
        shms_pending t;
        CHECK_EQ(SHMS_OK, verb_begin(w, "large", 5, NULL, 0, MIB - 16384, &t));
        shms_step_hook = NULL;
        pthread_join(closer, NULL);
        CHECK_EQ(SHMS_ECLOSED, verb_commit(w, &t, NULL));
        shms_reader_free(readers[0]);
        shms_writer_free(w);
    }
}

/* ---- what is not trusted, and what is not lost ---- */

TEST(a_slot_number_in_the_lease_table_is_not_read_back) {
    begin(65536, 64);
    CHECK_EQ(SHMS_OK, put_sized("k", 0, 64));
    shms_ref unpacked;
    shms_ref_unpack(&unpacked, ref);
    shms_word *what = &w->leases.table[unpacked.entry].what;
    uint32_t slot = shms_lease_slot(shms_get(what));
    shms_set(what, shms_lease_what(0xffffff, false, 0, 0));
    shms_stats stats;
    shms_add(&w->seg.writer->open_leases, 1); /* nor is their number */
    CHECK_EQ(SHMS_OK, shms_writer_stats(w, &stats));
    CHECK_EQ(1, stats.open_leases);
    shms_add(&w->seg.writer->open_leases, (uint64_t)-1);
    CHECK_EQ(1, shms_writer_cancel(w, ref));
    CHECK_EQ(SHMS_NONE, w->leases.first[slot]);
    end();
}

TEST(each_in_all_its_cases) {
    small_held_objects_do_not_keep_a_large_one_out(12, 16 * MIB);
    small_held_objects_do_not_keep_a_large_one_out(48, 4 * MIB);
    small_held_objects_do_not_keep_a_large_one_out(192, 2 * MIB);
    small_objects_fill_a_large_gap_before_an_eviction(true);
    small_objects_fill_a_large_gap_before_an_eviction(false);
    used_objects_leave_after_a_lap(4096, 64, 256);       /* one zone */
    used_objects_leave_after_a_lap(4 * MIB, 512, 15000);   /* large objects, several in a zone */
    used_objects_leave_after_a_lap(4 * MIB, 16384, 900); /* small ones, in both areas */
}
