/*
 * test_full.c - a full store: what ends a refusal, what does not, and that a repeated refusal is cheap.
 *
 * Work is counted in steps (W1a: one read of one rank's acknowledgement), not in time.
 */
#include "fixture.h"

enum { MANY = 2000 };

static uint64_t looks;
static void count_looks(const char *label) { looks += !strcmp(label, "W1a") || !strncmp(label, "W3", 2); }

static uint8_t refs[MANY][SHMS_REF_SIZE];

/* Objects that the writer keeps between the hand and the others: so many that a search uses the zones. */
static uint32_t crowd;
static uint64_t spare; /* bytes beyond those of all objects */

/* Creates a store of `n` objects of 128 bytes, all handed out, so that there is no room. */
static void begin(int n, uint32_t max_objects) {
    shms_options o = {
        .capacity = ((uint64_t)n + crowd) * 128 + spare, .n_readers = 2, .max_objects = max_objects + crowd};
    open_store("full", o, 2);
    for (uint32_t i = 0; i < crowd; i++) {
        const char *key = key_of("crowd", i);
        CHECK_EQ(SHMS_OK, put_marked(w, key, 64, i, NULL));
        CHECK_EQ(SHMS_OK, verb_protect(w, key, (uint32_t)strlen(key))); /* until the store ends */
    }
    for (int i = 0; i < n; i++)
        CHECK_EQ(SHMS_OK, put_marked(w, key_of("k", i), 64, (uint64_t)i, refs[i]));
}

/* Puts an object, which must be refused. Returns how many steps that took. */
static uint64_t refused_by(int code) {
    shms_stats before, after;
    CHECK_EQ(SHMS_OK, shms_writer_stats(w, &before));
    looks = 0;
    shms_step_hook = count_looks;
    CHECK_EQ(code, put_marked(w, "new", 64, 1, code == SHMS_ENOSLOT ? NULL : ref)); /* which may lack an entry, too */
    shms_step_hook = NULL;
    CHECK_EQ(SHMS_OK, shms_writer_stats(w, &after));
    CHECK_EQ(before.counters.refusals + 1, after.counters.refusals);
    before.counters.refusals++;
    before.open_leases = after.open_leases; /* complete leases are closed */
    CHECK(!memcmp(&before, &after, sizeof before)); /* nothing else has changed */
    return looks;
}

static uint64_t refused(void) { return refused_by(SHMS_EFULL); }

static void accepted(void) {
    CHECK_EQ(SHMS_OK, put_marked(w, "new", 64, 1, ref));
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
}

/* One walk from the hand, plus one zone. */
#define LITTLE 300

TEST(a_second_refusal_scans_only_zones_with_releases) {
    for (int slots = 0; slots < 2; slots++) { /* they run out, or the bytes */
        int code = slots ? SHMS_ENOSLOT : SHMS_EFULL;
        uint64_t little = slots ? 3 * LITTLE : LITTLE; /* a search for a slot walks more often */
        spare = slots ? 1 << 20 : 0;
        begin(MANY, MANY + !slots);
        CHECK(refused_by(code) >= MANY);
        for (int i = 0; i < 20; i++)
            CHECK(refused_by(code) <= little);
        CHECK_EQ(1, shms_reader_release(readers[0], refs[5])); /* a change that causes a scan, without result */
        CHECK(refused_by(code) <= little);
        CHECK(refused_by(code) <= little);
        CHECK_EQ(code, put_marked(w, "larger", 128, 1, NULL));
        CHECK(refused_by(code) <= little);
        shms_refusal why = {0};
        CHECK_EQ(SHMS_OK, shms_writer_holders(w, &why));
        CHECK_EQ((MANY - 1) * 128, why.held[0]);
        CHECK_EQ(MANY * 128, why.held[1]);
        end();
    }
    spare = 0;
}

static uint64_t probes;
static void count_probes(const char *label) {
    count_looks(label);
    probes += !strcmp(label, "W1c");
}

