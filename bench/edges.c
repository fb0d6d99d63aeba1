/*
 * edges.c - what a full store costs: refusals, long searches, large evictions, and a concurrent hit or get.
 *
 * The program uses only the public headers. `edges [GROUP ...]` prints a line
 * for each figure: its name, then microseconds or fractions. For "during" the values are median, 99th percentile and
 * longest. bench_edges.py compiles the program, and has the limits.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "batch.h"

#define MIB (UINT64_C(1) << 20)
#define CHECK(what)                                                                                                    \
    do {                                                                                                               \
        if (!(what)) {                                                                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);                                                 \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static shms_writer *w;
static shms_reader *readers[64];
static uint32_t n_readers;
static _Thread_local shms_batch batch; /* of the last put or hit, which is kept at once */
static uint8_t (*refs)[SHMS_REF_SIZE];
static char name[64];

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double part(double *times, size_t n, double share) {
    qsort(times, n, sizeof *times, ascending);
    size_t i = (size_t)(share * (double)n);
    return times[i < n ? i : n - 1];
}

static void begin(uint64_t capacity, uint32_t ranks, uint32_t max_objects, uint32_t flags) {
    shms_options o = {
        .capacity = capacity, .n_readers = ranks, .max_objects = max_objects, .flags = SHMS_PREFAULT | flags};
    snprintf(name, sizeof name, "shms-edges-%d", (int)getpid());
    CHECK(shms_writer_create(&w, name, &o) == 0);
    n_readers = ranks;
    for (uint32_t r = 0; r < ranks; r++)
        CHECK(shms_reader_attach(&readers[r], name, r, NULL) == 0);
}

static void end(void) {
    for (uint32_t r = 0; r < n_readers; r++) {
        shms_reader_close(readers[r]);
        shms_reader_free(readers[r]);
    }
    shms_writer_close(w, 1);
    shms_writer_free(w);
    free(refs);
    refs = NULL;
}

static int kept(int rc, uint8_t *ref) {
    batch.keep = 1;
    memcpy(ref, batch.ref, SHMS_REF_SIZE);
    return rc;
}

static shms_view *got(shms_reader *r, const uint8_t *ref) {
    shms_view *v;
    shms_reader_acquire(r, ref, &v);
    return v;
}

static int put(const char *prefix, uint64_t i, uint64_t size, uint8_t *ref) {
    static char *bytes;
    char key[32];
    if (!bytes)
        CHECK((bytes = calloc(1, 512 * MIB)));
    int n = snprintf(key, sizeof key, "%s%llu", prefix, (unsigned long long)i);
    shms_piece piece = {.size = size, .address = (uint64_t)(uintptr_t)bytes};
    shms_put put = {.key = key, .key_len = (uint32_t)n, .payload_size = size, .pieces = &piece, .n_pieces = 1};
    return kept(shms_batch_put(w, &batch, &put), ref);
}

static int hit(const char *prefix, uint64_t i, uint8_t *ref) {
    char key[32];
    int n = snprintf(key, sizeof key, "%s%llu", prefix, (unsigned long long)i);
    return kept(shms_batch_hit(w, &batch, key, (uint32_t)n, 0, 0), ref);
}

static void all_release(uint64_t i) {
    for (uint32_t r = 0; r < n_readers; r++)
        CHECK(shms_reader_release(readers[r], refs[i]) >= 0);
}

/* n objects of 1 KiB that no rank has read, in a store that they fill. */
static void fill(uint64_t n, uint32_t ranks) {
    begin(n * 1088 + 4096, ranks, (uint32_t)n + 64, 0);
    CHECK((refs = calloc(n, sizeof *refs)));
    for (uint64_t i = 0; i < n; i++)
        CHECK(put("k", i, 1024, refs[i]) == 0);
}

