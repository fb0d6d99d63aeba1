/* test_space.c - an arena's data takes memory from its first writer on: reserved before anything of it is written. */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "inspect/inspect.h"
#include "support.h"

enum { ARENAS = 4 };

static const char *name;
static shms_writer *first;
static const shms_layout *l;
static int file = -1;

/* Replaces the C library's functions: the file system is as full as the test says, and a signal interrupts no call. */
static uint64_t space = UINT64_MAX;
int fstatvfs(int fd, struct statvfs *fs) {
    (void)fd;
    *fs = (struct statvfs){.f_frsize = 4096, .f_blocks = 1, .f_bavail = space / 4096};
    return 0;
}

#define HUGETLBFS 0x958458f6
#define XFS 0x58465342
static uint32_t file_system = 0x01021994; /* tmpfs */
static long huge_page = 1 << 30;
int fstatfs(int fd, struct statfs *fs) {
    int rc = (int)syscall(SYS_fstatfs, fd, fs);
    fs->f_type = (long)file_system;
    if (file_system == HUGETLBFS)
        fs->f_bsize = huge_page;
    return rc;
}

/* How many descriptors of that file a child has that another thread forks now. */
static int kept_by_a_child(int fd) {
    struct stat own, st;
    int status, n = 0;
    CHECK(fstat(fd, &own) == 0);
    pid_t child = fork();
    for (int i = 0; child == 0 && i < 256; i++)
        n += fstat(i, &st) == 0 && st.st_dev == own.st_dev && st.st_ino == own.st_ino;
    if (child == 0)
        _exit(n);
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

static bool forks;
static int forked, kept;
static off_t reserved_last;
static int calls, refused_call; /* from that one on; below 0: only that one; 0: none */
static int refused_why = ENOSPC;
int fallocate(int fd, int mode, off_t at, off_t n) {
    if (mode == 0) {
        if (forks) {
            kept += kept_by_a_child(fd);
            forked++;
        }
        reserved_last = at;
        calls++;
        if (refused_call && (refused_call > 0 ? calls >= refused_call : calls == -refused_call)) {
            errno = refused_why;
            return -1;
        }
    }
    return (int)syscall(SYS_fallocate, fd, mode, at, n);
}

static uint64_t allocated(void) {
    struct stat st;
    CHECK(fstat(file, &st) == 0);
    return (uint64_t)st.st_blocks * 512;
}
static uint64_t tables(void) { return l->readers_at + l->n_readers * l->reader_stride; }
static uint64_t with_arenas(uint64_t n) { return tables() + n * l->data_stride; }
static off_t data_of(uint64_t arena) { return (off_t)(l->data_at + arena * l->data_stride); }

static void create(uint64_t capacity, uint32_t flags) {
    shms_options o = {.capacity = capacity, .n_readers = 1, .max_objects = 16, .n_writers = ARENAS, .flags = flags};
    name = store_name("space");
    CHECK_EQ(SHMS_OK, shms_writer_create(&first, name, &o));
    l = &first->seg.layout;
    file = shm_open(name, O_RDWR, 0);
    CHECK(file >= 0);
}

static void end(void) {
    close(file);
    CHECK_EQ(SHMS_OK, shms_writer_close(first, 1));
    shms_writer_free(first);
}

/* Joins, puts an object as large as the arena and reads it, and leaves; or says why not, and how much was needed. */
static int visit(int arena, uint64_t *needed) {
    shms_expected e = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID, .needed = needed};
    shms_writer *w;
    int rc = shms_writer_join(&w, name, arena, &e);
    if (rc)
        return rc;
    uint8_t ref[SHMS_REF_SIZE];
    shms_reader *r;
    CHECK_EQ(SHMS_OK, shms_writer_clear(w, "", 0));
    CHECK_EQ(SHMS_OK, shms_reader_attach(&r, name, 0, NULL));
    CHECK_EQ(SHMS_OK, put_marked(w, "k", l->capacity - 64, 'k', ref));
    shms_view *v = view_of(r, ref);
    CHECK(v && filled(v->payload, v->payload_size, 'k'));
    shms_view_release(v);
    shms_reader_free(r);
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    CHECK_EQ(SHMS_OK, shms_writer_close(w, 0));
    shms_writer_free(w);
    return SHMS_OK;
}

static int look(void) {
    shms_inspector *i;
    int rc = shms_inspector_open(&i, name, SHMS_OWN_UID);
    if (rc == SHMS_OK) {
        shms_finding f;
        CHECK_EQ(0, shms_inspector_verify(i, &f, 1));
        shms_inspector_free(i);
    }
    return rc;
}

