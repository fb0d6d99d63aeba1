/*
 * schedule.c - writers, ranks and a finder in one process, whose schedule and deaths come from one seed.
 *
 *     simulate SEED STEPS [MODE]     seeds from SEED on, of 20,000 steps each; MODE of weak.h for all of them
 *
 * A step is one that an actor has made. Whatever ends a run says which command replays it.
 *
 * Each actor is a coroutine that uses the core as its processes do. At each labelled step (step.h), and with every other seed
 * also before each access to a shared word, the simulator decides who goes on, who dies there, and who is stopped for how
 * long. A dead actor leaves its words as they are and loses its locks, as the kernel takes them; its successor starts at
 * any later step. With every other seed, calls of the system fail: a process that cannot join or attach then tries again. So a seed
 * replays exactly.
 *
 * After each step no byte under a view has changed. A reference that was promised to a rank is never stale, and its key
 * is found until somebody deletes it. After each call of a writer, its books are right, its answers and counters are
 * those of a model, and each open lease is counted. In the end everything that was
 * stored is found, all that was taken comes back while all live, an inspector finds nothing, and nobody has waited longer
 * than its bound.
 *
 * Stores are seen at once, or late and in order, or late in any order that C11 allows (weak.h); the seed says which. Loads
 * are never early.
 */
#include "simulate.h"

#include <sys/time.h>

#include "support.h"

enum { STACK = 1 << 18, LONGEST = 200000 };
enum {
    STEPS_A_SEED = 20000,
    SILENT = 5,
    BLOCKED = 60 /* seconds of the processor, and of the clock, without a step */
};

actor actors[ACTORS];
int current;
static ucontext_t scheduler;
static uint64_t seed; /* the state of the random numbers */
static uint64_t of_seed, of_steps; /* the seed that it began with, and the steps that it may have */
static enum weak_mode of_mode;
uint64_t now, serial;
uint64_t unit, units, keys, quota;
uint32_t slots, groups;
bool checksums;
uint64_t calls[WRITERS];
static uint64_t steps_a_life; /* on average */
bool acting, ending;
const char *name;
struct counted counted;

uint64_t one_of(uint64_t n) { return below(&seed, n); }
void step(const char *label) {
    (void)label;
    swapcontext(&self()->at, &scheduler);
}
void alone(bool now_on) {
    acting = !now_on;
    shms_step_hook = now_on ? NULL : step;
}

/* The end, with what it takes to see it again. */
static _Noreturn void end_with(int status, const char *why) {
    static const char *const modes[] = {"plain", "buffers", "any-order"};
    store_names_left(); /* before somebody is told who may be gone */
    fprintf(stderr, "\nseed %" PRIu64 ", moment %" PRIu64 ", after %" PRIu64 " steps, actor %d: %s\n", of_seed, now,
            counted.steps, current, why);
    fprintf(stderr, "again: python -m tests.simulate --seed %" PRIu64 " --steps %" PRIu64 " --mode %s\n", of_seed,
            of_steps, modes[of_mode]);
    _exit(status);
}
_Noreturn void fail(const char *what, uint64_t expected, uint64_t found) {
    char why[200];
    snprintf(why, sizeof why, "%s: expected %" PRId64 ", got %" PRId64, what, (int64_t)expected, (int64_t)found);
    end_with(1, why);
}
/* A signal that kills, or no step for long. */
static void on_signal(int signal) {
    static uint64_t before[] = {UINT64_MAX, UINT64_MAX};
    bool of_clock = signal == SIGALRM, watches = of_clock || signal == SIGPROF;
    if (watches && before[of_clock] != counted.steps) {
        before[of_clock] = counted.steps;
        return;
    }
    end_with(128 + signal, watches ? "no step for seconds" : strsignal(signal));
}
static void watch(void) {
    static char stack[1 << 16]; /* an actor's may be what has run out */
    int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGINT, SIGTERM, SIGPROF, SIGALRM};
    struct itimerval often = {{SILENT, 0}, {SILENT, 0}}, seldom = {{BLOCKED, 0}, {BLOCKED, 0}};
    sigaltstack(&(stack_t){.ss_sp = stack, .ss_size = sizeof stack}, NULL);
    for (int i = 0; i < 9; i++)
        sigaction(signals[i], &(struct sigaction){.sa_handler = on_signal, .sa_flags = SA_ONSTACK | SA_RESTART}, NULL);
    setitimer(ITIMER_PROF, &often, NULL);
    setitimer(ITIMER_REAL, &seldom, NULL);
}

void start(int number) {
    actor *a = &actors[number];
    char *stack = a->stack ? a->stack : malloc(STACK);
    uint64_t life = a->life + 1;
    *a = (actor){.stack = stack, .lives = true, .life = life};
    getcontext(&a->at);
    a->at.uc_stack.ss_sp = stack;
    a->at.uc_stack.ss_size = STACK;
    makecontext(&a->at, live, 0);
}

