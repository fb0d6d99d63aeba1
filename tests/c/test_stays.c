/* test_stays.c - how long a store's name stays: what closing does to it, and an owner without an arena. */
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "inspect/inspect.h"
#include "support.h"

static const char *name;

static shms_options options(uint32_t n_writers, uint32_t flags) {
    return (shms_options){.capacity = 4096, .n_readers = 1, .max_objects = 4, .n_writers = n_writers, .flags = flags};
}

static shms_writer *create(uint32_t n_writers, uint32_t flags) {
    shms_options o = options(n_writers, flags);
    shms_writer *w;
    name = store_name("stays");
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, &o));
    return w;
}

/* With SHMS_OUTLIVES, as a call that creates a store or takes it over to outlive its processes. */
static shms_writer *join(uint32_t n_writers, uint32_t flags) {
    shms_options o = options(n_writers, flags);
    shms_expected e = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID, .options = flags ? &o : NULL};
    shms_writer *w;
    CHECK_EQ(SHMS_OK, shms_writer_join(&w, name, SHMS_ANY_ARENA, &e));
    if (flags & SHMS_OUTLIVES)
        CHECK_EQ(SHMS_OK, shms_writer_stay(w, SHMS_BEYOND_CLOSE));
    return w;
}

static void close_as(shms_writer *w, int unlink) {
    CHECK_EQ(SHMS_OK, shms_writer_close(w, unlink));
    shms_writer_free(w);
}

static shms_probe probe(void) {
    shms_probe found;
    CHECK_EQ(SHMS_OK, shms_probe_file(&found, name));
    return found;
}

static bool there(void) {
    int fd = shm_open(name, O_RDONLY, 0);
    if (fd >= 0)
        close(fd);
    return fd >= 0;
}

TEST(the_segment_records_what_the_last_close_does) {
    static const struct {
        uint32_t created, joined;
        int first, last;
        bool stays;
    } cases[] = {
        {0, 0, SHMS_AS_RECORDED, SHMS_AS_RECORDED, false},
        {SHMS_EPHEMERAL, 0, SHMS_AS_RECORDED, SHMS_AS_RECORDED, false},
        {SHMS_OUTLIVES, 0, SHMS_AS_RECORDED, SHMS_AS_RECORDED, true},
        {0, SHMS_OUTLIVES, SHMS_AS_RECORDED, SHMS_AS_RECORDED, true},
        {SHMS_EPHEMERAL, SHMS_OUTLIVES, SHMS_AS_RECORDED, SHMS_AS_RECORDED, true},
        {SHMS_OUTLIVES, SHMS_OUTLIVES, SHMS_AS_RECORDED, 1, false},
        {SHMS_OUTLIVES, 0, 1, SHMS_AS_RECORDED, true}, /* the last one decides */
        {0, 0, 0, SHMS_AS_RECORDED, false},
        {0, 0, SHMS_AS_RECORDED, 0, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int creator_last = 0; creator_last < 2; creator_last++) {
            shms_writer *a = create(2, cases[i].created), *b = join(2, cases[i].joined);
            close_as(creator_last ? b : a, cases[i].first);
            CHECK(there());
            close_as(creator_last ? a : b, cases[i].last);
            CHECK_EQ(cases[i].stays, there());
            CHECK(!cases[i].stays || !probe().ephemeral);
            CHECK_EQ(cases[i].stays, shm_unlink(name) == 0);
        }
}

/* A put whose pending put ends after the close: the name goes, or stays, then. */
TEST(the_end_of_a_pending_put_goes_by_the_record) {
    for (int outlives = 0; outlives < 2; outlives++) {
        shms_writer *w = create(2, outlives ? SHMS_OUTLIVES : 0), *other = join(2, 0);
        shms_batch b = {0};
        CHECK_EQ(SHMS_OK, shms_batch_begin(w, &b, &(shms_put){.key = "a", .key_len = 1, .payload_size = 64}));
        CHECK_EQ(SHMS_OK, shms_writer_close(w, SHMS_AS_RECORDED));
        close_as(other, SHMS_AS_RECORDED);
        CHECK(there());
        shms_batch_drop(w, &b);
        CHECK_EQ(outlives, shm_unlink(name) == 0);
        shms_writer_free(w);
    }
}

TEST(an_owner_may_write_no_arena) {
    shms_writer *owner = create(2, SHMS_OWNS);
    uint8_t *words[] = {(uint8_t *)owner->seg.writer, owner->seg.data, (uint8_t *)shms_segment_writer(&owner->seg, 1),
                        owner->seg.control};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        pid_t child = fork_child();
        if (child == 0) {
            signal(SIGSEGV, SIG_DFL); /* also under a sanitizer */
            *(volatile uint8_t *)words[i] = 1;
            _exit(0);
        }
        CHECK_EQ(1000 + SIGSEGV, reap(child));
    }
    close_as(owner, 0); /* which records nothing */
    CHECK(there());
    shm_unlink(name);
}

