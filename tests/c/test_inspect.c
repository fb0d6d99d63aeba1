/* An inspector whose object is replaced between two of its reads. It returns one object or the other, or that the
 * object is gone, but never a mixture. */
#include <fcntl.h>
#include <sys/stat.h>

#include "failing.h"
#include "fixture.h"
#include "inspect/inspector.h"
#include "inspections.h"

int fstat(int fd, struct stat *out) {
    REAL(fstat, int, int, struct stat *);
    return fails(EIO) ? -1 : real(fd, out);
}

static shms_inspector *inspector;
static const char *where;
static int replacements;

enum { SMALL = 100, LARGE = 900 };

/* At the step `where`, replaces the only object, `times` times: same slot, same place, same lease entry. */
static void replace(const char *label) {
    if (strcmp(label, where) || replacements == 0)
        return;
    replacements--;
    shms_stats s;
    CHECK_EQ(0, shms_writer_stats(w, &s));
    char key[8] = "kkkkkkk";
    uint32_t key_len = 1 + s.next_id % 7;
    shms_step_hook = NULL;
    CHECK_EQ(1, shms_writer_cancel(w, ref));
    CHECK_EQ(0, shms_writer_clear(w, "", 0));
    char *payload = malloc(LARGE);
    uint64_t size = s.next_id % 2 ? SMALL : LARGE;
    fill(payload, size, s.next_id);
    shms_piece piece = {.offset = 0, .size = size, .address = (uint64_t)(uintptr_t)payload};
    CHECK_EQ(0, verb_put(w, key, key_len, NULL, 0, size, &piece, 1, ref));
    free(payload);
    shms_step_hook = replace;
}

static void start(const char *label, int times) {
    open_store("inspect", (shms_options){.capacity = 1024, .n_readers = 1, .max_objects = 1, .flags = SHMS_CHECKSUMS},
               0);
    char payload[SMALL];
    fill(payload, SMALL, 1);
    shms_piece piece = {.offset = 0, .size = SMALL, .address = (uint64_t)(uintptr_t)payload};
    CHECK_EQ(0, verb_put(w, "kk", 2, NULL, 0, SMALL, &piece, 1, ref));
    CHECK_EQ(0, shms_inspector_open(&inspector, name, SHMS_OWN_UID));
    where = label;
    replacements = times;
    shms_step_hook = replace;
}

static void end_both(void) {
    shms_inspector_free(inspector);
    end();
}

TEST(a_slot_that_is_replaced_during_a_read_is_read_again) {
    for (int times = 1; times < 6; times++) {
        shms_slot_record s;
        uint64_t at = 0;
        start("slot", times);
        CHECK_EQ(1, shms_inspector_slots(inspector, &at, &s, 1));
        CHECK_EQ(0, replacements);
        CHECK_EQ(1 + times, s.id);
        CHECK_EQ(1 + s.id % 7, s.key_len);
        CHECK_EQ(64 + (s.id % 2 ? SMALL : LARGE), s.length);
        CHECK_EQ(0, s.moving);
        end_both();
    }
}

TEST(a_slot_that_keeps_changing_is_reported_as_moving) {
    shms_slot_record s;
    uint64_t at = 0;
    start("slot", 100000);
    CHECK_EQ(1, shms_inspector_slots(inspector, &at, &s, 1));
    CHECK_EQ(1, s.moving);
    CHECK_EQ(100000 - 1 - SHMS_INSPECT_TRIES, replacements);
    end_both();
}

TEST(a_lease_that_is_replaced_during_a_read_is_read_again) {
    shms_lease_record e;
    uint64_t at = 0;
    start("lease", 3);
    shms_stats before;
    CHECK_EQ(0, shms_writer_stats(w, &before));
    CHECK_EQ(1, shms_inspector_leases(inspector, &at, &e, 1));
    CHECK_EQ(0, replacements);
    CHECK_EQ(e.number, e.id); /* one hand-out for each object, so that both counters agree */
    CHECK_EQ(4, e.number);
    CHECK_EQ(0, e.moving);
    end_both();
}

