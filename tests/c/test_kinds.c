/*
 * test_kinds.c - kinds of objects: their counts, also after a recovery, and quotas that keep one kind from pushing out
 * the others.
 */
#include <pthread.h>

#include "fixture.h"
#include "store/hand.h"

#define KIB (UINT64_C(1) << 10)

static shms_refusal why;
static uint32_t image, encoder;

static void begin(uint64_t capacity, uint32_t max_objects, uint32_t flags) {
    open_store("kinds",
               (shms_options){.capacity = capacity, .n_readers = 2, .max_objects = max_objects, .flags = flags}, 1);
    CHECK_EQ(SHMS_OK, shms_writer_retire(w, 1));
    image = (uint32_t)shms_writer_kind(w, "image", 5);
    encoder = (uint32_t)shms_writer_kind(w, "encoder", 7);
}

/* A key of 8 bytes. */
static const char *key(uint64_t i) {
    static char text[16];
    snprintf(text, sizeof text, "k%07llu", (unsigned long long)i);
    return text;
}

/* Puts an object of `size` bytes, key included, which is held. */
static int put(uint64_t i, uint64_t size, uint32_t kind) {
    shms_pending t;
    int rc = verb_begin_of(w, key(i), 8, NULL, 0, size - SHMS_ALIGN, kind, true, &t, &why);
    return rc ? rc : verb_commit(w, &t, ref);
}

static void put_free(uint64_t i, uint64_t size, uint32_t kind) {
    CHECK_EQ(SHMS_OK, put(i, size, kind));
    CHECK_EQ(1, shms_reader_release(readers[0], ref));
}

static int there(uint64_t i) { return shms_writer_has(w, key(i), 8); }
static int touch(uint64_t i) { return shms_writer_touch(w, key(i), 8); }

static shms_kind_info info(uint32_t kind) {
    shms_kind_info all[SHMS_KINDS];
    CHECK_EQ(SHMS_OK, shms_writer_kinds(w, all));
    return all[kind];
}

static void has(uint32_t kind, uint64_t bytes, uint64_t objects) {
    CHECK_EQ(bytes, info(kind).bytes);
    CHECK_EQ(objects, info(kind).objects);
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
}

static uint64_t evictions(void) { return shms_get(&w->seg.writer->counters[SHMS_C(evictions)]); }

/* ---- names and counts ---- */

TEST(a_name_gets_one_number_and_there_are_fifteen) {
    char text[32] = "kind0";
    begin(64 * KIB, 16, 0);
    CHECK_EQ(1, image);
    CHECK_EQ(2, encoder);
    for (int k = 3; k < SHMS_KINDS; k++) {
        text[4] = (char)('a' + k);
        CHECK_EQ(k, shms_writer_kind(w, text, 5));
        CHECK_EQ(k, shms_writer_kind(w, text, 5));
    }
    CHECK_EQ(0, shms_writer_kind(w, "another", 7));
    CHECK_EQ(image, shms_writer_kind(w, "image", 5));
    CHECK_EQ(0, shms_writer_kind(w, "imag", 4));
    CHECK_EQ(SHMS_EINVAL, shms_writer_kind(w, NULL, 1));
    CHECK_EQ(SHMS_EINVAL, shms_writer_kind(w, "", 0));
    CHECK_EQ(SHMS_EINVAL, shms_writer_kind(w, "a\0b", 3));
    CHECK_EQ(SHMS_EINVAL, shms_writer_kind(w, "a name of 24 bytes is to", 24));
    CHECK_EQ(SHMS_EINVAL, put(1, 128, SHMS_KINDS));
    CHECK_EQ(SHMS_EINVAL, shms_writer_quota(w, SHMS_KINDS, 1));
    CHECK_EQ(SHMS_EINVAL, shms_writer_quota(w, 0, 1));
    end();
    begin(64 * KIB, 16, 0);
    CHECK_EQ(3, shms_writer_kind(w, "a name of only 23 bytes", 23));
    CHECK(memcmp(info(3).name, "a name of only 23 bytes", 24) == 0);
    CHECK_EQ(SHMS_EINVAL, put(1, 128, 4)); /* it has no name yet */
    CHECK_EQ(SHMS_EINVAL, shms_writer_quota(w, 4, 1));
    end();
}

