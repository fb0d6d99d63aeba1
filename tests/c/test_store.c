/* test_store.c - the public API: what each call returns, who may have a store, and what outlives a handle. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "fixture.h"

static void begin(uint32_t attached) {
    open_store("store", (shms_options){.capacity = 4096, .n_readers = 1, .max_objects = 4}, attached);
}

static shms_writer *make(const char *name, uint64_t capacity, uint32_t n_readers, uint32_t max_objects) {
    shms_options o = {.capacity = capacity, .n_readers = n_readers, .max_objects = max_objects};
    shms_writer *w = NULL;
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, &o));
    return w;
}

static shms_reader *attached_to(const char *name, uint32_t rank) {
    shms_reader *r = NULL;
    CHECK_EQ(SHMS_OK, shms_reader_attach(&r, name, rank, NULL));
    return r;
}

static shms_stats stats_of(shms_writer *w) {
    shms_stats s;
    CHECK_EQ(SHMS_OK, shms_writer_stats(w, &s));
    return s;
}

TEST(names_that_are_not_file_names_are_refused) {
    char longest[SHMS_MAX_NAME + 2];
    memset(longest, 'x', sizeof longest);
    longest[SHMS_MAX_NAME + 1] = 0;
    const char *bad[] = {"", "a/b", "./a", "/", ".", "..", "/dev/shm/..", longest};
    shms_options o = {.capacity = 4096, .n_readers = 1};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        shms_writer *w;
        shms_reader *r;
        CHECK_EQ(SHMS_EINVAL, shms_writer_create(&w, bad[i], &o));
        CHECK_EQ(SHMS_EINVAL, shms_writer_recover(&w, bad[i], NULL));
        CHECK_EQ(SHMS_EINVAL, shms_reader_attach(&r, bad[i], 0, NULL));
    }
    longest[SHMS_MAX_NAME] = 0;
    const char *unique = store_name("longest");
    memcpy(longest, unique, strlen(unique));
    shms_writer *w = make(longest, 4096, 1, 0);
    end_writer(w);
}

TEST(a_store_has_one_writer_and_each_rank_one_reader) {
    const char *name = store_name("one");
    shms_options o = {.capacity = 4096, .n_readers = 2};
    shms_writer *w2;
    shms_reader *r2;
    CHECK_EQ(SHMS_ENOSTORE, shms_writer_recover(&w2, name, NULL));
    CHECK_EQ(SHMS_ENOSTORE, shms_reader_attach(&r2, name, 0, NULL));
    shms_writer *w = make(name, 4096, 2, 0);
    CHECK_EQ(SHMS_ESTOREEXISTS, shms_writer_create(&w2, name, &o));
    CHECK_EQ(SHMS_EWRITERACTIVE, shms_writer_recover(&w2, name, NULL));
    shms_reader *r = attached_to(name, 0);
    CHECK_EQ(SHMS_ERANKINUSE, shms_reader_attach(&r2, name, 0, NULL));
    CHECK_EQ(SHMS_EINVAL, shms_reader_attach(&r2, name, 2, NULL));
    CHECK_EQ(SHMS_EINVAL, shms_reader_attach(&r2, name, SHMS_MAX_READERS, NULL));
    CHECK_EQ(shms_reader_store(r), shms_writer_options(w, &o, (uint64_t[2]){0}));
    shms_reader *other = attached_to(name, 1);
    shms_reader_free(other);
    shms_reader_free(r);
    shms_reader_free(attached_to(name, 0));
    CHECK_EQ(SHMS_EINVAL, shms_writer_close(w, 2));
    CHECK_EQ(SHMS_EINVAL, shms_writer_close(w, SHMS_AS_IT_WAS - 1));
    CHECK_EQ(SHMS_OK, shms_writer_close(w, 0));
    CHECK_EQ(SHMS_OK, shms_writer_close(w, 1)); /* idempotent, without a second unlink */
    CHECK_EQ(SHMS_OK, shms_writer_recover(&w2, name, NULL));
    shms_writer_free(w);
    end_writer(w2);
    CHECK_EQ(SHMS_ENOSTORE, shms_writer_recover(&w2, name, NULL));
}