static shms_writer *came;
static pthread_t beside;
static void *join_one(void *_) {
    came = join(1, 0);
    return _;
}
static void *close_one(void *_) {
    close_as(came, SHMS_AS_RECORDED);
    return _;
}
static void *(*acts)(void *);
static void act_at_removal(const char *label) {
    if (!strcmp(label, "remove")) {
        shms_step_hook = NULL;
        CHECK_EQ(0, pthread_create(&beside, NULL, acts, NULL));
        usleep(20000);
    }
}
/* A removal that is refused, and what a thread does meanwhile. */
static void is_not_removed(int rc, void *(*act)(void *)) {
    shms_probe p = probe();
    shms_step_hook = act_at_removal;
    acts = act;
    CHECK_EQ(rc, shms_segment_remove(name, p.device, p.inode, p.size, 0));
    CHECK_EQ(0, pthread_join(beside, NULL));
}

TEST(a_removal_that_is_refused_stops_no_writer_from_joining) {
    shms_writer *owner = create(1, SHMS_OWNS);
    is_not_removed(SHMS_EWRITERACTIVE, join_one);
    close_as(came, SHMS_AS_RECORDED);
    close_as(owner, SHMS_AS_RECORDED);
    CHECK(!there());
}

TEST(a_writer_that_closes_beside_a_removal_that_is_refused_removes_the_name) {
    shms_reader *r;
    came = create(2, 0);
    CHECK_EQ(SHMS_OK, shms_reader_attach(&r, name, 0, NULL));
    is_not_removed(SHMS_ENOSTORE, close_one); /* when it tries again */
    CHECK(!there());
    shms_reader_free(r);
}

static void finish_now(const char *label) {
    if (!strcmp(label, "probed")) {
        shms_step_hook = NULL;
        CHECK_EQ(0, truncate(came->seg.path, 4096));
    }
}

TEST(an_empty_file_that_its_creator_finishes_beside_a_removal_stays) {
    shms_writer absent = {0};
    shms_probe p;
    came = &absent;
    name = store_name("empty");
    snprintf(absent.seg.path, sizeof absent.seg.path, "/dev/shm/%s", name);
    int fd = shm_open(name, O_RDWR | O_CREAT, 0600);
    p = probe();
    CHECK_EQ(1, p.writer_alive);
    CHECK_EQ(SHMS_EWRITERACTIVE, shms_segment_remove(name, p.device, p.inode, 0, 1)); /* it is young */
    CHECK_EQ(0, futimens(fd, (struct timespec[2]){{0}, {0}}));
    CHECK_EQ(0, close(fd));
    p = probe();
    CHECK_EQ(0, p.writer_alive);
    shms_step_hook = finish_now;
    CHECK_EQ(SHMS_ENOSTORE, shms_segment_remove(name, p.device, p.inode, 0, 0));
    CHECK(!shms_step_hook && there());
    p = probe();
    CHECK_EQ(SHMS_OK, shms_segment_remove(name, p.device, p.inode, p.size, 0));
    CHECK(!there());
}

