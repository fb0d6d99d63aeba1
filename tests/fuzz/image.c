/*
 * image.c - libFuzzer's target for the bytes of a segment: every way to open one, and every call on what was opened.
 *
 * An input is the number of a sound image, how it is opened, and patches of a few bytes each. The images are those that
 * a writer would leave if it died before a step of a script, one image for each step, with one arena and with two. So a
 * patch meets each state that a death can leave, and inputs stay small.
 *
 * A damaged image may give errors and wrong bytes, but no crash, no access outside the mapping, and no endless loop.
 */
#include <fcntl.h>
#include <sys/stat.h>

#include "inspect/inspect.h"
#include "store/batch.h"
#include "store/claims.h"
#include "store/find.h"
#include "support.h"

#define IMAGES 512
#define REFS 8

typedef struct image {
    uint8_t *bytes;
    size_t size;
    uint32_t arenas;
} image;

static image images[IMAGES];
static uint32_t n_images;
static uint8_t refs[REFS][SHMS_REF_SIZE]; /* of the scripts */
static const char *name;
static char path[300];

static uint32_t arenas; /* of the script that runs now */
static const char *KEYS[] = {"a", "b", "c", "d", "e"};

static shms_options options(void) {
    return (shms_options){.capacity = 8192,
                          .n_readers = 2,
                          .max_objects = 6,
                          .n_writers = arenas,
                          .flags = SHMS_CHECKSUMS,
                          .n_groups = arenas == 2 ? 2 : 0,
                          .group_sizes = {1, 1}};
}

static void keep_image(const char *label) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    (void)label;
    if (fd < 0)
        return;
    CHECK(n_images < IMAGES);
    CHECK_EQ(0, fstat(fd, &st));
    image *i = &images[n_images++];
    *i = (image){malloc((size_t)st.st_size), (size_t)st.st_size, arenas};
    CHECK_EQ((ssize_t)i->size, read(fd, i->bytes, i->size));
    close(fd);
}

/* Puts of two kinds, hits, a find, leases that are open, ended and held, evictions and a deletion. */
static void script(void) {
    shms_options o = options();
    shms_writer *w[2] = {NULL, NULL};
    shms_reader *r;
    shms_view *pinned, *v;
    uint8_t found[SHMS_REF_SIZE];
    shms_step_hook = keep_image;
    CHECK_EQ(SHMS_OK, shms_writer_create(&w[0], name, &o));
    if (arenas == 2)
        CHECK_EQ(SHMS_OK, shms_writer_join(&w[1], name, 1, NULL));
    shms_writer *last = w[arenas - 1];
    shms_writer_quota(w[0], (uint32_t)shms_writer_kind(w[0], "image", 5), 6000);
    CHECK_EQ(SHMS_OK, shms_reader_attach(&r, name, 0, NULL));
    for (int i = 0; i < 3; i++)
        CHECK_EQ(SHMS_OK, put_marked(w[i % (int)arenas], KEYS[i], 700, (uint64_t)i, refs[i]));
    verb_hit(last, "a", 1, refs[3]);
    shms_reader_acquire(r, refs[0], &pinned);
    shms_reader_find(r, "b", 1, found, &v);
    shms_view_release(v);
    shms_reader_release(r, refs[1]);
    shms_writer_cancel(last, refs[3]);
    verb_hit(last, "c", 1, refs[4]);
    verb_hold(last, refs[4]);
    for (int i = 0; i < 8; i++)
        put_marked(last, key_of("filler", (uint64_t)i), 900, 9, NULL);
    shms_writer_delete(last, "c", 1);
    put_marked(w[0], "d", 300, 4, refs[5]);
    shms_writer_retire(w[0], 1);
    keep_image("end");
    shms_step_hook = NULL;
    shms_view_release(pinned);
    shms_reader_free(r);
    shms_writer_free(w[0]);
    shms_writer_free(w[1]);
    unlink(path);
}

static void write_image(const image *i, const uint8_t *patches, size_t size) {
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    CHECK_EQ(0, ftruncate(fd, (off_t)i->size));
    CHECK_EQ((ssize_t)i->size, pwrite(fd, i->bytes, i->size, 0));
    while (size >= 5) { /* offset, length - 1, bytes */
        uint32_t at;
        memcpy(&at, patches, 4);
        size_t n = 1 + patches[4] % 16;
        patches += 5, size -= 5;
        if (n > size)
            n = size;
        at %= (uint32_t)i->size;
        if (n > i->size - at)
            n = i->size - at;
        CHECK_EQ((ssize_t)n, pwrite(fd, patches, n, at));
        patches += n, size -= n;
    }
    close(fd);
}

/* What waits for another process to go on does not wait here: there is none. */
int __wrap_nanosleep(const struct timespec *time, struct timespec *left);
int __wrap_nanosleep(const struct timespec *time, struct timespec *left) {
    (void)time, (void)left;
    return 0;
}

/* Every byte of a view can be read. */
__attribute__((no_sanitize("coverage"))) static void read_view(shms_view *v) {
    volatile uint8_t sum = 0;
    for (uint64_t i = 0; i < v->payload_size; i++)
        sum = (uint8_t)(sum + (uint8_t)v->payload[i]);
    for (uint32_t i = 0; i < v->meta_len; i++)
        sum = (uint8_t)(sum + (uint8_t)v->meta[i]);
    for (uint32_t i = 0; i < v->key_len; i++)
        sum = (uint8_t)(sum + (uint8_t)v->key[i]);
}

