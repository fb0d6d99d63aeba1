/*
 * simulate.c - writers, ranks and a finder in one process, whose schedule and deaths come from one seed.
 *
 *     simulate SEED STEPS [MODE]     seeds from SEED on, of 20,000 steps each; MODE of weak.h for all of them
 *
 * A step is one that an actor has made. Whatever ends a run says the seed, so that it can be replayed.
 *
 * Each actor is a coroutine that uses the core as its processes do. At each labelled step (step.h), and with every other seed
 * also before each access to a shared word, the simulator decides who goes on, who dies there, and who is stopped for how
 * long. A dead actor leaves its words as they are and loses its locks, as the kernel takes them; its successor starts at
 * any later step. With every other seed, calls of the system fail: who cannot join or attach then tries again. So a seed
 * replays exactly.
 *
 * After each step no byte under a view has changed. A reference that was promised to a rank is never stale. In the end
 * everything that was taken comes back, an inspector finds nothing, and nobody has waited longer than its bound.
 *
 * Stores are seen at once, or late and in order, or late in any order that C11 allows (weak.h); the seed says which. Loads
 * are never early.
 */
#include <inttypes.h>
#include <sys/time.h>
#include <ucontext.h>

#include "inspect/inspect.h"
#include "store/reader.c" /* what a dead rank leaves is private */
#define fork_child in_forked_child /* support.h has another */
#include "store/descriptors.c" /* the list of open segments */
#undef fork_child
#include "support.h"
#include "weak.h"

enum { UNIT = SHMS_ALIGN, UNITS = 24, WRITERS = 2, RANKS = 3, ACTORS = WRITERS + RANKS, FINDER = RANKS - 1 };
enum { KEYS = 10, VIEWS = 4, PROMISES = 64, STACK = 1 << 18, LONGEST = 200000, OPEN = 4 * ACTORS };
enum { STEPS_A_SEED = 20000, SILENT = 5 /* seconds of the processor without a step */ };

/* What a writer has handed out, and the ranks that may count on it: bit r. */
typedef struct promise {
    uint8_t ref[SHMS_REF_SIZE];
    uint64_t mark;
    int by;
    bool adopted;
    uint32_t ranks;
} promise;

typedef struct actor {
    ucontext_t at;
    char *stack;
    bool lives, done;
    bool refused; /* a call of the system, since the flag was last cleared */
    uint64_t life;       /* how many there were before */
    uint64_t stopped;    /* until that step */
    uint64_t since;      /* step at which its call began */
    uint64_t attached;   /* step at which it began to attach */
    shms_writer *w;
    shms_reader *r;
    shms_view *views[VIEWS];
    uint64_t marks[VIEWS];
} actor;

static actor actors[ACTORS];
static uint64_t retired[WRITERS][RANKS]; /* at which step an arena's writer retired the rank, or 0 */
static int current;
static ucontext_t scheduler;
static uint64_t seed, of_seed, now, serial; /* the state of the random numbers, and the seed that it began with */
static bool at_each_access;
static uint64_t units, keys; /* of an arena, and that there are in this seed's run: a small store is contested more */
static uint32_t slots;
static uint64_t calls; /* which of a writer's this seed makes, as bits; fewer reach deeper */
static uint64_t steps_a_life; /* on average */
static uint64_t one_fails_of; /* an actor's calls of the system, on average; 0: none fails */
static bool acting; /* an actor goes on, and not the simulator */
static bool ending; /* nobody dies or stops any more; each ends after its call */
static const char *name;
static promise promises[PROMISES];
static struct {
    shms_segment *seg;
    int of;
} opened[OPEN];
static struct {
    uint64_t steps, calls, deaths, stops, reads, finds, adopted, refused, failed;
} counted;

static uint64_t one_of(uint64_t n) { return below(&seed, n); }
static actor *self(void) { return &actors[current]; }

bool in_segment(const volatile void *at) {
    const uint8_t *byte = (const uint8_t *)at;
    for (shms_segment *s = open_segments; s; s = s->next)
        if ((byte >= s->control && byte < s->control + s->control_size) ||
            (byte >= s->all_data && byte < s->all_data + s->data_size))
            return true;
    return false;
}
void before_access(void) {
    if (at_each_access)
        SHMS_STEP("");
}

