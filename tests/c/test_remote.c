/* test_remote.c - look-ups, uses and pins of writer B on objects of writer A keep nothing that B does not lease. */
#include "store/remote.h"
#include "support.h"

enum { UNIT = SHMS_ALIGN, UNITS = 16, SLOTS = 6 };

static shms_writer *a, *b;
static uint8_t ref[SHMS_REF_SIZE];

/* A store of two writers, in which nothing is put. */
static void begin(void) {
    shms_options o = {.capacity = UNITS * UNIT, .n_readers = 1, .max_objects = SLOTS, .n_writers = 2};
    const char *name = store_name("remote");
    CHECK_EQ(SHMS_OK, shms_writer_create(&a, name, &o));
    CHECK_EQ(SHMS_OK, shms_writer_join(&b, name, 1, NULL));
}

static void end(void) {
    end_writer(b);
    end_writer(a);
}

static int put(shms_writer *w, const char *key, uint64_t units, uint64_t mark, uint8_t *ref) {
    return put_marked(w, key, units * UNIT, mark, ref);
}

static bool passes; /* B's pin ends as soon as A lets it run; B has not counted that yet */

int sched_yield(void) {
    if (passes)
        atomic_store(&b->seg.writer->pinning, 0);
    return 0;
}

static int put_of_kind(uint32_t kind, const char *key, uint64_t units) {
    shms_pending t;
    int rc = verb_begin_of(a, key, 3, NULL, 0, (units - 1) * UNIT, kind, false, &t, NULL);
    return rc ? rc : verb_commit(a, &t, NULL);
}

/* Nothing is held, but B stands on a pin: A lets it run and asks again, before it refuses a put. */
TEST(a_pin_in_passing_refuses_nobody) {
    static const int codes[] = {SHMS_EFULL, SHMS_ENOSLOT, SHMS_EQUOTA};
    static const uint64_t units[] = {UNITS, 1, 3};
    for (int i = 0; i < 3; i++) {
        char key[] = "n0";
        begin();
        CHECK_EQ(1, shms_writer_kind(a, "kind", 4));
        CHECK_EQ(SHMS_OK, shms_writer_quota(a, 1, units[2] * UNIT));
        CHECK_EQ(SHMS_OK, put_of_kind(i == 2, "one", units[i]));
        for (; codes[i] == SHMS_ENOSLOT && key[1] < '0' + SLOTS - 1; key[1]++)
            CHECK_EQ(SHMS_OK, put(a, key, 1, 1, ref)); /* leased */
        shms_slot seen;
        uint32_t slot = shms_look_remote(b, shms_key_hash(b, "one", 3), "one", 3, &seen);
        CHECK(slot != SHMS_NONE && shms_holds_pin(&b->seg, slot, shms_get(&seen.id)));
        for (uint64_t refused = 1; refused < 3; refused++) {
            CHECK_EQ(codes[i], put_of_kind(i == 2, "two", units[i]));
            CHECK_EQ(refused, shms_get(&a->seg.writer->counters[SHMS_C(refusals)]));
        }
        passes = true;
        CHECK_EQ(SHMS_OK, put_of_kind(i == 2, "two", units[i]));
        passes = false;
        end();
    }
}

static void a_needs_all(const char *label) {
    if (strcmp(label, "B2a") == 0) { /* after a pin */
        shms_step_hook = NULL;
        CHECK_EQ(SHMS_OK, put(a, "all", UNITS - 1, 9, NULL));
    }
}

static int seen_in_evicting;
static void b_looks(const char *label) {
    shms_step_hook = NULL;
    bool evicting = shms_get(&a->seg.slots[0].state) == SHMS_EVICTING; /* it may stay, but nobody waits for that */
    if (strcmp(label, "W3h") == 0 && shms_get(&a->seg.slots[0].state) != SHMS_FREE) {
        CHECK_EQ(evicting ? 0 : 1, shms_writer_has(b, "one", 3));
        CHECK_EQ(evicting ? 0 : 1, shms_writer_touch(b, "one", 3));
        seen_in_evicting += evicting;
    }
    shms_step_hook = b_looks;
}

/* Nobody holds anything, so A is not refused, wherever a look-up or a use of B stands. */
TEST(a_look_up_refuses_nobody) {
    for (int i = 0; i < 2; i++) {
        begin();
        CHECK_EQ(SHMS_OK, put(a, "one", 3, 1, NULL));
        shms_step_hook = a_needs_all;
        CHECK_EQ(1, i ? shms_writer_touch(b, "one", 3) : shms_writer_has(b, "one", 3));
        CHECK_EQ(0, shms_get(&b->seg.writer->releases)); /* B has pinned nothing, so it let go of nothing */
        shms_step_hook = b_looks;
        CHECK_EQ(SHMS_OK, put(a, "all", UNITS - 1, 9, NULL));
        shms_step_hook = NULL;
        CHECK_EQ(0, shms_writer_has(b, "one", 3));
        CHECK(seen_in_evicting > i);
        end();
    }
}