static void refused_after_a_get(const char *figure, uint64_t n, uint32_t ranks) {
    enum { ROUNDS = 200 };
    double times[ROUNDS];
    uint8_t ref[SHMS_REF_SIZE];
    shms_view *views[ROUNDS];
    fill(n, ranks);
    CHECK(put("new", 0, 8192, ref) == SHMS_EFULL);
    for (int i = 0; i < ROUNDS; i++) { /* rank 0 keeps its view, so the object stays held */
        CHECK((views[i] = got(readers[0], refs[(uint64_t)i * (n / ROUNDS)])));
        double start = now_us();
        CHECK(put("new", 0, 8192, ref) == SHMS_EFULL);
        times[i] = now_us() - start;
    }
    for (int i = 0; i < ROUNDS; i++)
        shms_view_release(views[i]);
    printf("%s %.2f\n", figure, part(times, ROUNDS, 0.5));
    end();
}

/* Every second object may go: room enough for 2 KiB, but not in one piece. */
static void refused_split(const char *figure, uint64_t n) {
    enum { ROUNDS = 100 };
    double times[ROUNDS];
    uint8_t ref[SHMS_REF_SIZE];
    fill(n, 1);
    for (uint64_t i = 0; i < n; i += 2)
        all_release(i);
    CHECK(put("new", 0, 8192, ref) == SHMS_EFULL);
    for (int i = 0; i < ROUNDS; i++) {
        shms_view *v = got(readers[0], refs[(uint64_t)i * (n / ROUNDS) / 2 * 2]);
        CHECK(v);
        shms_view_release(v);
        double start = now_us();
        CHECK(put("new", 0, 8192, ref) == SHMS_EFULL);
        times[i] = now_us() - start;
    }
    printf("%s %.2f\n", figure, part(times, ROUNDS, 0.5));
    end();
}

/* The hand is in front of n small held objects, and after them there is room for an object of 12 MiB. */
static void past_held(const char *figure, uint64_t n) {
    enum { ROUNDS = 15 };
    double times[ROUNDS], copies[ROUNDS];
    uint8_t ref[SHMS_REF_SIZE];
    begin(n * 1088 + 26 * MIB, 1, (uint32_t)n + 64, 0);
    CHECK((refs = calloc(n, sizeof *refs)));
    for (uint64_t i = 0; i < n; i++)
        CHECK(put("k", i, 1024, refs[i]) == 0);
    for (int i = -2; i < ROUNDS; i++) {
        double start = now_us();
        int rc = put("large", (uint64_t)(i + 2), 12 * MIB, ref);
        double took = now_us() - start;
        CHECK(rc == 0 && shms_reader_release(readers[0], ref) == 1);
        if (i >= 0)
            times[i] = took;
    }
    static char from[12 << 20], to[12 << 20];
    for (int i = 0; i < ROUNDS; i++) {
        double start = now_us();
        shms_copy(to, from, sizeof from);
        copies[i] = now_us() - start;
    }
    printf("%s %.1f %.1f\n", figure, part(times, ROUNDS, 0.5), part(copies, ROUNDS, 0.5));
    end();
}

static void no_lease_entry(const char *figure) {
    enum { ROUNDS = 50 };
    double times[ROUNDS];
    uint8_t ref[SHMS_REF_SIZE], first[SHMS_REF_SIZE];
    shms_stats stats;
    begin(64 * MIB, 1, 262144, 0);
    CHECK(put("k", 0, 64, first) == 0 && put("other", 0, 64, ref) == 0);
    CHECK(shms_writer_stats(w, &stats) == 0);
    for (uint64_t i = 2; i < stats.max_leases; i++)
        CHECK(hit("k", 0, ref) == 0);
    for (int i = 0; i < ROUNDS; i++) { /* each time there is a release, but not of a lease */
        shms_view *v = got(readers[0], first);
        CHECK(v);
        shms_view_release(v);
        double start = now_us();
        int rc = hit("k", 0, ref);
        times[i] = now_us() - start;
        CHECK(rc == (i ? SHMS_ENOLEASE : 0));
    }
    printf("%s %.2f %.2f\n", figure, part(times, ROUNDS, 0.5), part(times, ROUNDS, 1));
    end();
}

/* ---- a hit and a get during puts of another thread ---- */

static _Atomic bool stop;
static _Atomic uint64_t turns;
static enum { REFUSED, MANY_VICTIMS } what;

