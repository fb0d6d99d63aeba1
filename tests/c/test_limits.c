/*
 * test_limits.c - what runs out, and what is as large as it may be.
 *
 * The functions of libc below, and those of failing.h, fail where a limit is reached: descriptors, address space,
 * memory, bytes of a file system, locks.
 */
#include <fcntl.h>
#include <linux/capability.h>
#include <stdarg.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>

#include "failing.h"
#include "store/claims.h"
#include "inspections.h"

int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = va_arg(more, mode_t);
    va_end(more);
    REAL(open, int, const char *, int, ...);
    return fails(EMFILE) ? -1 : real(path, flags, mode);
}
int fcntl(int fd, int command, ...) {
    va_list more;
    va_start(more, command);
    void *argument = va_arg(more, void *);
    va_end(more);
    REAL(fcntl, int, int, int, ...);
    return fails(ENOLCK) ? -1 : real(fd, command, argument);
}
static bool lower; /* PROT_NONE maps another file, as overlayfs does */
void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset) {
    REAL(mmap, void *, void *, size_t, int, int, int, off_t);
    if (lower && protection == PROT_NONE)
        return real(at, size, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return fails(ENOMEM) ? MAP_FAILED : real(at, size, protection, flags, fd, offset);
}
int flock(int fd, int operation) {
    REAL(flock, int, int, int);
    return operation != LOCK_UN && fails(ENOLCK) ? -1 : real(fd, operation);
}
int mprotect(void *at, size_t size, int protection) {
    REAL(mprotect, int, void *, size_t, int);
    return fails(ENOMEM) ? -1 : real(at, size, protection);
}
int madvise(void *at, size_t size, int advice) {
    REAL(madvise, int, void *, size_t, int);
    return fails(ENOMEM) ? -1 : real(at, size, advice);
}
int fallocate(int fd, int mode, off_t offset, off_t size) {
    REAL(fallocate, int, int, int, off_t, off_t);
    return fails(ENOSPC) ? -1 : real(fd, mode, offset, size);
}
int ftruncate(int fd, off_t size) {
    REAL(ftruncate, int, int, off_t);
    return fails(ENOSPC) ? -1 : real(fd, size);
}
ssize_t getrandom(void *out, size_t size, unsigned flags) {
    REAL(getrandom, ssize_t, void *, size_t, unsigned);
    return fails(ENOSYS) ? -1 : real(out, size, flags);
}
ssize_t pread(int fd, void *out, size_t size, off_t at) {
    REAL(pread, ssize_t, int, void *, size_t, off_t);
    return fails(EIO) ? -1 : real(fd, out, size, at);
}
ssize_t pwrite(int fd, const void *in, size_t size, off_t at) {
    REAL(pwrite, ssize_t, int, const void *, size_t, off_t);
    return fails(ENOSPC) ? -1 : real(fd, in, size, at);
}
int unlink(const char *path) {
    REAL(unlink, int, const char *);
    return fails(EACCES) ? -1 : real(path);
}
int fchmod(int fd, mode_t mode) {
    REAL(fchmod, int, int, mode_t);
    return fails(EPERM) ? -1 : real(fd, mode);
}
int fchown(int fd, uid_t user, gid_t group) {
    REAL(fchown, int, int, uid_t, gid_t);
    return fails(EPERM) ? -1 : real(fd, user, group);
}
enum { TMPFS, HUGETLBFS = (int)0x958458f6, EXT4 = 0xef53 };
static int taken_for; /* a file system: not TMPFS, which all files of these tests are on */
int fstatfs(int fd, struct statfs *out) {
    REAL(fstatfs, int, int, struct statfs *);
    int rc = fails(EIO) ? -1 : real(fd, out);
    if (taken_for) {
        out->f_type = taken_for;
        out->f_bsize = 2 * sysconf(_SC_PAGESIZE);
    }
    return rc;
}
/* ---- each call of the system, in each call of ours ---- */

static const char *name, *remains;
static shms_writer *mine, *theirs, *small;
static shms_reader *reader;
static shms_view *view;
static uint8_t ref[SHMS_REF_SIZE];
static const shms_options few = {
    .capacity = 2 << 20, .n_readers = 1, .n_writers = 2, .max_objects = 8, .flags = SHMS_PREFAULT | SHMS_CHECKSUMS};
static const shms_options little = {.capacity = 4096, .n_readers = 1, .max_objects = 8}; /* needs no huge pages */

static shms_claim claim;

/* A call without a failure of its own, in one that has another. */
static void aside(void (*does)(void)) {
    int64_t left = until_failure;
    until_failure = -1;
    does();
    until_failure = left;
}
static void end_small(void) { end_writer(small); }

static int create(void) {
    shms_options o = few;
    o.group = getegid() + 1;
    return shms_writer_create(&mine, name, &o);
}
static int create_of(int file_system) {
    taken_for = file_system;
    int rc = shms_writer_create(&small, remains, &little);
    taken_for = TMPFS;
    if (rc == SHMS_OK)
        aside(end_small);
    return rc;
}
static int create_huge(void) { return create_of(HUGETLBFS); }
static int create_on_disk(void) { return create_of(EXT4); }
static int create_memfd(void) {
    shms_options o = little;
    shms_writer *w;
    o.flags |= SHMS_MEMFD;
    int rc = shms_writer_create(&w, "memory", &o);
    if (rc == SHMS_OK)
        shms_writer_free(w);
    return rc;
}
static int join(void) { return shms_writer_join(&theirs, name, SHMS_ANY_ARENA, NULL); }
static int attach(void) { return shms_reader_attach(&reader, name, 0, NULL); }
static int put(void) { return put_marked(mine, "key", 30000, 1, ref); }
static int hit(void) { return verb_hit(theirs, "key", 3, ref); }
static int get(void) { return shms_reader_acquire(reader, ref, &view); }
static int get_privately(void) { return shms_reader_acquire_private(reader, ref, &view); }
static int find(void) {
    uint8_t found[SHMS_REF_SIZE];
    return shms_reader_find(reader, "key", 3, found, &view);
}
static int release_all(void) {
    shms_view_release(view);
    view = NULL;
    return SHMS_OK;
}
static int ask(void) {
    uint64_t pid = shms_reader_pid(name, 0);
    return pid == 0 || pid == (uint64_t)getpid() ? SHMS_OK : SHMS_ECORRUPT;
}
static int inspect(void) {
    shms_inspector *i;
    int64_t rc = shms_inspector_open(&i, name, SHMS_OWN_UID);
    if (rc)
        return (int)rc;
    for (int n = 0; n < INSPECTIONS && rc >= 0; n++)
        rc = inspection(i, n);
    shms_inspector_free(i);
    return rc < 0 ? (int)rc : SHMS_OK;
}
static void die_early(void) {
    int fd = shm_open(remains, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK_EQ(0, futimens(fd, (struct timespec[2]){{0}, {0}})); /* long ago */
    close(fd);
}
static void remove_remains(void) { shm_unlink(remains); }
/* Removes the file of a creator that died early. */
static int discard(void) {
    shms_probe p;
    aside(die_early);
    int rc = shms_probe_file(&p, remains);
    return rc ? rc : shms_segment_remove(remains, p.device, p.inode, p.size, 0);
}
static int meet(void) {
    shms_reader *none;
    aside(die_early);
    int rc = shms_reader_attach(&none, remains, 0, NULL);
    aside(remove_remains);
    return rc == SHMS_ECREATING ? SHMS_OK : rc;
}
static int reserve(void) {
    const shms_object object = {.key = "key", .key_len = 3, .payload_size = 10};
    shms_uncommitted *u;
    char *payload;
    int rc = shms_writer_create(&small, remains, &little);
    if (rc)
        return rc;
    if ((rc = shms_writer_begin(small, &object, &payload, &u)) == SHMS_OK)
        shms_uncommitted_abort(u);
    aside(end_small);
    return rc;
}
/* Of the other writer's object: each time opens a lease, and the batch has room for four at first. */
static int protect(void) {
    static const uint8_t keys[] = "\3\0\0\0key\3\0\0\0key\3\0\0\0key\3\0\0\0key\3\0\0\0key\3\0\0\0key";
    shms_batch b = {0};
    int rc = shms_batch_protect(theirs, &b, keys, sizeof keys - 1);
    CHECK(rc || b.n_items == 6);
    shms_batch_drop(theirs, &b);
    return rc;
}
static int hold(void) {
    shms_batch b = {0};
    uint8_t held[SHMS_REF_SIZE];
    int rc = verb_hit(mine, "key", 3, held);
    if (rc == SHMS_OK)
        rc = shms_batch_hold(mine, &b, held);
    shms_batch_drop(mine, &b);
    return rc == 1 ? SHMS_OK : rc;
}
static int list(void) {
    uint8_t out[256];
    uint64_t size = sizeof out;
    int rc = shms_writer_keys(mine, "", 0, out, &size);
    CHECK(rc || size == 8 + 4 + 3);
    return rc;
}
/* Without its byte, a claim is granted all the same. */
static int claim_key(void) {
    CHECK_EQ(1, shms_writer_claim_for(mine, 7, "new", 3, &claim));
    CHECK_EQ(0, shms_writer_claimed(mine, "other", 5));
    return SHMS_OK;
}
static int end_claim(void) {
    shms_claim_drop(&claim);
    shms_claim_drop(&claim);
    CHECK_EQ(0, shms_claims_of(7));
    return SHMS_OK;
}
static int limit(void) {
    int kind = shms_writer_kind(mine, "kind", 4);
    return kind < 0 ? kind : shms_writer_quota(mine, (uint32_t)kind, 1 << 20);
}
static int put_all_that_fits(void) { return put_marked(mine, "all", few.capacity - SHMS_ALIGN, 1, ref); }
static int clear(void) { return shms_writer_clear(mine, "", 0); }
static int detach(void) {
    shms_reader_free(reader);
    reader = NULL;
    return SHMS_OK;
}
static int leave(void) {
    int rc = shms_writer_close(theirs, SHMS_AS_IT_WAS);
    shms_writer_free(theirs);
    theirs = NULL;
    return rc;
}
static int (*const calls[])(void) = {create,
                                     create_huge,
                                     create_on_disk,
                                     create_memfd,
                                     join,
                                     attach,
                                     claim_key,
                                     put,
                                     hit,
                                     get,
                                     release_all,
                                     get_privately,
                                     release_all,
                                     find,
                                     release_all,
                                     ask,
                                     inspect,
                                     discard,
                                     meet,
                                     reserve,
                                     protect,
                                     hold,
                                     list,
                                     limit,
                                     end_claim,
                                     clear,
                                     detach,
                                     leave,
                                     put_all_that_fits,
                                     join};

static uint64_t lines_of(const char *path, const char *with) {
    char line[4096];
    uint64_t n = 0;
    FILE *f = fopen(path, "r");
    while (fgets(line, sizeof line, f))
        n += strstr(line, with) != NULL;
    fclose(f);
    return n;
}
static int descriptors(void) {
    int n = 0;
    for (int fd = 0; fd < 64; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

/* The calls in turn; in that of number `at`, the nth call of the system fails. False: it had fewer. */
static bool fails_in(size_t at, int64_t nth) {
    int before = descriptors();
    failed = 0;
    for (size_t c = 0; c < sizeof calls / sizeof *calls; c++) {
        uint64_t maps = lines_of("/proc/self/maps", name);
        int opened = descriptors();
        until_failure = c == at ? nth : -1;
        int rc = calls[c]();
        until_failure = -1;
        if (rc != SHMS_OK) {
            CHECK(c == at && failed && rc < SHMS_OK);
            CHECK_EQ(maps, lines_of("/proc/self/maps", name));
            CHECK_EQ(opened, descriptors());
            CHECK_EQ(SHMS_OK, calls[c]());
        }
        CHECK_EQ(SHMS_OK, shms_writer_valid(mine));
    }
    shms_writer_free(theirs);
    end_writer(mine);
    CHECK_EQ(0, lines_of("/proc/self/maps", name));
    CHECK_EQ(before, descriptors());
    return failed;
}

TEST(a_call_in_which_a_system_call_fails_is_done_or_not_begun_and_leaks_nothing) {
    name = store_name("fails");
    remains = store_name("remains");
    for (size_t c = 0; c < sizeof calls / sizeof *calls; c++)
        for (int64_t nth = 0; fails_in(c, nth); nth++)
            continue;
}

TEST(a_creation_that_fails_says_why) {
    static const struct {
        const char *only;
        int64_t nth;
        int why, (*create)(void), rc, says;
    } rows[] = {
        {"pwrite", 0, ENOSPC, create, SHMS_ENOSPC, ENOSPC},
        {"pwrite", 0, EIO, create, SHMS_ESYS, EIO},
        {"fcntl", 6, ENOLCK, create, SHMS_ESYS, ENOLCK},
        {"fcntl", 6, EINVAL, create, SHMS_ESYS,
         ENOLCK}, /* as file systems say it; the other calls look for closed standard streams */
        {"fcntl", 6, ENOSYS, create, SHMS_ESYS, ENOLCK},
        {"fcntl", 6, EOPNOTSUPP, create, SHMS_ESYS, ENOLCK},
        {"open", 1, ENOENT, create_on_disk, SHMS_OK, 0}, /* there is no /proc */
        {"open", 1, EMFILE, create_on_disk, SHMS_ESYS, EMFILE},
        {"fstatfs", 0, EIO, create, SHMS_ESYS, EIO},
    };
    name = store_name("why");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        only = rows[i].only;
        instead = rows[i].why;
        until_failure = rows[i].nth;
        failed = 0;
        CHECK_EQ(rows[i].rc, rows[i].create());
        CHECK(failed && (rows[i].rc == SHMS_OK || rows[i].says == errno));
        until_failure = -1;
    }
    only = NULL;
    instead = 0;
    lower = true;
    CHECK(create() == SHMS_ESYS && errno == ENOLCK);
    lower = false;
}

/* ---- as many and as large as may be ---- */

TEST(each_of_64_writers_puts_for_256_ranks_what_each_of_them_reads) {
    static shms_writer *writers[SHMS_MAX_WRITERS];
    static shms_reader *ranks[SHMS_MAX_READERS];
    shms_options o = {.capacity = 4096, .n_readers = SHMS_MAX_READERS, .n_writers = SHMS_MAX_WRITERS, .max_objects = 2};
    name = store_name("crowd");
    CHECK_EQ(SHMS_OK, shms_writer_create(&writers[0], name, &o));
    for (int n = 1; n < SHMS_MAX_WRITERS; n++)
        CHECK_EQ(SHMS_OK, shms_writer_join(&writers[n], name, SHMS_ANY_ARENA, NULL));
    CHECK_EQ(SHMS_EWRITERACTIVE, shms_writer_join(&theirs, name, SHMS_ANY_ARENA, NULL));
    CHECK_EQ(SHMS_EINVAL, shms_writer_join(&theirs, name, SHMS_MAX_WRITERS, NULL));
    CHECK_EQ(SHMS_EINVAL, shms_writer_join(&theirs, name, SHMS_ANY_ARENA - 1, NULL));
    for (uint32_t r = 0; r < SHMS_MAX_READERS; r++)
        CHECK_EQ(SHMS_OK, shms_reader_attach(&ranks[r], name, r, NULL));
    for (uint64_t n = 0; n < SHMS_MAX_WRITERS; n++) {
        uint8_t next[SHMS_REF_SIZE];
        CHECK_EQ(SHMS_OK, put_marked(writers[n], key_of("all", n), 4096 - SHMS_ALIGN, n, ref)); /* all of an arena */
        const char *key = key_of("all", n);
        CHECK_EQ(SHMS_OK, verb_hit(writers[(n + 1) % SHMS_MAX_WRITERS], key, (uint32_t)strlen(key), next));
        for (uint32_t r = 0; r < SHMS_MAX_READERS; r++) {
            if (r == SHMS_MAX_READERS - 1)
                CHECK_EQ(SHMS_EFULL, put_marked(writers[n], "more", 64, 0, NULL));
            CHECK_EQ(SHMS_OK, shms_reader_acquire(ranks[r], ref, &view));
            CHECK(filled(view->payload, view->payload_size, n));
            CHECK_EQ(1, shms_reader_release(ranks[r], next));
            release_all();
        }
        CHECK_EQ(SHMS_OK, put_marked(writers[n], "more", 64, 0, NULL));
    }
    for (uint32_t r = 0; r < SHMS_MAX_READERS; r++)
        shms_reader_free(ranks[r]);
    for (int n = 1; n < SHMS_MAX_WRITERS; n++) {
        CHECK_EQ(SHMS_OK, shms_writer_valid(writers[n]));
        shms_writer_free(writers[n]);
    }
    end_writer(writers[0]);
}

#ifndef __SANITIZE_ADDRESS__ /* takes it 20 s */
TEST(a_million_objects_are_stored_found_and_make_room_for_more) {
    enum { MANY = 1000000 };
    shms_options o = {.capacity = (uint64_t)MANY * SHMS_ALIGN, .n_readers = 1, .max_objects = MANY};
    name = store_name("million");
    CHECK_EQ(SHMS_OK, shms_writer_create(&mine, name, &o));
    for (uint64_t n = 0; n < MANY + MANY / 100; n++)
        CHECK_EQ(SHMS_OK, put_marked(mine, key_of("", n), 0, 0, NULL));
    CHECK_EQ(MANY, shms_writer_count(mine));
    for (uint64_t n = 0; n < MANY; n += 1000)
        CHECK_EQ(n >= MANY / 100, has_key(mine, key_of("", n)));
    end_writer(mine);
}
#endif

TEST(ids_and_leases_go_on_to_the_last_that_may_be_and_no_successor_takes_what_is_beyond) {
    const uint64_t last = INT64_MAX / 4;
    name = store_name("numbers");
    CHECK_EQ(SHMS_OK, create());
    shms_set(&mine->seg.writer->next_id, last - 6);
    shms_set(&mine->seg.writer->next_lease, last - 3);
    shms_set(&mine->seg.writer->published, last - 3);
    CHECK_EQ(SHMS_OK, attach());
    for (int n = 0; n < 3; n++) {
        CHECK_EQ(SHMS_OK, put());
        CHECK_EQ(SHMS_OK, get());
        CHECK(filled(view->payload, view->payload_size, 1));
        release_all();
        CHECK_EQ(SHMS_OK, clear());
    }
    CHECK_EQ(SHMS_OK, shms_writer_valid(mine));
    shms_writer_free(mine);
    CHECK_EQ(SHMS_OK, shms_writer_join(&mine, name, 0, NULL));
    CHECK_EQ(SHMS_OK, put());
    shms_writer_free(mine);
    CHECK_EQ(SHMS_ECORRUPT, shms_writer_join(&mine, name, 0, NULL));
    detach();
    CHECK_EQ(1, store_names_left());
}

TEST(ten_thousand_attachments_leave_the_rank_and_the_books_as_after_one) {
    name = store_name("often");
    CHECK_EQ(SHMS_OK, create());
    for (int n = 0; n < 10000; n++) {
        CHECK_EQ(SHMS_OK, attach());
        if (n % 100 == 0) {
            CHECK_EQ(SHMS_OK, put());
            CHECK_EQ(SHMS_OK, get());
            release_all();
            CHECK_EQ(SHMS_OK, clear());
        }
        detach();
    }
    int opened = descriptors();
    CHECK_EQ(SHMS_OK, attach());
    CHECK_EQ(10001, shms_get(&shms_segment_reader(&mine->seg, 0)->epoch));
    detach();
    CHECK_EQ(opened, descriptors());
    end_writer(mine);
}

/* ---- a fork at each label ---- */

static int64_t until_fork;
static void fork_there(const char *label) {
    (void)label;
    if (until_fork-- != 0)
        return;
    pid_t child = fork_child();
    if (child == 0) { /* it has neither the locks nor the right to use the handles */
        taken_for = TMPFS;
        CHECK_EQ(SHMS_EFORKED, shms_writer_has(mine, "key", 3));
        CHECK(!theirs || SHMS_EFORKED == shms_writer_has(theirs, "key", 3));
        CHECK(!reader || SHMS_EFORKED == shms_reader_has(reader, "key", 3));
        shms_claim another;
        CHECK_EQ(SHMS_EFORKED, shms_writer_claim_for(mine, 7, "another", 7, &another));
        CHECK_EQ(SHMS_EFORKED, shms_writer_claimed(mine, "new", 3));
        end_claim();
        shms_segment seg;
        int rc = shms_segment_open(&seg, name, SHMS_ROLE_WRITER, NULL);
        CHECK_EQ(SHMS_EWRITERACTIVE, rc ? rc : shms_segment_take(&seg, 0, 0));
        _exit(0);
    }
    CHECK_EQ(0, reap(child));
}

TEST(a_child_forked_at_any_step_changes_nothing) {
    name = store_name("forks");
    bool forked = true;
    for (int64_t nth = 0; forked; nth++) {
        CHECK_EQ(SHMS_OK, create());
        until_fork = nth;
        shms_step_hook = fork_there;
        for (size_t c = 1; c < sizeof calls / sizeof *calls; c++)
            CHECK_EQ(SHMS_OK, calls[c]());
        shms_step_hook = NULL;
        forked = until_fork < 0;
        CHECK_EQ(SHMS_OK, shms_writer_valid(mine));
        leave();
        end_writer(mine);
    }
}

/* ---- a clock that jumps, and no memory to lock ---- */

static time_t jump;
int clock_gettime(clockid_t clock, struct timespec *out) {
    REAL(clock_gettime, int, clockid_t, struct timespec *);
    int rc = real(clock, out);
    if (clock == CLOCK_REALTIME)
        out->tv_sec += jump = -jump;
    return rc;
}

TEST(a_wall_clock_that_jumps_at_each_look_spoils_no_call_and_no_wait) {
    shms_batch b = {0};
    int rc;
    name = store_name("clock");
    jump = 1 << 30;
    for (size_t c = 0; c < sizeof calls / sizeof *calls; c++)
        CHECK_EQ(SHMS_OK, calls[c]());
    CHECK_EQ(SHMS_OK, attach());
    CHECK_EQ(SHMS_OK, put());
    shms_put more = {.key = "more",
                     .key_len = 4,
                     .payload_size = few.capacity - SHMS_ALIGN,
                     .timeout = 100 * 1000000,
                     .unleased = 1};
    uint64_t until = shms_clock_ns(CLOCK_MONOTONIC) + more.timeout;
    do
        rc = shms_batch_begin(mine, &b, &more);
    while (rc == SHMS_AGAIN);
    CHECK_EQ(SHMS_EFULL, rc);
    CHECK(shms_clock_ns(CLOCK_MONOTONIC) >= until);
    free(b.items);
    jump = 0;
    detach();
    leave();
    end_writer(mine);
}

TEST(a_process_that_may_lock_no_memory_has_all_of_a_store) {
    name = store_name("unlocked");
    pid_t child = fork_child();
    if (child == 0) {
        struct __user_cap_header_struct self = {_LINUX_CAPABILITY_VERSION_3, 0};
        struct __user_cap_data_struct nothing[2] = {{0}}; /* not even to exceed the limit */
        CHECK_EQ(0, setrlimit(RLIMIT_MEMLOCK, &(struct rlimit){0, 0}));
        CHECK_EQ(0, syscall(SYS_capset, &self, nothing));
        for (size_t c = 0; c < sizeof calls / sizeof *calls; c++)
            CHECK_EQ(SHMS_OK, calls[c]());
        leave();
        end_writer(mine);
        _exit(0);
    }
    CHECK_EQ(0, reap(child));
}
