/* test_c_calls.c - what shmstore.h offers to programs in C alone. */
#include "fixture.h"

static char payload[256], *place;
static shms_unborn *u;

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
    CHECK_EQ(SHMS_OK, shms_unborn_commit(u, ref));
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
        shms_unborn_abort(u);
        shms_unborn_abort(NULL);
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
    begin();
    shms_object o = object_of("k", sizeof payload);
    CHECK_EQ(SHMS_OK, shms_writer_begin(w, &o, &place, &u));
    CHECK_EQ(SHMS_OK, shms_writer_close(w, 0));
    CHECK_EQ(SHMS_ECLOSED, shms_unborn_commit(u, ref));
    shms_writer_free(w);
    CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
    CHECK(!has_key(w, "k"));
    end();
}

TEST(what_only_a_later_version_knows_is_refused) {
    begin();
    for (int i = 0; i < 4; i++) {
        shms_writer *other = NULL;
        shms_reader *reader = NULL;
        shms_options options = {.capacity = 1024, .n_readers = 1};
        shms_expected expected = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID};
        shms_object o = object_of("k", 1);
        options.reserved[i] = expected.reserved[i] = o.reserved[i] = 1;
        CHECK_EQ(SHMS_EINVAL, shms_writer_create(&other, store_name("later"), &options));
        CHECK_EQ(SHMS_EINVAL, shms_writer_recover(&other, name, &expected));
        CHECK_EQ(SHMS_EINVAL, shms_reader_attach(&reader, name, 0, &expected));
        CHECK_EQ(SHMS_EINVAL, shms_writer_put(w, &o, payload, ref));
        CHECK_EQ(SHMS_EINVAL, shms_writer_begin(w, &o, &place, &u));
    }
    end();
}

TEST(a_tensor_that_cannot_be_described_is_refused) {
    char meta[SHMS_TENSOR_META];
    uint64_t shape[SHMS_MAX_DIMS + 1];
    memset(shape, 0xff, sizeof shape);
    const char *longest = "a_name_of_32_bytes_of_an_element";
    CHECK(shms_tensor_meta(meta, longest + 1, shape, SHMS_MAX_DIMS) <= SHMS_TENSOR_META);
    CHECK_EQ(SHMS_EINVAL, shms_tensor_meta(meta, longest, shape, 1));
    CHECK_EQ(SHMS_EINVAL, shms_tensor_meta(meta, "", shape, 1));
    CHECK_EQ(SHMS_EINVAL, shms_tensor_meta(meta, "float32", shape, SHMS_MAX_DIMS + 1));
}
