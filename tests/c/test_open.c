/*
 * test_open.c - a successor that asks for options gets a store of these, or leaves it as it was; a reader notices it,
 * and a removal.
 */
#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include "store/file.h"
#include "support.h"

enum { SIZE = 64 };

static const shms_options asked = {.capacity = 5000, .n_readers = 2, .max_objects = 8};

static shms_writer *leave(const char *name, const shms_options *options) {
    shms_writer *w;
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, options));
    CHECK_EQ(SHMS_OK, put_marked(w, "a", SIZE, 1, NULL));
    return w;
}

TEST(a_store_of_other_options_stays_as_it_was) {
    static const shms_options others[] = {
        {.capacity = 5057, .n_readers = 2, .max_objects = 8},
        {.capacity = 5000, .n_readers = 1, .max_objects = 8},
        {.capacity = 5000, .n_readers = 2, .max_objects = 9},
        {.capacity = 5000, .n_readers = 2, .max_objects = 8, .flags = SHMS_CHECKSUMS},
        {.capacity = 5000, .n_readers = 2, .max_objects = 8, .max_object_size = 5000},
        {.capacity = 0, .n_readers = 2, .max_objects = 8},
    };
    const char *name = store_name("options");
    shms_writer *w = leave(name, &asked);
    uint64_t size = w->seg.layout.file_size;
    shms_writer_free(w);
    uint8_t *before = malloc(size), *after = malloc(size);
    int fd = shm_open(name, O_RDONLY, 0);
    CHECK(before && after && fd >= 0 && pread(fd, before, size, 0) == (ssize_t)size);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        shms_expected e = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID, .options = &others[i]};
        CHECK_EQ(SHMS_EOPTIONS, shms_writer_recover(&w, name, &e));
    }
    CHECK(pread(fd, after, size, 0) == (ssize_t)size && memcmp(before, after, size) == 0);
    shms_options ephemeral = asked;
    ephemeral.flags |= SHMS_EPHEMERAL;
    shms_expected same = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID, .options = &ephemeral};
    CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, &same));
    CHECK_EQ(1, shms_writer_has(w, "a", 1));
    end_writer(w);
    close(fd);
    free(before);
    free(after);
}

static bool dies;
int ftruncate(int fd, off_t size) {
    if (dies)
        kill(getpid(), SIGKILL);
    return (int)syscall(SYS_ftruncate, fd, size);
}

TEST(a_creator_that_dies_early_leaves_a_file_that_is_known_as_ours) {
    const char *name = store_name("magic");
    uint64_t magic = 0;
    pid_t child = fork_child();
    if (child == 0) {
        shms_segment seg;
        dies = true;
        shms_segment_create(&seg, name, &asked);
        _exit(0);
    }
    CHECK_EQ(1000 + SIGKILL, reap(child));
    int fd = shm_open(name, O_RDONLY, 0);
    CHECK(pread(fd, &magic, sizeof magic, 0) == sizeof magic && magic == SHMS_MAGIC);
    close(fd);
    shm_unlink(name);
}

TEST(a_store_above_the_limit_of_a_file_is_an_error_and_no_signal_and_leaves_no_file) {
    const char *name = store_name("large");
    pid_t child = fork_child();
    if (child == 0) {
        shms_writer *w;
        for (rlim_t most = 4; most <= 4096; most *= 32) {
            CHECK_EQ(0, setrlimit(RLIMIT_FSIZE, &(struct rlimit){most, RLIM_INFINITY}));
            CHECK_EQ(SHMS_ESYS, shms_writer_create(&w, name, &asked));
            CHECK_EQ(EFBIG, errno);
            CHECK_EQ(-1, shm_open(name, O_RDONLY, 0));
        }
        _exit(0);
    }
    CHECK_EQ(0, reap(child));
}

TEST(no_store_is_created_that_others_may_only_read_or_only_write) {
    static const uint32_t modes[] = {0640, 0604, 0644, 0620, 0602, 0664};
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        shms_options o = asked;
        shms_writer *w;
        o.mode = modes[i];
        CHECK_EQ(SHMS_EINVAL, shms_writer_create(&w, store_name("mode"), &o));
    }
    CHECK_EQ(0, store_names_left());
}