bool refused(int error) {
    if (!acting || ending || !one_fails_of || one_of(one_fails_of))
        return false;
    counted.failed++;
    self()->refused = true;
    errno = error;
    return true;
}

/* In the place of libc's, so that a seed replays: a step takes a microsecond, and the time of day jumps. */
int clock_gettime(clockid_t clock, struct timespec *out) {
    uint64_t ns = clock == CLOCK_MONOTONIC ? now * 1000 : one_of(UINT64_C(1) << 60);
    *out = (struct timespec){.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
    return 0;
}
ssize_t getrandom(void *out, size_t size, unsigned flags) {
    (void)flags;
    for (size_t i = 0; i < size; i++)
        ((uint8_t *)out)[i] = (uint8_t)one_of(256);
    return (ssize_t)size;
}

static void say(void) {
    fprintf(stderr, "\nseed %" PRIu64 ", moment %" PRIu64 ", after %" PRIu64 " steps, actor %d: ", of_seed, now,
            counted.steps, current);
}
static _Noreturn void fail(const char *what, uint64_t expected, uint64_t found) {
    say();
    fprintf(stderr, "%s: expected %" PRIu64 ", got %" PRIu64 "\n", what, expected, found);
    store_names_left();
    _exit(1);
}
/* A signal that kills, or no step for long. */
static void on_signal(int signal) {
    static uint64_t before = UINT64_MAX;
    if (signal == SIGPROF && before != counted.steps) {
        before = counted.steps;
        return;
    }
    say();
    fprintf(stderr, "%s\n", signal == SIGPROF ? "no step for seconds" : strsignal(signal));
    store_names_left();
    _exit(128 + signal);
}
static void watch(void) {
    static char stack[1 << 16]; /* an actor's may be what has run out */
    struct itimerval often = {{SILENT, 0}, {SILENT, 0}};
    sigaltstack(&(stack_t){.ss_sp = stack, .ss_size = sizeof stack}, NULL);
    for (int i = 0, fatal[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGINT, SIGTERM, SIGPROF}; i < 8; i++)
        sigaction(fatal[i], &(struct sigaction){.sa_handler = on_signal, .sa_flags = SA_ONSTACK | SA_RESTART}, NULL);
    setitimer(ITIMER_PROF, &often, NULL);
}
#define MUST(what, expected, found)                                                                                    \
    do {                                                                                                               \
        uint64_t want_ = (uint64_t)(expected), got_ = (uint64_t)(found);                                               \
        if (want_ != got_)                                                                                             \
            fail(what, want_, got_);                                                                                   \
    } while (0)

/* ---- values: their first word is the mark, which has the key in its lowest digits ---- */

static uint64_t mark_of(const shms_view *v) {
    uint64_t mark;
    memcpy(&mark, v->payload, sizeof mark);
    return mark;
}
static void whole(const shms_view *v, uint64_t mark) {
    MUST("mark of a view", mark, mark_of(v));
    for (uint64_t i = 8; i < v->payload_size; i++)
        MUST("byte of a view", (uint8_t)(mark + i), (uint8_t)v->payload[i]);
}

static void views_are_whole(void) {
    for (int a = 0; a < ACTORS; a++)
        for (int i = 0; i < VIEWS; i++)
            if (actors[a].lives && actors[a].views[i])
                whole(actors[a].views[i], actors[a].marks[i]);
}

/* ---- promises ---- */

static void promises_end(int by, bool only_adopted) {
    for (int i = 0; i < PROMISES; i++)
        if (promises[i].by == by && (promises[i].adopted || !only_adopted))
            promises[i].ranks = 0;
}
static void rank_forgets(int rank) {
    for (int i = 0; i < PROMISES; i++)
        promises[i].ranks &= ~(1u << rank);
}
/* The ranks that are attached: a lease that is opened from now on expects them. */
static uint32_t attached(void) {
    uint32_t ranks = 0;
    for (int r = 0; r < FINDER; r++) {
        const actor *a = &actors[WRITERS + r];
        ranks |= (uint32_t)(a->lives && a->r && retired[current][r] <= a->attached) << r;
    }
    return ranks;
}
static void retire(shms_writer *w) {
    uint32_t rank = (uint32_t)one_of(FINDER);
    for (int i = 0; i < PROMISES; i++)
        if (promises[i].by == current)
            promises[i].ranks &= ~(1u << rank);
    retired[current][rank] = UINT64_MAX; /* if it dies there, perhaps for ever */
    MUST("retire", SHMS_OK, shms_writer_retire(w, rank));
    retired[current][rank] = now;
}
static void promised_to(uint32_t ranks, const uint8_t *ref, uint64_t mark, bool adopted) {
    promise *p = &promises[one_of(PROMISES)];
    for (int i = 0; i < PROMISES; i++)
        if (promises[i].ranks == 0)
            p = &promises[i];
    if (p->ranks) { /* nobody will ask for the one whose place is taken, so it must not hold the store for ever */
        shms_writer *w = actors[p->by].w;
        if (actors[p->by].lives && w && p->by == current)
            shms_writer_cancel(w, p->ref);
        else
            return;
    }
    /* a rank that has died in the call, and its successor, are not expected */
    *p = (promise){.mark = mark, .by = current, .adopted = adopted, .ranks = ranks & attached()};
    memcpy(p->ref, ref, SHMS_REF_SIZE);
}

/* ---- what the actors do ---- */

static void write_once(shms_writer *w) {
    char key[2] = {(char)('a' + one_of(keys)), 0};
    uint8_t ref[SHMS_REF_SIZE];
    uint32_t ranks = attached();
    uint64_t lives[RANKS];
    for (int r = 0; r < RANKS; r++)
        lives[r] = actors[WRITERS + r].life;
    shms_ticket t;
    int rc;
    uint64_t which = one_of(16);
    while (!(calls >> which & 1))
        which = one_of(16);
    switch (which) {
    case 0:
        if (one_of(4) == 0) {
            promises_end(current, false);
            shms_writer_cancel_all(w);
        } else if (one_of(4) == 0)
            retire(w);
        break;
    case 1:
        shms_writer_touch(w, key, 1);
        break;
    case 2:
        shms_writer_delete(w, key, 1);
        break;
    case 3: {
        promise *p = &promises[one_of(PROMISES)];
        if (p->by == current && p->ranks) {
            p->ranks = 0;
            shms_writer_cancel(w, p->ref);
        }
        break;
    }
    case 4:
        MUST("the books", SHMS_OK, shms_writer_valid(w));
        break;
    case 5:
    case 6:
    case 7:
    case 8:
    case 9: {
        rc = verb_hit(w, key, 1, ref);
        if (rc == SHMS_OK) {
            shms_ref unpacked;
            shms_ref_unpack(&unpacked, ref);
            bool adopted = unpacked.slot / slots != w->seg.arena;
            counted.adopted += adopted;
            for (int r = 0; r < RANKS; r++)
                ranks &= ~((uint32_t)(lives[r] != actors[WRITERS + r].life) << r);
            promised_to(ranks, ref, 0, adopted);
        }
        break;
    }
    default: {
        uint64_t size = UNIT * (1 + one_of(6)), mark = serial++ * KEYS + (uint64_t)(key[0] - 'a');
        rc = (one_of(2) ? verb_begin : verb_reserve)(w, key, 1, NULL, 0, size, &t);
        if (rc == SHMS_OK) {
            char value[6 * UNIT];
            for (uint64_t i = 8; i < size; i++)
                value[i] = (char)(mark + i);
            memcpy(value, &mark, sizeof mark);
            memcpy(t.payload, value, size);
            bool leased = t.entry != SHMS_NONE;
            MUST("commit", SHMS_OK, verb_commit(w, &t, leased ? ref : NULL));
            for (int r = 0; r < RANKS; r++)
                ranks &= ~((uint32_t)(lives[r] != actors[WRITERS + r].life) << r);
            if (leased)
                promised_to(ranks, ref, mark, false);
        } else if (shms_is_refusal(rc))
            counted.refused++;
        else
            MUST("put", SHMS_EEXISTS, rc);
    }
    }
}

static void keep(actor *me, shms_view *v, uint64_t mark) {
    whole(v, mark);
    int i = (int)one_of(VIEWS);
    shms_view *old = me->views[i];
    me->views[i] = v, me->marks[i] = mark;
    shms_view_release(old);
}

static void take_promise(actor *me, promise *p, uint32_t bit) {
    shms_view *v;
    uint64_t mark = p->mark;
    bool counts = p->ranks & bit;
    promise before = *p;
    if (!counts)
        return;
    weak_empty_of(p->by); /* the message with the reference came after its stores */
    if (one_of(4) == 0) {
        p->ranks &= ~bit;
        shms_reader_release(me->r, before.ref);
        return;
    }
    int rc = shms_reader_acquire(me->r, before.ref, &v);
    bool same = !memcmp(p->ref, before.ref, SHMS_REF_SIZE);
    if (rc == SHMS_OK) {
        counted.reads++;
        if (same)
            p->ranks &= ~bit;
        keep(me, v, mark ? mark : mark_of(v));
    } else if (rc == SHMS_ESTALE) /* then its writer has ended it, or died with it, meanwhile */
        MUST("a promised object", 0, same && p->ranks & bit);
    else
        MUST("a read of a stopped writer's", SHMS_EBUSY, rc);
}

static void read_once(actor *me, uint32_t rank) {
    uint8_t ref[SHMS_REF_SIZE];
    shms_view *v;
    if (one_of(5) == 0) {
        int i = (int)one_of(VIEWS);
        v = me->views[i];
        me->views[i] = NULL;
        shms_view_release(v);
    } else if (rank == FINDER || one_of(4) == 0) {
        char key = (char)('a' + one_of(keys));
        int rc = shms_reader_find(me->r, &key, 1, ref, &v);
        if (rc == SHMS_OK) {
            counted.finds++;
            MUST("key of what was found", key - 'a', mark_of(v) % KEYS);
            keep(me, v, mark_of(v));
        } else
            MUST("find", SHMS_ENOTFOUND, rc);
    } else {
        promise *p = &promises[one_of(PROMISES)];
        for (int i = 0; i < PROMISES && !(p->ranks & 1u << rank); i++)
            p = &promises[one_of(PROMISES)];
        take_promise(me, p, 1u << rank);
    }
}

static void step(const char *label) {
    (void)label;
    swapcontext(&self()->at, &scheduler);
}

static bool begin_again(actor *me) {
    step("");
    me->since = me->attached = now;
    me->refused = false;
    return true;
}

static void live(void) {
    actor *me = self();
    int number = current;
    if (number < WRITERS) {
        shms_expected e = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID, .end_leases = (uint32_t)one_of(2)};
        if (e.end_leases)
            promises_end(number, false);
        shms_writer *w;
        while (begin_again(me) && shms_writer_join(&w, name, number, &e) != SHMS_OK)
            MUST("join without a failure of the system", true, me->refused);
        me->w = w;
    } else {
        shms_expected e = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID, .finds = number - WRITERS == FINDER};
        shms_reader *r;
        while (begin_again(me) && shms_reader_attach(&r, name, (uint32_t)(number - WRITERS), &e) != SHMS_OK)
            MUST("attach without a failure of the system", true, me->refused);
        me->r = r;
    }
    weak_empty(); /* as others learn of it */
    do {
        step("");
        me->since = now;
        counted.calls++;
        if (me->w)
            write_once(me->w);
        else
            read_once(me, (uint32_t)(number - WRITERS));
    } while (!ending);
    me->done = true;
    swapcontext(&me->at, &scheduler);
}

