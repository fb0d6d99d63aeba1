/*
 * test_reader_death.c - a reader is killed before each of its steps, with pins and leases. The next put that needs the
 * space gets all of it, whether or not another process has taken the rank. Objects that others hold stay.
 */
#include "support.h"

enum { CAPACITY = 64 * SHMS_ALIGN, OBJECTS = 4, SIZE = 3 * SHMS_ALIGN };

static uint64_t *all_steps; /* shared with the child */
static uint8_t (*refs)[SHMS_REF_SIZE];
static const char *name;

static shms_view *get(shms_reader *r, int i) {
    shms_view *v = view_of(r, refs[i]);
    CHECK(v && filled(v->payload, SIZE, (uint64_t)i));
    return v;
}

/* A reader that uses every call. It dies at its end with an open view and an open promise. */
static void live(void) {
    shms_reader *r, *again;
    CHECK_EQ(SHMS_OK, shms_reader_attach(&r, name, 0, NULL));
    shms_view *a = get(r, 0), *b = get(r, 1);
    shms_view_release(a);
    CHECK_EQ(1, shms_reader_release(r, refs[2]));
    CHECK_EQ(SHMS_OK, shms_reader_acquire_private(r, refs[0], &a));
    fill((char *)(uintptr_t)a->payload, SIZE, 9);
    uint8_t forged[SHMS_REF_SIZE];
    memcpy(forged, refs[3], sizeof forged);
    forged[39] ^= 1;
    CHECK(view_of(r, forged) == NULL);
    CHECK_EQ(SHMS_OK, shms_reader_close(r));
    shms_view_release(a);
    shms_view_release(b);
    shms_reader_free(r);
    CHECK_EQ(SHMS_OK, shms_reader_attach(&again, name, 0, NULL));
    get(again, 0);
    CHECK_EQ(SHMS_OK, shms_reader_acquire_private(again, refs[1], &b));
    CHECK_EQ(SHMS_OK, shms_reader_find(again, "c", 1, forged, &a));
    *all_steps = steps;
    kill(getpid(), SIGKILL);
}

static void everything_is_free(shms_writer *w) {
    for (int i = 0; i < 3; i++)
        CHECK_EQ(SHMS_OK, put_marked(w, (char[]){(char)('x' + i), 0}, CAPACITY - SHMS_ALIGN, 1, NULL));
    CHECK_EQ(1, shms_writer_count(w));
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
}

static void run(uint64_t k, bool replaced, bool first_life) {
    shms_options o = {.capacity = CAPACITY, .n_readers = 2, .max_objects = 16};
    shms_writer *w;
    shms_reader *other, *heir;
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, &o));
    CHECK_EQ(SHMS_OK, shms_reader_attach(&other, name, 1, NULL));
    if (!first_life) { /* the rank has been attached before */
        CHECK_EQ(SHMS_OK, shms_reader_attach(&heir, name, 0, NULL));
        shms_reader_free(heir);
    }
    for (int i = 0; i < OBJECTS; i++)
        CHECK_EQ(SHMS_OK, put_marked(w, (char[]){(char)('a' + i), 0}, SIZE, (uint64_t)i, refs[i]));
    shms_view *mine = view_of(other, refs[1]);
    CHECK(mine);
    for (int i = 0; i < OBJECTS; i++)
        CHECK_EQ(i != 1, shms_reader_release(other, refs[i]));
    pid_t child = fork_child();
    if (child == 0) {
        die_at_step(k);
        live();
        _exit(1);
    }
    reap_killed(child);
    bool ever = !first_life || shms_get(&shms_segment_reader(&w->seg, 0)->epoch) > 0;
    if (!ever) { /* never attached: still expected, and its promise is kept */
        CHECK_EQ(SHMS_EFULL, put_marked(w, "x", CAPACITY - 4 * SHMS_ALIGN, 1, NULL));
        CHECK_EQ(SHMS_OK, shms_writer_retire(w, 0));
    }
    if (replaced) {
        CHECK_EQ(SHMS_OK, shms_reader_attach(&heir, name, 0, NULL));
        for (uint32_t i = 0; i < o.max_objects; i++)
            CHECK_EQ(0, shms_pin_count(&shms_reader_pins(shms_segment_reader(&w->seg, 0))[i], memory_order_relaxed));
        if (!ever)
            for (int i = 0; i < OBJECTS; i++)
                shms_writer_cancel(w, refs[i]);
    }
    CHECK_EQ(SHMS_OK, put_marked(w, "w", CAPACITY / 2, 1, NULL)); /* around the one object that stays */
    CHECK(filled(mine->payload, SIZE, 1));
    CHECK_EQ(SHMS_EFULL, put_marked(w, "x", CAPACITY - SHMS_ALIGN, 1, NULL));
    shms_view_release(mine);
    everything_is_free(w);
    if (replaced)
        shms_reader_free(heir);
    shms_reader_free(other);
    end_writer(w);
}

TEST(a_dead_reader_leaves_no_pin_and_no_lease) {
    char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    all_steps = (uint64_t *)page;
    refs = (void *)(page + 64);
    name = store_name("death");
    for (int way = 0; way < 4; way++) {
        run(0, way & 1, way & 2);
        uint64_t n = *all_steps;
        CHECK(n > 30);
        for (uint64_t k = 1; k <= n; k++)
            run(k, way & 1, way & 2);
    }
}