TEST(a_refusal_asks_only_the_first_rank_that_holds_an_object) {
    enum { N = 512, RANKS = 64 };
    for (uint32_t late = 0; late < 2; late++) { /* or the last one */
        open_store("first", (shms_options){.capacity = N * 128, .n_readers = RANKS, .max_objects = 2 * N}, 1);
        CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[1], name, RANKS - 1, NULL));
        for (uint32_t r = 1; late && r < RANKS - 1; r++)
            CHECK_EQ(SHMS_OK, shms_writer_retire(w, r));
        for (int i = 0; i < N; i++) {
            CHECK_EQ(SHMS_OK, put_marked(w, key_of("k", i), 64, (uint64_t)i, refs[i]));
            if (late)
                CHECK_EQ(1, shms_reader_release(readers[0], refs[i]));
        }
        refused();
        for (int i = 7; i < N; i += 50) {
            CHECK_EQ(1, shms_reader_release(readers[late], refs[i]));
            looks = probes = 0;
            shms_step_hook = count_probes;
            int rc = put_marked(w, "new", 128, 1, NULL);
            shms_step_hook = NULL;
            CHECK_EQ(SHMS_EFULL, rc);
            CHECK(looks <= 2 * RANKS && probes <= 2);
        }
        end();
    }
}

TEST(who_holds_what_is_summed_up_again_only_after_a_release) {
    begin(MANY, MANY + 1);
    refused();
    for (int i = 0; i < 6; i++) {
        shms_refusal why = w->refusal;
        if (i % 3 == 2)
            CHECK_EQ(1, shms_reader_release(readers[0], refs[i]));
        looks = 0;
        shms_step_hook = count_looks;
        int rc = shms_writer_holders(w, &why);
        shms_step_hook = NULL;
        CHECK_EQ(SHMS_OK, rc);
        CHECK_EQ((uint64_t)(MANY - i / 3 - (i % 3 == 2)) * 128, why.held[0]);
        CHECK(i == 0 || i % 3 == 2 ? looks >= MANY : looks == 0);
        refused();
    }
    shms_refusal of_kind = {.kind = 1};
    CHECK_EQ(SHMS_OK, shms_writer_holders(w, &of_kind));
    CHECK_EQ(0, of_kind.held[0]);
    end();
}

TEST(a_refusal_reports_reclaimable_bytes_and_their_longest_stretch) {
    shms_refusal room;
    begin(10, 20);
    room = w->refusal;
    CHECK_EQ(SHMS_OK, shms_writer_holders(w, &room));
    CHECK(!room.reclaimable && !room.longest && !room.kept); /* nothing was refused yet */
    refused();
    room = w->refusal;
    CHECK_EQ(SHMS_OK, shms_writer_holders(w, &room));
    CHECK(!room.reclaimable && !room.longest && !room.kept); /* everything is held */
    for (int i = 0; i < 10; i++) /* free: 0 1 | 3 | 6 7 8 9; the writer keeps 7 */
        for (int r = 0; r < 2; r++)
            if (i != 2 && i != 4 && i != 5)
                CHECK_EQ(1, shms_reader_release(readers[r], refs[i]));
    CHECK_EQ(SHMS_EFULL, put_marked(w, "large", 1100, 1, refs[0]));
    room = w->refusal;
    CHECK_EQ(SHMS_OK, shms_writer_holders(w, &room));
    CHECK_EQ(7 * 128, room.reclaimable);
    CHECK_EQ(4 * 128, room.longest);
    CHECK_EQ(SHMS_OK, verb_protect(w, "k7", 2));
    CHECK_EQ(1, shms_writer_delete(w, "k0", 2)); /* a gap counts like an object that may go */
    CHECK_EQ(SHMS_EFULL, put_marked(w, "large", 1100, 1, refs[0]));
    room = w->refusal;
    CHECK_EQ(SHMS_OK, shms_writer_holders(w, &room));
    CHECK_EQ(5 * 128, room.reclaimable);
    CHECK_EQ(2 * 128, room.longest);
    CHECK_EQ(128, room.kept);
    CHECK_EQ(SHMS_OK, verb_unprotect(w, "k7", 2));
    end();
}