/* ---- the schedule ---- */

static void start(int number) {
    actor *a = &actors[number];
    char *stack = a->stack ? a->stack : malloc(STACK);
    uint64_t life = a->life + 1;
    *a = (actor){.stack = stack, .lives = true, .life = life};
    getcontext(&a->at);
    a->at.uc_stack.ss_sp = stack;
    a->at.uc_stack.ss_size = STACK;
    makecontext(&a->at, live, 0);
}

/* Segments that the actor has opened or closed since it went on. */
static void note_opened(int by) {
    for (int i = 0; i < OPEN; i++) {
        bool there = false;
        for (shms_segment *s = open_segments; s; s = s->next)
            there |= s == opened[i].seg;
        if (!there)
            opened[i].seg = NULL;
    }
    for (shms_segment *s = open_segments; s; s = s->next) {
        int free_at = -1;
        bool known = false;
        for (int i = 0; i < OPEN; i++) {
            known |= opened[i].seg == s;
            if (!opened[i].seg)
                free_at = i;
        }
        if (!known) {
            MUST("room for a segment", 1, free_at >= 0);
            opened[free_at].seg = s, opened[free_at].of = by;
        }
    }
}

/* The kernel takes its locks and mappings; its words stay. */
static void die(int number) {
    actor *a = &actors[number];
    weak_empty_of(number);
    a->lives = false;
    counted.deaths++;
    if (number < WRITERS)
        promises_end(number, true);
    else
        rank_forgets(number - WRITERS);
    for (int i = 0; i < OPEN; i++)
        if (opened[i].seg && opened[i].of == number) {
            shms_segment_close(opened[i].seg);
            opened[i].seg = NULL;
        }
    weak_free_all_of(number);
}