static shms_view *met;
static void find_at_w2(const char *label) {
    uint8_t found[SHMS_REF_SIZE];
    if (!strcmp(label, "W2") && !met)
        CHECK_EQ(SHMS_OK, shms_reader_find(readers[0], "k0000000", 8, found, &met));
}

TEST(an_object_that_a_rank_finds_as_its_kind_evicts_it_stays_and_the_next_goes) {
    begin(64 * KIB, 16, 0);
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, image, 16 * KIB));
    for (uint64_t i = 0; i < 2; i++)
        put_free(i, 8 * KIB, image);
    shms_step_hook = find_at_w2;
    put_free(2, 8 * KIB, image);
    shms_step_hook = NULL;
    CHECK(met && there(0) == 1 && there(1) == 0 && there(2) == 1);
    has(image, 16 * KIB, 2);
    shms_view_release(met);
    end();
}

TEST(a_successor_counts_again_and_keeps_names_and_quotas) {
    shms_pending t;
    begin(64 * KIB, 16, SHMS_CHECKSUMS);
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, encoder, 16 * KIB));
    for (uint64_t i = 0; i < 5; i++)
        put_free(i, 8 * KIB, i % 2 ? image : encoder);
    CHECK_EQ(SHMS_OK, verb_begin_of(w, "new", 3, NULL, 0, 4 * KIB, image, false, &t, NULL));
    shms_set(&w->seg.writer->kinds[image].bytes, 1); /* as after a death between two stores */
    shms_set(&w->seg.writer->kinds[encoder].objects, 77);
    succeed();
    has(image, 16 * KIB, 2);
    has(encoder, 16 * KIB, 2);
    CHECK_EQ(16 * KIB, info(encoder).quota);
    CHECK_EQ(0, info(image).quota);
    CHECK_EQ(encoder, shms_writer_kind(w, "encoder", 7));
    CHECK_EQ(0, there(0)); /* 2 and 4 are the others of the quota */
    put_free(10, 8 * KIB, encoder);
    CHECK_EQ(0, there(2)); /* the oldest one */
    CHECK_EQ(1, there(4));
    has(encoder, 16 * KIB, 2);
    /* a kind without a name is damage */
    CHECK_EQ(SHMS_OK, shms_writer_close(w, 0));
    shms_set(&w->seg.writer->kinds[image].name[0], 0);
    shms_writer *next;
    CHECK_EQ(SHMS_ECORRUPT, shms_writer_recover(&next, name, NULL));
    memcpy(&w->seg.writer->kinds[image].name[0], "image\0\0", 8);
    succeed();
    end();
}

/* ---- quotas ---- */

/* Fills the store: `n` images, and 4 encoder outputs, which are the whole quota. All objects have `size` bytes. */
static void at_the_quota(uint64_t n, uint64_t size) {
    begin((n + 4) * size, 256, 0);
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, encoder, 4 * size));
    for (uint64_t i = 0; i < n + 4; i++)
        put_free(i, size, i < n ? image : encoder);
    has(image, n * size, n);
    has(encoder, 4 * size, 4);
}

static void a_kind_at_its_quota_takes_the_places_of_its_own(uint64_t size) {
    at_the_quota(12, size);
    for (uint64_t i = 16; i < 100; i++) {
        put_free(i, size, encoder);
        has(encoder, 4 * size, 4);
        CHECK_EQ(1, there(i - 3));
        CHECK_EQ(0, there(i - 4)); /* the oldest one goes */
    }
    for (uint64_t i = 0; i < 12; i++)
        CHECK_EQ(1, there(i));
    end();
}