/* Found by the simulator: a rank that pins makes no zone stale. */
TEST(a_refusal_after_a_pin_says_less_than_was_refused) {
    shms_view *v;
    begin(4, 8);
    for (int i = 1; i < 3; i++)
        for (int r = 0; r < 2; r++)
            CHECK_EQ(1, shms_reader_release(readers[r], refs[i]));
    CHECK_EQ(SHMS_EFULL, put_marked(w, "large", 3 * 128 - 64, 1, NULL));
    CHECK_EQ(2 * 128, w->refusal.longest);
    CHECK_EQ(SHMS_OK, shms_reader_find(readers[0], "k1", 2, ref, &v));
    CHECK_EQ(SHMS_EFULL, put_marked(w, "large", 2 * 128 - 64, 1, NULL));
    CHECK_EQ(128, w->refusal.longest);
    CHECK_EQ(128, w->refusal.reclaimable);
    shms_view_release(v);
    end();
}

static shms_view *passing;

/* A reader that is alive whenever the writer probes it, and that has detached after the probe. */
static void pass_by(const char *label) {
    if (!strcmp(label, "W2"))
        CHECK((passing = view_of(readers[0], refs[0])));
    if (!strcmp(label, "W5")) {
        shms_view_release(passing);
        passing = NULL;
    }
}

TEST(a_refusal_after_a_thousand_failed_searches_reports_its_findings) {
    shms_refusal room;
    begin(1, 2);
    refused();
    for (int r = 0; r < 2; r++)
        CHECK_EQ(1, shms_reader_release(readers[r], refs[0]));
    shms_step_hook = pass_by;
    CHECK_EQ(SHMS_EFULL, put_marked(w, "new", 64, 1, NULL));
    shms_step_hook = NULL;
    room = w->refusal;
    CHECK_EQ(SHMS_OK, shms_writer_holders(w, &room));
    CHECK_EQ(128, room.reclaimable);
    CHECK_EQ(128, room.longest);
    CHECK(!room.held[0] && !room.held[1]);
    accepted();
    end();
}

TEST(a_second_refusal_for_a_lease_entry_scans_nothing) {
    begin(4, 2000);
    uint64_t entries = w->seg.layout.max_leases;
    for (uint64_t i = 4; i < entries; i++)
        CHECK_EQ(SHMS_OK, verb_hit(w, "k0", 2, ref));
    looks = 0;
    shms_step_hook = count_looks;
    CHECK_EQ(SHMS_ENOLEASE, verb_hit(w, "k0", 2, ref));
    CHECK(looks >= entries);
    looks = 0;
    CHECK_EQ(SHMS_ENOLEASE, verb_hit(w, "k0", 2, ref));
    CHECK(looks <= LITTLE);
    CHECK(refused_by(SHMS_ENOLEASE) <= LITTLE);
    CHECK_EQ(1, shms_reader_release(readers[0], refs[2]));
    CHECK_EQ(1, shms_reader_release(readers[1], refs[2]));
    CHECK_EQ(SHMS_OK, verb_hit(w, "k0", 2, ref));
    CHECK_EQ(SHMS_ENOLEASE, verb_hit(w, "k0", 2, ref));
    shms_pending t; /* an object that is not handed out needs no entry */
    CHECK_EQ(1, shms_writer_delete(w, "k2", 2));
    CHECK_EQ(SHMS_ENOLEASE, verb_begin(w, "new", 3, NULL, 0, 64, &t));
    CHECK_EQ(SHMS_OK, verb_reserve(w, "new", 3, NULL, 0, 64, &t));
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    CHECK_EQ(SHMS_OK, verb_abort(w, &t));
    CHECK_EQ(SHMS_OK, verb_reserve(w, "new", 3, NULL, 0, 64, &t));
    CHECK_EQ(SHMS_OK, verb_commit(w, &t, NULL));
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    CHECK_EQ(1, shms_writer_cancel(w, ref));
    CHECK_EQ(SHMS_OK, verb_hit(w, "k0", 2, ref));
    end();
}

static void both_release(int i) {
    CHECK_EQ(1, shms_reader_release(readers[0], refs[i]));
    CHECK_EQ(1, shms_reader_release(readers[1], refs[i]));
}

static void a_release(void) {
    refused();
    both_release(3);
}

static uint64_t all_looks;

static void release_meanwhile(const char *label) {
    count_looks(label);
    if (looks == all_looks) { /* the search has passed this one */
        shms_step_hook = NULL;
        both_release(1);
    }
}

