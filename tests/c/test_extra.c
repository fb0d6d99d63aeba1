/* test_extra.c - the extra bytes of an object are the writer's own, and survive it. */
#include "inspect/inspect.h"
#include "fixture.h"

#define LARGE 200000 /* more than is copied at once */

static char extra[SHMS_MAX_EXTRA], payload[100];

static void begin(uint64_t capacity) {
    open_store("extra", (shms_options){.capacity = capacity, .n_readers = 1, .flags = SHMS_CHECKSUMS}, 1);
    fill(extra, LARGE, 1);
    memset(payload, 'p', sizeof payload);
}

static int put(const char *key, uint64_t n_payload, uint32_t n_extra) {
    shms_piece piece = {0, n_payload, (uint64_t)(uintptr_t)payload};
    return shms_batch_put_lent(w, &b, &(shms_put){0}, key, (uint32_t)strlen(key), "meta", 4, extra, n_extra, n_payload,
                               &piece, 1);
}

static bool has_extra(const uint8_t *ref, uint64_t n) {
    static uint8_t out[LARGE];
    uint64_t size = sizeof out;
    memset(out, 0, sizeof out);
    return shms_writer_extra(w, ref, out, &size) == SHMS_OK && size == n && memcmp(out, extra, n) == 0 &&
           (n == LARGE || out[n] == 0);
}

TEST(readers_do_not_get_them) {
    begin(1 << 20);
    for (uint32_t n_payload = 0; n_payload <= 100; n_payload += 50)
        for (uint32_t n_extra = 0; n_extra < 130; n_extra += 43) {
            char key[20];
            snprintf(key, sizeof key, "k%u-%u", n_payload, n_extra);
            CHECK_EQ(SHMS_OK, put(key, n_payload, n_extra));
            shms_view *v = view_of(readers[0], b.ref);
            CHECK(v && v->payload_size == n_payload && memcmp(v->payload, payload, n_payload) == 0);
            CHECK(v->meta_len == 4 && memcmp(v->meta, "meta", 4) == 0);
            shms_view_release(v);
            CHECK(has_extra(b.ref, n_extra));
            CHECK_EQ(n_extra ? 2 : 1, shms_writer_has(w, key, (uint32_t)strlen(key)));
        }
    end();
}

static int equals(const char *meta, uint64_t size, uint64_t offset, const char *piece, uint64_t n) {
    shms_piece of = {offset, n, (uint64_t)(uintptr_t)piece};
    return shms_writer_equals(w, b.ref, meta, 4, size, &of, n != 0);
}

TEST(an_object_equals_what_was_put_and_nothing_else) {
    static char large[LARGE];
    begin(1 << 20);
    CHECK_EQ(SHMS_OK, put("k", 100, 43));
    CHECK_EQ(1, equals("meta", 100, 0, payload, 100));
    CHECK_EQ(1, equals("meta", 100, 30, payload, 70));
    CHECK_EQ(0, equals("mete", 100, 0, payload, 100));
    CHECK_EQ(0, equals("meta", 99, 0, payload, 99));
    CHECK_EQ(SHMS_EINVAL, equals("meta", 100, 1, payload, 100));
    shms_piece all = {0, LARGE, (uint64_t)(uintptr_t)extra};
    CHECK_EQ(SHMS_OK, verb_put(w, "l", 1, "meta", 4, LARGE, &all, 1, b.ref));
    w->waiting = 1; /* for no turn, so that it yields on its way */
    for (uint32_t i = 0, at = 0; i < 20; i++, at = (at + 9973) % LARGE) {
        memcpy(large, extra, LARGE);
        CHECK_EQ(1, equals("meta", LARGE, 0, large, LARGE));
        large[at] ^= 1;
        CHECK_EQ(0, equals("meta", LARGE, 0, large, LARGE));
    }
    w->waiting = 0;
    CHECK_EQ(1, shms_writer_delete(w, "l", 1));
    CHECK_EQ(1, equals("meta", LARGE, 0, extra, LARGE)); /* whoever has leased it has it */
    CHECK_EQ(1, shms_writer_cancel(w, b.ref));
    CHECK_EQ(SHMS_OK, shms_writer_clear(w, "", 0));
    CHECK_EQ(0, equals("meta", LARGE, 0, extra, LARGE));
    end();
}