TEST(an_arena_takes_memory_from_its_first_writer_on) {
    static const uint32_t flags[] = {0, SHMS_PREFAULT, SHMS_OWNS | SHMS_PREFAULT};
    for (int i = 0; i < 6; i++) {
        create(i < 3 ? 1 << 20 : 4 << 20, flags[i % 3]);
        uint64_t taken = !(flags[i % 3] & SHMS_OWNS);
        CHECK_EQ(with_arenas(taken), allocated());
        CHECK_EQ(SHMS_OK, visit(2, NULL));
        CHECK_EQ(with_arenas(taken + 1), allocated());
        CHECK_EQ(SHMS_OK, look());
        CHECK_EQ(SHMS_OK, visit(3, NULL));
        CHECK_EQ(with_arenas(taken + 2), allocated());
        calls = 0;
        space = 0;
        CHECK_EQ(SHMS_OK, visit(2, NULL)); /* was reserved, and stays so */
        CHECK_EQ(0, calls);
        space = UINT64_MAX;
        CHECK_EQ(with_arenas(taken + 2), allocated());
        end();
    }
}

TEST(a_child_forked_while_memory_is_taken_keeps_no_descriptor) {
    forks = true;
    create(1 << 20, 0);
    shms_writer *w;
    int before = forked;
    CHECK(before > 0);
    close(file);
    CHECK_EQ(SHMS_OK, shms_writer_join(&w, name, 1, NULL));
    CHECK(forked > before);
    forks = false;
    CHECK_EQ(0, kept);
    shms_writer_free(w);
    file = shm_open(name, O_RDWR, 0);
    end();
}

TEST(an_arena_that_does_not_fit_stays_free_and_nothing_of_it_is_written) {
    create(1 << 20, 0);
    CHECK_EQ(SHMS_OK, put_marked(first, "a", 1000, 'a', NULL));
    uint8_t before[4096], after[4096];
    off_t table = (off_t)(l->writer_at + 2 * l->arena_stride);
    CHECK(pread(file, before, sizeof before, table) == sizeof before);
    for (int late = 0; late < 2; late++) { /* seen before, or found by the kernel */
        uint64_t needed = 0;
        space = late ? l->data_stride : l->data_stride - 4096;
        calls = 0;
        refused_call = late;
        CHECK_EQ(SHMS_ENOSPC, visit(2, &needed));
        CHECK_EQ(late, calls);
        CHECK_EQ(l->data_stride, needed);
        calls = 0;
        CHECK_EQ(SHMS_ENOSPC, visit(SHMS_ANY_ARENA, NULL));
        CHECK(pread(file, after, sizeof after, table) == sizeof after && memcmp(before, after, sizeof before) == 0);
        refused_call = 0;
        CHECK_EQ(with_arenas(1), allocated());
        CHECK_EQ(SHMS_OK, look());
        CHECK_EQ(SHMS_OK, put_marked(first, key_of("b", (uint64_t)late), 1000, 'b', NULL));
        CHECK_EQ(1, shms_writer_has(first, "a", 1));
        space = l->data_stride;
    }
    CHECK_EQ(SHMS_OK, visit(2, NULL));
    space = UINT64_MAX;
    end();
}

TEST(a_creation_needs_the_tables_and_the_creators_arena) {
    for (uint32_t owns = 0; owns < 2; owns++) {
        shms_options o = {.capacity = 4 << 20, .n_readers = 1, .n_writers = 2, .flags = owns ? SHMS_OWNS : 0};
        shms_writer *w;
        create(4 << 20, o.flags);
        uint64_t hole = l->data_at - tables();
        o.n_writers = ARENAS;
        o.max_objects = 16;
        CHECK_EQ(with_arenas(!owns) + hole, shms_space_needed(&o, "/dev/shm"));
        CHECK_EQ(with_arenas(!owns) + hole,
                 shms_space_needed(&o, "/dev/shm/none")); /* as if pages were the usual ones */
        space = with_arenas(!owns) - 4096;
        CHECK_EQ(SHMS_ENOSPC, shms_writer_create(&w, store_name("full"), &o));
        space += 4096;
        CHECK_EQ(SHMS_OK, shms_writer_create(&w, store_name("fits"), &o));
        space = UINT64_MAX;
        CHECK_EQ(SHMS_OK, shms_writer_close(w, 1));
        shms_writer_free(w);
        end();
    }
}

TEST(what_a_joiner_reserved_before_it_was_killed_serves_the_next) {
    create(1 << 20, 0);
    pid_t child = fork_child();
    if (child == 0) {
        die_before("J1", 1);
        visit(2, NULL);
        _exit(0);
    }
    CHECK_EQ(1000 + SIGKILL, reap(child));
    CHECK_EQ(with_arenas(2), allocated());
    CHECK_EQ(SHMS_OK, look());
    space = 0;
    CHECK_EQ(SHMS_OK, visit(2, NULL));
    CHECK_EQ(with_arenas(2), allocated());
    CHECK_EQ(SHMS_ENOSPC, visit(3, NULL));
    space = UINT64_MAX;
    end();
}

/* A joiner is killed in arena 2, and the next comes to arena 3: as much as it needs is there, and is not its own. */
TEST(what_is_reserved_for_another_arena_is_not_taken_for_ones_own) {
    create(1 << 20, 0);
    CHECK(fallocate(file, 0, data_of(2), (off_t)l->data_stride) == 0);
    CHECK_EQ(SHMS_OK, visit(3, NULL));
    CHECK_EQ(with_arenas(3), allocated());
    CHECK_EQ(data_of(3), reserved_last);
    end();
}