static void a_release_during_the_search(void) {
    refused();
    CHECK_EQ(1, shms_reader_release(readers[0], refs[5]));
    all_looks = refused();
    CHECK_EQ(1, shms_reader_release(readers[0], refs[4]));
    looks = 0;
    shms_step_hook = release_meanwhile;
    CHECK_EQ(SHMS_EFULL, put_marked(w, "new", 64, 1, NULL));
    CHECK(!shms_step_hook);
}

static void an_unpin(void) {
    shms_view *v = view_of(readers[0], refs[3]), *u = view_of(readers[1], refs[3]);
    CHECK(v && u);
    shms_view_release(u);
    refused();
    refused();
    CHECK(filled(v->payload, 64, 3));
    shms_view_release(v);
}

static void a_refusal_does_not_apply_to_a_smaller_object(void) {
    both_release(3);
    CHECK_EQ(SHMS_EFULL, put_marked(w, "large", 200, 1, NULL));
    CHECK_EQ(SHMS_EFULL, put_marked(w, "larger", 300, 1, NULL));
}

static void a_cancel(void) {
    refused();
    CHECK_EQ(1, shms_writer_cancel(w, refs[2]));
}

static void a_delete_once_the_object_is_not_held(void) {
    CHECK_EQ(SHMS_OK, put_marked(w, "new", 64, 1, NULL) == SHMS_EFULL ? SHMS_OK : 1);
    CHECK_EQ(1, shms_writer_delete(w, "k2", 2));
    refused();
    both_release(2);
}

static void an_abort(void) {
    shms_pending t;
    CHECK_EQ(1, shms_writer_cancel(w, refs[2]));
    CHECK_EQ(SHMS_OK, verb_begin(w, "pending", 7, NULL, 0, 64, &t));
    refused();
    CHECK_EQ(SHMS_OK, verb_abort(w, &t));
}

static void a_commit_without_a_hand_out(void) {
    shms_pending t;
    CHECK_EQ(1, shms_writer_cancel(w, refs[2]));
    CHECK_EQ(SHMS_OK, verb_reserve(w, "pending", 7, NULL, 0, 64, &t));
    refused();
    CHECK_EQ(SHMS_OK, verb_commit(w, &t, NULL));
}

static void an_unprotect(void) {
    CHECK_EQ(SHMS_OK, verb_protect(w, "k2", 2));
    CHECK_EQ(SHMS_OK, verb_protect(w, "k2", 2));
    both_release(2);
    refused();
    CHECK_EQ(SHMS_OK, verb_unprotect(w, "k2", 2));
    refused();
    CHECK_EQ(1, shms_writer_delete(w, "k2", 2)); /* held by its protection, deleted or not */
    refused();
    CHECK_EQ(SHMS_OK, verb_unprotect(w, "k2", 2));
}

static void a_close_even_if_a_view_keeps_the_rank(void) {
    CHECK((passing = view_of(readers[1], refs[5])));
    CHECK_EQ(1, shms_reader_release(readers[0], refs[4]));
    CHECK_EQ(1, shms_reader_release(readers[0], refs[5]));
    refused();
    CHECK_EQ(SHMS_OK, shms_reader_close(readers[1]));
}

static uint8_t old_ref[SHMS_REF_SIZE];

static void refuse_meanwhile(const char *label) {
    if (strcmp(label, "R2b"))
        return;
    shms_step_hook = NULL;
    CHECK_EQ(SHMS_EFULL, put_marked(w, "new", 64, 1, NULL)); /* the pin is on the object that is in the slot now */
}

static void the_unpin_of_a_pin_on_another_object(void) {
    memcpy(old_ref, refs[3], sizeof old_ref);
    both_release(3);
    CHECK_EQ(1, shms_writer_delete(w, "k3", 2));
    CHECK_EQ(SHMS_OK, put_marked(w, "again", 64, 1, refs[3])); /* the same slot and place */
    both_release(3);
    shms_step_hook = refuse_meanwhile;
    CHECK(!view_of(readers[0], old_ref) && errno == -SHMS_ESTALE);
    CHECK(!shms_step_hook);
}

static void a_retirement(void) {
    CHECK_EQ(1, shms_reader_release(readers[0], refs[4]));
    refused();
    CHECK_EQ(SHMS_OK, shms_writer_retire(w, 1)); /* the rank is alive, but no lease expects it any more */
}