static void *keep_putting(void *arg) {
    uint8_t ref[SHMS_REF_SIZE];
    double *longest = arg;
    for (uint64_t i = 0; !stop; i++) {
        if (what == REFUSED) { /* one release each time */
            shms_view *v = got(readers[0], refs[i * 7919 % 100000]);
            if (v)
                shms_view_release(v);
            put("new", 0, 8192, ref);
        } else {
            for (uint64_t k = 0; k < 32768; k++) /* victims, and then the object that they are evicted for */
                CHECK(put("v", i << 20 | k, 64, ref) == 0 && shms_reader_release(readers[0], ref) == 1);
            double start = now_us();
            CHECK(put("big", i, 32768 * 128 - 128, ref) == 0 && shms_reader_release(readers[0], ref) == 1);
            double took = now_us() - start;
            *longest = took > *longest ? took : *longest;
        }
        turns++;
    }
    return NULL;
}

static void during(const char *figure, double seconds) {
    enum { MOST = 4000000 };
    double *hits = malloc(MOST * sizeof *hits), *gets = malloc(MOST * sizeof *gets), longest = 0;
    size_t n = 0;
    uint8_t ref[SHMS_REF_SIZE];
    pthread_t thread;
    stop = false;
    turns = 0;
    CHECK(hits && gets && pthread_create(&thread, NULL, keep_putting, &longest) == 0);
    double began = now_us();
    while (n < MOST && (now_us() - began < seconds * 1e6 || turns < 3)) {
        double start = now_us();
        int rc = hit("h", n % 16, ref);
        hits[n] = now_us() - start;
        CHECK(rc == 0);
        start = now_us();
        shms_view *v = got(readers[0], ref);
        gets[n] = now_us() - start;
        CHECK(v);
        shms_view_release(v);
        n++;
    }
    stop = true;
    pthread_join(thread, NULL);
    printf("%s-hit %.2f %.2f %.1f\n", figure, part(hits, n, 0.5), part(hits, n, 0.99), part(hits, n, 1));
    printf("%s-get %.2f %.2f %.1f\n", figure, part(gets, n, 0.5), part(gets, n, 0.99), part(gets, n, 1));
    if (longest > 0)
        printf("%s-put %.1f\n", figure, longest);
    free(hits);
    free(gets);
    end();
}

static void during_refused(void) {
    uint8_t ref[SHMS_REF_SIZE];
    begin(100000 * 1088 + 16 * 1088 + 4096, 1, 101000, 0);
    for (uint64_t i = 0; i < 16; i++)
        CHECK(put("h", i, 1024, ref) == 0);
    CHECK((refs = calloc(100000, sizeof *refs)));
    for (uint64_t i = 0; i < 100000; i++)
        CHECK(put("k", i, 1024, refs[i]) == 0);
    what = REFUSED;
    during("during-refused", 3);
}

static void during_many_victims(void) {
    uint8_t ref[SHMS_REF_SIZE];
    shms_batch guard = {0};
    uint8_t keys[16 * 8];
    uint64_t size = 0;
    begin(32768 * 128 + 16 * 1088, 1, 40000, 0);
    for (uint64_t i = 0; i < 16; i++) {
        uint32_t len = (uint32_t)sprintf((char *)keys + size + 4, "h%llu", (unsigned long long)i);
        memcpy(keys + size, &len, 4);
        size += 4 + len;
        CHECK(put("h", i, 1024, ref) == 0 && shms_reader_release(readers[0], ref) == 1);
    }
    CHECK(shms_batch_protect(w, &guard, keys, size) == 0);
    what = MANY_VICTIMS;
    during("during-victims", 3);
}

/* ---- is_cached during a put with much metadata ---- */

static void *put_metadata(void *arg) {
    uint8_t ref[SHMS_REF_SIZE];
    shms_put put = {.key = "meta", .key_len = 4, .meta = arg, .meta_len = 200 << 20};
    for (uint64_t i = 0; i < 5; i++) {
        CHECK(kept(shms_batch_put(w, &batch, &put), ref) == 0);
        CHECK(shms_writer_delete(w, "meta", 4) == 1 && shms_writer_cancel(w, ref) == 1);
        usleep(1000); /* the object is not held at the next put */
    }
    stop = true;
    return NULL;
}

