/* test_c_calls.c - what shmstore.h offers to programs in C alone. */
#include "fixture.h"
#include "store/claims.h"

static char payload[256], *place;
static shms_uncommitted *u;

static shms_object object_of(const char *key, uint64_t size) {
    return (shms_object){
        .key = key, .key_len = (uint32_t)strlen(key), .meta = "m", .meta_len = 1, .payload_size = size};
}

static void begin(void) {
    open_store("c", (shms_options){.capacity = 1024, .n_readers = 1}, 1);
    fill(payload, sizeof payload, 1);
}

static bool shows(const uint8_t *packed, uint64_t size) {
    shms_view *v = view_of(readers[0], packed);
    bool right = v && v->payload_size == size && filled(v->payload, size, 1) && v->meta_len == 1 && *v->meta == 'm';
    shms_view_release(v);
    return right;
}

TEST(a_put_is_handed_out_and_a_hit_hands_it_out_again) {
    uint8_t again[SHMS_REF_SIZE];
    begin();
    shms_object bare = {.key = "bare", .key_len = 4};
    CHECK_EQ(SHMS_OK, shms_writer_put(w, &bare, NULL, ref)); /* no metadata either */
    CHECK_EQ(1, shms_reader_release(readers[0], ref));
    for (uint64_t size = 0; size <= sizeof payload; size += sizeof payload) {
        shms_object o = object_of(size ? "all" : "nothing", size);
        CHECK_EQ(SHMS_OK, shms_writer_put(w, &o, size ? payload : NULL, ref));
        CHECK_EQ(SHMS_EEXISTS, shms_writer_put(w, &o, payload, ref));
        CHECK_EQ(SHMS_OK, shms_writer_hit(w, o.key, o.key_len, again));
        CHECK(memcmp(ref, again, sizeof ref) != 0 && shows(ref, size) && shows(again, size));
    }
    CHECK_EQ(SHMS_ENOTFOUND, shms_writer_hit(w, "other", 5, again));
    end();
}

TEST(a_payload_is_written_in_place_and_seen_after_the_commit) {
    begin();
    shms_object o = object_of("k", sizeof payload);
    CHECK_EQ(SHMS_OK, shms_writer_begin(w, &o, &place, &u));
    CHECK_EQ(0, (uintptr_t)place % SHMS_ALIGN);
    memcpy(place, payload, sizeof payload);
    CHECK(!has_key(w, "k"));
    CHECK_EQ(SHMS_OK, shms_uncommitted_commit(u, ref));
    CHECK(has_key(w, "k") && shows(ref, sizeof payload));
    end();
}

TEST(what_is_aborted_or_refused_takes_no_room) {
    begin();
    shms_object o = object_of("k", 900);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(SHMS_OK, shms_writer_begin(w, &o, &place, &u));
        shms_object other = object_of("other", 900);
        CHECK_EQ(SHMS_EFULL, shms_writer_put(w, &other, payload, ref));
        shms_uncommitted_abort(u);
        shms_uncommitted_abort(NULL);
        CHECK_EQ(0, shms_writer_count(w));
    }
    o.payload_size = 2000;
    CHECK_EQ(SHMS_ETOOLARGE, shms_writer_begin(w, &o, &place, &u));
    o.payload_size = 1;
    CHECK_EQ(SHMS_EINVAL, shms_writer_put(w, &o, NULL, ref)); /* no payload */
    CHECK(!has_key(w, "k"));
    CHECK_EQ(SHMS_ECLOSED, shms_writer_put(NULL, &o, payload, ref));
    end();
}

TEST(a_commit_after_the_close_ends_the_object) {
    for (uint32_t flags = 0; flags <= SHMS_CHECKSUMS; flags += SHMS_CHECKSUMS) {
        open_store("closed", (shms_options){.capacity = 1024, .n_readers = 1, .flags = flags}, 1);
        shms_object o = object_of("k", sizeof payload);
        CHECK_EQ(SHMS_OK, shms_writer_begin(w, &o, &place, &u));
        CHECK_EQ(SHMS_OK, shms_writer_close(w, 0));
        CHECK_EQ(SHMS_ECLOSED, shms_uncommitted_commit(u, ref));
        shms_writer_free(w);
        CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
        CHECK(!has_key(w, "k"));
        end();
    }
}

