/*
 * test_open.c - a successor that asks for options gets a store of these, or leaves it as it was; a reader notices it,
 * and a removal; a watch tells when a store comes.
 */
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "support.h"

enum { SIZE = 64 };

static const shms_options asked = {.capacity = 5000, .n_readers = 2, .max_objects = 8, .flags = SHMS_FIFO};

static shms_writer *leave(const char *name, const shms_options *options) {
    shms_writer *w;
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, options));
    CHECK_EQ(SHMS_OK, put_marked(w, "a", SIZE, 1, NULL));
    return w;
}

TEST(a_store_of_other_options_stays_as_it_was) {
    static const shms_options others[] = {
        {.capacity = 5057, .n_readers = 2, .max_objects = 8, .flags = SHMS_FIFO},
        {.capacity = 5000, .n_readers = 1, .max_objects = 8, .flags = SHMS_FIFO},
        {.capacity = 5000, .n_readers = 2, .max_objects = 9, .flags = SHMS_FIFO},
        {.capacity = 5000, .n_readers = 2, .max_objects = 8},
        {.capacity = 5000, .n_readers = 2, .max_objects = 8, .flags = SHMS_FIFO | SHMS_CHECKSUMS},
        {.capacity = 5000, .n_readers = 2, .max_objects = 8, .flags = SHMS_FIFO, .max_object_size = 5000},
        {.capacity = 0, .n_readers = 2, .max_objects = 8, .flags = SHMS_FIFO},
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

TEST(a_watch_tells_of_a_file_and_of_the_end_of_a_creation) {
    const char *name = store_name("watch"), *other = store_name("watch");
    int watch;
    CHECK_EQ(SHMS_OK, shms_watch(&watch, "/dev/shm"));
    struct pollfd wait = {.fd = watch, .events = POLLIN};
    shms_segment seg;
    CHECK_EQ(0, shms_watch_read(watch, name));
    shms_writer *w = leave(other, &asked);
    CHECK_EQ(1, poll(&wait, 1, 10000));
    CHECK_EQ(0, shms_watch_read(watch, name));
    CHECK_EQ(SHMS_OK, shms_segment_create(&seg, name, &asked));
    CHECK_EQ(1, poll(&wait, 1, 10000));
    CHECK_EQ(1, shms_watch_read(watch, name));
    CHECK_EQ(0, shms_watch_read(watch, name));
    shms_segment_publish(&seg);
    CHECK_EQ(1, poll(&wait, 1, 10000));
    CHECK_EQ(1, shms_watch_read(watch, name));
    shms_segment_unlink(&seg);
    shms_segment_close(&seg);
    end_writer(w);
    shms_watch_close(&watch);
    shms_watch_close(&watch);
    CHECK_EQ(SHMS_ESYS, shms_watch_read(wait.fd, name));
}

TEST(a_creator_that_dies_early_leaves_a_file_that_is_known_as_ours) {
    const char *name = store_name("magic");
    uint64_t magic = 0;
    pid_t child = fork_child();
    if (child == 0) {
        shms_segment seg;
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        setrlimit(RLIMIT_FSIZE, &(struct rlimit){512, 512}); /* the kernel kills it when it sets the file's size */
        shms_segment_create(&seg, name, &asked);
        _exit(0);
    }
    CHECK_EQ(1000 + SIGXFSZ, reap(child));
    int fd = shm_open(name, O_RDONLY, 0);
    CHECK(pread(fd, &magic, sizeof magic, 0) == sizeof magic && magic == SHMS_MAGIC);
    close(fd);
    shm_unlink(name);
}

/* The library's calls come here: a file that is to be created is locked at once, as by a process that removes it; or the
 * one that is opened has gone before the next call. */
static int remover = -1;
static bool removing;
static const char *goes;

int open(const char *path, int flags, ...) {
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, flags, 0600);
    if (removing && fd >= 0 && flags & O_EXCL) {
        struct flock writer = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
        remover = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
        CHECK(remover >= 0 && fcntl(remover, F_OFD_SETLK, &writer) == 0);
    }
    if (goes)
        CHECK_EQ(0, shm_unlink(goes));
    goes = NULL;
    return fd;
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
            CHECK_EQ(SHMS_ENOSTORE,
                     writes ? shms_writer_recover(&w, name, NULL) : shms_reader_attach(&r, name, 0, NULL));
            close(fd);
        }
    }
}
