/* test_arenas.c - several writers of one store: joining, one another's objects, and what the owner still may evict. */
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <time.h>

#include "support.h"

enum { ARENAS = 3, UNIT = 4096, SLOTS = 8 };

static const char *name;
static shms_writer *writers[ARENAS];
static shms_reader *reader;
static uint8_t ref[SHMS_REF_SIZE];

static void open_arenas(uint64_t capacity, uint32_t slots) {
    shms_options o = {.capacity = capacity, .n_readers = 1, .max_objects = slots, .n_writers = ARENAS};
    name = store_name("arenas");
    CHECK_EQ(SHMS_OK, shms_writer_create(&writers[0], name, &o));
    for (int i = 1; i < ARENAS; i++)
        CHECK_EQ(SHMS_OK, shms_writer_join(&writers[i], name, i, NULL));
    CHECK_EQ(SHMS_OK, shms_reader_attach(&reader, name, 0, NULL));
}
static void open_all(void) { open_arenas(SLOTS * UNIT, SLOTS); }

static void close_all(void) {
    shms_reader_free(reader);
    for (int i = 0; i < ARENAS; i++)
        end_writer(writers[i]);
}

static void put(int by, const char *key, uint64_t size, uint8_t *ref) {
    CHECK_EQ(SHMS_OK, put_marked(writers[by], key, size, (uint64_t)key[0], ref));
}
static bool hit(int by, const char *key, uint8_t *ref) {
    int rc = verb_hit(writers[by], key, (uint32_t)strlen(key), ref);
    CHECK(rc == SHMS_OK || rc == SHMS_ENOTFOUND);
    return rc == SHMS_OK;
}
/* Reads a reference, and checks the bytes. */
static void get(const uint8_t *ref, char key) {
    shms_view *v = view_of(reader, ref);
    CHECK(v);
    CHECK(v->key[0] == key && filled(v->payload, v->payload_size, (uint64_t)key));
    shms_view_release(v);
}

/* The library's calls come here: the next locks are refused, as by a writer that closes and has let go before the caller
 * can see why. */
static int refused;

int fcntl(int fd, int cmd, ...) {
    va_list more;
    va_start(more, cmd);
    void *argument = va_arg(more, void *);
    va_end(more);
    if (cmd == F_OFD_SETLK && refused > 0) {
        refused--;
        errno = EAGAIN;
        return -1;
    }
    return (int)syscall(SYS_fcntl, fd, cmd, argument);
}

TEST(a_writer_that_closed_meanwhile_is_not_in_the_way) {
    open_all();
    shms_writer_free(writers[2]);
    refused = ARENAS;
    CHECK_EQ(SHMS_OK, shms_writer_join(&writers[2], name, SHMS_ANY_ARENA, NULL));
    CHECK_EQ(0, refused);
    close_all();
}

/* Fills an arena so that everything that may go has gone. */
static bool survives(int owner, const char *key) {
    for (int i = 0; i < 3 * SLOTS; i++) {
        int rc = put_marked(writers[owner], key_of("f", i), UNIT - 64, 'f', NULL);
        CHECK(rc == SHMS_OK || rc == SHMS_EFULL);
    }
    return shms_writer_has(writers[owner], key, (uint32_t)strlen(key)) == 1;
}

TEST(ids_and_references_are_unique_in_the_store) {
    uint8_t ref[ARENAS][SHMS_REF_SIZE];
    shms_ref seen[ARENAS];
    open_all();
    for (int i = 0; i < ARENAS; i++) {
        put(i, "a", 1000, ref[i]); /* two that miss at once store twice */
        shms_ref_unpack(&seen[i], ref[i]);
    }
    for (int i = 0; i < ARENAS; i++)
        for (int k = 0; k < i; k++)
            CHECK(seen[i].id != seen[k].id && seen[i].slot != seen[k].slot && seen[i].entry != seen[k].entry &&
                  seen[i].address != seen[k].address);
    for (int i = 0; i < ARENAS; i++)
        get(ref[i], 'a');
    close_all();
}