TEST(an_address_is_told_of_each_arena_and_the_bytes_of_each_protected_object) {
    uint64_t of_writer[2], size;
    shms_stored seen;
    shms_object o = object_of("k", sizeof payload);
    open_store("places", (shms_options){.capacity = 1024, .n_readers = 1, .n_writers = 2, .flags = SHMS_OWNS}, 1);
    CHECK_EQ(0, shms_writer_data(w, of_writer)); /* an owner has no arena */
    CHECK(of_writer[0] == 0 && of_writer[1] == 0);
    CHECK_EQ(1, shms_reader_writer_epoch(readers[0]));
    shms_writer *joined;
    CHECK_EQ(SHMS_OK, shms_writer_join(&joined, name, 1, NULL));
    CHECK_EQ(SHMS_OK, shms_writer_put(joined, &o, payload, ref));
    shms_view *v = view_of(readers[0], ref);
    const char *at = (const char *)(uintptr_t)shms_reader_data(readers[0], 1, &size);
    CHECK(v && size == 1024 && at <= v->key && v->payload + v->payload_size <= at + size);
    CHECK(shms_reader_data(readers[0], 0, &size) && size == 0); /* never taken */
    CHECK(!shms_reader_data(readers[0], 2, &size) && size == 0);
    const char *own = (const char *)(uintptr_t)shms_writer_data(joined, of_writer);
    CHECK_EQ(1024, of_writer[0]);
    CHECK_EQ(joined->seg.layout.data_at + joined->seg.layout.data_stride, of_writer[1]);
    CHECK_EQ(SHMS_ENOTFOUND, shms_writer_look(joined, "k", 1, &seen));
    CHECK_EQ(SHMS_OK, verb_protect(joined, "k", 1));
    CHECK_EQ(SHMS_OK, shms_writer_look(joined, "k", 1, &seen));
    CHECK(seen.payload - own == v->payload - at && filled(seen.payload, seen.payload_size, 1));
    CHECK(seen.payload_size == sizeof payload && seen.meta_len == 1 && *seen.meta == 'm' && seen.extra_len == 0);
    CHECK_EQ(SHMS_OK, verb_unprotect(joined, "k", 1));
    shms_view_release(v);
    shms_writer_free(joined);
    CHECK_EQ((uint64_t)getpid(), shms_reader_pid(name, 0));
    CHECK_EQ(0, shms_reader_pid(name, 1)); /* no such rank */
    CHECK_EQ(0, shms_reader_pid("", 0));   /* no name of a store */
    detach(0);
    CHECK_EQ(SHMS_OK, shms_writer_close(w, 1));
    shms_writer_free(w);
}

TEST(a_closed_reader_and_writer_grant_no_claim) {
    shms_claim claim;
    CHECK_EQ(SHMS_ECLOSED, shms_reader_claim_for(NULL, 1, "k", 1, &claim));
    CHECK_EQ(SHMS_ECLOSED, shms_reader_claimed(NULL, "k", 1));
    CHECK_EQ(SHMS_ECLOSED, shms_writer_claim_for(NULL, 1, "k", 1, &claim));
    CHECK_EQ(SHMS_ECLOSED, shms_writer_claimed(NULL, "k", 1));
}

TEST(the_last_moment_that_any_writer_has_told_holds_for_all) {
    uint64_t moment;
    open_store("tiers", (shms_options){.capacity = 1024, .n_readers = 1, .n_writers = 2}, 0);
    shms_writer *joined, *tell[2] = {w};
    CHECK_EQ(SHMS_OK, shms_writer_join(&joined, name, 1, NULL));
    tell[1] = joined;
    CHECK(shms_writer_tier_cleared(w, &moment) == SHMS_OK && moment == 0);
    for (uint64_t n = 1; n < 5; n++) {
        CHECK_EQ(SHMS_OK, shms_writer_clear_tier(tell[n % 2], n));
        for (int i = 0; i < 2; i++)
            CHECK(shms_writer_tier_cleared(tell[i], &moment) == SHMS_OK && moment == n);
    }
    shms_writer_free(joined);
    end();
}