TEST(unlinking_never_removes_a_namesake) {
    const char *name = store_name("namesake");
    shms_writer *old = make(name, 4096, 1, 0), *heir;
    char path[300];
    snprintf(path, sizeof path, "/%s", name);
    CHECK(shm_unlink(path) == 0);
    heir = make(name, 4096, 1, 0);
    end_writer(old);
    shms_reader_free(attached_to(name, 0));
    end_writer(heir);
}

TEST(a_get_returns_what_was_put_and_a_failed_call_changes_nothing) {
    const char *name = store_name("put");
    shms_options o = {.capacity = 8192, .max_object_size = 4000, .n_readers = 1, .max_objects = 8};
    shms_writer *w;
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, &o));
    shms_reader *r = attached_to(name, 0);
    char bytes[300];
    fill(bytes, sizeof bytes, 3);
    shms_piece pieces[] = {{100, 200, (uintptr_t)bytes + 100}, {0, 100, (uintptr_t)bytes}};
    CHECK_EQ(SHMS_OK, verb_put(w, "key", 3, "meta", 4, 300, pieces, 2, ref));
    shms_view *v = view_of(r, ref);
    CHECK(v && v->key_len == 3 && !memcmp(v->key, "key", 3) && v->meta_len == 4 && !memcmp(v->meta, "meta", 4));
    CHECK(v->payload_size == 300 && (uintptr_t)v->payload % SHMS_ALIGN == 0 && filled(v->payload, 300, 3));
    shms_view_drop(&v);

    shms_stats before = stats_of(w);
    shms_pending t;
    CHECK_EQ(SHMS_EEXISTS, put_marked(w, "key", 10, 1, ref));
    CHECK_EQ(SHMS_ETOOLARGE, put_marked(w, "large", 4000, 1, ref));
    CHECK_EQ(SHMS_ETOOLARGE, put_marked(w, "large", UINT64_MAX, 1, ref));
    CHECK_EQ(SHMS_ETOOLARGE, verb_begin(w, "k", 1, "m", SHMS_MAX_META, 0, &t));
    CHECK_EQ(SHMS_ETOOLARGE, verb_begin(w, "k", 1, "m", SHMS_MAX_META + 1, 0, &t));
    CHECK_EQ(SHMS_EINVAL, verb_begin(w, "k", 0, NULL, 0, 1, &t));
    CHECK_EQ(SHMS_EINVAL, verb_begin(w, NULL, 1, NULL, 0, 1, &t));
    CHECK_EQ(SHMS_EINVAL, verb_begin(w, "k", SHMS_MAX_KEY + 1, NULL, 0, 1, &t));
    pieces[0].size = 201;
    CHECK_EQ(SHMS_EINVAL, verb_put(w, "other", 5, NULL, 0, 300, pieces, 2, ref));
    pieces[0] = (shms_piece){UINT64_MAX, 2, (uintptr_t)bytes};
    CHECK_EQ(SHMS_EINVAL, verb_put(w, "other", 5, NULL, 0, 300, pieces, 2, ref));
    CHECK_EQ(SHMS_EINVAL, verb_hit(w, "k", 0, ref));
    CHECK_EQ(SHMS_EINVAL, shms_writer_has(w, NULL, 3));
    CHECK_EQ(SHMS_EINVAL, shms_writer_retire(w, 1));
    CHECK_EQ(SHMS_OK, verb_unprotect(w, "absent", 6));
    CHECK_EQ(SHMS_OK, verb_protect(w, "absent", 6));
    CHECK_EQ(SHMS_OK, verb_unprotect(w, "absent", 6));
    CHECK_EQ(0, shms_writer_has(w, "absent", 6));
    CHECK_EQ(0, shms_writer_touch(w, "absent", 6));
    CHECK_EQ(0, shms_writer_delete(w, "absent", 6));
    shms_stats after = stats_of(w);
    CHECK(!memcmp(&before, &after, sizeof before));
    CHECK_EQ(SHMS_ENOTFOUND, verb_hit(w, "absent", 6, ref));
    CHECK_EQ(1, stats_of(w).counters.misses);

    CHECK_EQ(SHMS_OK, verb_put(w, "empty", 5, NULL, 0, 0, NULL, 0, ref)); /* an empty payload is valid */
    v = view_of(r, ref);
    CHECK(v && v->payload_size == 0 && v->meta_len == 0 && !memcmp(v->key, "empty", 5));
    shms_view_release(v);
    CHECK_EQ(SHMS_OK, put_marked(w, "most", 4000 - SHMS_ALIGN, 1, ref));
    shms_reader_free(r);
    end_writer(w);
}

