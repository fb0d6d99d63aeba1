/* test_arenas.c - several writers of one store: joining, one another's objects, and what the owner still may evict. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "store/batch.h"
#include "support.h"

enum { ARENAS = 3, UNIT = 4096, SLOTS = 8 };

static const char *name;
static shms_writer *writers[ARENAS];
static shms_reader *readers[2];

static void open_all(uint32_t n_readers) {
    static int stores;
    const char *what = key_of("arenas", stores++);
    shms_options o = {.capacity = SLOTS * UNIT, .n_readers = n_readers, .max_objects = SLOTS, .n_writers = ARENAS};
    name = store_name(what);
    CHECK_EQ(SHMS_OK, shms_writer_create(&writers[0], name, &o));
    for (uint32_t i = 1; i < ARENAS; i++) {
        CHECK_EQ(SHMS_OK, shms_writer_join(&writers[i], name, SHMS_ANY_ARENA, NULL));
        CHECK_EQ(i, shms_writer_arena(writers[i]));
    }
    for (uint32_t r = 0; r < n_readers; r++)
        CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[r], name, r, NULL));
}

static void close_all(uint32_t n_readers) {
    for (uint32_t r = 0; r < n_readers; r++)
        shms_reader_free(readers[r]);
    for (int i = 0; i < ARENAS; i++) {
        CHECK_EQ(SHMS_OK, shms_writer_valid(writers[i]));
        CHECK(shms_reader_pid(name, 0) || n_readers == 0); /* the name stays until the last one goes */
        end_writer(writers[i]);
    }
    CHECK_EQ(0, shms_reader_pid(name, 0));
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
static void get(int rank, const uint8_t *ref, char key) {
    shms_view *v = view_of(readers[rank], ref);
    CHECK(v);
    CHECK(v->key[0] == key && filled(v->payload, v->payload_size, (uint64_t)key));
    shms_view_release(v);
}

TEST(every_arena_has_one_writer) {
    shms_writer *w;
    open_all(1);
    CHECK_EQ(SHMS_EWRITERACTIVE, shms_writer_join(&w, name, SHMS_ANY_ARENA, NULL));
    CHECK_EQ(SHMS_EWRITERACTIVE, shms_writer_join(&w, name, 1, NULL));
    CHECK_EQ(SHMS_EINVAL, shms_writer_join(&w, name, ARENAS, NULL));
    CHECK_EQ(SHMS_EINVAL, shms_writer_join(&w, name, -2, NULL));
    put(1, "x", 100, NULL);
    shms_writer_free(writers[1]); /* like a process that dies */
    CHECK_EQ(SHMS_OK, shms_writer_join(&writers[1], name, SHMS_ANY_ARENA, NULL));
    CHECK_EQ(1, shms_writer_arena(writers[1]));
    CHECK_EQ(1, shms_writer_has(writers[1], "x", 1)); /* joining is recovering */
    close_all(1);
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
    open_all(1);
    shms_writer_free(writers[2]);
    refused = ARENAS;
    CHECK_EQ(SHMS_OK, shms_writer_join(&writers[2], name, SHMS_ANY_ARENA, NULL));
    CHECK_EQ(0, refused);
    close_all(1);
}

TEST(an_arena_is_not_taken_while_a_process_still_writes_there_for_its_dead_writer) {
    open_all(1);
    uint64_t place[2];
    char path[64];
    shms_writer_data(writers[0], place);
    snprintf(path, sizeof path, "/dev/shm/%s", name);
    pid_t helper = fork();
    if (helper == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* a check that fails ends this process only */
        struct flock data = {.l_type = F_RDLCK, .l_start = (off_t)place[1], .l_len = (off_t)place[0]};
        int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR);
        _exit(fd < 0 || fcntl(fd, F_SETLK, &data) || raise(SIGSTOP));
    }
    int status;
    CHECK(waitpid(helper, &status, WUNTRACED) == helper && WIFSTOPPED(status));
    shms_writer *w;
    for (int i = 0; i < 2; i++)
        shms_writer_free(writers[i]);
    CHECK_EQ(SHMS_EWRITERACTIVE, shms_writer_join(&w, name, 0, NULL));
    CHECK_EQ(SHMS_OK, shms_writer_join(&writers[1], name, SHMS_ANY_ARENA, NULL)); /* nobody writes there */
    CHECK_EQ(1, shms_writer_arena(writers[1]));
    CHECK(kill(helper, SIGKILL) == 0 && waitpid(helper, &status, 0) == helper);
    CHECK_EQ(SHMS_OK, shms_writer_join(&writers[0], name, 0, NULL));
    close_all(1);
}