TEST(an_unleased_object_is_found_and_awaited_by_no_rank) {
    open_store("unleased", (shms_options){.capacity = 1024, .n_readers = 2}, 1);
    shms_view *v;
    for (int i = 0; i < 8; i++) { /* rank 1 never attaches */
        shms_object o = object_of(key_of("k", (uint64_t)i), sizeof payload);
        o.unleased = 1;
        if (i % 2) {
            CHECK_EQ(SHMS_OK, shms_writer_begin(w, &o, &place, &u));
            memcpy(place, payload, sizeof payload);
            CHECK_EQ(SHMS_OK, shms_uncommitted_commit(u, ref));
        } else {
            CHECK_EQ(SHMS_OK, shms_writer_put(w, &o, payload, ref));
        }
        uint8_t found[SHMS_REF_SIZE];
        CHECK_EQ(SHMS_OK, shms_reader_find(readers[0], o.key, o.key_len, found, &v));
        shms_view_release(v);
        CHECK(memcmp(found, ref, sizeof ref) == 0 && shows(ref, sizeof payload));
        CHECK_EQ(0, shms_writer_cancel(w, ref));
    }
    shms_stats stats;
    CHECK_EQ(SHMS_OK, shms_writer_stats(w, &stats));
    CHECK(stats.open_leases == 0 && stats.counters.puts == 8 && stats.counters.evictions > 0);
    shms_rank_stats of_rank;
    CHECK_EQ(SHMS_OK, shms_reader_stats(readers[0], &of_rank));
    CHECK(of_rank.live_views == 0 && of_rank.counters.finds == 8);
    shms_object o = object_of("leased", 900), other = object_of("k", 900);
    CHECK_EQ(SHMS_OK, shms_writer_put(w, &o, (char[900]){0}, ref));
    CHECK_EQ(SHMS_EFULL, shms_writer_put(w, &other, (char[900]){0}, ref));
    CHECK(strstr(shms_last_error(),
                 "put unleased, or raise capacity; 1024 of 1024 bytes are in use, 0 of them reclaimable"));
    end();
}

TEST(a_put_for_a_group_waits_for_its_ranks_only) {
    open_store("group", (shms_options){.capacity = 1024, .n_readers = 2, .n_groups = 2, .group_sizes = {1, 1}}, 2);
    shms_object o = object_of("k", 900);
    for (o.group = 1; o.group <= 2; o.group++, o.key = "l") {
        CHECK_EQ(SHMS_OK, shms_writer_put(w, &o, (char[900]){0}, ref));
        CHECK_EQ(1, shms_reader_release(readers[o.group - 1], ref));
    }
    CHECK_EQ(SHMS_EINVAL, shms_writer_put(w, &o, payload, ref));
    CHECK(strstr(shms_last_error(), "n_groups, 2, not 3"));
    end();
}

TEST(one_of_all_makes_an_object_and_the_others_find_it) {
    shms_claim *claim, *other = (shms_claim *)payload;
    begin();
    CHECK_EQ(1, shms_writer_claim(w, "k", 1, &claim));
    CHECK_EQ(0, shms_reader_claim(readers[0], "k", 1, &other));
    CHECK(!other && shms_reader_claimed(readers[0], "k", 1) == 1 && shms_writer_claimed(w, "other", 5) == 0);
    shms_claim_end(claim);
    CHECK_EQ(1, shms_reader_claim(readers[0], "k", 1, &claim));
    shms_object o = object_of("k", 1);
    CHECK_EQ(SHMS_OK, shms_writer_put(w, &o, payload, ref)); /* without a claim: they guard nothing */
    shms_claim_end(claim);
    CHECK_EQ(SHMS_EEXISTS, shms_reader_claim(readers[0], "k", 1, &claim));
    CHECK_EQ(SHMS_EEXISTS, shms_writer_claim(w, "k", 1, &claim));
    CHECK(!claim && shms_reader_claimed(readers[0], "k", 1) == 0);
    shms_claim_end(NULL);
    end();
}

/* What shmstore.h says: a program can list the keys without asking for their number. */
TEST(the_keys_are_listed_by_their_prefix) {
    begin();
    for (int i = 0; i < 3; i++)
        CHECK_EQ(SHMS_OK, put_marked(w, key_of(i ? "a" : "b", (uint64_t)i), 8, 1, NULL));
    uint8_t list[2 * (12 + 2)];
    uint64_t size = 0, id;
    CHECK_EQ(SHMS_OK, shms_writer_keys(w, "a", 1, NULL, &size));
    CHECK_EQ(sizeof list, size);
    CHECK_EQ(SHMS_OK, shms_writer_keys(w, "a", 1, list, &size));
    memcpy(&id, list + 14, sizeof id);
    CHECK(id == 3 && list[8] == 2 && !memcmp(list + 12, "a1", 2) && !memcmp(list + 26, "a2", 2));
    CHECK_EQ(SHMS_OK, shms_writer_keys(w, NULL, 0, NULL, &(uint64_t){0}));
    CHECK_EQ(SHMS_EINVAL, shms_writer_keys(w, NULL, 1, list, &size));
    CHECK_EQ(SHMS_EINVAL, shms_writer_keys(w, NULL, 0, NULL, &size));
    CHECK_EQ(SHMS_EINVAL, shms_writer_keys(w, NULL, 0, list, NULL));
    end();
}

