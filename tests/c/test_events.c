/* test_events.c - the log of events: kinds, ids and positions; what a slow listener loses, and a listener of a dead
 * writer. */
#include <fcntl.h>

#include "fixture.h"

#define ROOM (1 << 20)

static uint8_t out[ROOM];
static uint64_t sizes[3];

static void begin(uint64_t capacity) {
    open_store("events", (shms_options){.capacity = capacity, .n_readers = 1, .max_objects = 64}, 0);
    CHECK_EQ(SHMS_OK, shms_writer_retire(w, 0));
}

static int listen(uint64_t from, uint64_t room) {
    sizes[0] = room;
    return shms_writer_events(w, from, out, sizes);
}

/* Checks the events in `out`: a kind, an id and a key of one character each. */
static void expect(const char *kinds, const char *ids, const char *keys) {
    const uint8_t *at = out;
    for (; *kinds; kinds++, ids++, keys++, at += sizeof(shms_event) + 1) {
        shms_event e;
        memcpy(&e, at, sizeof e);
        CHECK_EQ(*kinds == '+' ? SHMS_EVENT_PUT : *kinds == '-' ? SHMS_EVENT_EVICTED : SHMS_EVENT_DELETED, e.kind);
        CHECK_EQ(*ids - '0', e.id);
        CHECK_EQ(1, e.key_len);
        CHECK_EQ(*keys, at[sizeof e]);
    }
    CHECK_EQ(at - out, sizes[0]);
}

TEST(a_small_room_gets_whole_events_and_learns_what_one_needs) {
    begin(4096);
    CHECK(shms_writer_track_events(w, 1) > 0);
    uint64_t start = w->events.first, one = sizeof(shms_event) + 1;
    for (char c = 'a'; c < 'e'; c++)
        CHECK_EQ(SHMS_OK, put_marked(w, (char[]){c, 0}, 64, 1, NULL));
    CHECK_EQ(SHMS_OK, listen(start, one - 1));
    CHECK_EQ(one, sizes[0]);
    CHECK_EQ(start, sizes[1]);
    CHECK_EQ(SHMS_OK, listen(start, 3 * one - 1));
    expect("++", "12", "ab");
    CHECK_EQ(SHMS_OK, listen(sizes[1], 2 * one));
    expect("++", "34", "cd");
    CHECK_EQ(start + 4, shms_writer_track_events(w, 0));
    CHECK_EQ(SHMS_OK, listen(start, ROOM));
    CHECK(sizes[0] == 0 && sizes[2] == start + 4); /* all is lost */
    end();
}

/* Keys of `len` bytes come until each ring has gone round several times. */
static void a_slow_listener_is_told_what_it_has_lost(uint32_t len) {
    begin(1 << 20);
    CHECK(shms_writer_track_events(w, 1) > 0);
    static char key[SHMS_MAX_KEY];
    uint64_t start = w->events.first, n = 0;
    for (; n < 20000 && n * len < 5 * SHMS_MIN_LOG; n += 2) {
        memset(key, 'a' + (int)(n / 2 % 26), len);
        CHECK_EQ(SHMS_OK, verb_put(w, key, len, NULL, 0, 0, NULL, 0, out));
        CHECK_EQ(1, shms_writer_delete(w, key, len));
    }
    CHECK_EQ(SHMS_OK, listen(start, ROOM));
    CHECK_EQ(0, sizes[0]);
    uint64_t first = sizes[2];
    CHECK(first > start && first < start + n);
    CHECK_EQ(SHMS_OK, listen(first, ROOM));
    CHECK_EQ(start + n, sizes[1]);
    CHECK_EQ((start + n - first) * (sizeof(shms_event) + len), sizes[0]);
    uint64_t log = w->events.n_cells, keys = w->events.n_bytes;
    CHECK_EQ(SHMS_MIN_LOG, log * sizeof(shms_event_cell) + keys);
    CHECK_EQ(keys / len < log ? keys / len : log, start + n - first); /* as many as the fuller ring has room for */
    for (uint64_t i = first - start; i < n; i++) {
        shms_event e;
        const uint8_t *at = out + (i + start - first) * (sizeof e + len);
        memcpy(&e, at, sizeof e);
        CHECK_EQ(i / 2 + 1, e.id);
        CHECK_EQ(i % 2 ? SHMS_EVENT_DELETED : SHMS_EVENT_PUT, e.kind);
        for (uint32_t b = 0; b < len; b++)
            CHECK(at[sizeof e + b] == 'a' + i / 2 % 26);
    }
    end();
}

/* Otherwise the log would be written or read out of bounds. */
TEST(a_damaged_key_or_position_is_not_taken_over) {
    static const size_t counts[] = {SHMS_C(puts), SHMS_C(evictions), SHMS_C(deletes)};
    begin(1 << 20);
    CHECK_EQ(SHMS_OK, put_marked(w, "a", 200000, 1, NULL));
    shms_set(&w->seg.slots[0].head, SHMS_MAX_KEY);
    shms_writer_free(w);
    CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
    shms_set(&w->seg.slots[0].head, SHMS_MAX_KEY + 1);
    shms_writer_free(w);
    CHECK_EQ(SHMS_ECORRUPT, shms_writer_recover(&w, name, NULL));
    begin(4096);
    for (int i = 0; i <= 3; i++) {
        shms_word *word = i < 3 ? &w->seg.writer->counters[counts[i]] : &w->seg.writer->epoch;
        int fd = shm_open(name, O_RDWR, 0);
        uint64_t before = shms_get(word), damage = UINT64_MAX - 5;
        off_t at = (off_t)((uint8_t *)word - (uint8_t *)w->seg.sb);
        CHECK(fd >= 0 && pwrite(fd, &damage, 8, at) == 8);
        shms_writer_free(w);
        CHECK_EQ(SHMS_ECORRUPT, shms_writer_recover(&w, name, NULL));
        CHECK(pwrite(fd, &before, 8, at) == 8);
        close(fd);
        CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
    }
    end();
}

TEST(each_in_all_its_cases) {
    a_slow_listener_is_told_what_it_has_lost(1);
    a_slow_listener_is_told_what_it_has_lost(100);
    a_slow_listener_is_told_what_it_has_lost(SHMS_MAX_KEY);
    CHECK_EQ(1, store_names_left()); /* the damaged one */
}