TEST(what_was_used_has_a_second_chance) {
    at_the_quota(12, 4 * KIB);
    CHECK_EQ(1, touch(12));
    CHECK_EQ(1, touch(13));
    put_free(16, 4 * KIB, encoder);
    CHECK_EQ(1, there(12));
    CHECK_EQ(1, there(13));
    CHECK_EQ(0, there(14));
    put_free(17, 4 * KIB, encoder);
    CHECK_EQ(1, there(13));
    put_free(18, 4 * KIB, encoder); /* 16 is younger than 12, whose chance is over */
    CHECK_EQ(0, there(12));
    CHECK_EQ(1, there(16));
    for (uint64_t i = 13; i < 19; i++) /* all of them used: the second lap takes one */
        touch(i);
    put_free(19, 4 * KIB, encoder);
    has(encoder, 16 * KIB, 4);
    has(image, 48 * KIB, 12);
    end();
}

TEST(an_only_object_of_its_kind_goes_although_it_was_used) {
    begin(64 * KIB, 16, 0);
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, encoder, 8 * KIB));
    for (uint64_t i = 0; i < 4; i++) {
        put_free(i, 8 * KIB, encoder);
        CHECK_EQ(1, touch(i));
        CHECK_EQ(0, i && there(i - 1));
    }
    end();
}

TEST(a_search_scans_again_what_has_lost_its_second_chance) {
    int64_t budget = INT64_MAX;
    at_the_quota(12, 64 * KIB);
    CHECK_EQ(1, touch(12));
    CHECK(shms_zones_scan(&w->zones, &budget));
    put_free(16, 64 * KIB, encoder); /* passes 12, takes 13 */
    CHECK_EQ(1, there(12));
    CHECK_EQ(1, w->ring.zones[shms_ring_zone(&w->ring, 12 * 64 * KIB)].stale);
    end();
}

TEST(the_new_object_is_not_the_next_victim_of_the_hand) {
    begin(64 * KIB, 256, 0);
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, encoder, 16 * KIB));
    for (uint64_t i = 0; i < 16; i++)
        put_free(i, 4 * KIB, i > 0 && i < 5 ? encoder : image);
    put_free(16, 4 * KIB, image); /* in the place of 0; the hand is in front of 1 now */
    put_free(17, 4 * KIB, encoder); /* in the place of 1 */
    CHECK_EQ(0, there(0) + there(1));
    put_free(18, 4 * KIB, image);
    CHECK_EQ(1, there(17));
    CHECK_EQ(0, there(2));
    end();
}

/* For the ghost list: the hand of a kind that passes an object ends its second chance, not its history. */
TEST(what_a_kind_evicts_was_used_all_the_same) {
    begin(64 * KIB, 64, 0);
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, encoder, 4 * KIB));
    for (uint64_t i = 0; i < 4; i++) {
        put_free(i, KIB, encoder);
        CHECK_EQ(1, touch(i));
    }
    for (uint64_t i = 4; i < 8; i++)
        put_free(i, KIB, encoder); /* the first of them ends four second chances */
    uint32_t used = 0;
    for (uint32_t e = 0; e < SHMS_GHOST_EPOCHS; e++)
        used += w->ghosts.sums[1][e].n;
    CHECK_EQ(4, used);
    end();
}