TEST(facts_are_read_again_until_they_agree_and_are_reported_as_moving_if_they_never_do) {
    static const int times[] = {0, 3, 100000};
    for (int i = 0; i < 3; i++) {
        shms_facts f;
        start("facts", times[i]);
        CHECK_EQ(0, shms_inspector_facts(inspector, 0, &f));
        int made = times[i] - replacements;
        CHECK_EQ(i == 2 ? SHMS_INSPECT_TRIES : times[i], made);
        CHECK_EQ(2 + made, f.next_id);
        CHECK_EQ(i == 2, f.moving);
        end_both();
    }
}

static void attach_again(const char *label) {
    if (strcmp(label, "rank") || replacements-- <= 0)
        return;
    shms_step_hook = NULL;
    detach(0);
    attach(0);
    shms_step_hook = attach_again;
}

TEST(a_rank_whose_process_is_replaced_during_a_read_is_read_again) {
    static const int times[] = {0, 3, 100000};
    for (int i = 0; i < 3; i++) {
        shms_rank_record rank;
        start("", 0);
        attach(0);
        replacements = times[i];
        shms_step_hook = attach_again;
        CHECK_EQ(0, shms_inspector_ranks(inspector, &rank));
        CHECK_EQ(i == 2, rank.moving);
        CHECK_EQ(1 + (i == 2 ? SHMS_INSPECT_TRIES : times[i]), rank.epoch);
        end_both();
    }
}

TEST(bytes_of_an_object_that_is_evicted_during_the_copy_are_refused) {
    uint8_t out[SMALL + 64];
    start("copy", 1);
    CHECK_EQ(SHMS_ESTALE, shms_inspector_copy(inspector, 0, 1, 0, sizeof out, out));
    CHECK_EQ(SHMS_ESTALE, shms_inspector_copy(inspector, 0, 1, 0, 1, out));
    CHECK_EQ(0, shms_inspector_copy(inspector, 0, 2, 64, SMALL, out));
    CHECK(filled((char *)out, SMALL, 2));
    CHECK_EQ(SHMS_EINVAL, shms_inspector_copy(inspector, 0, 2, 64, LARGE + 1, out));
    CHECK_EQ(SHMS_EINVAL, shms_inspector_copy(inspector, 0, 2, 64 + LARGE + 1, 0, out));
    CHECK_EQ(SHMS_EINVAL, shms_inspector_copy(inspector, 1, 2, 0, 1, out));
    end_both();
}

TEST(bytes_that_are_being_written_or_lie_outside_of_the_data_are_refused) {
    uint8_t out[1];
    shms_pending t;
    shms_finding f;
    start("", 0);
    CHECK_EQ(1, shms_writer_cancel(w, ref));
    CHECK_EQ(0, verb_reserve(w, "new", 3, NULL, 0, SMALL, &t));
    CHECK_EQ(SHMS_ESTALE, shms_inspector_copy(inspector, t.slot, t.id, 0, 1, out));
    CHECK_EQ(SHMS_ESTALE, shms_inspector_check(inspector, t.slot, t.id, &f));
    CHECK_EQ(0, verb_commit(w, &t, NULL));
    CHECK_EQ(0, shms_inspector_copy(inspector, t.slot, t.id, 0, 1, out));
    uint64_t offset = shms_get(&w->seg.slots[t.slot].offset);
    shms_set(&w->seg.slots[t.slot].offset, 1024);
    CHECK_EQ(SHMS_ECORRUPT, shms_inspector_copy(inspector, t.slot, t.id, 0, 1, out));
    CHECK_EQ(SHMS_ECORRUPT, shms_inspector_check(inspector, t.slot, t.id, &f));
    shms_set(&w->seg.slots[t.slot].offset, offset);
    end_both();
}