TEST(an_unfinished_object_is_invisible_until_its_commit) {
    const char *name = store_name("pending");
    shms_writer *w = make(name, 4096, 1, 4), *w2;
    shms_pending t, twin;
    CHECK_EQ(SHMS_OK, verb_begin(w, "k", 1, NULL, 0, 100, &t));
    CHECK_EQ(0, shms_writer_has(w, "k", 1));
    CHECK_EQ(0, shms_writer_count(w));
    CHECK_EQ(0, shms_writer_delete(w, "k", 1));
    CHECK_EQ(SHMS_ENOTFOUND, verb_hit(w, "k", 1, ref));
    CHECK_EQ(SHMS_EEXISTS, verb_begin(w, "k", 1, NULL, 0, 100, &twin));
    CHECK_EQ(SHMS_OK, verb_protect(w, "k", 1));
    CHECK_EQ(SHMS_OK, shms_writer_clear(w, "", 0));
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    CHECK_EQ(SHMS_OK, verb_abort(w, &t));
    CHECK_EQ(SHMS_OK, verb_begin(w, "l", 1, NULL, 0, 100, &twin)); /* the same slot */
    CHECK_EQ(t.slot, twin.slot);
    CHECK_EQ(0, w->protected[twin.slot]);
    CHECK_EQ(SHMS_OK, verb_protect(w, "l", 1));
    CHECK_EQ(SHMS_OK, verb_unprotect(w, "k", 1));
    CHECK_EQ(1, w->protected[twin.slot]); /* another key's */
    CHECK_EQ(SHMS_OK, verb_unprotect(w, "l", 1));
    CHECK_EQ(0, w->protected[twin.slot]);
    CHECK_EQ(SHMS_OK, verb_abort(w, &twin));
    CHECK_EQ(SHMS_EINVAL, verb_abort(w, &t)); /* twice */
    CHECK_EQ(SHMS_EINVAL, verb_commit(w, &t, ref));
    CHECK_EQ(SHMS_EINVAL, verb_copy(w, &t, NULL, 0));
    CHECK_EQ(0, stats_of(w).used_bytes);
    CHECK_EQ(SHMS_OK, verb_begin(w, "k", 1, NULL, 0, 100, &twin));
    CHECK_EQ(SHMS_EINVAL, verb_commit(w, &t, ref)); /* another object's slot by now */
    shms_piece beyond = {50, 51, (uintptr_t)&t};
    CHECK_EQ(SHMS_EINVAL, verb_copy(w, &twin, &beyond, 1));
    CHECK_EQ(SHMS_OK, verb_commit(w, &twin, ref));
    CHECK_EQ(SHMS_EINVAL, verb_commit(w, &twin, ref));
    CHECK_EQ(1, shms_writer_count(w));
    CHECK_EQ(SHMS_OK, verb_begin(w, "half", 4, NULL, 0, 100, &t));
    twin = t;
    twin.entry = (uint32_t)w->seg.layout.max_leases;
    CHECK_EQ(SHMS_EINVAL, verb_copy(w, &twin, NULL, 0)); /* not as it was given out */
    CHECK_EQ(SHMS_OK, shms_writer_close(w, 0));
    CHECK_EQ(SHMS_ECLOSED, verb_copy(w, &twin, NULL, 0));
    CHECK_EQ(SHMS_ECLOSED, verb_copy(w, &t, NULL, 0));
    CHECK_EQ(SHMS_ECLOSED, verb_commit(w, &t, ref));
    CHECK_EQ(SHMS_OK, shms_writer_recover(&w2, name, NULL)); /* the half-written object is gone, the other is there */
    CHECK_EQ(1, shms_writer_has(w2, "k", 1));
    CHECK_EQ(0, shms_writer_has(w2, "half", 4));
    CHECK_EQ(1, stats_of(w2).objects);
    shms_writer_free(w);
    end_writer(w2);
}

