/* test_verify.c - what verify finds where one word is wrong, and that it finds no more. tests/inspect has a damage for
 * each kind of finding; these are the other ways to make them. */
#include <sys/stat.h>

#include "fixture.h"
#include "inspect/inspector.h"

static shms_inspector *inspector;
static shms_finding found[8];

/* A bit for each kind of finding that there is now. */
static uint64_t kinds_found(void) {
    uint64_t kinds = 0;
    int64_t n = shms_inspector_verify(inspector, found, 8);
    CHECK(n >= 0 && n < 8);
    for (int64_t k = 0; k < n; k++)
        kinds |= UINT64_C(1) << found[k].kind;
    return kinds;
}
#define ONE_OF(a) (UINT64_C(1) << SHMS_F_##a)

/* One word has that value for a while. */
static void finds(uint64_t kinds, shms_word *at, uint64_t value) {
    uint64_t was = shms_get(at);
    CHECK_EQ(0, kinds_found());
    shms_set(at, value);
    CHECK_EQ(kinds, kinds_found());
    shms_set(at, was);
}

static void open_both(const char *what, shms_options o) {
    open_store(what, o, 1);
    CHECK_EQ(0, shms_inspector_open(&inspector, name, SHMS_OWN_UID));
}

static void end_both(void) {
    CHECK_EQ(0, kinds_found());
    shms_inspector_free(inspector);
    end();
}

TEST(damage_in_a_slot_or_a_hand_is_found) {
    enum { SIZE = 2 * SHMS_MAX_KEY, MOST = 4 * SIZE };
    open_both("verify",
              (shms_options){.capacity = 8 * SIZE, .max_object_size = MOST, .n_readers = 1, .max_objects = 8});
    for (int k = 0; k < 4; k++)
        CHECK_EQ(0, put_marked(w, key_of("", (uint64_t)k), SIZE, 0, NULL));
    shms_slot *slots[4];
    for (uint32_t s = 0; s < 8; s++)
        if (shms_get(&w->seg.slots[s].state) == SHMS_LIVE)
            slots[shms_get(&w->seg.slots[s].id) - 1] = &w->seg.slots[s];
    finds(ONE_OF(ID), &slots[0]->id, 0);
    finds(ONE_OF(KEY) | ONE_OF(INDEX), &slots[0]->head, SHMS_MAX_KEY + 1);
    finds(ONE_OF(BOUNDS) | ONE_OF(USED) | ONE_OF(KIND_BYTES), &slots[3]->length, MOST + 1);
    finds(ONE_OF(HAND), &w->seg.writer->hand, 1);
    finds(ONE_OF(HAND), &w->seg.writer->small_hand, SHMS_ALIGN + 1);
    /* The first lies over the two after it: both are named as sharing its bytes. */
    uint64_t length = shms_get(&slots[0]->length), overlaps = 0;
    shms_set(&slots[0]->length, 3 * length);
    CHECK_EQ(ONE_OF(OVERLAP) | ONE_OF(USED) | ONE_OF(KIND_BYTES), kinds_found());
    for (int k = 0; k < 8; k++)
        if (found[k].kind == SHMS_F_OVERLAP)
            overlaps += &w->seg.slots[found[k].value] == slots[0] &&
                        (&w->seg.slots[found[k].where] == slots[1] || &w->seg.slots[found[k].where] == slots[2]);
    CHECK_EQ(2, overlaps);
    shms_set(&slots[0]->length, length);
    end_both();
}

/* The hash of a word that another one follows. */
static uint64_t before_next(uint64_t x) { return shms_hash_key(x, "", 0) + UINT64_C(0x9e3779b97f4a7c15); }

TEST(keys_that_differ_are_not_the_same_key_though_their_hashes_are) {
    open_both("hashes", (shms_options){.capacity = 64 << 10, .n_readers = 1, .max_objects = 8});
    uint64_t secret = w->seg.sb->secret, one[2] = {1}, two[2] = {2};
    one[1] = secret ^ 8 ^ one[0] ^ before_next(secret ^ 16 ^ one[0]); /* as the hash of the first word alone */
    two[1] = one[1] ^ before_next(secret ^ 16 ^ one[0]) ^ before_next(secret ^ 16 ^ two[0]);
    const struct {
        const void *key;
        uint32_t len;
    } keys[] = {{two, 16}, {one, 16}, {one, 8}};
    for (int k = 0; k < 3; k++) {
        shms_pending t;
        CHECK_EQ(0, verb_reserve(w, keys[k].key, keys[k].len, NULL, 0, 1, &t));
        CHECK_EQ(0, verb_commit(w, &t, NULL));
        CHECK_EQ(shms_hash_key(secret, keys[0].key, 16), shms_hash_key(secret, keys[k].key, keys[k].len));
    }
    end_both();
}

