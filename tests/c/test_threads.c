/*
 * test_threads.c - many reader and writer threads over one mapping, so that ThreadSanitizer sees both sides.
 *
 * Every word of a payload names its object. The writers run until they have done their share and the readers, which the
 * scheduler may have kept waiting, have met every case.
 */
#include <fcntl.h>
#include <pthread.h>

#include "store/directory.h"
#include "store/batch.h"
#include "store/file.h"
#include "support.h"

enum { WRITERS = 2, RANKS = 3, THREADS = 2, KEYS = 150, PUTS = 20000, BOXES = 10 };

static shms_writer *w;
static shms_reader *readers[RANKS];
static struct box { /* where writers leave references for all readers; the last one counts */
    pthread_mutex_t mutex;
    uint64_t mark;
    uint8_t ref[SHMS_REF_SIZE];
} boxes[BOXES];
static _Atomic uint64_t marks = 1, gets, stale, refusals, hits, stop;

/* The library's calls: a reader of this process uses the writer's mapping. */
int __real_shms_segment_open(shms_segment *seg, const char *name, int role, const shms_expected *expected);
int __wrap_shms_segment_open(shms_segment *seg, const char *name, int role, const shms_expected *expected);
int __wrap_shms_segment_open(shms_segment *seg, const char *name, int role, const shms_expected *expected) {
    if (role < 0)
        return __real_shms_segment_open(seg, name, role, expected);
    *seg = w->seg;
    seg->lock = seg->name = NULL; /* the writer's own: two that unmap a page unmap what comes there later */
    CHECK(shms_segment_open_file(seg, 0, false, false) >= 0);
    CHECK(mprotect(seg->control, seg->control_size, PROT_READ | PROT_WRITE) == 0);
    return SHMS_OK;
}
void __real_shms_segment_close(shms_segment *seg);
void __wrap_shms_segment_close(shms_segment *seg);
void __wrap_shms_segment_close(shms_segment *seg) {
    shms_segment_unlock(seg, 0);
    shms_file_unlist(seg);
    if (seg == &w->seg)
        __real_shms_segment_close(seg);
}

static void payload_is_whole(const shms_view *v) {
    const uint64_t *words = (const uint64_t *)v->payload;
    CHECK(v->payload >= (char *)w->seg.data && v->payload <= (char *)w->seg.data + w->seg.data_size);
    for (uint64_t i = 0; i < v->payload_size / 8; i++)
        CHECK(words[i] == words[0]);
    CHECK(v->payload_size < 8 || !memcmp(v->meta, words, 8));
}

static void post(uint64_t *seed, const uint8_t *ref) {
    struct box *box = &boxes[below(seed, BOXES)];
    uint8_t old[SHMS_REF_SIZE];
    pthread_mutex_lock(&box->mutex);
    bool was = box->mark++ != 0;
    memcpy(old, box->ref, SHMS_REF_SIZE);
    memcpy(box->ref, ref, SHMS_REF_SIZE);
    pthread_mutex_unlock(&box->mutex);
    if (was)
        CHECK(shms_writer_cancel(w, old) >= 0); /* a reader that has not read it will not */
}

static void *write_many(void *arg) {
    uint64_t seed = (uint64_t)(uintptr_t)arg * 77 + 1;
    for (int i = 0; i < PUTS || ((gets < 1000 || stale < 10) && i < 100 * PUTS); i++) {
        char key[16];
        uint8_t ref[SHMS_REF_SIZE];
        uint32_t len = (uint32_t)snprintf(key, sizeof key, "k%d", (int)below(&seed, KEYS));
        int rc = verb_hit(w, key, len, ref);
        if (rc == SHMS_OK) {
            hits++;
            post(&seed, ref);
            if (below(&seed, 4) == 0)
                CHECK(shms_writer_delete(w, key, len) >= 0);
            continue;
        }
        CHECK(rc == SHMS_ENOTFOUND || rc == SHMS_ENOLEASE);
        uint64_t mark = atomic_fetch_add(&marks, 1), size = 8 * below(&seed, 200), words[200];
        for (int k = 0; k < 200; k++)
            words[k] = mark;
        shms_piece piece = {0, size, (uintptr_t)words};
        rc = verb_put(w, key, len, (char *)&mark, 8, size, &piece, 1, ref);
        bool refused = rc == SHMS_EFULL || rc == SHMS_ENOSLOT || rc == SHMS_ENOLEASE;
        CHECK(rc == SHMS_OK || refused || rc == SHMS_EEXISTS);
        refusals += refused;
        if (rc == SHMS_OK)
            post(&seed, ref);
        if (i % 1000 == 999)
            CHECK_EQ(SHMS_OK, shms_writer_valid(w));
        if (i % 1500 == 1499)
            CHECK_EQ(SHMS_OK, shms_writer_clear(w, "", 0));
    }
    return NULL;
}