TEST(a_kind_whose_own_are_held_is_refused) {
    uint8_t refs[4][SHMS_REF_SIZE];
    begin(64 * KIB, 256, 0);
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, encoder, 16 * KIB));
    for (uint64_t i = 0; i < 4; i++)
        put_free(i, 4 * KIB, image);
    for (uint64_t i = 4; i < 8; i++) {
        CHECK_EQ(SHMS_OK, put(i, 4 * KIB, encoder));
        memcpy(refs[i - 4], ref, sizeof ref);
    }
    CHECK_EQ(SHMS_ETOOLARGE, put(9, 16 * KIB + 64, encoder));
    CHECK_EQ(SHMS_EQUOTA, put(9, 4 * KIB, encoder));
    CHECK_EQ(encoder, why.kind);
    CHECK_EQ(16 * KIB, why.quota);
    CHECK_EQ(16 * KIB, why.kind_bytes);
    CHECK_EQ(SHMS_OK, shms_writer_holders(w, &why));
    CHECK_EQ(16 * KIB, why.held[0]);
    CHECK_EQ(0, why.held[1]);
    CHECK_EQ(0, why.kept);
    has(encoder, 16 * KIB, 4);
    put_free(10, 4 * KIB, image); /* there is room for others */
    CHECK_EQ(1, shms_reader_release(readers[0], refs[1]));
    CHECK_EQ(SHMS_EQUOTA, put(9, 8 * KIB, encoder)); /* two must go, and one may: none goes */
    CHECK_EQ(SHMS_OK, shms_writer_holders(w, &why));
    CHECK_EQ(12 * KIB, why.held[0]);
    CHECK_EQ(0, evictions());
    CHECK_EQ(SHMS_OK, verb_protect(w, "k0000005", 8));
    CHECK_EQ(SHMS_EQUOTA, put(9, 4 * KIB, encoder));
    CHECK_EQ(SHMS_OK, shms_writer_holders(w, &why));
    CHECK_EQ(4 * KIB, why.kept);
    CHECK_EQ(SHMS_OK, verb_unprotect(w, "k0000005", 8));
    put_free(9, 4 * KIB, encoder);
    CHECK_EQ(0, there(5));
    CHECK_EQ(1, evictions());
    CHECK_EQ(3, shms_get(&w->seg.writer->counters[SHMS_C(refusals)]));
    CHECK_EQ(SHMS_EFULL, put(11, 64 * KIB, 0)); /* the next refusal is for bytes */
    CHECK_EQ(0, why.kind);
    CHECK_EQ(0, why.quota);
    end();
}

static uint64_t looks;
static void count_looks(const char *label) { looks += !strcmp(label, "W1a"); }

TEST(a_refusal_is_remembered_until_something_changes) {
    enum { N = 2000 };
    uint8_t refs[N][SHMS_REF_SIZE];
    begin(N * KIB + 64 * KIB, 4096, 0);
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, encoder, N * KIB));
    for (uint64_t i = 0; i < N; i++) {
        CHECK_EQ(SHMS_OK, put(i, KIB, encoder));
        memcpy(refs[i], ref, sizeof ref);
    }
    shms_step_hook = count_looks;
    CHECK_EQ(SHMS_EQUOTA, put(N, KIB, encoder));
    CHECK(looks >= N);
    CHECK_EQ(SHMS_EQUOTA, put(N, KIB, encoder)); /* the first poll of the ranks finds a change */
    looks = 0;
    for (int i = 0; i < 100; i++)
        CHECK_EQ(SHMS_EQUOTA, put(N, KIB, encoder));
    CHECK_EQ(0, looks);
    shms_step_hook = NULL;
    CHECK_EQ(SHMS_OK, shms_writer_holders(w, &why));
    CHECK_EQ(N * KIB, why.held[0]);
    CHECK_EQ(1,
             shms_reader_release(readers[0], refs[N / 2])); /* the reader's own word: the writer learns it by a poll */
    CHECK_EQ(SHMS_EQUOTA, put(N, 2 * KIB, encoder));
    CHECK_EQ(SHMS_OK, put(N, KIB, encoder));
    CHECK_EQ(0, there(N / 2));
    end();
}

static uint8_t early[SHMS_REF_SIZE];
static void release_early(const char *label) {
    shms_ref parts;
    if (strcmp(label, "W1a") || ++looks != 20)
        return;
    shms_ref_unpack(&parts, early); /* like a thread that cancels while the put yields */
    shms_end_lease(w, parts.slot, parts.entry);
}