TEST(a_checksum_of_an_object_that_is_evicted_meanwhile_is_refused) {
    shms_finding f;
    start("crc", 1);
    CHECK_EQ(SHMS_ESTALE, shms_inspector_check(inspector, 0, 1, &f));
    CHECK_EQ(1, shms_inspector_check(inspector, 0, 2, &f));
    end_both();
}

TEST(what_keeps_changing_is_not_damaged) {
    static const char *const labels[] = {"slot", "lease"};
    for (int i = 0; i < 2; i++) {
        shms_finding f[8];
        start(labels[i], 100000);
        CHECK_EQ(0, shms_inspector_verify(inspector, f, 8));
        CHECK(replacements < 100000 - SHMS_INSPECT_TRIES);
        end_both();
    }
}

TEST(a_handle_that_cannot_be_used_says_why_in_every_call) {
    start("", 0);
    shms_inspector_free(NULL);
    for (int n = 0; n < INSPECTIONS; n++)
        CHECK_EQ(SHMS_ECLOSED, inspection(NULL, n));
    pid_t child = fork_child();
    if (child == 0) {
        for (int n = 0; n < INSPECTIONS; n++)
            CHECK_EQ(SHMS_EFORKED, inspection(inspector, n));
        _exit(0);
    }
    CHECK_EQ(0, reap(child));
    int kept = dup(inspector->seg.fd);
    close(inspector->seg.fd); /* as foreign code may */
    for (int n = 0; n < INSPECTIONS; n++)
        CHECK_EQ(SHMS_ESYS, inspection(inspector, n));
    CHECK_EQ(inspector->seg.fd, dup2(kept, inspector->seg.fd));
    close(kept);
    off_t size = (off_t)w->seg.layout.file_size;
    char data[1024];
    memcpy(data, w->seg.data, sizeof data);
    for (int n = 0; n < INSPECTIONS; n++)
        CHECK(inspection(inspector, n) >= 0);
    CHECK_EQ(0, truncate(w->seg.path, size - 1));
    for (int n = 0; n < INSPECTIONS; n++)
        CHECK_EQ(SHMS_ECORRUPT, inspection(inspector, n));
    CHECK_EQ(0, truncate(w->seg.path, size));
    memcpy(w->seg.data, data, sizeof data);
    end_both();
}

TEST(what_is_no_file_of_that_name_is_neither_probed_nor_removed) {
    enum { MISSING, PIPE, LINK, OTHER, NAME, CASES };
    static const int probed[] = {SHMS_ENOSTORE, SHMS_ELAYOUT, SHMS_ELAYOUT, SHMS_OK, SHMS_EINVAL};
    static const int removed[] = {SHMS_ENOSTORE, SHMS_ENOSTORE, SHMS_ESYS, SHMS_ENOSTORE, SHMS_EINVAL};
    start("", 0);
    for (int i = 0; i < CASES; i++) {
        const char *other = i == NAME ? "a/b" : store_name("probe");
        char path[300];
        shms_probe p = {0};
        snprintf(path, sizeof path, "/dev/shm/%s", other);
        CHECK(i != PIPE || mkfifo(path, 0600) == 0);
        CHECK(i != LINK || symlink(w->seg.path, path) == 0);
        CHECK(i != OTHER || close(open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600)) == 0);
        CHECK_EQ(probed[i], shms_probe_file(&p, other));
        CHECK_EQ(removed[i], shms_segment_remove(other, p.device, p.inode + 1, p.size, 0));
        CHECK_EQ(i == MISSING || i == NAME ? -1 : 0, unlink(path));
    }
    end_both();
}