TEST(a_copy_of_an_ephemeral_store_is_one_as_far_as_its_writers_say_so) {
    shms_writer *w = create(2, SHMS_EPHEMERAL);
    const shms_layout *l = &w->seg.layout;
    uint64_t count = offsetof(shms_superblock, layout.n_writers),
             stride = offsetof(shms_superblock, layout.arena_stride);
    uint64_t stays = l->writer_at + l->arena_stride + offsetof(shms_writer_table, stays); /* of writer 1 */
    const struct {
        uint64_t size, at[2], values[2], ephemeral;
    } cases[] = {
        {l->file_size, {0}, {0}, 1},
        {count, {0}, {0}, 0}, /* cut off there */
        {stays, {0}, {0}, 0},
        {l->file_size, {stays}, {SHMS_UNTIL_CLOSED}, 1},
        {l->file_size, {stays}, {SHMS_BEYOND_DEATH}, 0},
        {l->file_size, {stays - l->arena_stride}, {SHMS_UNTIL_CLOSED}, 0},
        {l->file_size, {count}, {UINT64_MAX}, 0},
        {l->file_size, {count, stride}, {UINT64_MAX, 0}, 0}, /* all of them in the same place */
    };
    uint8_t *bytes = zeroed(l->file_size);
    int fd = shm_open(name, O_RDONLY, 0);
    CHECK_EQ((ssize_t)l->file_size, pread(fd, bytes, l->file_size, 0));
    close(fd);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        shms_probe found;
        const char *copy = store_name("copy");
        fd = shm_open(copy, O_RDWR | O_CREAT, 0600);
        CHECK_EQ((ssize_t)cases[i].size, write(fd, bytes, cases[i].size));
        for (int k = 0; k < 2 && cases[i].at[k]; k++)
            CHECK_EQ(8, pwrite(fd, &cases[i].values[k], 8, (off_t)cases[i].at[k]));
        close(fd);
        CHECK_EQ(SHMS_OK, shms_probe_file(&found, copy));
        CHECK_EQ(1, found.same_version);
        CHECK_EQ(cases[i].ephemeral, found.ephemeral);
        CHECK_EQ(0, shm_unlink(copy));
    }
    free(bytes);
    close_as(w, SHMS_AS_RECORDED);
}

/* These calls of libc wait, or have another writer close: what gives a lock back, what removes a name, and what reserves. */
static _Thread_local bool waits;
static _Atomic bool waiting, goes_on;
int munmap(void *at, size_t size) {
    int rc = (int)syscall(SYS_munmap, at, size);
    if (waits) {
        waits = false;
        waiting = true;
        while (!goes_on)
            usleep(100);
    }
    return rc;
}
static bool beside_removal, no_room;
int unlink(const char *path) {
    if (beside_removal) {
        shms_options o = options(1, 0);
        beside_removal = false;
        goes_on = true;
        CHECK_EQ(0, pthread_join(beside, NULL));
        if (shms_writer_create(&came, name, &o) != SHMS_OK)
            came = NULL;
    }
    return (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}
int fallocate(int fd, int mode, off_t at, off_t size) {
    if (no_room) {
        close_one(NULL);
        errno = ENOSPC;
        return -1;
    }
    return (int)syscall(SYS_fallocate, fd, mode, at, size);
}

static void *close_slowly(void *w) {
    waits = true;
    close_as(w, SHMS_AS_RECORDED);
    return NULL;
}

TEST(two_that_close_at_once_leave_the_next_store_of_that_name_alone) {
    shms_writer *first = create(2, 0), *second = join(2, 0);
    CHECK_EQ(0, pthread_create(&beside, NULL, close_slowly, first));
    while (!waiting)
        usleep(100);
    beside_removal = true;
    close_as(second, SHMS_AS_RECORDED);
    CHECK(!beside_removal);
    CHECK_EQ(came != NULL, there());
    if (came)
        close_as(came, 1);
}

TEST(a_join_that_fails_leaves_the_name_to_the_last_that_closes) {
    came = create(2, 0);
    shms_writer *w;
    no_room = true;
    CHECK_EQ(SHMS_ENOSPC, shms_writer_join(&w, name, 1, NULL));
    no_room = false;
    CHECK(!there());
}