static void during_metadata(void) {
    pthread_t thread;
    double longest = 0;
    char *meta = calloc(1, 200 << 20);
    begin(512 * MIB, 1, 0, 0);
    stop = false;
    CHECK(meta && pthread_create(&thread, NULL, put_metadata, meta) == 0);
    while (!stop) {
        double start = now_us();
        CHECK(shms_writer_has(w, "other", 5) == 0);
        double took = now_us() - start;
        longest = took > longest ? took : longest;
    }
    pthread_join(thread, NULL);
    printf("during-metadata-has %.1f\n", longest);
    free(meta);
    end();
}

/* ---- how full a store gets: objects of 1 to 32 MiB, a tenth of the bytes held at any time ---- */

static uint64_t chance(void) { /* xorshift64* */
    static uint64_t state = 88172645463325252;
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (state * UINT64_C(2685821657736338717)) >> 16;
}

static void effective_capacity(const char *figure, uint64_t capacity) {
    enum { HELD = 4096, LAPS = 40, WARM = 4 };
    static shms_view *held[HELD];
    static uint64_t sizes[HELD];
    uint64_t first = 0, last = 0, held_bytes = 0, put_bytes = 0;
    double sum = 0, least = 1;
    uint32_t n = 0;
    shms_options o = {.capacity = capacity, .n_readers = 1};
    shms_stats stats;
    snprintf(name, sizeof name, "shms-edges-%d", (int)getpid());
    CHECK(shms_writer_create(&w, name, &o) == 0 && shms_reader_attach(&readers[0], name, 0, NULL) == 0);
    n_readers = 1;
    for (uint64_t i = 0; put_bytes < LAPS * capacity; i++) {
        uint64_t size = MIB + chance() % (31 * MIB);
        uint8_t ref[SHMS_REF_SIZE];
        char key[32];
        int len = snprintf(key, sizeof key, "k%llu", (unsigned long long)i);
        put_bytes += size;
        /* without a copy: only the place matters */
        if (shms_batch_begin(w, &batch, &(shms_put){.key = key, .key_len = (uint32_t)len, .payload_size = size}))
            continue;
        CHECK(kept(shms_batch_commit(w, &batch), ref) == 0);
        if (chance() % 10 == 0) {
            CHECK((held[last % HELD] = got(readers[0], ref)));
            sizes[last++ % HELD] = size;
            held_bytes += size;
        } else {
            CHECK(shms_reader_release(readers[0], ref) == 1);
        }
        for (; held_bytes > capacity / 10; first++) {
            shms_view_release(held[first % HELD]);
            held_bytes -= sizes[first % HELD];
        }
        CHECK(shms_writer_stats(w, &stats) == 0);
        double share = (double)stats.used_bytes / (double)capacity;
        if (put_bytes > WARM * capacity) {
            sum += share;
            n++;
            least = share < least ? share : least;
        }
    }
    for (; first < last; first++)
        shms_view_release(held[first % HELD]);
    printf("%s %.4f %.4f\n", figure, sum / n, least);
    end();
}

static bool wanted(int argc, char **argv, const char *figure) {
    bool any = argc < 2;
    for (int i = 1; i < argc; i++)
        any |= !strcmp(argv[i], figure);
    return any;
}

int main(int argc, char **argv) {
    if (wanted(argc, argv, "refused")) {
        refused_after_a_get("refused-1-rank", 100000, 1);
        refused_after_a_get("refused-8-ranks", 100000, 8);
    }
    if (wanted(argc, argv, "split")) {
        refused_split("split-100k", 100000);
        refused_split("split-500k", 500000);
    }
    if (wanted(argc, argv, "past")) {
        past_held("past-100k", 100000);
        past_held("past-500k", 500000);
    }
    if (wanted(argc, argv, "lease"))
        no_lease_entry("no-lease-entry");
    if (wanted(argc, argv, "during")) {
        during_refused();
        during_many_victims();
    }
    if (wanted(argc, argv, "metadata"))
        during_metadata();
    if (wanted(argc, argv, "capacity")) {
        effective_capacity("capacity-1-gib", UINT64_C(1) << 30);
        effective_capacity("capacity-4-gib", UINT64_C(4) << 30);
    }
    return 0;
}