TEST(every_call_on_a_closed_handle_returns_eclosed) {
    const char *name = store_name("closed");
    shms_writer *w = make(name, 4096, 1, 4), *handles[] = {NULL, w};
    shms_reader *r = attached_to(name, 0), *readers[] = {NULL, r};
    CHECK_EQ(SHMS_OK, put_marked(w, "k", 10, 1, ref));
    CHECK_EQ(SHMS_OK, shms_writer_close(w, 1));
    CHECK_EQ(SHMS_OK, shms_reader_close(r));
    for (int i = 0; i < 2; i++) {
        shms_writer *h = handles[i];
        shms_pending t = {0};
        shms_stats stats;
        uint64_t size = 0, sizes[2] = {0};
        CHECK_EQ(SHMS_ECLOSED, put_marked(h, "x", 1, 1, ref));
        CHECK_EQ(SHMS_ECLOSED, verb_commit(h, &t, ref));
        CHECK_EQ(SHMS_ECLOSED, verb_abort(h, &t));
        CHECK_EQ(SHMS_ECLOSED, verb_copy(h, &t, NULL, 0));
        CHECK_EQ(SHMS_ECLOSED, verb_hit(h, "k", 1, ref));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_has(h, "k", 1));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_touch(h, "k", 1));
        CHECK_EQ(SHMS_ECLOSED, verb_protect(h, "k", 1));
        CHECK_EQ(SHMS_ECLOSED, verb_reserve(h, "x", 1, NULL, 0, 1, &t));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_cancel(h, ref));
        shms_batch b = {0};
        CHECK_EQ(SHMS_ECLOSED, shms_batch_protect(h, &b, (const uint8_t *)"\1\0\0\0k", 5));
        free(b.items);
        CHECK_EQ(SHMS_ECLOSED, verb_hold(h, ref));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_assign_group(h, ref, 1));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_validate(h, ref, NULL, 0));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_extra(h, ref, NULL, &size));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_cancel_all(h));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_stay(h, SHMS_BEYOND_CLOSE));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_kind(h, "kind", 4));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_kinds(h, (shms_kind_info[SHMS_KINDS]){0}));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_quota(h, 0, 1));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_retire(h, 0));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_delete(h, "k", 1));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_clear(h, "", 0));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_count(h));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_stats(h, &stats));
        CHECK_EQ(SHMS_ECLOSED, verb_unprotect(h, "k", 1));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_keys(h, "", 0, NULL, &size));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_holders(h, &(shms_refusal){0}));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_equals(h, ref, "", 0, 0, NULL, 0));
        CHECK_EQ(SHMS_EINVAL, shms_writer_equals(h, ref, "", 0, 0, &(shms_piece){.size = 1}, 1));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_tier(h, &stats.tier)); /* the words may be a successor's */
        CHECK_EQ(SHMS_ECLOSED, shms_writer_clear_tier(h, 9));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_tier_cleared(h, &size));
        CHECK_EQ(SHMS_ECLOSED, shms_writer_valid(h));
        shms_rank_stats s;
        CHECK(view_of(readers[i], ref) == NULL && errno == -SHMS_ECLOSED);
        CHECK_EQ(SHMS_ECLOSED, shms_reader_release(readers[i], ref));
        CHECK_EQ(SHMS_ECLOSED, shms_reader_validate(readers[i], ref));
        CHECK_EQ(SHMS_ECLOSED, shms_reader_stats(readers[i], &s));
        CHECK_EQ(SHMS_OK, shms_reader_close(readers[i]));
        CHECK_EQ(SHMS_OK, shms_writer_close(h, 1));
        shms_options o;
        uint64_t store = shms_writer_options(h, &o, (uint64_t[2]){0}); /* these work after a close, too */
        CHECK_EQ(h != NULL, store != 0);
        CHECK_EQ(store, shms_reader_store(readers[i]));
        CHECK_EQ(h != NULL, shms_reader_writer_epoch(readers[i]));
        CHECK_EQ(h ? 0 : SHMS_ECLOSED, shms_reader_named(readers[i]));
        CHECK(!h == !shms_writer_data(h, sizes) && sizes[0] == (h ? 4096 : 0) && !h == !sizes[1]);
        CHECK(!h == !shms_reader_data(readers[i], 0, &size) && size == sizes[0]);
    }
    shms_reader_free(r);
    shms_reader_free(NULL);
    shms_writer_free(w);
    shms_writer_free(NULL);
}