TEST(what_goes_while_a_choice_yields_ends_the_refusal) {
    begin(64 * KIB, 64, 0);
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, encoder, 32 * KIB));
    for (uint64_t i = 0; i < 32; i++) {
        CHECK_EQ(SHMS_OK, put(i, KIB, encoder));
        if (i == 0)
            memcpy(early, ref, sizeof early);
    }
    for (int i = 0; i < 2; i++) /* the first poll of the ranks finds a change */
        CHECK_EQ(SHMS_EQUOTA, put(100, KIB, encoder));
    shms_zones_stale_all(&w->zones);
    looks = 0;
    shms_step_hook = release_early;
    CHECK_EQ(SHMS_EQUOTA, put(100, KIB, encoder)); /* the first object was held when the choice visited it */
    shms_step_hook = NULL;
    CHECK(looks >= 20);
    CHECK_EQ(SHMS_OK, put(100, KIB, encoder));
    CHECK_EQ(0, there(0));
    end();
}

TEST(a_refusal_ends_with_its_quota) {
    begin(64 * KIB, 64, 0);
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, encoder, 8 * KIB));
    for (uint64_t i = 0; i < 8; i++)
        CHECK_EQ(SHMS_OK, put(i, KIB, encoder));
    CHECK_EQ(1, shms_reader_release(readers[0], ref));
    for (int i = 0; i < 3; i++)
        CHECK_EQ(SHMS_EQUOTA, put(9, 3 * KIB, encoder));
    CHECK_EQ(KIB, why.longest);
    CHECK_EQ(SHMS_EQUOTA, put(9, 8 * KIB, encoder));
    CHECK_EQ(KIB, why.longest);
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, encoder, 10 * KIB));
    CHECK_EQ(SHMS_OK, put(9, 3 * KIB, encoder)); /* still too much without one that goes */
    has(encoder, 10 * KIB, 8);
    end();
}

/* Held objects among the victims' neighbours leave no place of the new size. So nothing of the kind itself goes. */
TEST(nothing_goes_for_a_put_that_finds_no_place) {
    uint8_t refs[8][SHMS_REF_SIZE];
    begin(32 * KIB, 64, 0);
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, encoder, 16 * KIB));
    for (uint64_t i = 0; i < 8; i++) {
        CHECK_EQ(SHMS_OK, put(i, 4 * KIB, i % 2 ? image : encoder));
        memcpy(refs[i], ref, sizeof ref);
        if (i % 2 == 0)
            CHECK_EQ(1, shms_reader_release(readers[0], ref));
    }
    CHECK_EQ(SHMS_EFULL, put(9, 8 * KIB, encoder));
    CHECK_EQ(0, evictions());
    has(encoder, 16 * KIB, 4);
    CHECK_EQ(1, shms_reader_release(readers[0], refs[5]));
    CHECK_EQ(SHMS_OK, put(9, 8 * KIB, encoder)); /* 0 and 2 go for the quota; 4, 5 or 5, 6 for the place */
    CHECK_EQ(0, there(0) + there(2) + there(5));
    CHECK_EQ(1, there(4) + there(6));
    CHECK_EQ(1, there(1) + there(3) + there(7) - 2);
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    end();
}

/* Several victims make one place: then no other kind loses an object. */
TEST(neighbours_that_go_make_one_place) {
    at_the_quota(12, 64 * KIB);
    put_free(20, 128 * KIB, encoder);
    has(encoder, 256 * KIB, 3);
    has(image, 12 * 64 * KIB, 12);
    put_free(21, 256 * KIB, encoder);
    has(encoder, 256 * KIB, 1);
    has(image, 12 * 64 * KIB, 12);
    end();
}