TEST(a_place_that_no_object_can_have_is_not_looked_at) {
    uint64_t size = UNITS * UNIT;
    uint8_t out[UNITS * UNIT];
    begin();
    CHECK_EQ(SHMS_OK, put(a, "one", 3, 1, NULL));
    CHECK_EQ(SHMS_OK, verb_hit(b, "one", 3, ref));
    shms_set(&a->seg.slots[0].offset, UINT64_MAX - UNIT + 1);
    CHECK_EQ(0, shms_writer_has(b, "one", 3));
    CHECK_EQ(0, shms_writer_validate(b, ref, "one", 3));
    CHECK_EQ(SHMS_ESTALE, shms_writer_extra(b, ref, out, &size));
    CHECK_EQ(0, shms_writer_equals(b, ref, "", 0, 0, NULL, 0));
    CHECK_EQ(1, shms_writer_cancel(b, ref)); /* in no zone */
    CHECK_EQ(2, shms_get(&b->seg.writer->releases)); /* the pin's, and this one */
    shms_set(&a->seg.slots[0].offset, 0);
    CHECK_EQ(1, shms_writer_has(b, "one", 3));
    shms_set(&a->seg.slots[0].head, 2); /* as if by now the slot had an object of another key */
    CHECK_EQ(0, shms_writer_has(b, "one", 3));
    shms_set(&a->seg.slots[0].head, 3);
    end();
}

/* The library's calls come here: the next object comes into the slot while B compares or copies the bytes of this one. */
enum { EXTRA = 100 };
static bool goes;
static void go(void) {
    if (goes)
        shms_add(&a->seg.slots[0].id, 1);
    goes = false;
}
int memcmp(const void *one, const void *other, size_t n) {
    const uint8_t *x = one, *y = other;
    go();
    while (n && *x == *y)
        n--, x++, y++;
    return n ? *x - *y : 0;
}
void *memcpy(void *out, const void *in, size_t n) {
    uint8_t *to = out;
    const uint8_t *from = in;
    if (n == EXTRA)
        go();
    while (n--)
        *to++ = *from++;
    return out;
}

#ifdef __SANITIZE_ADDRESS__ /* which copies by itself */
enum { READS = 3 };
#else
enum { READS = 4 };
#endif

TEST(what_goes_while_it_is_read_was_not_there) {
    char extra[EXTRA] = "";
    uint8_t out[EXTRA];
    uint64_t size = EXTRA;
    shms_batch batch = {0};
    begin();
    CHECK_EQ(SHMS_OK,
             shms_batch_put(a, &batch, &(shms_put){.key = "one", .key_len = 3, .extra = extra, .extra_len = EXTRA}));
    memcpy(ref, batch.ref, sizeof ref);
    for (int i = 0; i < READS; i++) {
        uint64_t id = shms_get(&a->seg.slots[0].id);
        goes = true;
        if (i == 0)
            CHECK_EQ(0, shms_writer_has(b, "one", 3));
        else if (i == 1)
            CHECK_EQ(0, shms_writer_validate(b, ref, "one", 3));
        else if (i == 2)
            CHECK_EQ(0, shms_writer_equals(b, ref, "", 0, 0, NULL, 0));
        else /* and the bytes may be those of the next one */
            CHECK_EQ(SHMS_ESTALE, shms_writer_extra(b, ref, out, &size));
        CHECK(!goes);
        shms_set(&a->seg.slots[0].id, id);
    }
    shms_batch_drop(a, &batch);
    end();
}

TEST(what_its_owner_has_deleted_is_not_dropped_again) {
    begin();
    CHECK_EQ(SHMS_OK, put(a, "one", 3, 1, ref));
    CHECK_EQ(1, shms_writer_delete(a, "one", 3));
    CHECK_EQ(SHMS_LIVE, shms_get(&a->seg.slots[0].state)); /* still held */
    uint64_t drops = shms_get(&b->seg.writer->drops);
    CHECK_EQ(SHMS_OK, shms_writer_clear(b, "", 0));
    CHECK_EQ(drops, shms_get(&b->seg.writer->drops));
    CHECK_EQ(1, shms_writer_cancel(a, ref));
    end();
}

/* A's CLOCK spares what B has used, however often. */
TEST(what_another_writer_uses_stays) {
    static const int uses[] = {0, 1, 255, 256, 257, 65536, 1};
    for (int i = 0; i < 7; i++) {
        begin();
        CHECK_EQ(SHMS_OK, put(a, "hot", 7, 1, NULL));
        CHECK_EQ(SHMS_OK, put(a, "cold", 7, 2, NULL));
        for (int n = 0; i < 6 && n < uses[i]; n++)
            CHECK_EQ(1, shms_writer_touch(b, "hot", 3));
        if (i == 6) { /* a hit is a use, too, when its lease has ended */
            CHECK_EQ(SHMS_OK, verb_hit(b, "hot", 3, ref));
            CHECK_EQ(1, shms_writer_cancel(b, ref));
        }
        CHECK_EQ(SHMS_OK, put(a, "new", 7, 3, NULL));
        CHECK_EQ(uses[i] > 0, shms_writer_has(a, "hot", 3));
        CHECK_EQ(uses[i] == 0, shms_writer_has(a, "cold", 4));
        end();
    }
}