static shms_writer *joined;
static void join_in_between(const char *label) {
    if (strcmp(label, "taken"))
        return;
    shms_step_hook = NULL;
    CHECK_EQ(SHMS_OK, shms_writer_join(&joined, name, 1, NULL));
}

TEST(a_look_while_an_arena_is_taken_finds_no_hole) {
    create(1 << 20, 0);
    shms_step_hook = join_in_between;
    CHECK_EQ(SHMS_OK, look());
    CHECK(joined);
    CHECK_EQ(SHMS_OK, shms_writer_close(joined, 0));
    shms_writer_free(joined);
    end();
}

TEST(a_store_with_a_hole_in_a_table_or_a_taken_arena_is_opened_by_nobody) {
    create(1 << 20, 0);
    CHECK_EQ(SHMS_OK, visit(2, NULL));
    const off_t holes[] = {data_of(2) + 4096 /* past the key */, (off_t)(l->slots_at + 3 * l->arena_stride)};
    for (int i = 0; i < 2; i++) {
        CHECK(fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, holes[i], 4096) == 0);
        CHECK_EQ(SHMS_ESPARSE, look());
        CHECK_EQ(SHMS_ESPARSE, visit(1, NULL));
        CHECK_EQ(with_arenas(2) - 4096, allocated());
        CHECK(fallocate(file, 0, holes[i], 4096) == 0);
    }
    CHECK_EQ(SHMS_OK, visit(1, NULL));
    end();
}

TEST(an_arena_that_cannot_be_reserved_is_the_error_of_the_system) {
    create(1 << 20, 0);
    refused_call = 1;
    for (int i = 0; i < 2; i++) {
        calls = 0;
        refused_why = i ? EIO : ENOMEM;
        CHECK_EQ(i ? SHMS_ESYS : SHMS_ENOSPC, visit(1, NULL));
    }
    refused_call = calls = 0;
    refused_why = ENOSPC;
    CHECK_EQ(SHMS_OK, visit(1, NULL));
    CHECK_EQ(data_of(1), reserved_last);
    end();
}

TEST(a_damaged_table_leads_no_look_into_an_arena_that_was_never_taken) {
    create(1 << 20, 0);
    shms_slot slot = {.state = SHMS_LIVE, .id = 1, .length = 100, .head = 1};
    CHECK(pwrite(file, &slot, sizeof slot, (off_t)(l->slots_at + 3 * l->arena_stride)) == sizeof slot);
    shms_inspector *i;
    shms_finding f[8];
    CHECK_EQ(SHMS_OK, shms_inspector_open(&i, name, SHMS_OWN_UID));
    CHECK(shms_inspector_verify(i, f, 8) > 0);
    CHECK(f[0].arena == 3);
    shms_inspector_free(i);
    CHECK_EQ(with_arenas(1), allocated());
    end();
}

TEST(file_systems_that_share_no_memory_or_write_elsewhere_are_refused_and_no_file_is_left) {
    shms_options o = {.capacity = 4096, .n_readers = 1};
    shms_writer *w = NULL;
    shms_reader *r = NULL;
    const char *there = store_name("elsewhere");
    const uint32_t kinds[] = {0x6969, 0x01021997, 0x65735546, 0x9123683e, 0x2fc12fc1, HUGETLBFS};
    /* NFS, 9p, FUSE, btrfs, ZFS, and hugetlbfs with pages of 1 GiB */
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        file_system = 0x01021994;
        CHECK_EQ(SHMS_OK, shms_writer_create(&w, there, &o));
        file_system = kinds[i];
        CHECK_EQ(SHMS_ESYS, shms_reader_attach(&r, there, 0, NULL));
        CHECK_EQ(EOPNOTSUPP, errno);
        CHECK_EQ(SHMS_OK, shms_writer_close(w, 1));
        shms_writer_free(w);
        CHECK_EQ(SHMS_ESYS, shms_writer_create(&w, there, &o));
        CHECK_EQ(EOPNOTSUPP, errno);
        file_system = 0;
        CHECK_EQ(SHMS_ENOSTORE, shms_reader_attach(&r, there, 0, NULL));
    }
}

TEST(a_store_is_on_a_disk_too_but_not_where_its_pages_do_not_fit) {
    shms_options o = {.capacity = 4096, .n_readers = 1};
    shms_writer *w;
    shms_reader *r;
    file_system = XFS;
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, store_name("disk"), &o));
    CHECK(w->seg.boot);
    end_writer(w);
    file_system = 0x01021994;
    const char *pages = store_name("pages");
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, pages, &o));
    file_system = HUGETLBFS;
    huge_page = 3072; /* no such page is there, but a mapping of one of 4096 bytes ends with it */
    CHECK_EQ(SHMS_ELAYOUT, shms_reader_attach(&r, pages, 0, NULL));
    file_system = 0x01021994;
    end_writer(w);
}