/* tests/data/wire.txt, which the tests of Python read, too */
TEST(the_metadata_of_a_tensor_is_read_and_written_as_python_does) {
    static char line[512], meta[256], again[SHMS_TENSOR_META];
    FILE *f = fopen("../data/wire.txt", "r");
    CHECK(f);
    int seen[3] = {0};
    while (fgets(line, sizeof line, f)) {
        unsigned long long size, value;
        char kind[16], dtype[SHMS_DTYPE_SIZE] = "";
        uint32_t len = 0, n_dims = 0;
        int at, more;
        if (*line == '#')
            continue;
        for (unsigned byte; sscanf(line + 2 * len, "%2x", &byte) == 1 && line[2 * len] != ' '; len++)
            meta[len] = (char)byte;
        CHECK_EQ(2, sscanf(line + 2 * len, "%llu %15s%n", &size, kind, &at));
        shms_tensor t;
        bool leaf = !strcmp(kind, "tensor") || !strcmp(kind, "array"), corrupt = !strcmp(kind, "corrupt");
        CHECK_EQ(leaf ? 1 : corrupt ? SHMS_ECORRUPT : 0, shms_tensor_parse(&t, meta, len, size));
        seen[leaf ? 0 : corrupt ? 1 : 2]++;
        for (uint32_t cut = 0; !corrupt && cut < len; cut++)
            CHECK(shms_tensor_parse(&t, meta, cut, size) != 1);
        if (!leaf)
            continue;
        CHECK_EQ(1, shms_tensor_parse(&t, meta, len, size));
        char *next = line + 2 * len + at;
        unsigned long long offset, bytes;
        CHECK_EQ(3, sscanf(next, "%23s %llu %llu%n", dtype, &offset, &bytes, &more));
        CHECK(!strcmp(dtype, t.dtype) && t.offset == offset && t.size == bytes && bytes % t.itemsize == 0);
        for (next += more; sscanf(next, "%llu%n", &value, &more) == 1; next += more)
            CHECK_EQ(value, t.shape[n_dims++]);
        CHECK_EQ(n_dims, t.n_dims);
        CHECK_EQ(len, shms_tensor_meta(again, t.dtype, t.shape, t.n_dims));
        CHECK(memcmp(meta, again, len) == 0);
    }
    fclose(f);
    CHECK(seen[0] > 10 && seen[1] > 5 && seen[2] > 20);
    CHECK_EQ(0, shms_tensor_parse(&(shms_tensor){0}, NULL, 0, 0));
    CHECK_EQ(SHMS_EINVAL, shms_tensor_parse(&(shms_tensor){0}, NULL, 1, 0));
    CHECK_EQ(SHMS_EINVAL, shms_tensor_parse(NULL, meta, 1, 0));
}

static void *text_of_this_thread(void *unused) {
    (void)unused;
    return *shms_last_error() ? payload : NULL;
}

#define SAYS(code, part, call)                                                                                         \
    do {                                                                                                               \
        CHECK_EQ(code, call);                                                                                          \
        CHECK(strstr(shms_last_error(), part));                                                                        \
    } while (0)