/* Stores that only the owner may do: states as a death, or a turn of the scheduler, leaves them. */
static shms_slot *slot_of(int by, const uint8_t *ref) {
    shms_ref seen;
    shms_ref_unpack(&seen, ref);
    return &writers[by]->seg.slots[seen.slot % SLOTS];
}

TEST(an_object_that_is_being_evicted_is_deleted_all_the_same) {
    open_all();
    put(0, "a", 100, ref);
    get(ref, 'a');
    for (int all = 0; all < 2; all++) {
        shms_set(&slot_of(0, ref)->state, SHMS_EVICTING);
        if (all)
            CHECK_EQ(SHMS_OK, shms_writer_clear(writers[2], "", 0));
        else
            CHECK_EQ(1, shms_writer_delete(writers[1], "a", 1));
        shms_set(&slot_of(0, ref)->state, SHMS_LIVE); /* W5: it stays */
        CHECK(!hit(1 + all, "a", ref));
    }
    CHECK(!hit(0, "a", ref));
    close_all();
}

TEST(undoing_a_hit_leaves_the_next_object_in_the_slot_alone) {
    static shms_batch batch;
    open_all();
    put(0, "a", 100, ref);
    get(ref, 'a');
    CHECK_EQ(SHMS_OK, shms_batch_hit(writers[1], &batch, "a", 1, 0, 0));
    shms_set(&slot_of(0, ref)->state, SHMS_WRITING); /* P2, before the next id is stored */
    shms_batch_undo(writers[1], &batch);
    CHECK_EQ(SHMS_WRITING, shms_get(&slot_of(0, ref)->state));
    CHECK_EQ(SHMS_OK, shms_writer_valid(writers[1]));
    shms_set(&slot_of(0, ref)->state, SHMS_LIVE);
    close_all();
}

static int join_again(int by, bool keep) {
    shms_expected e = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID, .end_leases = !keep};
    shms_writer_free(writers[by]);
    return shms_writer_join(&writers[by], name, by, &e);
}

TEST(a_successor_keeps_the_leases_whose_objects_are_still_there) {
    uint8_t a[3][SHMS_REF_SIZE], held[SHMS_REF_SIZE], lost[SHMS_REF_SIZE], own[SHMS_REF_SIZE], wrong[SHMS_REF_SIZE];
    for (int keep = 0; keep < 2; keep++) {
        open_all();
        put(0, "a", 3000, NULL);
        put(2, "h", 3000, NULL);
        put(0, "l", 3000, NULL);
        put(1, "o", 3000, own);
        for (int i = 0; i < 3; i++)
            CHECK(hit(1, "a", a[i]));
        CHECK(hit(1, "h", held) && hit(1, "l", lost) && hit(1, "h", wrong));
        shms_ref parts;
        shms_ref_unpack(&parts, wrong);
        shms_set(&shms_segment_lease(&writers[1]->seg, parts.entry)->what, 0xffffff); /* no slot, after damage */
        CHECK_EQ(1, verb_hold(writers[1], held));
        get(held, 'h');
        shms_set(&slot_of(0, lost)->id, 1000); /* reclaimed, as far as anyone can see */
        CHECK_EQ(SHMS_OK, join_again(1, keep));
        shms_stats stats;
        CHECK_EQ(SHMS_OK, shms_writer_stats(writers[1], &stats));
        CHECK_EQ(keep ? 5 : 0, stats.open_leases);
        CHECK_EQ(SHMS_OK, shms_writer_valid(writers[1]));
        CHECK_EQ(keep, survives(0, "a"));
        CHECK_EQ(keep, survives(2, "h"));
        CHECK_EQ(keep, survives(1, "o"));
        for (int i = 2; keep && i >= 0; i -= 2) {
            CHECK_EQ(1, shms_writer_cancel(writers[1], a[i]));
            CHECK_EQ(SHMS_OK, shms_writer_valid(writers[1]));
        }
        if (keep) {
            get(a[1], 'a');
            CHECK_EQ(1, shms_writer_cancel(writers[1], held));
            CHECK(!survives(0, "a") && !survives(2, "h"));
        }
        close_all();
    }
}