/* The kernel takes its locks and mappings; its words stay. */
static void die(int number) {
    actor *a = &actors[number];
    weak_empty_of(number);
    a->lives = false;
    counted.deaths++;
    if (number < WRITERS) {
        promises_end(number, true);
        are_deleted(a, a->deleting);
        a->deleting = 0;
    } else
        rank_forgets(number - WRITERS);
    close_all_of(number);
    for (uint64_t k = 0; k < KEYS; k++)
        shms_claim_drop(&a->claims[k]);
    weak_free_all_of(number);
}

void go_on(int number) {
    current = number;
    weak_in(number);
    acting = true;
    swapcontext(&scheduler, &actors[number].at);
    acting = false;
    weak_out();
    weak_let_out(number, one_of(UINT64_C(1) << 32));
    weak_let_out((int)one_of(ACTORS), one_of(UINT64_C(1) << 32));
    note_opened(number);
    now++;
    counted.steps++;
    if (actors[number].lives && now - actors[number].since > LONGEST)
        fail("steps of one call", LONGEST, now - actors[number].since);
}

static void schedule(uint64_t steps) {
    int last = 0;
    for (uint64_t end = counted.steps + steps; counted.steps < end;) {
        int next = one_of(3) ? last : (int)one_of(ACTORS); /* runs of steps reach deeper than single ones */
        actor *a = &actors[next];
        if (!a->lives) {
            if (one_of(50) == 0)
                start(next);
            last = (int)one_of(ACTORS);
            now++;
            continue;
        }
        if (a->stopped > now) {
            last = (int)one_of(ACTORS);
            now++;
            continue;
        }
        go_on(next);
        last = next;
        views_are_whole();
        if (one_of(steps_a_life) == 0)
            die(next);
        else if (one_of(400) == 0) {
            weak_empty_of(next);
            a->stopped = now + one_of(2000);
            counted.stops++;
        }
    }
}

static void run(uint64_t of, uint64_t steps, int mode) {
    of_seed = of, of_steps = steps, of_mode = mode < 0 ? (enum weak_mode)(of % 3) : (enum weak_mode)mode;
    seed = of * UINT64_C(0x9e3779b97f4a7c15) + 1;
    ending = false;
    now = 0;
    serial = 1;
    at_each_access = of / 3 % 2;
    for (int a = 0; a < WRITERS; a++) /* hits always, and puts, unless the writer is one that takes what others put */
        calls[a] = (one_of(1 << 16) | 3 << 9) & (a && one_of(2) ? (1 << 10) - 1 : (1 << 16) - 1);
    steps_a_life = UINT64_C(200) << one_of(6);
    one_fails_of = one_of(2) ? 0 : 4 << one_of(6);
    weak_begin(of_mode, UINT64_C(1) << one_of(7));
    memset(promises, 0, sizeof promises);
    memset(retired, 0, sizeof retired);
    unit = one_of(4) ? SHMS_ALIGN : LARGEST_UNIT; /* an arena of one zone, or of several */
    units = 8 + one_of(UNITS - 7);
    keys = 2 + one_of(KEYS - 1);
    slots = (uint32_t)(2 + one_of(7));
    memset(deleted, 0, sizeof deleted);
    quota = one_of(2) ? 0 : 4 + one_of(units);
    checksums = one_of(4) == 0;
    groups = 1 + (uint32_t)one_of(2);
    shms_options o = {.capacity = units * unit, .n_readers = RANKS, .max_objects = slots, .n_writers = WRITERS};
    o.flags = checksums ? SHMS_CHECKSUMS : 0;
    if (groups == 2)
        o.n_groups = 2, o.group_sizes[0] = 1, o.group_sizes[1] = RANKS - 1;
    shms_writer *w;
    MUST("create", SHMS_OK, shms_writer_create(&w, name, &o));
    MUST("close", SHMS_OK, shms_writer_close(w, 0));
    shms_writer_free(w);
    note_opened(0);
    shms_step_hook = step;
    for (int a = 0; a < ACTORS; a++)
        start(a);
    schedule(steps);
    end_all();
    none_is_open();
    MUST("names left", 0, store_names_left());
}

int main(int argc, char **argv) {
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    uint64_t steps = argc > 2 ? strtoull(argv[2], NULL, 10) : 1000000;
    int mode = argc > 3 ? atoi(argv[3]) : -1;
    name = store_name("simulate");
    uint64_t s = first;
    watch();
    for (; counted.steps < steps; s++) {
        if (isatty(STDERR_FILENO))
            fprintf(stderr, "\rseed %" PRIu64, s);
        run(s, steps - counted.steps < STEPS_A_SEED ? steps - counted.steps : STEPS_A_SEED, mode);
    }
    fprintf(stderr, "\n");
    printf("seeds %" PRIu64 " to %" PRIu64 ": %" PRIu64 " steps, %" PRIu64 " calls, %" PRIu64 " deaths, %" PRIu64
           " stops, %" PRIu64 " reads, %" PRIu64 " finds, %" PRIu64 " remote hits, %" PRIu64 " refusals, %" PRIu64
           " failures of the system; nothing found\n",
           first, s - 1, counted.steps, counted.calls, counted.deaths, counted.stops, counted.reads, counted.finds,
           counted.remote, counted.refused, counted.failed);
    return 0;
}