TEST(a_forked_child_can_do_nothing_and_holds_no_lock) {
    begin(1);
    CHECK_EQ(SHMS_OK, put_marked(w, "k", 10, 1, ref));
    shms_view *v = view_of(readers[0], ref);
    CHECK(v);
    int go[2], ready[2];
    char c;
    CHECK(pipe(go) == 0 && pipe(ready) == 0);
    pid_t child = fork_child();
    if (child == 0) {
        shms_stats stats;
        CHECK_EQ(SHMS_EFORKED, put_marked(w, "x", 1, 1, ref));
        CHECK_EQ(SHMS_EFORKED, shms_writer_stats(w, &stats));
        CHECK_EQ(SHMS_EFORKED, shms_writer_cancel(w, ref));
        CHECK_EQ(SHMS_EFORKED, shms_writer_close(w, 1));
        CHECK(view_of(readers[0], ref) == NULL && errno == -SHMS_EFORKED);
        CHECK_EQ(SHMS_EFORKED, shms_reader_release(readers[0], ref));
        CHECK_EQ(SHMS_EFORKED, shms_reader_validate(readers[0], ref));
        CHECK_EQ(SHMS_EFORKED, shms_reader_close(readers[0]));
        shms_view_release(v); /* frees only its memory: the pin is the parent's */
        close(go[1]);
        CHECK_EQ(1, write(ready[1], "x", 1));
        CHECK_EQ(0, read(go[0], &c, 1)); /* until the parent has checked, with the mappings that fork copied */
        shms_writer_free(w);
        detach(0);
        _exit(0);
    }
    close(go[0]);
    /* by now the fork handlers have run in the child, and it has tried everything */
    CHECK_EQ(1, read(ready[0], &c, 1));
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    CHECK_EQ(1, shms_reader_pins(shms_segment_reader(&w->seg, 0))[w->ring.first]);
    shms_view_release(v);
    detach(0);
    attach(0); /* the child is alive, and has neither lock */
    CHECK_EQ(SHMS_OK, shms_writer_close(w, 0));
    succeed();
    close(go[1]);
    CHECK_EQ(0, reap(child));
    close(ready[0]);
    close(ready[1]);
    CHECK_EQ(1, shms_writer_has(w, "k", 1)); /* nothing is unlinked, nothing is lost */
    end();
}

static shms_segment *volatile on_a_stack;
static int opened[2], forked[2];

static void *have_a_segment_on_the_stack(void *name) {
    shms_segment seg;
    char c;
    CHECK_EQ(SHMS_OK, shms_segment_open(&seg, name, SHMS_ROLE_INSPECTOR, NULL));
    on_a_stack = &seg;
    CHECK_EQ(1, write(opened[1], "x", 1));
    CHECK_EQ(1, read(forked[0], &c, 1));
    shms_segment_close(&seg);
    return NULL;
}

TEST(a_forked_child_forgets_segments_on_stacks_of_threads_it_does_not_have) {
    begin(0);
    pthread_t thread;
    char c;
    CHECK(pipe(opened) == 0 && pipe(forked) == 0);
    CHECK(pthread_create(&thread, NULL, have_a_segment_on_the_stack, (void *)name) == 0);
    CHECK_EQ(1, read(opened[0], &c, 1));
    pid_t child = fork_child();
    if (child == 0) {
        shms_segment reused; /* the next thread's segment, on the same stack */
        memset(&reused, 0xa5, sizeof reused);
        memcpy(on_a_stack, &reused, sizeof reused);
        attach(0);
        CHECK_EQ(0, memcmp(on_a_stack, &reused, sizeof reused));
        pid_t grandchild = fork_child(); /* which walks the list again */
        if (grandchild == 0)
            _exit(0);
        CHECK_EQ(0, reap(grandchild));
        _exit(0);
    }
    CHECK_EQ(0, reap(child));
    CHECK_EQ(1, write(forked[1], "x", 1));
    pthread_join(thread, NULL);
    for (int i = 0; i < 2; i++) {
        close(opened[i]);
        close(forked[i]);
    }
    end();
}