TEST(a_successor_waits_for_one_stopped_owner_only) {
    uint8_t ref[3][SHMS_REF_SIZE];
    shms_stats stats;
    struct timespec before, after;
    open_all();
    for (int i = 0; i < 3; i++) {
        put(0, (char[]){(char)('a' + i), 0}, 300, NULL);
        CHECK(hit(1, (char[]){(char)('a' + i), 0}, ref[i]));
    }
    for (int i = 0; i < 2; i++)
        shms_set(&slot_of(0, ref[i])->state, SHMS_EVICTING);
    clock_gettime(CLOCK_MONOTONIC, &before);
    CHECK_EQ(SHMS_OK, join_again(1, true));
    clock_gettime(CLOCK_MONOTONIC, &after);
    CHECK(after.tv_sec - before.tv_sec <= 1);
    CHECK_EQ(SHMS_OK, shms_writer_stats(writers[1], &stats));
    CHECK_EQ(1, stats.open_leases);
    for (int i = 0; i < 2; i++)
        shms_set(&slot_of(0, ref[i])->state, SHMS_LIVE);
    close_all();
}

TEST(dropped_objects_are_found_however_far_the_owner_is_behind) {
    open_all();
    for (int n = 0; n < 300; n = n < 100 || n > 140 ? n + 50 : n + 1)
        for (int first = 0; first < 2; first++) { /* the owner's is the oldest of n + 1, or the newest */
            put(0, "a", 100, NULL);
            for (int again = 0; first && again < 2; again++)
                CHECK_EQ(!again, shms_writer_delete(writers[2], "a", 1));
            for (int i = 0; i < n; i++) {
                put(1, "x", 100, NULL);
                CHECK_EQ(1, shms_writer_delete(writers[2], "x", 1));
            }
            if (!first)
                CHECK_EQ(1, shms_writer_delete(writers[2], "a", 1));
            CHECK(!hit(0, "a", ref));
        }
    close_all();
}

static void count(shms_writer *w) { CHECK_EQ(0, shms_writer_count(w)); }
static void list(shms_writer *w) {
    uint64_t size = 0;
    CHECK_EQ(SHMS_OK, shms_writer_keys(w, "", 0, NULL, &size));
    CHECK_EQ(0, size);
}
static void ask_stats(shms_writer *w) { CHECK_EQ(SHMS_OK, shms_writer_stats(w, &(shms_stats){0})); }
static void ask_kinds(shms_writer *w) {
    shms_kind_info kinds[SHMS_KINDS];
    CHECK_EQ(SHMS_OK, shms_writer_kinds(w, kinds));
    CHECK_EQ(0, kinds[0].objects);
}
static void has(shms_writer *w) { CHECK_EQ(0, shms_writer_has(w, "b", 1)); }
static void touch(shms_writer *w) { CHECK_EQ(0, shms_writer_touch(w, "b", 1)); }
static void look(shms_writer *w) { CHECK_EQ(SHMS_ENOTFOUND, shms_writer_look(w, "b", 1, &(shms_stored){0})); }
static void hit_none(shms_writer *w) { CHECK_EQ(SHMS_ENOTFOUND, verb_hit(w, "b", 1, ref)); }
static void delete_none(shms_writer *w) { CHECK_EQ(0, shms_writer_delete(w, "b", 1)); }
static void clear_none(shms_writer *w) { CHECK_EQ(SHMS_OK, shms_writer_clear(w, "b", 1)); }
static void validate(shms_writer *w) { CHECK_EQ(0, shms_writer_validate(w, ref, NULL, 0)); }
static void protect(shms_writer *w) {
    shms_batch b = {0};
    CHECK_EQ(SHMS_OK, shms_batch_protect(w, &b, (const uint8_t *)"\1\0\0\0a", 5));
    shms_batch_drop(w, &b);
}
static void begin_put(shms_writer *w) {
    shms_pending t;
    CHECK_EQ(SHMS_OK, verb_begin(w, "a", 1, "", 0, 1, &t));
    CHECK_EQ(SHMS_OK, verb_abort(w, &t));
}