static void inspect(void) {
    static shms_slot_record slots[16];
    static shms_lease_record leases[16];
    static shms_rank_record ranks[SHMS_MAX_READERS];
    static shms_kind_info kinds[SHMS_KINDS];
    static shms_finding findings[32];
    shms_facts facts;
    uint8_t bytes[64];
    shms_inspector *i;
    if (shms_inspector_open(&i, name, SHMS_OWN_UID) != SHMS_OK)
        return;
    for (uint64_t arena = 0; shms_inspector_facts(i, arena, &facts) == SHMS_OK; arena++) {
        shms_inspector_kinds(i, arena, kinds);
        CHECK(shms_inspector_open_leases(i, arena) >= 0);
    }
    shms_inspector_ranks(i, ranks);
    int64_t n;
    for (uint64_t at = 0; (n = shms_inspector_slots(i, &at, slots, 16)) > 0;)
        for (int64_t k = 0; k < n; k++) {
            shms_inspector_copy(i, slots[k].slot, slots[k].id, 0, slots[k].length < 64 ? slots[k].length : 64, bytes);
            shms_inspector_check(i, slots[k].slot, slots[k].id, &findings[0]);
        }
    for (uint64_t at = 0; shms_inspector_leases(i, &at, leases, 16) > 0;)
        ;
    CHECK(shms_inspector_verify(i, findings, 32) >= 0);
    shms_inspector_free(i);
}

static void read_all(uint32_t rank, bool finds) {
    shms_expected e = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID, .finds = finds};
    shms_rank_stats stats;
    shms_reader *r;
    shms_view *v;
    uint8_t found[SHMS_REF_SIZE];
    if (shms_reader_attach(&r, name, rank, &e) != SHMS_OK)
        return;
    for (int i = 0; i < REFS; i++) {
        shms_reader_validate(r, refs[i]);
        if (i % 2 && shms_reader_acquire_private(r, refs[i], &v) == SHMS_OK) {
            read_view(v);
            shms_view_release(v);
        }
        if (shms_reader_acquire(r, refs[i], &v) == SHMS_OK) {
            read_view(v);
            shms_view_release(v);
        }
        shms_reader_release(r, refs[i]);
    }
    for (size_t i = 0; i < sizeof KEYS / sizeof *KEYS; i++) {
        shms_reader_has(r, KEYS[i], 1);
        if (shms_reader_find(r, KEYS[i], 1, found, &v) == SHMS_OK) {
            read_view(v);
            shms_reader_validate(r, found);
            shms_view_release(v);
        }
    }
    shms_reader_stats(r, &stats);
    shms_reader_free(r);
}

static int put(shms_writer *w, const char *key, uint64_t size, uint8_t *out) {
    shms_pending t;
    int rc = (out ? verb_begin : verb_reserve)(w, key, (uint32_t)strlen(key), NULL, 0, size, &t);
    if (rc)
        return rc;
    memset(t.payload, 1, size);
    return verb_commit(w, &t, out);
}

static void write_all(int arena, bool end_leases) {
    static uint8_t log[1 << 18];
    shms_expected e = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID, .end_leases = end_leases};
    shms_kind_info kinds[SHMS_KINDS];
    shms_stats stats;
    shms_stored stored;
    shms_writer *w;
    uint8_t ref[SHMS_REF_SIZE];
    if ((arena < 0 ? shms_writer_recover(&w, name, &e) : shms_writer_join(&w, name, arena, &e)) != SHMS_OK)
        return;
    uint64_t size = sizeof log;
    shms_writer_keys(w, "", 0, log, &size);
    shms_writer_kinds(w, kinds);
    for (int i = 0; i < REFS; i++) {
        uint64_t room = sizeof log;
        shms_writer_validate(w, refs[i], NULL, 0);
        shms_writer_extra(w, refs[i], log, &room);
        shms_writer_assign_group(w, refs[i], 1);
        shms_writer_cancel(w, refs[i]);
    }
    for (size_t i = 0; i < sizeof KEYS / sizeof *KEYS; i++) {
        verb_hit(w, KEYS[i], 1, ref);
        shms_writer_touch(w, KEYS[i], 1);
    }
    verb_protect(w, "a", 1);
    shms_writer_look(w, "a", 1, &stored);
    for (int i = 0; i < 9; i++)
        put(w, key_of("new", (uint64_t)i), 1000, i % 3 ? NULL : ref);
    verb_unprotect(w, "a", 1);
    shms_writer_delete(w, "b", 1);
    shms_writer_cancel_all(w);
    for (int i = 0; i < 4; i++)
        put(w, key_of("more", (uint64_t)i), 500, NULL);
    shms_writer_stats(w, &stats);
    shms_writer_clear(w, "", 0);
    shms_writer_close(w, 0);
    shms_writer_free(w);
}

/* Freed memory is used again soon, so that its pages stay in the processor's cache. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "quarantine_size_mb=8"; }

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    name = store_name("fuzz");
    snprintf(path, sizeof path, "/dev/shm/%s", name);
    for (arenas = 1; arenas <= 2; arenas++)
        script();
    fprintf(stderr, "%u images of %zu and %zu bytes\n", n_images, images[0].size, images[n_images - 1].size);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 3)
        return -1;
    write_image(&images[(data[0] | (uint32_t)data[1] << 8) % n_images], data + 3, size - 3);
    uint8_t how = data[2];
    shms_probe probe;
    if (how & 1)
        inspect();
    if (how & 2)
        read_all((how >> 2) & 1, how & 8);
    if (!(how & 3)) /* it asks for 256 locks, which takes longer than all else */
        shms_probe_file(&probe, name);
    write_all((int)(how >> 4 & 3) - 1, how >> 6 & 1); /* the recovered owner, or an arena */
    if (how & 128) {
        inspect();
        read_all(0, false);
        write_all(0, false);
    }
    unlink(path);
    return 0;
}