static void a_retirement_ends_when_the_rank_attaches(void) {
    begin(8, 16);
    CHECK_EQ(SHMS_OK, shms_writer_retire(w, 1));
    detach(1);
    attach(1);
    CHECK_EQ(1, shms_reader_release(readers[0], refs[1]));
    CHECK_EQ(SHMS_OK, put_marked(w, "new", 64, 1, ref)); /* earlier leases do not expect it; this one does */
    CHECK_EQ(1, shms_reader_release(readers[0], ref));
    for (int i = 0; i < 8; i++)
        if (i != 1)
            CHECK_EQ(1, shms_reader_release(readers[0], refs[i]));
    CHECK_EQ(SHMS_OK, shms_writer_clear(w, "", 0));
    CHECK_EQ(1 + crowd, w->seg.writer->objects);
    shms_view *v = view_of(readers[1], ref);
    CHECK(v && filled(v->payload, 64, 1));
    shms_view_release(v);
    end();
}

static void a_detachment(void) {
    CHECK_EQ(1, shms_reader_release(readers[0], refs[4]));
    refused();
    CHECK_EQ(SHMS_OK, shms_reader_close(readers[1]));
}

static void an_attachment(void) {
    for (int i = 0; i < 8; i++)
        CHECK_EQ(1, shms_reader_release(readers[0], refs[i]));
    refused();
    /* Detached and attached again between two puts: the lock looks unchanged. */
    detach(1);
    attach(1);
}

static void a_death_ends_the_refusal(void) {
    begin(8, 16);
    shms_reader_free(readers[1]);
    int ready[2];
    char c;
    CHECK(pipe(ready) == 0);
    pid_t child = fork_child();
    if (child == 0) {
        attach(1);
        CHECK(view_of(readers[1], refs[4])); /* never released */
        CHECK_EQ(1, write(ready[1], "x", 1));
        pause();
    }
    CHECK_EQ(1, read(ready[0], &c, 1));
    for (int i = 0; i < 8; i++)
        CHECK_EQ(1, shms_reader_release(readers[0], refs[i]));
    for (int i = 0; i < 7; i++)  /* opened before the child attached: only the child's pin counts */
        CHECK_EQ(SHMS_OK, put_marked(w, key_of("k", 100 + i), 64, 1, refs[10 + i]));
    CHECK_EQ(1, shms_writer_has(w, "k4", 2));
    for (int i = 0; i < 7; i++)
        CHECK_EQ(1, shms_reader_release(readers[0], refs[10 + i]));
    refused();
    CHECK(refused() <= LITTLE);
    kill(child, SIGKILL);
    reap_killed(child);
    for (int i = 0; i < 8; i++)  /* the pinned object and the promised ones, so all of them */
        CHECK_EQ(SHMS_OK, put_marked(w, key_of("k", 200 + i), 64, 1, NULL));
    CHECK_EQ(0, shms_writer_has(w, "k4", 2));
    attach(1);
    close(ready[0]);
    close(ready[1]);
    end();
}

TEST(slots_run_out_like_bytes) {
    begin(8, 8);
    CHECK_EQ(SHMS_EFULL, put_marked(w, "new", 0, 1, NULL));
    both_release(6);
    both_release(5);
    CHECK_EQ(1, shms_writer_delete(w, "k5", 2)); /* a slot and bytes */
    accepted();
    CHECK_EQ(1, shms_writer_has(w, "k6", 2)); /* not one object more than needed */
    end();
}

static bool count_scanned(void *context, uint32_t slot) {
    looks++;
    return shms_evictable(context, slot);
}

TEST(a_put_that_needs_the_slot_of_another_object_looks_for_no_gap) {
    open_store("no slot", (shms_options){.capacity = 1 << 20, .n_readers = 1, .max_objects = 512}, 1);
    w->zones.evictable = count_scanned;
    looks = 0;
    for (uint64_t i = 0; i < 3000; i++) /* they leave gaps of all sizes */
        CHECK_EQ(SHMS_OK, put_marked(w, key_of("k", i), 448 + 1024 * (i % 3), i, NULL));
    CHECK_EQ(0, looks);
    end();
}