TEST(they_survive_the_writer) {
    begin(1 << 20);
    CHECK_EQ(SHMS_OK, put("k", 100, LARGE));
    w->waiting = 1; /* for no turn, so that it yields on its way */
    CHECK(has_extra(b.ref, LARGE));
    w->waiting = 0;
    b.keep = 1;
    shms_batch_drop(w, &b);
    shms_writer_free(w);
    CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
    CHECK_EQ(SHMS_OK, shms_batch_hit(w, &b, "k", 1, 0, 0));
    CHECK(has_extra(b.ref, LARGE));
    shms_inspector *i;
    shms_slot_record s;
    shms_finding finding;
    uint64_t at = 0;
    CHECK_EQ(SHMS_OK, shms_inspector_open(&i, name, SHMS_OWN_UID));
    CHECK_EQ(1, shms_inspector_slots(i, &at, &s, 1));
    CHECK_EQ(LARGE, s.extra_len);
    CHECK_EQ(1, shms_inspector_check(i, s.slot, s.id, &finding));
    shms_inspector_free(i);
    end();
}

TEST(a_writer_looks_only_at_what_it_keeps) {
    shms_stored s;
    begin(1 << 20);
    CHECK_EQ(SHMS_OK, put("k", 50, 43));
    CHECK_EQ(SHMS_EINVAL, shms_writer_look(w, "", 0, &s));
    CHECK_EQ(SHMS_ENOTFOUND, shms_writer_look(w, "other", 5, &s));
    CHECK_EQ(SHMS_ENOTFOUND, shms_writer_look(w, "k", 1, &s)); /* it may go at any time */
    CHECK_EQ(SHMS_OK, verb_protect(w, "k", 1));
    CHECK_EQ(SHMS_OK, shms_writer_look(w, "k", 1, &s));
    CHECK(s.meta_len == 4 && memcmp(s.meta, "meta", 4) == 0);
    CHECK(s.payload_size == 50 && memcmp(s.payload, payload, 50) == 0);
    CHECK(s.extra_len == 43 && memcmp(s.extra, extra, 43) == 0);
    CHECK_EQ(SHMS_OK, verb_unprotect(w, "k", 1));
    end();
}

TEST(they_are_gone_with_the_object) {
    uint8_t out[1];
    uint64_t size = 0;
    begin(1024);
    CHECK_EQ(SHMS_OK, put("k", 100, 100));
    memcpy(ref, b.ref, sizeof ref);
    CHECK_EQ(SHMS_OK, shms_writer_extra(w, ref, out, &size)); /* no room: only the size */
    CHECK_EQ(100, size);
    CHECK_EQ(1, shms_writer_cancel(w, ref));
    CHECK_EQ(SHMS_OK, put("other", 100, 700));
    CHECK_EQ(SHMS_ESTALE, shms_writer_extra(w, ref, out, &size));
    ref[0] ^= 1; /* of another store */
    CHECK_EQ(SHMS_ESTALE, shms_writer_extra(w, ref, out, &size));
    CHECK_EQ(SHMS_EINVAL, shms_writer_extra(w, NULL, out, &size));
    ref[0] ^= 1;
    ref[39] ^= 1; /* a forged tag */
    CHECK_EQ(SHMS_ESTALE, shms_writer_extra(w, ref, out, &size));
    CHECK_EQ(SHMS_ETOOLARGE, put("too large", 100, 1024));
    end();
    begin(UINT64_C(32) << 20);
    CHECK_EQ(SHMS_ETOOLARGE, put("too large", 100, SHMS_MAX_EXTRA + 1));
    CHECK_EQ(SHMS_OK, put("most", 100, SHMS_MAX_EXTRA));
    end();
}

TEST(more_than_the_object_has_is_damage) {
    begin(1024);
    CHECK_EQ(SHMS_OK, put("k", 100, 10));
    shms_slot *s = shms_writer_slot(w, 0);
    uint64_t flags = shms_get(&s->flags);
    shms_set(&s->flags, flags + ((uint64_t)101 << SHMS_SLOT_EXTRA_SHIFT));
    CHECK_EQ(SHMS_ECORRUPT, shms_writer_valid(w));
    errno = 0;
    CHECK(view_of(readers[0], b.ref) == NULL && errno == -SHMS_ECORRUPT);
    shms_set(&s->flags, flags);
    end();
}