TEST(a_hit_on_anothers_object_is_read_like_ones_own) {
    uint8_t ref[ARENAS][SHMS_REF_SIZE];
    shms_stats stats;
    open_all(2);
    for (int i = 0; i < ARENAS; i++) {
        char key[2] = {(char)('a' + i), 0};
        put(i, key, 3000, NULL);
    }
    for (int by = 0; by < ARENAS; by++)
        for (int i = 0; i < ARENAS; i++) {
            char key[2] = {(char)('a' + i), 0};
            CHECK_EQ(1, shms_writer_has(writers[by], key, 1));
            CHECK(hit(by, key, ref[i]));
            CHECK_EQ(1, shms_writer_validate(writers[by], ref[i], key, 1));
            for (int r = 0; r < 2; r++)
                get(r, ref[i], key[0]);
        }
    CHECK(!hit(0, "z", ref[0]));
    CHECK_EQ(0, shms_writer_has(writers[0], "z", 1));
    CHECK_EQ(SHMS_OK, shms_writer_stats(writers[0], &stats));
    CHECK_EQ(3, stats.counters.hits);
    CHECK_EQ(2, shms_get(&writers[0]->seg.writer->counters[SHMS_C(adopted)]));
    close_all(2);
}

/* Fills an arena so that everything that may go has gone. */
static bool survives(int owner, const char *key) {
    for (int i = 0; i < 3 * SLOTS; i++) {
        int rc = put_marked(writers[owner], key_of("f", i), UNIT - 64, 'f', NULL);
        CHECK(rc == SHMS_OK || rc == SHMS_EFULL);
    }
    return shms_writer_has(writers[owner], key, (uint32_t)strlen(key)) == 1;
}

TEST(an_adopted_object_stays_until_the_adopters_lease_ends) {
    uint8_t ref[4][SHMS_REF_SIZE];
    for (int how = 0; how < 5; how++) {
        open_all(1);
        put(0, "a", 3000, NULL);
        for (int i = 0; i < 3; i++) /* a list of leases */
            CHECK(hit(1, "a", ref[i]));
        CHECK(hit(2, "a", ref[3]));
        CHECK(survives(0, "a"));
        CHECK_EQ(SHMS_ESTALE, shms_writer_cancel(writers[1], ref[3])); /* another's lease */
        for (int i = 2; i >= 0; i -= 2) /* the first, then the last of the list */
            CHECK_EQ(1, shms_writer_cancel(writers[1], ref[i]));
        get(0, ref[3], 'a');
        CHECK(survives(0, "a"));
        switch (how) {
        case 0:
            get(0, ref[1], 'a');
            break;
        case 1:
            CHECK_EQ(1, shms_reader_release(readers[0], ref[1]));
            break;
        case 2:
            CHECK_EQ(1, shms_writer_cancel(writers[1], ref[1]));
            break;
        case 3: /* the adopter's death voids its leases */
            shms_writer_free(writers[1]);
            CHECK(!survives(0, "a"));
            CHECK_EQ(SHMS_OK, shms_writer_join(&writers[1], name, 1, NULL));
            break;
        case 4: /* the rank's death, and its successor */
            shms_reader_free(readers[0]);
            CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[0], name, 0, NULL));
            break;
        }
        CHECK(!survives(0, "a"));
        CHECK(!view_of(readers[0], ref[1]) && errno == -SHMS_ESTALE);
        close_all(1);
    }
}

TEST(what_is_held_or_viewed_by_another_stays) {
    uint8_t ref[SHMS_REF_SIZE];
    open_all(1);
    put(0, "a", 3000, NULL);
    CHECK(hit(1, "a", ref));
    CHECK_EQ(1, verb_hold(writers[1], ref));
    get(0, ref, 'a');
    get(0, ref, 'a');
    CHECK(survives(0, "a"));
    shms_view *v = view_of(readers[0], ref);
    CHECK_EQ(1, shms_writer_cancel(writers[1], ref));
    CHECK(survives(0, "a"));
    shms_view_release(v);
    CHECK(!survives(0, "a"));
    close_all(1);
}

