/* test_private.c - a private view is writable, and nobody sees what is written; it ends before its pin does. */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "fixture.h"

enum { UNIT = SHMS_ALIGN, SIZE = 3 * UNIT, OBJECTS = 4 }; /* all in one page */

static uint8_t refs[OBJECTS][SHMS_REF_SIZE];
static char *written; /* the payload that the hook looks at */
static int looks;

static shms_view *private_of(const uint8_t *of) {
    shms_view *v;
    int rc = shms_reader_acquire_private(readers[0], of, &v);
    if (rc)
        errno = -rc;
    return v;
}

static bool is_mapped(const char *at) {
    unsigned char in_core;
    char *page = (char *)((uintptr_t)at & ~(uintptr_t)(sysconf(_SC_PAGESIZE) - 1));
    return mincore(page, 1, &in_core) == 0;
}

static void open_objects(const char *what) {
    open_store(what, (shms_options){.capacity = OBJECTS * (SIZE + UNIT), .n_readers = 1, .max_objects = 8}, 1);
    for (int i = 0; i < OBJECTS; i++)
        CHECK_EQ(SHMS_OK, put_marked(w, key_of("k", (uint64_t)i), SIZE, (uint64_t)i, refs[i]));
}

static void look_at_unpin(const char *label) {
    if (!strcmp(label, "R4")) {
        CHECK(!is_mapped(written));
        looks++;
    }
}

TEST(the_mapping_ends_before_the_pin) {
    open_objects("unmap");
    shms_view *v = private_of(refs[0]);
    CHECK(v && is_mapped(written = (char *)(uintptr_t)v->payload));
    shms_step_hook = look_at_unpin;
    shms_view_release(v);
    CHECK_EQ(1, looks);
    end();
}

TEST(a_payload_is_mapped_to_its_end_and_none_needs_no_mapping) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE); /* and it does not begin where one does */
    open_store("pages", (shms_options){.capacity = 4 * page, .n_readers = 1, .max_objects = 8}, 1);
    CHECK_EQ(SHMS_OK, put_marked(w, "k", page, 1, ref));
    shms_view *v = private_of(ref);
    CHECK(v && (uintptr_t)v->payload % page && filled(v->payload, page, 1));
    fill((char *)(uintptr_t)v->payload, page, 2);
    shms_view_release(v);
    CHECK_EQ(SHMS_OK, put_marked(w, "empty", 0, 1, ref));
    v = private_of(ref);
    CHECK(v && v->payload_size == 0);
    shms_view_release(v);
    end();
}

/* Nothing is acknowledged and nothing is held, and the object can be read. */
static void is_refused(shms_reader *r, uint32_t rank, int why) {
    shms_view *v;
    errno = 0;
    CHECK_EQ(SHMS_EMAP, shms_reader_acquire_private(r, refs[2], &v));
    CHECK_EQ(why, errno);
    CHECK(v == NULL);
    shms_rank_stats stats;
    CHECK_EQ(SHMS_OK, shms_reader_stats(r, &stats));
    CHECK_EQ(0, stats.live_views);
    CHECK_EQ(0, stats.counters.gets);
    shms_reader_table *t = shms_segment_reader(&w->seg, rank);
    for (uint32_t i = 0; i < 8; i++)
        CHECK_EQ(0, shms_pin_count(&shms_reader_pins(t)[i], memory_order_relaxed));
    CHECK_EQ(0, shms_get(&shms_reader_acks(t, &w->seg.layout)[2]));
    CHECK((v = view_of(r, refs[2])) && filled(v->payload, SIZE, 2));
    shms_view_release(v);
}

TEST(without_its_descriptor_a_reader_has_views_only) {
    open_store("descriptor", (shms_options){.capacity = 1 << 14, .n_readers = 2, .max_objects = 8}, 1);
    for (int i = 0; i < OBJECTS; i++)
        CHECK_EQ(SHMS_OK, put_marked(w, key_of("k", (uint64_t)i), SIZE, (uint64_t)i, refs[i]));
    pid_t child = fork_child();
    if (child == 0) {
        shms_reader *r;
        CHECK_EQ(SHMS_OK, shms_reader_attach(&r, name, 1, NULL));
        for (int fd = 3; fd < 100; fd++)
            close(fd);
        for (int fd = 3; fd < 100; fd++) /* another file has its number */
            CHECK(open("/dev/zero", O_RDWR) >= 0);
        is_refused(r, 1, EBADF);
        _exit(0);
    }
    CHECK_EQ(0, reap(child));
    end();
}