/* The library's calls come here: of a file that is to be created the names are stopped at once, as by a process that removes it; one
 * that is opened has gone before the next call; or it may not be opened. */
static int remover = -1;
static bool removing, denied;
static const char *goes;
static int opened_before; /* how many times, before it goes */
/* Foreign code closes the descriptor as soon as it is there, or as the call has seen where the file is. */
static int closed_after; /* 1: open, 2: fstatfs */

int open(const char *path, int flags, ...) {
    if (denied) {
        errno = EACCES;
        return -1;
    }
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, flags, 0600);
    if (removing && fd >= 0 && flags & O_EXCL) {
        remover = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
        CHECK(remover >= 0 && flock(remover, LOCK_EX) == 0);
    }
    if (goes && opened_before-- == 0) {
        CHECK_EQ(0, shm_unlink(goes));
        goes = NULL;
    }
    if (closed_after == 1)
        close(fd);
    return fd;
}

int fstatfs(int fd, struct statfs *out) {
    int rc = (int)syscall(SYS_fstatfs, fd, out);
    if (closed_after == 2)
        close(fd);
    return rc;
}

static bool another_user;
uid_t geteuid(void) { return (uid_t)syscall(SYS_geteuid) + another_user; }

TEST(an_open_whose_descriptor_is_closed_fails) {
    const char *name = store_name("closed");
    shms_writer *w = leave(name, &asked);
    for (closed_after = 1; closed_after < 3; closed_after++) {
        shms_reader *r;
        CHECK_EQ(SHMS_ESYS, shms_reader_attach(&r, name, 0, NULL));
        CHECK_EQ(EBADF, errno);
    }
    closed_after = 0;
    end_writer(w);
}