TEST(the_last_error_of_a_thread_says_what_was_wrong_and_what_is_expected) {
    begin();
    shms_reader *r;
    shms_writer *made;
    shms_claim *claim;
    const struct {
        shms_options options;
        const char *says;
    } wrong[] = {
        {{.n_readers = 1}, "capacity must be from 1 to 281474976710656, not 0"},
        {{.capacity = 1024, .n_readers = 300}, "n_readers must be from 1 to 256, not 300"},
        {{.capacity = 1024, .n_readers = 1, .max_object_size = 2000},
         "max_object_size must be from 0 to 1024, not 2000"},
        {{.capacity = 1024, .n_readers = 1, .mode = 0777}, "mode must be 0600, 0660, 0606 or 0666, not 0777"},
        {{.capacity = 1024, .n_readers = 1, .mode = 0400}, "not 0400"},
        {{.capacity = 1024, .n_readers = 1, .flags = 4}, "flags must be those of the header, not 0x4"},
        {{.capacity = 1024, .n_readers = 2, .n_groups = 1, .group_sizes = {1}}, "together n_readers, 2"},
        {{.capacity = 1024, .n_readers = 1, .n_writers = 64, .max_objects = 1 << 20}, "at most 16777216, not 67108864"},
        {{.capacity = SHMS_MAX_CAPACITY, .n_readers = 1, .n_writers = 2, .max_objects = 8}, "at most 2^48 bytes"},
        {{.capacity = 1024, .n_readers = 1, .reserved = {1}}, "`reserved` must be 0"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        SAYS(SHMS_EINVAL, wrong[i].says, shms_writer_create(&made, store_name("wrong"), &wrong[i].options));
    SAYS(SHMS_EINVAL, "not a/b", shms_writer_create(&made, "a/b", &wrong[0].options));
    SAYS(SHMS_EINVAL, "NULL", shms_writer_create(&made, NULL, &wrong[0].options));
    SAYS(SHMS_EINVAL, "NULL", shms_writer_create(&made, name, NULL));

    const shms_options asked = {.capacity = 2048, .n_readers = 1};
    shms_expected e = SHMS_EXPECTED_DEFAULTS;
    SAYS(SHMS_EINVAL, "rank must be below n_readers, 1, not 1", shms_reader_attach(&r, name, 1, &e));
    SAYS(SHMS_EINVAL, "rank must be below 256, not 256", shms_reader_attach(&r, name, 256, &e));
    SAYS(SHMS_EINVAL, "arena must be below n_writers, 1,", shms_writer_join(&made, name, 7, &e));
    e.n_readers = 3;
    SAYS(SHMS_ERANKS, "n_readers=1, not 3", shms_reader_attach(&r, name, 0, &e));
    e.store = 7;
    SAYS(SHMS_EOTHERSTORE, "not 7: begin with SHMS_EXPECTED_DEFAULTS", shms_reader_attach(&r, name, 0, &e));
    e = (shms_expected){.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID, .options = &asked};
    SAYS(SHMS_EOPTIONS, "capacity=1024,", shms_reader_attach(&r, name, 0, &e));
    e.allow_uid = getuid() + 1;
    SAYS(SHMS_EFOREIGN, "has mode 0600", shms_reader_attach(&r, name, 0, &e));

    shms_object o = object_of("k", 2000), none = {0};
    SAYS(SHMS_ETOOLARGE, "and 1 of metadata, exceed max_object_size, 1024, or metadata exceeds 1073741824",
         shms_writer_put(w, &o, payload, ref));
    SAYS(SHMS_EINVAL, "not 0", shms_writer_put(w, &none, payload, ref));
    SAYS(SHMS_EINVAL, "NULL", shms_writer_put(w, NULL, payload, ref));
    o = object_of("\xff", 1);
    SAYS(SHMS_EINVAL, "UTF-8", shms_writer_put(w, &o, payload, ref));
    o = object_of("k", 900);
    SAYS(SHMS_EINVAL, "payload", shms_writer_put(w, &o, NULL, ref));
    SAYS(SHMS_EINVAL, "SHMS_REF_SIZE", shms_writer_put(w, &o, payload, NULL));
    CHECK_EQ(SHMS_OK, put_marked(w, "held", 900, 1, ref));
    SAYS(SHMS_EFULL, "1024 of 1024 bytes are in use", shms_writer_put(w, &o, payload, ref));
    SAYS(SHMS_EFULL, "at most 0 could be had in one piece", shms_writer_begin(w, &o, &place, &u));
    detach(0);
    SAYS(SHMS_EINVAL, "group must be 0, or 1 + a number below n_groups, 1, not 9", shms_writer_assign_group(w, ref, 9));
    SAYS(SHMS_EINVAL, "rank must be below n_readers, 1, not 9", shms_writer_retire(w, 9));
    SAYS(SHMS_EINVAL, "unlink must be", shms_writer_close(w, 2));
    SAYS(SHMS_EINVAL, "at most 12, not 13", shms_tensor_meta(payload, "int8", (uint64_t[13]){0}, 13));
    SAYS(SHMS_EINVAL, "not double", shms_tensor_meta(payload, "double", NULL, 0));
    SAYS(SHMS_EINVAL, "65536 bytes, not 0", shms_writer_claim(w, "", 0, &claim));

    pthread_t other;
    void *there = payload;
    CHECK_EQ(0, pthread_create(&other, NULL, text_of_this_thread, NULL));
    CHECK_EQ(0, pthread_join(other, &there));
    CHECK(there == NULL && *shms_last_error());
    end();
}

TEST(a_code_has_a_text_and_the_library_a_version) {
    CHECK(!strcmp(SHMSTORE_VERSION, shms_version()));
    CHECK(!strcmp("done", shms_strerror(SHMS_OK)));
    CHECK(strcmp(shms_strerror(SHMS_EMAP), shms_strerror(SHMS_ENOARENA)));
    CHECK(!strcmp(shms_strerror(1), shms_strerror(SHMS_EMAP - 1)) &&
          !strcmp(shms_strerror(1), shms_strerror(INT32_MIN)));
}

TEST(what_only_a_later_version_knows_is_refused) {
    uint64_t larger[7] = {0};
    CHECK(shms_is_unused(larger));
    larger[6] = 1;
    CHECK(!shms_is_unused(larger));
    begin();
    shms_options options = {.capacity = 1024, .n_readers = 1};
    for (size_t i = 0; i < sizeof options.reserved / sizeof *options.reserved; i++) {
        shms_writer *other = NULL;
        shms_reader *reader = NULL;
        shms_expected expected = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID};
        shms_object o = object_of("k", 1);
        options.reserved[i] = expected.reserved[i] = o.reserved[i] = 1;
        CHECK_EQ(SHMS_EINVAL, shms_writer_create(&other, store_name("later"), &options));
        CHECK_EQ(SHMS_EINVAL, shms_writer_recover(&other, name, &expected));
        CHECK_EQ(SHMS_EINVAL, shms_reader_attach(&reader, name, 0, &expected));
        CHECK_EQ(SHMS_EINVAL, shms_writer_put(w, &o, payload, ref));
        CHECK_EQ(SHMS_EINVAL, shms_writer_begin(w, &o, &place, &u));
        options.reserved[i] = 0;
    }
    end();
}

TEST(a_null_is_refused_and_what_a_failed_call_returns_is_null) {
    begin();
    const shms_options out_of_range = {.capacity = 0};
    shms_options right = {.capacity = 1024, .n_readers = 1};
    void *garbage = payload;
    shms_writer *made = garbage;
    CHECK(shms_writer_create(&made, store_name("other"), NULL) == SHMS_EINVAL && !made);
    made = garbage;
    CHECK(shms_writer_create(&made, name, &out_of_range) == SHMS_EINVAL && !made);
    made = garbage;
    CHECK(shms_writer_create(&made, NULL, &right) == SHMS_EINVAL && !made);
    made = garbage;
    CHECK(shms_writer_recover(&made, NULL, NULL) == SHMS_EINVAL && !made);
    made = garbage;
    CHECK(shms_writer_join(&made, name, SHMS_ANY_ARENA, NULL) == SHMS_EWRITERACTIVE && !made);
    CHECK_EQ(0, shms_space_needed(NULL, "/dev/shm"));

    shms_reader *reader = garbage;
    CHECK(shms_reader_attach(&reader, name, SHMS_MAX_READERS, NULL) == SHMS_EINVAL && !reader);
    reader = garbage;
    CHECK(shms_reader_attach(&reader, NULL, 0, NULL) == SHMS_EINVAL && !reader);
    shms_view *v = garbage;
    memset(ref, 0, sizeof ref);
    CHECK(shms_reader_acquire(readers[0], ref, &v) == SHMS_ESTALE && !v);
    v = garbage;
    CHECK(shms_reader_find(readers[0], "k", 1, ref, &v) == SHMS_ENOTFOUND && !v);

    shms_object no_key = object_of("k", 1), no_meta = no_key, empty = no_key;
    no_key.key = no_meta.meta = NULL;
    empty.key_len = 0;
    const shms_object *refused[] = {NULL, &no_key, &no_meta, &empty};
    for (int i = 0; i < 4; i++) {
        u = garbage;
        place = garbage;
        CHECK(shms_writer_begin(w, refused[i], &place, &u) == SHMS_EINVAL && !u && !place);
        CHECK_EQ(SHMS_EINVAL, shms_writer_put(w, refused[i], payload, ref));
    }
    CHECK_EQ(SHMS_EINVAL, shms_uncommitted_commit(NULL, ref));
    CHECK_EQ(0, shms_writer_count(w));
    end();
}

TEST(a_null_reference_or_place_for_a_result_is_refused) {
    begin();
    const shms_options options = {.capacity = 1024, .n_readers = 1};
    shms_object o = object_of("k", 1);
    shms_view *v;
    CHECK_EQ(SHMS_EINVAL, shms_writer_create(NULL, store_name("other"), &options));
    CHECK_EQ(SHMS_EINVAL, shms_writer_create(NULL, store_name("other"), NULL));
    CHECK_EQ(SHMS_EINVAL, shms_writer_recover(NULL, name, NULL));
    CHECK_EQ(SHMS_EINVAL, shms_writer_join(NULL, name, SHMS_ANY_ARENA, NULL));
    CHECK_EQ(SHMS_EINVAL, shms_reader_attach(NULL, name, 0, NULL));
    CHECK_EQ(SHMS_EINVAL, shms_writer_put(w, &o, payload, NULL));
    CHECK_EQ(SHMS_EINVAL, shms_writer_begin(w, &o, NULL, &u));
    CHECK_EQ(SHMS_EINVAL, shms_writer_begin(w, &o, &place, NULL));
    CHECK_EQ(SHMS_OK, shms_writer_begin(w, &o, &place, &u));
    CHECK_EQ(SHMS_EINVAL, shms_uncommitted_commit(u, NULL));
    CHECK_EQ(0, shms_writer_count(w));
    CHECK_EQ(SHMS_OK, shms_writer_put(w, &o, payload, ref));
    CHECK_EQ(SHMS_EINVAL, shms_writer_hit(w, "k", 1, NULL));
    CHECK_EQ(SHMS_EINVAL, shms_writer_cancel(w, NULL));
    CHECK_EQ(SHMS_EINVAL, shms_writer_assign_group(w, NULL, 0));
    CHECK(shms_reader_acquire(readers[0], NULL, &v) == SHMS_EINVAL && !v);
    CHECK(shms_reader_acquire_private(readers[0], NULL, &v) == SHMS_EINVAL && !v);
    CHECK(shms_reader_find(readers[0], "k", 1, NULL, &v) == SHMS_EINVAL && !v);
    CHECK_EQ(SHMS_EINVAL, shms_reader_acquire(readers[0], ref, NULL));
    CHECK_EQ(SHMS_EINVAL, shms_reader_acquire_private(readers[0], ref, NULL));
    CHECK_EQ(SHMS_EINVAL, shms_reader_find(readers[0], "k", 1, ref, NULL));
    CHECK_EQ(SHMS_EINVAL, shms_reader_validate(readers[0], NULL));
    CHECK_EQ(SHMS_EINVAL, shms_reader_release(readers[0], NULL));
    CHECK_EQ(1, shms_reader_release(readers[0], ref));
    end();
}

TEST(a_key_that_is_null_or_of_no_valid_length_is_refused_before_a_byte_is_read) {
    begin();
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *at = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    memset(at, 'k', page);
    CHECK_EQ(0, mprotect(at + page, page, PROT_NONE));
    const struct {
        const char *key;
        uint32_t len;
    } wrong[] = {{NULL, 0}, {NULL, 1}, {"k", 0}, {at, SHMS_MAX_KEY + 1}, {at, UINT32_MAX}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const char *key = wrong[i].key;
        uint32_t len = wrong[i].len;
        shms_object o = {.key = key, .key_len = len, .payload_size = 1};
        shms_view *v = (void *)payload;
        CHECK_EQ(SHMS_EINVAL, shms_writer_put(w, &o, payload, ref));
        CHECK_EQ(SHMS_EINVAL, shms_writer_begin(w, &o, &place, &u));
        CHECK_EQ(SHMS_EINVAL, shms_writer_hit(w, key, len, ref));
        CHECK_EQ(SHMS_EINVAL, shms_writer_has(w, key, len));
        CHECK_EQ(SHMS_EINVAL, shms_writer_touch(w, key, len));
        CHECK_EQ(SHMS_EINVAL, shms_writer_delete(w, key, len));
        CHECK_EQ(SHMS_EINVAL, shms_reader_has(readers[0], key, len));
        CHECK(shms_reader_find(readers[0], key, len, ref, &v) == SHMS_EINVAL && !v);
    }
    munmap(at, 2 * page);
    shms_object o = object_of("k", 1);
    CHECK_EQ(SHMS_OK, shms_writer_put(w, &o, payload, ref));
    CHECK_EQ(SHMS_EINVAL, shms_writer_clear(w, NULL, 1));
    CHECK_EQ(1, shms_writer_count(w));
    CHECK_EQ(SHMS_OK, shms_writer_clear(w, NULL, 0));
    CHECK_EQ(1, shms_reader_release(readers[0], ref));
    end();
}

TEST(a_key_is_utf_8_also_after_its_namespace) {
    static const char *const keys[] = {"k",
                                       "\x7f",
                                       "\xc2\x80",
                                       "\xe0\xa0\x80",
                                       "\xed\x9f\xbf",
                                       "\xee\x80\x80",
                                       "\xf0\x90\x80\x80",
                                       "\xf4\x8f\xbf\xbf",
                                       "\xff\1nk",
                                       "\xff\2\xc3\xa9\xc3\xa9"};
    static const char *const others[] = {"\x80",
                                         "\xbf\xbf",
                                         "\xc0\x80",
                                         "\xc1\xbf",
                                         "\xc3",
                                         "\xc3k",
                                         "\xe0\x9f\xbf",
                                         "\xed\xa0\x80",
                                         "\xed\xbf\xbf",
                                         "\xf0\x8f\xbf\xbf",
                                         "\xf4\x90\x80\x80",
                                         "\xf8\x88\x80\x80\x80",
                                         "k\xff",
                                         "\xff",
                                         "\xff\1n",
                                         "\xff\2nk",
                                         "\xff\1\xffk",
                                         "\xff\1n\xff"};
    begin();
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        shms_object o = object_of(keys[i], 1);
        CHECK_EQ(SHMS_OK, shms_writer_put(w, &o, payload, ref));
        CHECK_EQ(1, shms_reader_release(readers[0], ref));
    }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        shms_object o = object_of(others[i], 1);
        CHECK_EQ(SHMS_EINVAL, shms_writer_put(w, &o, payload, ref));
        CHECK_EQ(SHMS_EINVAL, shms_writer_begin(w, &o, &place, &u));
    }
    shms_object cut = object_of("\xc3\xa9", 1), unnamed = object_of("\xff", 1);
    cut.key_len = 1;
    unnamed.key = "\xff\0kk";
    unnamed.key_len = 4;
    CHECK_EQ(SHMS_EINVAL, shms_writer_put(w, &cut, payload, ref));
    CHECK_EQ(SHMS_EINVAL, shms_writer_put(w, &unnamed, payload, ref));
    end();
}