TEST(each_call_that_takes_a_key_or_a_list_first_deletes_what_others_dropped) {
    static void (*const calls[])(shms_writer *) = {count,    list,    ask_stats, ask_kinds,   has,
                                                   touch,    look,    hit_none,  delete_none, clear_none,
                                                   validate, protect, begin_put};
    open_all();
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        put(0, "a", 100, ref);
        CHECK_EQ(1, shms_writer_cancel(writers[0], ref));
        CHECK_EQ(1, shms_writer_delete(writers[1], "a", 1));
        CHECK_EQ(1, shms_get(&writers[0]->seg.writer->objects));
        calls[i](writers[0]);
        CHECK_EQ(0, shms_get(&writers[0]->seg.writer->objects));
    }
    close_all();
}

TEST(what_was_dropped_is_gone_before_the_owner_has_deleted_it) {
    shms_stats stats;
    open_arenas(1 << 20, 2001); /* not a multiple of what one call scans */
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 2000; i++)
            put(0, key_of("k", i), 100, NULL);
        CHECK_EQ(2000, shms_writer_count(writers[0]));
        CHECK_EQ(SHMS_OK, shms_writer_clear(writers[1], "", 0));
        for (int i = 0; i < 100; i++)
            CHECK(!has_key(writers[0], key_of("k", i * 19 + round)));
        CHECK(writers[0]->scan_left > 1000);
        put(0, "k500", 100, NULL); /* a new one, which stays */
        for (int i = 0; i < (round == 1 ? 300 : 1); i++)
            CHECK(has_key(writers[0], "k500"));
        CHECK_EQ(round == 1, writers[0]->scan_left == 0);
        if (round == 2)
            CHECK_EQ(SHMS_OK, shms_writer_stats(writers[0], &stats));
        CHECK_EQ(1, shms_writer_count(writers[0]));
        CHECK_EQ(0, writers[0]->scan_left);
        CHECK_EQ(1, shms_writer_delete(writers[0], "k500", 4));
    }
    CHECK_EQ(192, stats.used_bytes);
    close_all();
}

static shms_writer *lister;
/* As another thread of the owner would, next to a writer that lies. */
static void falls_behind_again(const char *label) {
    if (strcmp(label, "D1") == 0)
        lister->scan_left = (uint32_t)lister->seg.layout.max_objects;
}

static void put_and_drop_many(void) {
    for (int i = 0; i < 2000; i++)
        put(0, key_of("k", i), 100, NULL);
    CHECK_EQ(SHMS_OK, shms_writer_clear(writers[1], "", 0));
}

static pthread_t other;
static void *list_too(void *unused) {
    CHECK_EQ(0, shms_writer_count(lister));
    return unused;
}
static void let_in(const char *label) {
    if (strcmp(label, "D1"))
        return;
    shms_step_hook = NULL;
    CHECK(pthread_create(&other, NULL, list_too, NULL) == 0);
    while (!atomic_load(&lister->waiting))
        sched_yield();
}

TEST(a_list_ends_however_often_the_owner_falls_behind) {
    open_arenas(1 << 20, 2000);
    lister = writers[0];
    put_and_drop_many();
    shms_step_hook = falls_behind_again;
    CHECK_EQ(0, shms_writer_count(writers[0]));
    shms_step_hook = NULL;
    CHECK_EQ(2000, lister->scan_left); /* it begins again, and finds nothing */
    CHECK_EQ(0, shms_writer_count(writers[0]));
    CHECK_EQ(0, lister->scan_left);
    put_and_drop_many();
    shms_step_hook = let_in; /* another thread, which lists all that is left */
    CHECK_EQ(0, shms_writer_count(writers[0]));
    CHECK(pthread_join(other, NULL) == 0);
    CHECK_EQ(0, lister->scan_left);
    close_all();
}

TEST(what_a_writer_dropped_as_it_died_is_told_by_its_successor) {
    open_all();
    put(0, "a", 100, NULL);
    CHECK_EQ(1, shms_writer_delete(writers[1], "a", 1));
    shms_add(&writers[1]->seg.writer->drops, (uint64_t)-1); /* it died before D2 */
    CHECK(hit(0, "a", ref) && !hit(2, "a", ref));
    CHECK_EQ(SHMS_OK, join_again(1, false));
    CHECK(!hit(0, "a", ref));
    close_all();
}