TEST(a_dead_owners_objects_are_adopted_until_someone_takes_them_over) {
    uint8_t ref[SHMS_REF_SIZE];
    open_all(1);
    put(0, "a", 3000, NULL);
    shms_writer_free(writers[0]);
    CHECK(hit(1, "a", ref));
    CHECK_EQ(SHMS_OK, shms_writer_join(&writers[0], name, SHMS_ANY_ARENA, NULL));
    CHECK_EQ(0, shms_writer_arena(writers[0]));
    CHECK(survives(0, "a")); /* its successor respects the lease of another */
    get(0, ref, 'a');
    CHECK(!survives(0, "a"));
    close_all(1);
}

TEST(uses_of_others_give_a_second_chance) {
    uint8_t ref[SHMS_REF_SIZE];
    char key[2] = "a";
    open_all(1);
    for (key[0] = 'a'; key[0] < 'a' + SLOTS; key[0]++)
        put(0, key, UNIT - 64, NULL);
    CHECK(hit(1, "b", ref));
    get(0, ref, 'b');
    CHECK_EQ(1, shms_writer_touch(writers[2], "d", 1));
    for (int i = 0; i < SLOTS - 2; i++)
        put(0, key_of("n", i), UNIT - 64, NULL);
    for (key[0] = 'a'; key[0] < 'a' + SLOTS; key[0]++)
        CHECK_EQ(key[0] == 'b' || key[0] == 'd', shms_writer_has(writers[0], key, 1));
    put(0, "y", UNIT - 64, NULL); /* one chance, not two */
    put(0, "z", UNIT - 64, NULL);
    CHECK(!shms_writer_has(writers[0], "b", 1) || !shms_writer_has(writers[0], "d", 1));
    close_all(1);
}

TEST(what_another_deletes_is_not_handed_out) {
    uint8_t ref[SHMS_REF_SIZE];
    open_all(1);
    put(0, "a", 100, NULL);
    put(0, "ab", 100, NULL);
    put(2, "b", 100, NULL);
    CHECK_EQ(1, shms_writer_delete(writers[1], "a", 1));
    CHECK_EQ(0, shms_writer_delete(writers[1], "a", 1));
    CHECK(!hit(1, "a", ref));
    CHECK(!hit(0, "a", ref)); /* the owner has been told */
    put(0, "a", 200, NULL);   /* a new object under the key */
    CHECK(hit(1, "a", ref));
    get(0, ref, 'a');
    CHECK_EQ(SHMS_OK, shms_writer_clear(writers[1], "a", 1));
    CHECK(!hit(1, "a", ref) && !hit(1, "ab", ref) && hit(1, "b", ref));
    CHECK_EQ(0, shms_writer_count(writers[0]));
    CHECK_EQ(SHMS_OK, shms_writer_clear(writers[1], "", 0));
    CHECK_EQ(0, shms_writer_count(writers[2]));
    close_all(1);
}

TEST(a_retirement_by_the_adopter_reaches_the_owner) {
    uint8_t ref[SHMS_REF_SIZE];
    open_all(1);
    shms_reader_free(readers[0]);
    shms_options o = {.capacity = SLOTS * UNIT, .n_readers = 2, .max_objects = SLOTS, .n_writers = ARENAS};
    for (int i = 0; i < ARENAS; i++)
        end_writer(writers[i]);
    name = store_name("retiring");
    CHECK_EQ(SHMS_OK, shms_writer_create(&writers[0], name, &o));
    for (int i = 1; i < ARENAS; i++)
        CHECK_EQ(SHMS_OK, shms_writer_join(&writers[i], name, i, NULL));
    CHECK_EQ(SHMS_OK, shms_reader_attach(&readers[0], name, 0, NULL));
    put(0, "a", 3000, NULL);
    CHECK(hit(1, "a", ref));
    get(0, ref, 'a');
    CHECK(survives(0, "a")); /* rank 1 may still come */
    CHECK_EQ(SHMS_OK, shms_writer_retire(writers[1], 1));
    CHECK(!survives(0, "a"));
    close_all(1);
}