TEST(a_stale_reference_leaves_no_pin) {
    begin(1);
    for (int again = 0; again < 2; again++) { /* of a slot that is free, then of one that another object has */
        CHECK_EQ(SHMS_OK, put_marked(w, "k", 10, 1, ref));
        CHECK_EQ(1, shms_writer_cancel(w, ref));
        CHECK_EQ(1, shms_writer_delete(w, "k", 1));
        if (again)
            CHECK_EQ(SHMS_OK, put_marked(w, "k", 10, 2, NULL));
        CHECK(view_of(readers[0], ref) == NULL && errno == -SHMS_ESTALE);
        CHECK_EQ(0, shms_reader_validate(readers[0], ref));
        CHECK_EQ(0, shms_reader_release(readers[0], ref));
        for (uint32_t i = 0; i < 4; i++)
            CHECK_EQ(0, shms_reader_pins(shms_segment_reader(&w->seg, 0))[i]);
    }
    end();
}

TEST(views_never_come_to_more_than_the_pins_of_one_object_can_count) {
    begin(1);
    CHECK_EQ(SHMS_OK, put_marked(w, "k", 10, 1, ref));
    *shms_reader_live(readers[0]) += SHMS_PIN_COUNT / 2;
    CHECK(view_of(readers[0], ref) == NULL && errno == -SHMS_ENOMEM);
    --*shms_reader_live(readers[0]);
    shms_view *v = view_of(readers[0], ref);
    CHECK(v);
    shms_view_release(v);
    *shms_reader_live(readers[0]) -= SHMS_PIN_COUNT / 2 - 1;
    end();
}

TEST(a_key_that_is_none_or_is_there_twice_lets_nobody_take_the_store) {
    for (int twice = 0; twice < 2; twice++) {
        shms_writer *heir;
        begin(0);
        CHECK_EQ(SHMS_OK, put_marked(w, "a", 10, 1, NULL));
        CHECK_EQ(SHMS_OK, put_marked(w, "b", 10, 1, NULL));
        shms_slot *last = shms_writer_slot(w, w->ring.last);
        if (twice)
            w->seg.data[shms_get(&last->offset)] = 'a';
        else
            shms_set(&last->head, 0);
        shms_writer_free(w);
        CHECK_EQ(SHMS_ECORRUPT, shms_writer_recover(&heir, name, NULL));
        CHECK_EQ(0, shm_unlink(name));
    }
}

static shms_slot *spoilt;

static void spoil(const char *label) {
    if (!strcmp(label, "R3a"))
        shms_set(&spoilt->length, 1 << 30);
}

TEST(a_view_has_the_checked_lengths_even_if_the_slot_changes) {
    begin(1);
    CHECK_EQ(SHMS_OK, put_marked(w, "k", 100, 3, ref));
    spoilt = shms_writer_slot(w, w->ring.first);
    uint64_t length = shms_get(&spoilt->length);
    shms_step_hook = spoil; /* between the check and the view */
    shms_view *v = view_of(readers[0], ref);
    shms_step_hook = NULL;
    CHECK(v);
    CHECK_EQ(100, v->payload_size);
    CHECK(view_of(readers[0], ref) == NULL && errno == -SHMS_ECORRUPT);
    shms_set(&spoilt->length, length);
    shms_add(&spoilt->offset, SHMS_ALIGN); /* the reference has the address, too */
    CHECK(view_of(readers[0], ref) == NULL && errno == -SHMS_ESTALE);
    CHECK_EQ(0, shms_reader_validate(readers[0], ref));
    shms_add(&spoilt->offset, (uint64_t)-SHMS_ALIGN);
    shms_set(&spoilt->state, SHMS_EVICTING); /* it may stay */
    CHECK_EQ(1, shms_reader_validate(readers[0], ref));
    shms_set(&spoilt->state, SHMS_LIVE);
    shms_view_release(v);
    end();
}