TEST(a_file_that_cannot_be_looked_at_is_neither_probed_nor_removed) {
    shms_probe p, none;
    int rc = SHMS_ESYS, unknown = 0;
    start("", 0);
    shms_writer_free(w);
    CHECK_EQ(0, shms_probe_file(&p, name));
    until_failure = 0;
    CHECK_EQ(SHMS_ESYS, shms_probe_file(&none, name));
    for (int64_t nth = 0; rc; nth++) {
        CHECK_EQ(0, access(inspector->seg.path, F_OK));
        until_failure = nth;
        rc = shms_segment_remove(name, p.device, p.inode, p.size, 0);
        until_failure = -1;
        unknown += rc == SHMS_ESYS;
    }
    CHECK_EQ(2, unknown); /* where it is opened, and where its size is asked for */
    shms_inspector_free(inspector);
    CHECK_EQ(0, store_names_left());
}

static int lease_looks, slot_looks;

static void count_looks(const char *label) {
    lease_looks += strcmp(label, "lease") == 0;
    slot_looks += strcmp(label, "slot") == 0;
}

TEST(holdings_are_summed_with_one_read_of_each_lease_and_slot) {
    enum { RANKS = 5, OBJECTS = 7, HANDED_OUT = 3, LEASES = OBJECTS + HANDED_OUT - 1 };
    shms_view *view;
    shms_rank_record ranks[RANKS];
    uint8_t refs[OBJECTS][SHMS_REF_SIZE], again[SHMS_REF_SIZE];
    open_store("ranks", (shms_options){.capacity = 64 << 10, .n_readers = RANKS, .max_objects = 2 * OBJECTS}, 0);
    attach(1);
    CHECK_EQ(0, shms_inspector_open(&inspector, name, SHMS_OWN_UID));
    for (int k = 0; k < OBJECTS; k++)
        CHECK_EQ(0, put_marked(w, (char[]){(char)('a' + k), 0}, SMALL, 0, refs[k]));
    for (int k = 1; k < HANDED_OUT; k++)
        CHECK_EQ(0, verb_hit(w, "a", 1, again));
    /* it still owes the other two hand-outs of the object */
    CHECK_EQ(0, shms_reader_acquire(readers[1], refs[0], &view));
    for (int k = 1; k < OBJECTS - 1; k++)
        CHECK_EQ(1, shms_reader_release(readers[1], refs[k]));
    shms_lease *table = w->leases.table;
    for (uint64_t k = 0; k < LEASES; k++) /* the last is the oldest, but for one, which rank 1 has released */
        shms_set(&table[k].opened_ns, k == 3 ? 1 : 2 * LEASES - 2 - k);
    shms_step_hook = count_looks;
    CHECK_EQ(0, shms_inspector_ranks(inspector, ranks));
    shms_step_hook = NULL;
    CHECK_EQ(LEASES, lease_looks);
    CHECK_EQ(OBJECTS, slot_looks);
    uint64_t span = shms_span(64 + SMALL);
    for (int r = 0; r < RANKS; r++) {
        CHECK_EQ(r, ranks[r].rank);
        CHECK_EQ(r == 1, ranks[r].pins);
        CHECK_EQ(r == 1, ranks[r].pinned_objects);
        CHECK_EQ(r == 1 ? span : 0, ranks[r].pinned_bytes);
        CHECK_EQ(r == 1 ? HANDED_OUT - 1 + 1 : LEASES, ranks[r].owed_leases);
        CHECK_EQ((r == 1 ? 2 : OBJECTS) * span, ranks[r].owed_bytes);
        CHECK_EQ((r == 1 ? 2 : OBJECTS) * span, ranks[r].held_bytes);
        CHECK_EQ(r == 1 ? LEASES - 1 : 1, ranks[r].oldest_owed_ns);
    }
    uint64_t what = shms_get(&table[0].what);
    shms_set(&table[0].what, shms_lease_what(0xffffff, false, 0, 0)); /* a slot that there is not */
    CHECK_EQ(0, shms_inspector_ranks(inspector, ranks));
    CHECK_EQ(LEASES, ranks[0].owed_leases);
    shms_set(&table[0].what, what);
    shms_view_release(view);
    end_both();
}