TEST(a_quota_may_change) {
    at_the_quota(12, 4 * KIB);
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, encoder, 8 * KIB));
    has(encoder, 16 * KIB, 4); /* until the next put */
    put_free(20, 4 * KIB, encoder);
    has(encoder, 8 * KIB, 2);
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, image, 16 * KIB));
    put_free(21, 4 * KIB, image);
    has(image, 16 * KIB, 4);
    CHECK_EQ(1, there(11));
    CHECK_EQ(0, there(8));
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, encoder, 0));
    for (uint64_t i = 30; i < 38; i++)
        put_free(i, 4 * KIB, encoder);
    has(encoder, 40 * KIB, 10);
    end();
}

/* ---- threads ---- */

static _Atomic bool deleting;

static void *delete_some(void *arg) {
    uint64_t seed = (uintptr_t)arg;
    while (deleting) {
        const char *some = key_of("k", 1000000 + below(&seed, 3000));
        shms_writer_delete(w, some, 8);
        shms_writer_touch(w, some, 8);
    }
    return NULL;
}

/* Objects of the kind leave and are used while a put chooses among them. */
TEST(others_may_delete_and_use_what_is_chosen) {
    pthread_t threads[2];
    uint64_t seed = 5;
    begin(600 * KIB, 4096, 0);
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, encoder, 300 * KIB));
    deleting = true;
    for (uintptr_t i = 0; i < 2; i++)
        CHECK_EQ(0, pthread_create(&threads[i], NULL, delete_some, (void *)(i + 1)));
    for (int i = 0; i < 20000 / EACH; i++) {
        int rc = put(1000000 + below(&seed, 3000), 128 + 64 * below(&seed, i % 50 ? 20 : 2000), below(&seed, 3));
        CHECK(rc == SHMS_OK || rc == SHMS_EEXISTS);
        if (rc == SHMS_OK)
            CHECK_EQ(1, shms_reader_release(readers[0], ref));
        CHECK(info(encoder).bytes <= 300 * KIB);
        if (i % 500 == 0)
            CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    }
    deleting = false;
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    end();
}

/* ---- at random ---- */

static void no_kind_exceeds_its_quota_whatever_is_done(uint64_t seed) {
    enum { KEYS = 400 };
    static uint8_t refs[KEYS][SHMS_REF_SIZE];
    bool held[KEYS] = {0};
    uint64_t refused = 0, quotas[] = {0, 0, 200 * KIB, 100 * KIB};
    begin(1000 * KIB, 512, 0);
    uint32_t third = (uint32_t)shms_writer_kind(w, "third", 5);
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, encoder, quotas[encoder]));
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, third, quotas[third]));
    for (int step = 0; step < 6000; step++) {
        uint64_t i = below(&seed, KEYS), size = 128 + 64 * below(&seed, below(&seed, 8) ? 60 : 900);
        uint32_t kind = (uint32_t)below(&seed, 4);
        switch (below(&seed, 8)) {
        case 0:
            shms_writer_delete(w, key(i), 8);
            break;
        case 1:
            touch(i);
            break;
        default:
            if (held[i])
                shms_reader_release(readers[0], refs[i]);
            held[i] = false;
            int rc = put(i, size, kind);
            CHECK(rc == SHMS_OK || rc == SHMS_EEXISTS || rc == SHMS_EQUOTA || rc == SHMS_EFULL);
            refused += rc == SHMS_EQUOTA;
            if (rc == SHMS_OK) {
                memcpy(refs[i], ref, sizeof ref);
                if (!(held[i] = below(&seed, 3) == 0))
                    CHECK_EQ(1, shms_reader_release(readers[0], ref));
            }
        }
        for (uint32_t k = 2; k < 4; k++)
            CHECK(info(k).bytes <= quotas[k]);
        CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    }
    CHECK(refused > 10);
    end();
}

TEST(each_in_all_its_cases) {
    a_kind_at_its_quota_takes_the_places_of_its_own(128);
    a_kind_at_its_quota_takes_the_places_of_its_own(64 * KIB);
    for (uint64_t seed = 1; seed < 4; seed++)
        no_kind_exceeds_its_quota_whatever_is_done(seed);
}
