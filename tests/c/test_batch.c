/* test_batch.c - what a batch has done is undone as a whole, once, and only where it is still there. */
#include <dlfcn.h>

#include "fixture.h"

static void begin(void) {
    open_store("batch", (shms_options){.capacity = 8192, .n_readers = 1, .max_objects = 16}, 0);
    CHECK_EQ(SHMS_OK, put_marked(w, "old", 64, 1, NULL));
}

static shms_stats stats(void) {
    shms_stats s;
    CHECK_EQ(SHMS_OK, shms_writer_stats(w, &s));
    return s;
}

static int put(const char *key) {
    return shms_batch_put(w, &b, &(shms_put){.key = key, .key_len = (uint32_t)strlen(key), .meta = "m", .meta_len = 1});
}

static int begin_new(uint64_t size, bool leased) {
    return shms_batch_begin(w, &b, &(shms_put){.key = "new", .key_len = 3, .payload_size = size, .unleased = !leased});
}

static void only_the_old_object_is_left(void) {
    shms_stats s = stats();
    CHECK(s.objects == 1 && s.open_leases == 0 && s.used_bytes == 128);
    CHECK_EQ(1, shms_writer_count(w));
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
}

TEST(everything_is_undone_and_again_is_nothing) {
    begin();
    for (char c = 'a'; c < 'a' + 9; c++)
        CHECK_EQ(SHMS_OK, put((char[]){c, 0}));
    for (int i = 0; i < 9; i++)
        CHECK_EQ(SHMS_OK, shms_batch_hit(w, &b, i % 2 ? "a" : "old", i % 2 ? 1 : 3, 0, 0));
    CHECK_EQ(18, stats().open_leases);
    shms_batch_item items[18];
    memcpy(items, b.items, sizeof items);
    shms_batch_undo(w, &b);
    only_the_old_object_is_left();
    shms_batch_undo(w, &b);
    only_the_old_object_is_left();
    CHECK_EQ(SHMS_OK, put_marked(w, "other", 0, 1, NULL)); /* in the slot and the entry of one that is undone */
    CHECK_EQ(SHMS_OK, verb_hit(w, "other", 5, ref));
    shms_stats before = stats(), after;
    b.keep = 0; /* as if the first undoing had not been noted */
    memcpy(b.items, items, sizeof items);
    b.n_items = 18;
    shms_batch_undo(w, &b);
    after = stats();
    CHECK(!memcmp(&before, &after, sizeof before));
    CHECK_EQ(11, after.counters.puts); /* old, nine that were undone, and other */
    CHECK_EQ(9, after.counters.deletes);
    end();
}

TEST(what_was_deleted_meanwhile_is_deleted_once) {
    begin();
    CHECK_EQ(SHMS_OK, put("a"));
    CHECK_EQ(SHMS_OK, verb_hit(w, "a", 1, ref));
    CHECK_EQ(1, shms_writer_delete(w, "a", 1));
    shms_batch_undo(w, &b);
    CHECK(stats().counters.deletes == 1 && stats().objects == 2); /* the other lease holds it */
    CHECK_EQ(1, shms_writer_cancel(w, ref));
    CHECK_EQ(SHMS_OK, shms_writer_clear(w, "a", 1));
    only_the_old_object_is_left();
    end();
}

TEST(what_is_kept_stays_and_the_batch_begins_again) {
    begin();
    CHECK_EQ(SHMS_OK, put("a"));
    b.keep = 1;
    shms_batch_undo(w, &b);
    CHECK(stats().objects == 2 && stats().open_leases == 1);
    CHECK_EQ(SHMS_OK, put("b"));
    CHECK_EQ(0, b.keep);
    shms_batch_drop(w, &b);
    CHECK(stats().objects == 2 && stats().open_leases == 1 && shms_writer_has(w, "a", 1) == 1);
    end();
}

TEST(a_pending_put_is_undone_in_each_of_its_states) {
    for (int leased = 0; leased < 2; leased++)
        for (int committed = 0; committed < 2; committed++) {
            begin();
            CHECK_EQ(SHMS_OK, begin_new(64, leased));
            if (committed)
                CHECK_EQ(SHMS_OK, shms_batch_commit(w, &b));
            CHECK_EQ((uint64_t)(leased && committed), stats().open_leases);
            shms_batch_undo(w, &b);
            only_the_old_object_is_left();
            end();
        }
}