static void *read_many(void *arg) {
    uint64_t id = (uint64_t)(uintptr_t)arg, seed = id * 99 + 5;
    shms_reader *r = readers[id % RANKS];
    shms_view *held[4] = {NULL};
    while (!atomic_load(&stop)) {
        struct box *box = &boxes[below(&seed, BOXES)];
        uint8_t ref[SHMS_REF_SIZE];
        pthread_mutex_lock(&box->mutex);
        bool there = box->mark;
        memcpy(ref, box->ref, SHMS_REF_SIZE);
        pthread_mutex_unlock(&box->mutex);
        if (!there)
            continue;
        if (below(&seed, 8) == 0) {
            CHECK(shms_reader_release(r, ref) >= SHMS_OK);
            continue;
        }
        shms_view *v = view_of(r, ref);
        CHECK(v || errno == -SHMS_ESTALE);
        if (!v) {
            stale++;
            continue;
        }
        gets++;
        payload_is_whole(v);
        shms_view **place = &held[below(&seed, 4)];
        if (*place) {
            payload_is_whole(*place);
            shms_view_release(*place);
        }
        *place = v;
    }
    for (int i = 0; i < 4; i++)
        if (held[i]) {
            payload_is_whole(held[i]);
            shms_view_release(held[i]);
        }
    return NULL;
}

static shms_batch batch;

static void *undo(void *unused) {
    shms_batch_undo(w, &batch);
    return unused;
}

/* As a signal's handler and a finalizer in another thread may; each batch is one thread's, but for this. */
static void a_protection_ends_while_others_begin(void) {
    CHECK_EQ(SHMS_OK, put_marked(w, "guarded", 10, 1, NULL));
    uint32_t slot = shms_find_live(w, shms_key_hash(w, "guarded", 7), "guarded", 7);
    for (int i = 0; i < 50; i++) {
        pthread_t thread;
        CHECK_EQ(SHMS_OK, shms_batch_protect(w, &batch, (const uint8_t *)"\7\0\0\0guarded", 11));
        CHECK(pthread_create(&thread, NULL, undo, NULL) == 0);
        CHECK_EQ(SHMS_OK, verb_protect(w, "guarded", 7));
        CHECK(pthread_join(thread, NULL) == 0);
        CHECK_EQ(1, w->protected[slot]);
        CHECK_EQ(SHMS_OK, verb_unprotect(w, "guarded", 7));
        CHECK_EQ(0, w->protected[slot]);
    }
    shms_batch_drop(w, &batch);
    CHECK_EQ(1, shms_writer_delete(w, "guarded", 7));
}

TEST(threads_of_all_sides_read_whole_objects) {
    shms_options o = {.capacity = 32 << 10, .n_readers = RANKS, .max_objects = 24};
    const char *name = store_name("threads");
    pthread_t writers[WRITERS], threads[RANKS * THREADS];
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, &o));
    for (uint32_t r = 0; r < RANKS; r++)
        CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[r], name, r, NULL));
    for (int i = 0; i < BOXES; i++)
        pthread_mutex_init(&boxes[i].mutex, NULL);
    for (uintptr_t i = 0; i < RANKS * THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, read_many, (void *)i) == 0);
    for (uintptr_t i = 0; i < WRITERS; i++)
        CHECK(pthread_create(&writers[i], NULL, write_many, (void *)i) == 0);
    for (int i = 0; i < WRITERS; i++)
        CHECK(pthread_join(writers[i], NULL) == 0);
    atomic_store(&stop, 1);
    for (int i = 0; i < RANKS * THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    for (int r = 0; r < RANKS; r++)
        for (uint32_t s = 0; s < o.max_objects; s++)
            CHECK_EQ(0, shms_reader_pins(shms_segment_reader(&w->seg, (uint32_t)r))[s]);
    shms_stats stats;
    CHECK_EQ(SHMS_OK, shms_writer_stats(w, &stats));
    CHECK(stats.counters.evictions > 500 && gets > 500 && hits > 100 && stale > 0);
    for (int r = 0; r < RANKS; r++) {
        shms_reader_free(readers[r]);
    }
    a_protection_ends_while_others_begin();
    CHECK_EQ(SHMS_OK, put_marked(w, "all", (32 << 10) - SHMS_ALIGN, 1, NULL)); /* nothing is held any more */
    end_writer(w);
}
