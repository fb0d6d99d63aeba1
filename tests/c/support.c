/* support.c - see support.h. It has the main function, and defines the hook of step.h, so that every test links. */
#include "support.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/prctl.h>

#define NAMES 64
#define TESTS 64

void (*shms_step_hook)(const char *label);

static char names[NAMES][64];
static int n_names;
static pid_t owner;

static void (*tests[TESTS])(void);
static int n_tests;

void add_test(void (*test)(void)) {
    CHECK(n_tests < TESTS);
    tests[n_tests++] = test;
}

int main(void) {
    for (int i = 0; i < n_tests; i++)
        tests[i]();
    CHECK_EQ(0, store_names_left());
    return 0;
}

int store_names_left(void) {
    int left = 0;
    for (int i = 0; i < n_names && getpid() == owner; i++)
        left += shm_unlink(names[i]) == 0;
    return left;
}

#ifdef SHMS_COVERAGE
void __gcov_dump(void);
void __real__exit(int status);
int __real_kill(pid_t pid, int signal);
void __wrap__exit(int status) {
    __gcov_dump();
    __real__exit(status);
}
int __wrap_kill(pid_t pid, int signal) {
    if (pid == getpid() && signal == SIGKILL)
        __gcov_dump();
    return __real_kill(pid, signal);
}
#endif

#ifdef SHMS_EMULATED
/* No forked child has a page with MADV_DONTFORK: those of locks. */
#define UNFORKED 1024
static _Atomic(void *) unforked[UNFORKED];
int __real_madvise(void *at, size_t size, int advice);
int __wrap_madvise(void *at, size_t size, int advice) {
    for (int i = 0; advice == MADV_DONTFORK; i++) {
        CHECK(i < UNFORKED);
        if (atomic_compare_exchange_strong(&unforked[i], &(void *){NULL}, at))
            break;
    }
    return __real_madvise(at, size, advice);
}
int __real_munmap(void *at, size_t size);
int __wrap_munmap(void *at, size_t size) {
    for (int i = 0; i < UNFORKED; i++)
        atomic_compare_exchange_strong(&unforked[i], &(void *){at}, NULL);
    return __real_munmap(at, size);
}
static void unmap_in_child(void) {
    for (int i = 0; i < UNFORKED; i++)
        if (unforked[i])
            munmap(unforked[i], 4096);
}
__attribute__((constructor)) static void unmap_in_children(void) { pthread_atfork(NULL, NULL, unmap_in_child); }
#endif

static void clean(void) { store_names_left(); }

const char *store_name(const char *what) {
    if (owner != getpid()) { /* a child's names are its own */
        owner = getpid();
        n_names = 0;
        atexit(clean);
    }
    CHECK(n_names < NAMES);
    snprintf(names[n_names], sizeof names[0], "/shms-test-%s-%d-%d", what, (int)getpid(), n_names);
    return names[n_names++] + 1;
}

const char *key_of(const char *prefix, uint64_t number) {
    static _Thread_local char keys[5][32];
    static _Thread_local unsigned next;
    char *key = keys[next++ % 5];
    snprintf(key, sizeof keys[0], "%s%llu", prefix, (unsigned long long)number);
    return key;
}

void end_writer(shms_writer *w) {
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    CHECK_EQ(SHMS_OK, shms_writer_close(w, 1));
    shms_writer_free(w);
}

int put_marked(shms_writer *w, const char *key, uint64_t size, uint64_t mark, uint8_t *out) {
    shms_pending t;
    int rc = (out ? verb_begin : verb_reserve)(w, key, (uint32_t)strlen(key), NULL, 0, size, &t);
    if (rc)
        return rc;
    fill(t.payload, size, mark);
    return verb_commit(w, &t, out);
}

shms_reader *four_read_objects(const char *name, uint64_t capacity, uint64_t size, uint8_t refs[4][SHMS_REF_SIZE]) {
    shms_options o = {.capacity = capacity, .n_readers = 1, .max_objects = 8};
    shms_writer *w;
    shms_reader *r;
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, &o));
    CHECK_EQ(SHMS_OK, shms_reader_attach(&r, name, 0, NULL));
    for (int i = 0; i < 4; i++)
        CHECK_EQ(SHMS_OK, put_marked(w, (char[]){(char)('a' + i), 0}, size, (uint64_t)i, refs[i]));
    for (int i = 0; i < 4; i++)
        CHECK_EQ(1, shms_reader_release(r, refs[i]));
    shms_writer_free(w);
    return r;
}

void *zeroed(uint64_t size) {
    void *memory = aligned_alloc(4096, shms_align_up(size, 4096));
    CHECK(memory);
    memset(memory, 0, shms_align_up(size, 4096));
    return memory;
}

pid_t fork_child(void) {
    pid_t parent = getpid(), pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
    }
    return pid;
}

int reap(pid_t pid) {
    int status;
    while (waitpid(pid, &status, 0) < 0)
        CHECK(errno == EINTR);
    return WIFSIGNALED(status) ? 1000 + WTERMSIG(status) : WEXITSTATUS(status);
}

static uint64_t fatal;
static const char *fatal_label;
uint64_t steps;

static void count_and_die(const char *label) {
    if (fatal_label && strcmp(label, fatal_label))
        return;
    if (++steps == fatal)
        kill(getpid(), SIGKILL);
}

static void die_as_of(uint64_t number, const char *label) {
    fatal = number;
    fatal_label = label;
    steps = 0;
    shms_step_hook = count_and_die;
}

void die_at_step(uint64_t number) { die_as_of(number, NULL); }
void die_before(const char *label, int nth) { die_as_of((uint64_t)nth, label); }

bool killed_at(uint64_t number, void (*script)(void)) {
    pid_t child = fork_child();
    if (child == 0) {
        die_at_step(number);
        script();
        _exit(0);
    }
    int how = reap(child);
    CHECK(how == 0 || how == 1000 + SIGKILL);
    return how != 0;
}

void rank_dies(const char *name, uint32_t rank) {
    shms_reader *r;
    pid_t child = fork_child();
    if (child == 0) {
        CHECK_EQ(SHMS_OK, shms_reader_attach(&r, name, rank, NULL));
        kill(getpid(), SIGKILL);
    }
    reap_killed(child);
}