TEST(only_the_count_of_open_leases_reads_them_and_it_stops_behind_the_last_in_use) {
    enum { OPEN = 3 };
    shms_facts facts;
    uint8_t refs[OPEN][SHMS_REF_SIZE];
    open_store("open", (shms_options){.capacity = 64 << 10, .n_readers = 1, .max_objects = 8}, 0);
    CHECK_EQ(0, shms_inspector_open(&inspector, name, SHMS_OWN_UID));
    for (int k = 0; k < OPEN; k++)
        CHECK_EQ(0, put_marked(w, (char[]){(char)('a' + k), 0}, SMALL, 0, refs[k]));
    /* as a writer leaves it that dies before it counts the lease */
    shms_lease *first = w->leases.table, *last = &first[w->leases.n_entries - 1];
    while (shms_get(&first->number) == 0)
        first++;
    shms_set(&w->seg.writer->next_lease, OPEN + 2);
    shms_set(&last->what, shms_get(&first->what));
    shms_set(&last->id, shms_get(&first->id));
    shms_set(&last->number, OPEN + 1);
    shms_set(&w->seg.writer->published, OPEN + 2);
    lease_looks = 0;
    shms_step_hook = count_looks;
    CHECK_EQ(0, shms_inspector_facts(inspector, 0, &facts));
    CHECK_EQ(0, lease_looks);
    CHECK_EQ(OPEN, shms_inspector_open_leases(inspector, 0));
    CHECK_EQ(OPEN, lease_looks);
    CHECK_EQ(SHMS_EINVAL, shms_inspector_open_leases(inspector, 1));
    CHECK_EQ(SHMS_EINVAL, shms_inspector_facts(inspector, 1, &facts));
    CHECK_EQ(SHMS_ECLOSED, shms_inspector_open_leases(NULL, 0));
    shms_step_hook = NULL;
    attach(0);
    CHECK_EQ(1, shms_reader_release(readers[0], refs[1])); /* nobody waits for it, but its entry is still in use */
    CHECK_EQ(OPEN - 1, shms_inspector_open_leases(inspector, 0));
    shms_writer_free(w);
    CHECK_EQ(OPEN, shms_inspector_open_leases(inspector, 0));
    CHECK_EQ(0, shms_writer_recover(&w, name, NULL));
    end_both();
}

static pid_t child;

static void fork_here(const char *label) {
    int ready[2];
    char c;
    if (strcmp(label, "remove"))
        return;
    CHECK(pipe(ready) == 0);
    if ((child = fork_child()) == 0) {
        CHECK_EQ(1, write(ready[1], "x", 1)); /* the fork handlers have run in the child */
        pause();
        _exit(0);
    }
    CHECK_EQ(1, read(ready[0], &c, 1));
    close(ready[0]);
    close(ready[1]);
}

TEST(a_child_forked_while_a_segment_is_being_removed_has_no_lock_of_it) {
    shms_probe p;
    open_store("remove", (shms_options){.capacity = 1024, .n_readers = 1, .max_objects = 1}, 1);
    shms_writer_free(w);
    CHECK_EQ(0, shms_probe_file(&p, name));
    CHECK_EQ(SHMS_ENOSTORE, shms_segment_remove(name, p.device, p.inode, p.size - 1, 1)); /* changed since the probe */
    CHECK_EQ(SHMS_ENOSTORE, shms_segment_remove(name, p.device + 1, p.inode, p.size, 1));
    shms_step_hook = fork_here;
    CHECK_EQ(SHMS_ERANKINUSE, shms_segment_remove(name, p.device, p.inode, p.size, 0));
    shms_step_hook = NULL;
    CHECK_EQ(0, shms_writer_recover(&w, name, NULL)); /* the child is alive */
    kill(child, SIGKILL);
    reap_killed(child);
    end();
}