TEST(a_tensor_that_cannot_be_described_is_refused) {
    static const char *const others[] = {NULL,  "",   "<",   "float33", "floa", "float32 ",
                                         "<f3", "f4", "=f4", "<M8[ns]", "|O"};
    char meta[SHMS_TENSOR_META];
    uint64_t shape[SHMS_MAX_DIMS + 1];
    memset(shape, 0xff, sizeof shape);
    int longest = shms_tensor_meta(meta, "float4_e2m1fn_x2", shape, SHMS_MAX_DIMS);
    CHECK(0 < longest && longest <= SHMS_TENSOR_META);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        CHECK_EQ(SHMS_EINVAL, shms_tensor_meta(meta, others[i], shape, 1));
    static const char array[] = "\x98\xc7\0\4\xa3<f4\0\xcc\xff\xcd\xff\xff\xce\xff\xff\xff\xff\xcf\0\0\0\1\0\0\0\0\x7f",
                      scalar[] = "\x93\xc7\0\3\xa4"
                                 "bool\0";
    const uint64_t sizes[] = {UINT8_MAX, UINT16_MAX, UINT32_MAX, UINT64_C(1) << 32, 127};
    CHECK_EQ(sizeof array - 1, shms_tensor_meta(meta, "<f4", sizes, 5));
    CHECK(!memcmp(array, meta, sizeof array - 1));
    CHECK_EQ(sizeof scalar - 1, shms_tensor_meta(meta, "bool", NULL, 0));
    CHECK(!memcmp(scalar, meta, sizeof scalar - 1));
    CHECK_EQ(SHMS_EINVAL, shms_tensor_meta(meta, "float32", shape, SHMS_MAX_DIMS + 1));
    CHECK_EQ(SHMS_EINVAL, shms_tensor_meta(meta, "float32", NULL, 1));
    CHECK_EQ(SHMS_EINVAL, shms_tensor_meta(NULL, "float32", shape, 1));
}