static shms_lease *held;
static void renumber(const char *label) {
    if (!strcmp(label, "lease"))
        shms_set(&held->number, shms_get(&held->number) ^ 2);
}

TEST(damage_in_the_list_of_a_lease_on_an_object_of_another_is_found) {
    shms_writer *other;
    uint8_t own[SHMS_REF_SIZE];
    shms_ref lease;
    open_both("lists", (shms_options){.capacity = 64 << 10, .n_readers = 1, .n_writers = 2, .max_objects = 8});
    CHECK_EQ(0, shms_writer_join(&other, name, 1, NULL));
    CHECK_EQ(0, put_marked(w, "key", 1, 0, NULL));
    CHECK_EQ(0, verb_hit(other, "key", 3, ref));
    CHECK_EQ(0, put_marked(other, "own", 1, 0, own));
    shms_ref_unpack(&lease, ref);
    const uint32_t n_entries = other->leases.n_entries, n_slots = shms_all_slots(&w->seg.layout);
    _Atomic uint32_t *first = &shms_segment_holds(&other->seg, 1)[lease.slot].first;
    held = shms_segment_lease(&other->seg, lease.entry);
    uint32_t was = atomic_load(first);
    for (int far = 0; far < 2; far++) { /* entries that there are not */
        atomic_store(first, far ? UINT32_MAX / 2 : n_entries + 1);
        CHECK_EQ(ONE_OF(HOLDS) | ONE_OF(UNLISTED), kinds_found());
    }
    atomic_store(first, was);
    finds(ONE_OF(HOLDS) | ONE_OF(OPEN_LEASES), &held->number, 0);
    finds(ONE_OF(HOLDS) | ONE_OF(LEASE_SLOT), &held->what, shms_lease_what(n_slots, false, 0, 0));
    finds(0, &other->seg.writer->pinning, lease.slot + 1);
    finds(ONE_OF(PINNING), &other->seg.writer->pinning, n_slots + 1);
    /* A lease that changes during each read is not compared with the list. */
    atomic_store(first, 0);
    CHECK_EQ(ONE_OF(UNLISTED), kinds_found());
    shms_step_hook = renumber;
    CHECK_EQ(0, kinds_found());
    shms_step_hook = NULL;
    CHECK_EQ(lease.lease, shms_get(&held->number));
    atomic_store(first, was);
    /* A list of leases on an object of one's own, which no owner walks. */
    shms_ref_unpack(&lease, own);
    first = &shms_segment_holds(&other->seg, 1)[lease.slot].first;
    atomic_store(first, lease.entry - n_entries + 1);
    CHECK_EQ(ONE_OF(HOLDS), kinds_found());
    atomic_store(first, 0);
    CHECK_EQ(0, kinds_found());
    CHECK_EQ(0, shms_writer_valid(other));
    shms_writer_free(other);
    end_both();
}

static void cut_now(const char *label) {
    if (!strcmp(label, "slot"))
        CHECK_EQ(0, truncate(w->seg.path, (off_t)w->seg.layout.file_size - 1));
}

TEST(a_file_that_is_cut_off_between_two_passes_is_corrupt) {
    open_both("cut", (shms_options){.capacity = 64 << 10, .n_readers = 1, .max_objects = 8});
    CHECK_EQ(0, put_marked(w, "key", 1, 0, NULL));
    uint64_t used = shms_get(&w->seg.writer->used_bytes);
    shms_set(&w->seg.writer->used_bytes, 64);
    shms_step_hook = cut_now;
    CHECK_EQ(SHMS_ECORRUPT, shms_inspector_verify(inspector, found, 8));
    shms_step_hook = NULL;
    CHECK_EQ(0, truncate(w->seg.path, (off_t)w->seg.layout.file_size));
    shms_set(&w->seg.writer->used_bytes, used);
    end_both();
}