TEST(ids_and_references_are_unique_in_the_store) {
    uint8_t ref[ARENAS][SHMS_REF_SIZE];
    shms_ref seen[ARENAS];
    open_all(1);
    for (int i = 0; i < ARENAS; i++) {
        put(i, "a", 1000, ref[i]); /* two that miss at once store twice */
        shms_ref_unpack(&seen[i], ref[i]);
    }
    for (int i = 0; i < ARENAS; i++)
        for (int k = 0; k < i; k++)
            CHECK(seen[i].id != seen[k].id && seen[i].slot != seen[k].slot && seen[i].entry != seen[k].entry &&
                  seen[i].address != seen[k].address);
    for (int i = 0; i < ARENAS; i++)
        get(0, ref[i], 'a');
    close_all(1);
}

/* Stores that only the owner may do: states as a death, or a turn of the scheduler, leaves them. */
static shms_slot *slot_of(int by, const uint8_t *ref) {
    shms_ref seen;
    shms_ref_unpack(&seen, ref);
    return &writers[by]->seg.slots[seen.slot % SLOTS];
}

TEST(an_object_that_is_being_evicted_is_deleted_all_the_same) {
    uint8_t ref[SHMS_REF_SIZE];
    open_all(1);
    put(0, "a", 100, ref);
    get(0, ref, 'a');
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
    close_all(1);
}

TEST(undoing_a_hit_leaves_the_next_object_in_the_slot_alone) {
    static shms_batch batch;
    uint8_t ref[SHMS_REF_SIZE];
    open_all(1);
    put(0, "a", 100, ref);
    get(0, ref, 'a');
    CHECK_EQ(SHMS_OK, shms_batch_hit(writers[1], &batch, "a", 1, 0, 0));
    shms_set(&slot_of(0, ref)->state, SHMS_WRITING); /* P2, before the next id is stored */
    shms_batch_undo(writers[1], &batch);
    CHECK_EQ(SHMS_WRITING, shms_get(&slot_of(0, ref)->state));
    CHECK_EQ(SHMS_OK, shms_writer_valid(writers[1]));
    shms_set(&slot_of(0, ref)->state, SHMS_LIVE);
    close_all(1);
}

static int join_again(int by, bool keep) {
    shms_expected e = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID, .end_leases = !keep};
    shms_writer_free(writers[by]);
    return shms_writer_join(&writers[by], name, by, &e);
}

TEST(a_successor_keeps_the_leases_whose_objects_are_still_there) {
    uint8_t a[3][SHMS_REF_SIZE], held[SHMS_REF_SIZE], lost[SHMS_REF_SIZE], own[SHMS_REF_SIZE];
    for (int keep = 0; keep < 2; keep++) {
        open_all(1);
        put(0, "a", 3000, NULL);
        put(2, "h", 3000, NULL);
        put(0, "l", 3000, NULL);
        put(1, "o", 3000, own);
        for (int i = 0; i < 3; i++)
            CHECK(hit(1, "a", a[i]));
        CHECK(hit(1, "h", held) && hit(1, "l", lost));
        CHECK_EQ(1, verb_hold(writers[1], held));
        get(0, held, 'h');
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
            get(0, a[1], 'a');
            CHECK_EQ(1, shms_writer_cancel(writers[1], held));
            CHECK(!survives(0, "a") && !survives(2, "h"));
        }
        close_all(1);
    }
}

TEST(a_successor_waits_for_one_stopped_owner_only) {
    uint8_t ref[3][SHMS_REF_SIZE];
    shms_stats stats;
    struct timespec before, after;
    open_all(1);
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
    close_all(1);
}