static void go_on(int number) {
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

/* Everything that was taken comes back. */
static void end_all(void) {
    shms_finding found[4];
    shms_inspector *inspector;
    ending = true;
    for (int a = 0; a < ACTORS; a++)
        if (!actors[a].lives)
            start(a);
    for (bool again = true; again;) {
        again = false;
        for (int a = 0; a < ACTORS; a++) /* in turn: one may wait for another that was stopped while it evicted */
            if (!actors[a].done) {
                go_on(a);
                views_are_whole();
                again = true;
            }
    }
    shms_step_hook = NULL;
    for (int a = 0; a < ACTORS; a++)
        weak_empty_of(a);
    for (int i = 0; i < PROMISES; i++)
        for (int r = 0; r < FINDER; r++)
            if (promises[i].ranks & 1u << r) {
                current = WRITERS + r;
                take_promise(self(), &promises[i], 1u << r);
            }
    for (int r = 0; r < RANKS; r++) {
        actor *a = &actors[WRITERS + r];
        for (int i = 0; i < VIEWS; i++)
            shms_view_release(a->views[i]);
        shms_reader_free(a->r);
    }
    CHECK_EQ(SHMS_OK, shms_inspector_open(&inspector, name));
    MUST("findings", 0, shms_inspector_verify(inspector, found, 4));
    shms_inspector_free(inspector);
    for (int a = 0; a < WRITERS; a++)
        shms_writer_cancel_all(actors[a].w);
    for (int a = 0; a < WRITERS; a++) {
        shms_writer *w = actors[a].w;
        MUST("the last of one's own", SHMS_OK, shms_writer_clear(w, "", 0));
        MUST("all of an arena", SHMS_OK, put_marked(w, key_of("all", (uint64_t)a), units * UNIT - UNIT, 1, NULL));
        MUST("the books", SHMS_OK, shms_writer_valid(w));
    }
    for (int a = 0; a < WRITERS; a++) {
        shms_writer_close(actors[a].w, 1);
        shms_writer_free(actors[a].w);
    }
}

static void run(uint64_t of, uint64_t steps, int mode) {
    of_seed = of;
    seed = of * UINT64_C(0x9e3779b97f4a7c15) + 1;
    ending = false;
    now = 0;
    serial = 1;
    at_each_access = of / 3 % 2;
    calls = one_of(1 << 16) | 3 << 9; /* hits and puts always */
    steps_a_life = UINT64_C(200) << one_of(6);
    one_fails_of = one_of(2) ? 0 : 4 << one_of(6);
    weak_begin(mode < 0 ? (enum weak_mode)(of % 3) : (enum weak_mode)mode, UINT64_C(1) << one_of(7));
    memset(promises, 0, sizeof promises);
    memset(retired, 0, sizeof retired);
    units = 8 + one_of(UNITS - 7);
    keys = 2 + one_of(KEYS - 1);
    slots = (uint32_t)(2 + one_of(7));
    shms_options o = {.capacity = units * UNIT, .n_readers = RANKS, .max_objects = slots, .n_writers = WRITERS};
    shms_writer *w;
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, &o));
    CHECK_EQ(SHMS_OK, shms_writer_close(w, 0));
    shms_writer_free(w);
    note_opened(0);
    shms_step_hook = step;
    for (int a = 0; a < ACTORS; a++)
        start(a);
    schedule(steps);
    end_all();
    CHECK_EQ(0, store_names_left());
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
           " stops, %" PRIu64 " reads, %" PRIu64 " finds, %" PRIu64 " adoptions, %" PRIu64 " refusals, %" PRIu64
           " failures of the system\n",
           first, s - 1, counted.steps, counted.calls, counted.deaths, counted.stops, counted.reads, counted.finds,
           counted.adopted, counted.refused, counted.failed);
    return 0;
}