static pthread_t closer;

static void *close_it(void *unused) {
    CHECK_EQ(SHMS_OK, shms_writer_close(w, 0));
    return unused;
}

static void close_during_a_scan(const char *label) {
    if (strcmp(label, "P3c"))
        return;
    shms_writer *heir;
    CHECK(pthread_create(&closer, NULL, close_it, NULL) == 0);
    while (shms_writer_count(w) != SHMS_ECLOSED)
        ;
    CHECK_EQ(SHMS_EWRITERACTIVE, shms_writer_recover(&heir, name, NULL));
}

TEST(a_writer_keeps_its_lock_while_bytes_are_being_copied) {
    char byte = 1;
    shms_piece piece = {0, 1, (uintptr_t)&byte};
    begin(0);
    shms_step_hook = close_during_a_scan;
    CHECK_EQ(SHMS_ECLOSED, verb_put(w, "k", 1, NULL, 0, 1, &piece, 1, ref));
    shms_step_hook = NULL;
    CHECK(pthread_join(closer, NULL) == 0);
    succeed();
    CHECK_EQ(0, shms_writer_has(w, "k", 1));
    end();
}

/* Replaces the C library's function: a kernel that gives up and undoes what takes longer than the time between two
 * signals. */
static off_t most_at_once = INT64_MAX;
static int interruptions;

int fallocate(int fd, int mode, off_t at, off_t n) {
    if (n <= most_at_once)
        return (int)syscall(SYS_fallocate, fd, mode, at, n);
    CHECK(++interruptions < 100);
    errno = EINTR;
    return -1;
}

TEST(a_reservation_ends_under_periodic_signals) {
    most_at_once = 1 << 20;
    shms_writer *w = make(store_name("interrupted"), (20 << 20) + 64, 1, 4);
    most_at_once = INT64_MAX;
    CHECK(interruptions > 0);
    struct stat st;
    CHECK(fstat(w->seg.fd, &st) == 0 && (uint64_t)st.st_blocks * 512 >= w->seg.layout.capacity);
    end_writer(w);
}

static void close_before_the_lock(const char *label) {
    if (!strcmp(label, "V0"))
        CHECK_EQ(SHMS_OK, shms_writer_close(w, 1));
}

TEST(a_store_that_its_writer_unlinked_meanwhile_is_not_recovered) {
    shms_writer *heir;
    begin(0);
    shms_step_hook = close_before_the_lock;
    CHECK_EQ(SHMS_ENOSTORE, shms_writer_recover(&heir, name, NULL));
    shms_step_hook = NULL;
    shms_writer_free(w);
}

TEST(a_reader_may_write_only_its_own_table) {
    open_store("rights", (shms_options){.capacity = 4096, .n_readers = 2}, 0);
    CHECK_EQ(SHMS_OK, put_marked(w, "k", 10, 1, ref));
    for (int what = 0; what < 6; what++) {
        pid_t child = fork_child();
        if (child == 0) {
            signal(SIGSEGV, SIG_DFL);
            shms_segment seg;
            CHECK_EQ(SHMS_OK, shms_segment_open(&seg, name, 1, NULL));
            uint8_t *at[] = {(uint8_t *)seg.sb,
                             (uint8_t *)seg.writer,
                             (uint8_t *)seg.slots,
                             seg.data,
                             (uint8_t *)&shms_segment_reader(&seg, 0)->reserved,
                             (uint8_t *)&shms_segment_reader(&seg, 1)->reserved};
            *(volatile uint8_t *)at[what] = 0;
            _exit(0);
        }
        CHECK_EQ(what < 5 ? 1000 + SIGSEGV : 0, reap(child));
    }
    for (int what = 0; what < 4; what++) {
        if (what == 2) /* the same for a successor */
            succeed();
        pid_t child = fork_child();
        if (child == 0) { /* nor may the writer write a reader's table, or the superblock once it is published */
            signal(SIGSEGV, SIG_DFL);
            *(volatile uint64_t *)(what % 2 ? w->seg.control + w->seg.layout.readers_at : w->seg.control) = 0;
            _exit(0);
        }
        CHECK_EQ(1000 + SIGSEGV, reap(child));
    }
    end();
}