TEST(dropped_objects_are_found_however_far_the_owner_is_behind) {
    uint8_t ref[SHMS_REF_SIZE];
    open_all(1);
    for (int n = 0; n < 300; n = n < 100 || n > 140 ? n + 50 : n + 1)
        for (int first = 0; first < 2; first++) { /* the owner's is the oldest of n + 1, or the newest */
            put(0, "a", 100, NULL);
            if (first)
                CHECK_EQ(1, shms_writer_delete(writers[2], "a", 1));
            for (int i = 0; i < n; i++) {
                put(1, "x", 100, NULL);
                CHECK_EQ(1, shms_writer_delete(writers[2], "x", 1));
            }
            if (!first)
                CHECK_EQ(1, shms_writer_delete(writers[2], "a", 1));
            CHECK(!hit(0, "a", ref));
        }
    close_all(1);
}

TEST(what_was_dropped_is_gone_before_the_owner_has_deleted_it) {
    shms_options o = {.capacity = 1 << 20, .n_readers = 1, .max_objects = 2000, .n_writers = 2};
    const char *name = store_name("scan");
    char key[8];
    shms_stats stats;
    CHECK_EQ(SHMS_OK, shms_writer_create(&writers[0], name, &o));
    CHECK_EQ(SHMS_OK, shms_writer_join(&writers[1], name, 1, NULL));
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 2000; i++) {
            snprintf(key, sizeof key, "k%04d", i);
            put(0, key, 100, NULL);
        }
        CHECK_EQ(2000, shms_writer_count(writers[0]));
        CHECK_EQ(SHMS_OK, shms_writer_clear(writers[1], "", 0));
        for (int i = 0; i < 100; i++) {
            snprintf(key, sizeof key, "k%04d", i * 19 + round);
            CHECK_EQ(0, shms_writer_has(writers[0], key, 5));
        }
        CHECK(writers[0]->scan_left > 1000);
        put(0, "k0500", 100, NULL); /* a new one, which stays */
        if (round == 2)
            CHECK_EQ(SHMS_OK, shms_writer_stats(writers[0], &stats));
        CHECK_EQ(1, shms_writer_count(writers[0]));
        CHECK_EQ(0, writers[0]->scan_left);
        CHECK_EQ(1, shms_writer_delete(writers[0], "k0500", 5));
    }
    CHECK_EQ(192, stats.used_bytes);
    CHECK_EQ(SHMS_OK, shms_writer_valid(writers[0]));
    for (int i = 0; i < 2; i++)
        end_writer(writers[i]);
}

static shms_writer *lister;
static void falls_behind_again(
    const char *label) { /* as another thread of the owner would, beside a writer that lies */
    if (strcmp(label, "D1") == 0)
        lister->scan_left = (uint32_t)lister->seg.layout.max_objects;
}

TEST(a_list_ends_however_often_the_owner_falls_behind) {
    shms_options o = {.capacity = 1 << 20, .n_readers = 1, .max_objects = 2000, .n_writers = 2};
    const char *name = store_name("behind");
    char key[8];
    CHECK_EQ(SHMS_OK, shms_writer_create(&writers[0], name, &o));
    CHECK_EQ(SHMS_OK, shms_writer_join(&writers[1], name, 1, NULL));
    for (int i = 0; i < 2000; i++) {
        snprintf(key, sizeof key, "k%04d", i);
        put(0, key, 100, NULL);
    }
    CHECK_EQ(SHMS_OK, shms_writer_clear(writers[1], "", 0));
    lister = writers[0];
    shms_step_hook = falls_behind_again;
    CHECK_EQ(0, shms_writer_count(writers[0]));
    shms_step_hook = NULL;
    CHECK_EQ(2000, lister->scan_left); /* it begins again, and finds nothing */
    CHECK_EQ(0, shms_writer_count(writers[0]));
    CHECK_EQ(0, lister->scan_left);
    for (int i = 0; i < 2; i++)
        end_writer(writers[i]);
}

TEST(what_a_writer_dropped_as_it_died_is_told_by_its_successor) {
    uint8_t ref[SHMS_REF_SIZE];
    open_all(1);
    put(0, "a", 100, NULL);
    CHECK_EQ(1, shms_writer_delete(writers[1], "a", 1));
    shms_add(&writers[1]->seg.writer->drops, (uint64_t)-1); /* it died before D2 */
    CHECK(hit(0, "a", ref) && !hit(2, "a", ref));
    CHECK_EQ(SHMS_OK, join_again(1, false));
    CHECK(!hit(0, "a", ref));
    close_all(1);
}