TEST(a_path_through_a_descriptor_is_no_descriptor_and_one_too_long_none) {
    const char *name = store_name("target"), *link = store_name("link");
    char path[PATH_MAX + 1];
    shms_reader *r;
    shms_writer *w = leave(name, &asked);
    int folder = open("/dev/shm", O_RDONLY | O_DIRECTORY);
    CHECK(folder >= 0 && symlinkat(name, folder, link) == 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d/%s", folder, link);
    CHECK_EQ(SHMS_ELAYOUT, shms_reader_attach(&r, path, 0, NULL)); /* a link, which is not followed */
    snprintf(path, sizeof path, "/proc/self/fd/%d/%s", folder, name);
    CHECK_EQ(SHMS_OK, shms_reader_attach(&r, path, 0, NULL));
    shms_reader_free(r);
    memset(path, '/', sizeof path - 1);
    memcpy(path + PATH_MAX - 1, "k", 2);
    CHECK_EQ(SHMS_EINVAL, shms_reader_attach(&r, path, 0, NULL));
    CHECK(unlinkat(folder, link, 0) == 0 && close(folder) == 0);
    end_writer(w);
}

/* Otherwise it could remove the next store of that name. */
TEST(a_creator_leaves_its_name_to_the_process_that_removes_it) {
    const char *name = store_name("removed");
    shms_writer *w;
    removing = true;
    CHECK_EQ(SHMS_EWRITERACTIVE, shms_writer_create(&w, name, &asked));
    removing = false;
    CHECK_EQ(0, shm_unlink(name));
    close(remover);
}

TEST(an_unfinished_creation_that_goes_while_it_is_opened_is_no_store) {
    for (off_t size = 0; size <= 4096; size += 4096) {
        shms_reader *r;
        shms_writer *w;
        for (int writes = 0; writes < 2; writes++) {
            const char *name = store_name("goes");
            int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
            CHECK(fd >= 0 && ftruncate(fd, size) == 0);
            goes = name;
            opened_before = 0;
            CHECK_EQ(SHMS_ENOSTORE,
                     writes ? shms_writer_recover(&w, name, NULL) : shms_reader_attach(&r, name, 0, NULL));
            close(fd);
        }
    }
}

TEST(a_name_that_goes_at_any_moment_of_a_recovery_is_no_store) {
    int rc = SHMS_ENOSTORE, at = 0;
    for (; rc == SHMS_ENOSTORE; at++) {
        const char *name = store_name("soon");
        shms_writer *w = leave(name, &asked);
        shms_writer_free(w);
        goes = name;
        opened_before = at;
        rc = shms_writer_recover(&w, name, NULL);
        if (rc == SHMS_OK)
            end_writer(w);
    }
    CHECK_EQ(SHMS_OK, rc);
    CHECK_EQ(4, at); /* it has been opened to be looked at, mapped and locked */
    goes = NULL;
}

TEST(a_socket_is_no_store) {
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    const char *name = store_name("socket");
    int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    shms_reader *r;
    snprintf(at.sun_path, sizeof at.sun_path, "/dev/shm/%s", name);
    CHECK(s >= 0 && bind(s, (struct sockaddr *)&at, sizeof at) == 0);
    CHECK_EQ(SHMS_ELAYOUT, shms_reader_attach(&r, name, 0, NULL));
    close(s);
    CHECK_EQ(0, shm_unlink(name));
}

TEST(a_store_that_may_not_be_opened_is_foreign_unless_it_is_not_yet_open_to_its_group) {
    const int64_t own = getuid();
    const struct {
        off_t size;
        int64_t allow_uid;
        bool mine;
        int rc;
    } cases[] = {{0, own, false, SHMS_ECREATING},
                 {0, own + 2, false, SHMS_EFOREIGN},
                 {0, SHMS_OWN_UID, false, SHMS_EFOREIGN},
                 {4096, own, false, SHMS_EFOREIGN},
                 {0, own, true, SHMS_ESYS}};
    shms_reader *r;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *name = store_name("foreign");
        shms_expected e = {.store = SHMS_ANY_STORE, .allow_uid = cases[i].allow_uid};
        int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
        CHECK(fd >= 0 && ftruncate(fd, cases[i].size) == 0);
        close(fd);
        denied = true;
        another_user = !cases[i].mine;
        CHECK_EQ(cases[i].rc, shms_reader_attach(&r, name, 0, &e));
        CHECK_EQ(cases[i].mine ? SHMS_ESYS : SHMS_EFOREIGN, shms_reader_attach(&r, name, 0, NULL));
        CHECK_EQ(EACCES, errno);
        CHECK_EQ(0, shm_unlink(name));
        CHECK_EQ(SHMS_ESYS, shms_reader_attach(&r, name, 0, &e)); /* nobody's */
        denied = another_user = false;
    }
}

TEST(a_store_is_its_users_own_and_admits_no_other_unless_that_is_expected) {
    const char *name = store_name("owner");
    shms_writer *w = leave(name, &asked);
    const int64_t own = getuid();
    for (int other = 0; other < 2; other++)
        for (mode_t mode = 0600; mode <= 0660; mode += 020) /* 0620 and 0640: for nobody */
            for (int64_t allow = SHMS_OWN_UID; allow <= own; allow += own + 1) {
                shms_expected e = {.store = SHMS_ANY_STORE, .allow_uid = allow};
                shms_reader *r = NULL;
                CHECK_EQ(0, fchmod(w->seg.fd, mode));
                another_user = other;
                CHECK_EQ((allow == own && (mode == 0600 || mode == 0660)) || (!other && mode == 0600) ? SHMS_OK
                                                                                                      : SHMS_EFOREIGN,
                         shms_reader_attach(&r, name, 0, &e));
                shms_reader_free(r);
                another_user = false;
            }
    shms_segment seg;
    CHECK_EQ(SHMS_OK, shms_segment_open(&seg, name, SHMS_ROLE_INSPECTOR, NULL));
    close(seg.fd); /* as any code of the process may do */
    CHECK_EQ(seg.control_size, shms_segment_lacks(&seg)); /* nothing is known to be there */
    CHECK(!shms_exceeds_free_space(seg.fd, UINT64_MAX));
    shms_segment_close(&seg);
    end_writer(w);
}