TEST(a_pending_put_of_a_closed_writer_is_ended_and_no_more) {
    begin();
    CHECK_EQ(SHMS_OK, put("a"));
    CHECK_EQ(SHMS_OK, begin_new(64, true));
    CHECK_EQ(SHMS_OK, shms_writer_close(w, 0));
    shms_batch_undo(w, &b);
    CHECK_EQ(0, w->unfinished);
    shms_writer *successor;
    CHECK_EQ(SHMS_OK, shms_writer_recover(&successor, name, NULL));
    CHECK_EQ(2, shms_writer_count(successor));
    shms_writer_free(w);
    w = successor;
    end();
}

/* The library's calls come here: what another thread does as soon as the mutex is free. */
static void (*meanwhile)(void);
int pthread_mutex_unlock(pthread_mutex_t *mutex) {
    static int (*real)(pthread_mutex_t *);
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "pthread_mutex_unlock");
    int rc = real(mutex);
    void (*does)(void) = meanwhile;
    if (does && mutex == &w->mutex) {
        meanwhile = NULL;
        does();
    }
    return rc;
}

static void undo(void) { shms_batch_undo(w, &b); }

TEST(a_pending_put_that_ends_while_its_checksum_is_computed_is_not_committed) {
    open_store("ends", (shms_options){.capacity = 1024, .n_readers = 1, .flags = SHMS_CHECKSUMS}, 0);
    CHECK_EQ(SHMS_OK, begin_new(64, true));
    meanwhile = undo;
    CHECK_EQ(SHMS_EINVAL, shms_batch_commit(w, &b));
    CHECK_EQ(0, shms_writer_count(w));
    end();
}

static void unprotect_another(void) { CHECK_EQ(SHMS_OK, verb_unprotect(w, "none", 4)); }
static void let_another_in(const char *label) {
    if (strcmp(label, "W2"))
        return;
    shms_step_hook = NULL;
    meanwhile = unprotect_another; /* which frees the rest */
    w->waiting = 1;
}

TEST(deleted_objects_are_freed_once_when_two_calls_end_protections) {
    enum { KEYS = 300, PACKED = 4 + 3 }; /* more than are visited between two yields */
    static uint8_t keys[KEYS * PACKED];
    open_store("keys", (shms_options){.capacity = KEYS * 128, .n_readers = 1, .max_objects = KEYS}, 0);
    for (int i = 0; i < KEYS; i++) {
        memcpy(keys + i * PACKED, "\3\0\0", 4);
        memcpy(keys + i * PACKED + 4, key_of("", 100 + (uint64_t)i), 3);
        CHECK_EQ(SHMS_OK, put_marked(w, key_of("", 100 + (uint64_t)i), 1, 1, NULL));
    }
    CHECK_EQ(SHMS_OK, shms_batch_protect(w, &b, keys, sizeof keys));
    CHECK_EQ(SHMS_OK, shms_writer_clear(w, "", 0));
    CHECK_EQ(KEYS, w->n_deleted_but_protected);
    shms_step_hook = let_another_in;
    shms_batch_undo(w, &b);
    CHECK(!meanwhile && w->ring.count == 0 && w->n_deleted_but_protected == 0);
    w->waiting = 0;
    end();
}

TEST(a_refusal_is_in_the_batch_that_met_it) {
    begin();
    CHECK_EQ(SHMS_OK, begin_new(64, true));
    CHECK_EQ(SHMS_EFULL, shms_batch_begin(w, &b, &(shms_put){.key = "large", .key_len = 5, .payload_size = 8000}));
    CHECK_EQ(SHMS_OK, shms_writer_holders(w, &b.refusal));
    CHECK(b.refusal.capacity == 8192 && b.refusal.used_bytes == 256 && b.refusal.kept == 128);
    CHECK(b.refusal.awaited[0] == 1 && b.refusal.reclaimable == 128);
    shms_batch_undo(w, &b);
    only_the_old_object_is_left();
    end();
}

TEST(keys_are_protected_until_the_undoing) {
    begin();
    CHECK_EQ(SHMS_OK, shms_batch_protect(w, &b, (const uint8_t *)"\3\0\0\0old\3\0\0\0new\3\0\0\0old", 21));
    CHECK_EQ(1, shms_writer_delete(w, "old", 3));
    CHECK_EQ(1, stats().objects); /* still */
    CHECK_EQ(SHMS_EFULL, put_marked(w, "large", 8100, 1, NULL));
    shms_batch_undo(w, &b);
    CHECK_EQ(0, stats().objects);
    CHECK_EQ(0, w->n_kept);
    CHECK_EQ(SHMS_OK, put_marked(w, "large", 8100, 1, NULL));
    end();
}