TEST(a_refusal_names_the_resource) {
    shms_options o = {.capacity = 1024, .n_readers = 1, .max_objects = 2};
    open_store("short", o, 0);
    CHECK_EQ(SHMS_OK, put_marked(w, "a", 64, 1, ref));
    CHECK_EQ(SHMS_OK, put_marked(w, "b", 64, 1, ref));
    CHECK_EQ(SHMS_EFULL, put_marked(w, "new", 900, 1, ref)); /* neither bytes nor a slot */
    CHECK_EQ(SHMS_ENOSLOT, put_marked(w, "new", 64, 1, ref));
    CHECK_EQ(SHMS_ENOSLOT, put_marked(w, "new", 64, 1, ref)); /* remembered with its cause */
    for (uint64_t i = 2; i < w->seg.layout.max_leases; i++)
        CHECK_EQ(SHMS_OK, verb_hit(w, "a", 1, ref));
    CHECK_EQ(SHMS_ENOLEASE, verb_hit(w, "a", 1, ref));
    CHECK_EQ(SHMS_ENOLEASE, put_marked(w, "new", 64, 1, ref));
    end();
    open_store("gap", o, 0); /* a slot was available, but not a gap that is long enough */
    CHECK_EQ(SHMS_OK, shms_writer_retire(w, 0));
    CHECK_EQ(SHMS_OK, put_marked(w, "first", 256, 1, NULL));
    CHECK_EQ(SHMS_OK, put_marked(w, "held", 64, 1, NULL));
    CHECK_EQ(1, shms_writer_delete(w, "first", 5));
    CHECK_EQ(SHMS_OK, put_marked(w, "last", 64, 1, NULL));
    CHECK_EQ(SHMS_OK, verb_protect(w, "held", 4));
    CHECK_EQ(SHMS_EFULL, put_marked(w, "new", 640, 1, NULL));
    CHECK_EQ(SHMS_OK, put_marked(w, "new", 64, 1, NULL));
    CHECK_EQ(SHMS_OK, verb_unprotect(w, "held", 4));
    end();
}

TEST(a_rank_that_never_attached_is_expected_until_it_is_retired) {
    open_store("never", (shms_options){.capacity = 1024, .n_readers = 2, .max_objects = 8}, 1);
    CHECK_EQ(SHMS_OK, put_marked(w, "k", 800, 1, ref));
    CHECK_EQ(1, shms_reader_release(readers[0], ref));
    CHECK_EQ(SHMS_EFULL, put_marked(w, "new", 800, 1, NULL));
    CHECK_EQ(SHMS_EFULL, put_marked(w, "new", 800, 1, NULL));
    CHECK_EQ(SHMS_OK,
             shms_reader_attach(&readers[1], name, 1, NULL)); /* attaches late, and finds what it was promised */
    CHECK_EQ(SHMS_EFULL, put_marked(w, "new", 800, 1, NULL));
    shms_view *v = view_of(readers[1], ref);
    CHECK(v && filled(v->payload, 800, 1));
    shms_view_release(v);
    CHECK_EQ(SHMS_OK, put_marked(w, "new", 800, 2, ref));
    CHECK_EQ(SHMS_OK, shms_reader_close(readers[0]));
    CHECK_EQ(SHMS_EFULL, put_marked(w, "newer", 800, 1, NULL));
    CHECK_EQ(SHMS_OK, shms_writer_retire(w, 1));
    CHECK_EQ(SHMS_OK, put_marked(w, "newer", 800, 3, NULL));
    end();
}

/* Each is refused a put, and then ends that. */
static void (*const ends[])(void) = {a_release,
                                     a_release_during_the_search,
                                     an_unpin,
                                     a_refusal_does_not_apply_to_a_smaller_object,
                                     a_cancel,
                                     a_delete_once_the_object_is_not_held,
                                     an_abort,
                                     a_commit_without_a_hand_out,
                                     an_unprotect,
                                     a_close_even_if_a_view_keeps_the_rank,
                                     the_unpin_of_a_pin_on_another_object,
                                     a_retirement,
                                     a_detachment,
                                     an_attachment};

TEST(whatever_lets_go_of_an_object_ends_the_refusal) {
    for (crowd = 0; crowd <= 300; crowd += 300) {
        for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
            begin(8, 16);
            ends[i]();
            accepted();
            shms_view_release(passing);
            passing = NULL;
            end();
        }
        a_retirement_ends_when_the_rank_attaches();
        a_death_ends_the_refusal();
    }
    crowd = 0;
}
