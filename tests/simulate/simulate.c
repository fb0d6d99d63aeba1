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
 * After each step no byte under a view has changed. A reference that was promised to a rank is never stale, and its key
 * is found until somebody deletes it. After each call of a writer, its books are right, its answers and counters are
 * those of a model, which the events of the store are for, and each open lease is counted. In the end everything that was
 * stored is found, all that was taken comes back while all live, an inspector finds nothing, and nobody has waited longer
 * than its bound.
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

enum { UNITS = 24, WRITERS = 2, RANKS = 3, ACTORS = WRITERS + RANKS, FINDER = RANKS - 1 };
enum { KEYS = 10, VIEWS = 4, PROMISES = 64, STACK = 1 << 18, LONGEST = 200000, OPEN = 4 * ACTORS };
enum { STEPS_A_SEED = 20000, SILENT = 5 /* seconds of the processor without a step */ };

/* What a writer has handed out, and the ranks that may count on it: bit r. Free if nobody may, and it is not held. */
typedef struct promise {
    uint8_t ref[SHMS_REF_SIZE];
    uint64_t mark;  /* 0: not known, since the object is another's */
    uint64_t since; /* when its object's put began; 0: not known */
    int by;
    char key;
    bool adopted, held;
    uint32_t group;
    uint32_t ranks, taking; /* those that are reading it */
} promise;

/* What an arena has under a key, by its events. */
typedef struct stored {
    uint64_t id; /* 0: nothing */
    uint64_t mark, since;
} stored;

typedef struct actor {
    ucontext_t at;
    char *stack;
    bool lives, done;
    bool refused; /* a call of the system, since the flag was last cleared */
    bool closing;
    uint64_t life;       /* how many there were before */
    uint64_t stopped;    /* until that step */
    uint64_t since;      /* step at which its call began */
    uint64_t attached;   /* step at which it began to attach */
    shms_writer *w;
    shms_reader *r;
    shms_view *views[VIEWS];
    uint64_t marks[VIEWS];
    stored own[KEYS], put[KEYS]; /* what is stored, and what is being put */
    uint32_t kind, kept, deleting; /* the number of its kind; protected keys, and those being deleted: bits */
    uint64_t events; /* position behind those that were read */
    shms_counters counters; /* as they must be */
} actor;

static actor actors[ACTORS];
static uint64_t retired[WRITERS][RANKS]; /* at which step an arena's writer retired the rank, or 0 */
static int current;
static ucontext_t scheduler;
static uint64_t seed, of_seed, now, serial; /* the state of the random numbers, and the seed that it began with */
static bool at_each_access;
static uint64_t unit, units,
    keys; /* of an arena, and that there are in this seed's run: a small store is contested more */
static uint64_t quota; /* of the kind, in units; 0: there is no kind */
static uint32_t slots, groups;
static bool checksums;
static uint64_t deleted[KEYS]; /* when a delete of the key was last under way */
static uint64_t calls[WRITERS]; /* which this seed makes, as bits; fewer reach deeper */
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
static void step(const char *label) {
    (void)label;
    swapcontext(&self()->at, &scheduler);
}

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

/* ---- values: their first word is the mark: serial number, payload in units, key ---- */

enum { SIZES = 8, LONGEST_EXTRA = 3, LARGEST_UNIT = 1024 };

static uint64_t size_of(uint64_t mark) { return mark / KEYS % SIZES * unit; }
static uint32_t meta_len_of(uint64_t mark) { return (uint32_t)(mark / KEYS / SIZES % 4); }
static uint32_t extra_len_of(uint64_t mark) { return mark / KEYS / SIZES % 5 ? 0 : LONGEST_EXTRA; }
static char byte_of(uint64_t mark, uint64_t i) { return (char)(mark + i); }

static uint64_t mark_of(const shms_view *v) {
    uint64_t mark;
    memcpy(&mark, v->payload, sizeof mark);
    return mark;
}
static void are_bytes_of(uint64_t mark, const char *at, uint64_t from, uint64_t size) {
    for (uint64_t i = from; i < size; i += size < unit ? 1 : unit / 8) /* two objects share 64 bytes at least */
        MUST("byte of an object", (uint8_t)byte_of(mark, i), (uint8_t)at[i]);
}
static void whole(const shms_view *v, uint64_t mark) {
    MUST("mark of a view", mark, mark_of(v));
    are_bytes_of(mark, v->payload, 8, v->payload_size);
}
static void is_object(const shms_view *v, char key, uint64_t mark) {
    MUST("length of a key", 1, v->key_len);
    MUST("key of a view", key, v->key[0]);
    MUST("key of a mark", key - 'a', mark % KEYS);
    MUST("size of a view", size_of(mark), v->payload_size);
    MUST("size of metadata", meta_len_of(mark), v->meta_len);
    are_bytes_of(mark, v->meta, 0, v->meta_len);
    whole(v, mark);
}

static void views_are_whole(void) {
    for (int a = 0; a < ACTORS; a++)
        for (int i = 0; i < VIEWS; i++)
            if (actors[a].lives && actors[a].views[i])
                whole(actors[a].views[i], actors[a].marks[i]);
}

/* What cannot be seen by an actor takes no step. */
static void alone(bool now_on) {
    acting = !now_on;
    shms_step_hook = now_on ? NULL : step;
}

/* ---- promises ---- */

static bool counts(const promise *p) { return p->ranks || p->held; }
static void forget(promise *p) { p->ranks = 0, p->held = false; }
static void promises_end(int by, bool only_adopted) {
    for (int i = 0; i < PROMISES; i++)
        if (promises[i].by == by && (promises[i].adopted || !only_adopted))
            forget(&promises[i]);
}
static void rank_forgets(int rank) {
    for (int i = 0; i < PROMISES; i++)
        promises[i].ranks &= ~(1u << rank), promises[i].taking &= ~(1u << rank);
}
/* The ranks that are attached: a lease that is opened from now on expects them. */
static uint32_t attached(void) {
    uint32_t ranks = 0;
    for (int r = 0; r < FINDER; r++) {
        const actor *a = &actors[WRITERS + r];
        ranks |= (uint32_t)(a->lives && a->r && !a->closing && retired[current][r] <= a->attached) << r;
    }
    return ranks;
}
static uint32_t ranks_of(uint32_t group) { return group == 0 || groups == 1 ? UINT32_MAX : group == 1 ? 1 : ~1u; }
static void retire(shms_writer *w) {
    uint32_t rank = (uint32_t)one_of(FINDER);
    for (int i = 0; i < PROMISES; i++)
        if (promises[i].by == current)
            promises[i].ranks &= ~(1u << rank);
    retired[current][rank] = UINT64_MAX; /* if it dies there, perhaps for ever */
    MUST("retire", SHMS_OK, shms_writer_retire(w, rank));
    retired[current][rank] = now;
}
static void cancel(shms_writer *w, promise *p) {
    uint32_t owed = p->ranks & ~p->taking;
    bool held = p->held;
    uint64_t lives[RANKS];
    uint8_t ref[SHMS_REF_SIZE];
    memcpy(ref, p->ref, sizeof ref);
    for (int r = 0; r < RANKS; r++)
        lives[r] = actors[WRITERS + r].life;
    forget(p);
    int rc = shms_writer_cancel(w, ref);
    for (int r = 0; r < RANKS; r++)
        owed &= ~((uint32_t)(lives[r] != actors[WRITERS + r].life || actors[WRITERS + r].closing) << r);
    if (owed || held)
        MUST("cancel", 1, rc);
    self()->counters.cancels += rc == 1;
}
static promise *place(shms_writer *w) {
    promise *p = &promises[one_of(PROMISES)];
    for (int i = 0; i < PROMISES; i++)
        if (!counts(&promises[i]))
            p = &promises[i];
    if (counts(p) && p->by == current) /* nobody will ask for this one, so it must not hold the store for ever */
        cancel(w, p);
    return counts(p) ? NULL : p;
}
/* Of its writer's arena, and no delete of its key has been under way since its put began? Then it is found. */
static bool not_deleted(const promise *p) {
    if (p->adopted || p->since <= deleted[p->key - 'a'] || !actors[p->by].lives || !actors[p->by].w)
        return false;
    for (int a = 0; a < WRITERS; a++)
        if (actors[a].deleting >> (p->key - 'a') & 1)
            return false;
    return true;
}

/* ---- what a writer does ---- */

/* Checks the books, and reads the events into the model. Nobody sees it. */
static void books(actor *me) {
    uint8_t packed[4096], *at = packed;
    uint64_t size[3] = {sizeof packed}, open_leases = 0, n = 0;
    shms_counters found;
    alone(true);
    if (one_of(2))
        MUST("the books", SHMS_OK, shms_writer_valid(me->w));
    MUST("events", SHMS_OK, shms_writer_events(me->w, me->events, packed, size));
    MUST("first event", true, size[2] <= me->events);
    me->events = size[1];
    while (at < packed + size[0]) {
        shms_event e;
        memcpy(&e, at, sizeof e);
        MUST("length of an event's key", 1, e.key_len);
        int key = at[sizeof e] - 'a';
        stored *o = &me->own[key];
        at += sizeof e + 1;
        MUST("id under the key of an event", e.kind == SHMS_EVENT_PUT ? 0 : e.id, o->id);
        if (e.kind == SHMS_EVENT_PUT) {
            MUST("id of a put", me->put[key].id, e.id);
            *o = me->put[key];
            me->put[key] = (stored){0};
            me->counters.puts++;
            me->counters.put_bytes += size_of(o->mark);
            continue;
        }
        if (e.kind == SHMS_EVENT_EVICTED) {
            MUST("protected", 0, me->kept >> key & 1);
            me->counters.evictions++;
            me->counters.evicted_bytes += shms_span(SHMS_ALIGN + size_of(o->mark) + extra_len_of(o->mark));
        } else
            me->counters.deletes++;
        o->id = 0;
    }
    shms_words_read(me->w->seg.writer->counters, &found, sizeof found);
    memcpy(&me->counters.more_hits_at_4x, &found.more_hits_at_4x, 3 * sizeof(uint64_t));
    for (size_t i = 0; i < sizeof found / sizeof(uint64_t); i++)
        MUST("counter", ((uint64_t *)&me->counters)[i], ((uint64_t *)&found)[i]);
    for (uint64_t k = 0; k < keys; k++)
        n += me->own[k].id != 0;
    MUST("keys", n, me->w->index.count - me->w->unfinished);
    for (int i = 0; i < PROMISES; i++)
        open_leases += promises[i].by == current && (promises[i].held || promises[i].ranks & ~promises[i].taking);
    MUST("open leases", true, open_leases <= shms_reclaim_open(me->w));
    alone(false);
}

static void are_deleted(actor *me, uint32_t bits) {
    for (int k = 0; k < KEYS; k++)
        if (bits >> k & 1)
            deleted[k] = now;
    me->deleting = bits;
}
static void delete(actor *me, shms_writer *w, const char *key) {
    uint32_t bit = 1u << (*key - 'a'), all = one_of(4) ? 0 : one_of(2) ? bit : UINT32_MAX;
    are_deleted(me, all ? all : bit);
    int rc = all ? shms_writer_clear(w, key, all == bit) : shms_writer_delete(w, key, 1);
    are_deleted(me, me->deleting);
    me->deleting = 0;
    books(me);
    MUST("delete", true, rc == SHMS_OK || (rc == 1 && !all));
    for (int k = 0; k < KEYS; k++)
        if ((all ? all : bit) >> k & 1)
            MUST("what was deleted", 0, me->own[k].id);
}

static void protect(actor *me, shms_writer *w, const char *key) {
    uint32_t bit = 1u << (*key - 'a');
    shms_stored s;
    if (me->kept) {
        for (char k = 'a'; k < 'a' + KEYS; k++)
            if (me->kept >> (k - 'a') & 1) {
                me->kept &= ~(1u << (k - 'a'));
                MUST("unprotect", SHMS_OK, verb_unprotect(w, &k, 1));
            }
        return;
    }
    int rc = verb_protect(w, key, 1);
    if (rc != SHMS_ENOMEM)
        MUST("protect", SHMS_OK, rc);
    me->kept = rc == SHMS_OK ? bit : 0;
    books(me);
    stored o = me->own[*key - 'a'];
    alone(true);
    rc = shms_writer_look(w, key, 1, &s);
    alone(false);
    if (o.id && me->kept) {
        MUST("look", SHMS_OK, rc);
        uint64_t mark = *(const uint64_t *)s.payload;
        MUST("mark of what is protected", o.mark, mark);
        MUST("extra bytes of it", extra_len_of(mark), s.extra_len);
        are_bytes_of(mark, s.extra, 0, s.extra_len);
        are_bytes_of(mark, s.payload, 8, s.payload_size);
    }
}

static void write_once(actor *me, shms_writer *w);

/* Hands out what is stored, or puts it. */
static void hand_out(actor *me, shms_writer *w, const char *key, bool put) {
    uint32_t ranks = attached(), group = (uint32_t)one_of(groups + 1);
    uint64_t lives[RANKS], began = now, mark = 0, which = (uint64_t)(*key - 'a');
    stored before = me->own[which];
    bool leased = true, held = one_of(16) == 0;
    shms_batch b = {.unless_stored = put && one_of(4) == 0};
    int rc;
    for (int r = 0; r < RANKS; r++)
        lives[r] = actors[WRITERS + r].life;
    if (put) {
        mark = (serial++ * SIZES + 1 + one_of(6)) * KEYS + which;
        char value[SIZES * LARGEST_UNIT];
        uint32_t kind = one_of(2) ? me->kind : 0, extra = extra_len_of(mark), unless = (uint32_t)b.unless_stored;
        bool unfinished = me->put[which].id;
        for (uint64_t i = 0; i < SIZES * unit; i++)
            value[i] = byte_of(mark, i);
        leased = one_of(2);
        rc = shms_batch_begin(w, &b, key, 1, value, meta_len_of(mark), value, extra, size_of(mark), kind, leased);
        me->counters.refusals += shms_is_refusal(rc);
        counted.refused += shms_is_refusal(rc);
        if (rc == SHMS_ETOOLARGE)
            MUST("larger than the quota", true, kind && quota);
        else if (rc == SHMS_EEXISTS)
            MUST("already there", true, unless || before.id || unfinished);
        else if (!shms_is_refusal(rc))
            MUST("put", SHMS_OK, rc);
        if (rc == SHMS_OK) {
            books(me);
            MUST("key of a put", 0, me->own[which].id);
            me->put[which] = (stored){b.ticket.id, mark, began};
            memcpy(value, &mark, sizeof mark);
            memcpy(b.ticket.payload, value, size_of(mark));
            if (one_of(8) == 0)
                write_once(me, w);
            if (one_of(8) == 0) {
                shms_batch_undo(w, &b);
                me->put[which].id = 0;
                rc = SHMS_ENOTFOUND;
            } else
                MUST("commit", SHMS_OK, rc = shms_batch_commit(w, &b, group, held));
        }
    } else {
        rc = shms_batch_hit(w, &b, key, 1, group, held);
        me->counters.refusals += shms_is_refusal(rc);
        me->counters.misses += rc == SHMS_ENOTFOUND;
        me->counters.hits += rc == SHMS_OK;
        if (rc != SHMS_OK && rc != SHMS_ENOTFOUND)
            MUST("hit", SHMS_ENOLEASE, rc);
    }
    free(b.items);
    shms_ref ref = {0};
    shms_ref_unpack(&ref, b.ref);
    bool adopted = ref.slot / slots != w->seg.arena;
    for (int r = 0; r < RANKS; r++)
        ranks &= ~((uint32_t)(lives[r] != actors[WRITERS + r].life) << r);
    if (rc == SHMS_OK && !put) {
        counted.adopted += adopted;
        me->counters.adopted += adopted;
        if (!adopted)
            MUST("id of a hit", before.id, ref.id);
    }
    promise *p = rc == SHMS_OK && leased ? place(w) : NULL;
    if (p) { /* a rank that has died in the call, and its successor, are not expected */
        *p = (promise){.by = current, .key = *key, .adopted = adopted, .held = held, .group = group};
        p->ranks = ranks & attached() & ranks_of(group);
        p->mark = put ? mark : adopted ? 0 : before.mark;
        p->since = put ? began : adopted ? 0 : before.since;
        memcpy(p->ref, b.ref, SHMS_REF_SIZE);
    }
    books(me);
    if (!put && rc == SHMS_ENOTFOUND)
        MUST("what a hit has missed", 0, me->own[which].id);
    if (p && !adopted && not_deleted(p)) {
        uint8_t extra[LONGEST_EXTRA];
        uint64_t size = sizeof extra;
        alone(true);
        MUST("has", extra_len_of(p->mark) ? 2 : 1, shms_writer_has(w, key, 1));
        MUST("valid for a writer", 1, counts(p) ? shms_writer_validate(w, b.ref, key, 1) : 1);
        if (counts(p)) {
            MUST("extra", SHMS_OK, shms_writer_extra(w, b.ref, extra, &size));
            MUST("size of extra bytes", extra_len_of(p->mark), size);
            are_bytes_of(p->mark, (const char *)extra, 0, size);
        }
        alone(false);
    }
}

/* A refusal says what has room: if that is refused, too, because it is held by now, then something shorter. */
static void put_the_longest(actor *me, shms_writer *w) {
    shms_ticket t;
    shms_refusal why;
    uint64_t size = units * unit;
    int rc;
    alone(true);
    do {
        rc = verb_begin_of(w, "z", 1, NULL, 0, size - SHMS_ALIGN, 0, false, &t, &why);
        me->counters.refusals += shms_is_refusal(rc);
        if (rc == SHMS_EFULL)
            MUST("shorter than what was refused", true, why.longest < size);
        size = why.longest;
    } while (rc == SHMS_EFULL && size);
    if (rc == SHMS_OK)
        MUST("abort", SHMS_OK, verb_abort(w, &t));
    else
        MUST("refusal", true, rc == SHMS_ENOSLOT || rc == SHMS_EFULL);
    alone(false);
}

static void change(shms_writer *w, promise *p) {
    if (p->by != current || !counts(p))
        return;
    uint8_t ref[SHMS_REF_SIZE];
    memcpy(ref, p->ref, sizeof ref);
    uint32_t group = 1 + (uint32_t)one_of(2);
    if (one_of(2))
        cancel(w, p);
    else if (one_of(2)) {
        if (verb_hold(w, ref) == 1) {
            if (counts(p) && !memcmp(ref, p->ref, sizeof ref))
                p->held = true;
            else /* all have read it meanwhile */
                self()->counters.cancels += shms_writer_cancel(w, ref) == 1;
        }
    } else if (p->group == 0 && groups > 1) {
        p->ranks &= ranks_of(group), p->group = group;
        shms_writer_assign_group(w, ref, group);
    }
}

static void write_once(actor *me, shms_writer *w) {
    char key[2] = {(char)('a' + one_of(keys)), 0};
    int rc;
    uint64_t which = one_of(16);
    while (!(calls[current] >> which & 1))
        which = one_of(16);
    switch (which) {
    case 0:
        if (one_of(4) == 0) {
            promises_end(current, false);
            me->counters.cancels += (uint64_t)shms_writer_cancel_all(w);
        } else if (one_of(4) == 0)
            retire(w);
        else if (one_of(2))
            protect(me, w, key);
        else
            put_the_longest(me, w);
        break;
    case 1:
        rc = shms_writer_touch(w, key, 1);
        books(me);
        MUST("touch", true, rc == 1 || (rc == 0 && !me->own[key[0] - 'a'].id));
        break;
    case 2:
        delete(me, w, key);
        break;
    case 3:
        change(w, &promises[one_of(PROMISES)]);
        break;
    case 4:
        rc = shms_writer_has(w, key, 1);
        books(me);
        MUST("has", true, rc == 1 || rc == 2 || (rc == 0 && !me->own[key[0] - 'a'].id));
        break;
    case 5:
    case 6:
    case 7:
    case 8:
    case 9:
        hand_out(me, w, key, false);
        break;
    default:
        hand_out(me, w, key, true);
    }
    books(me);
}

/* ---- what a rank does ---- */

static void keep(actor *me, shms_view *v, char key, uint64_t mark) {
    is_object(v, key, mark);
    int i = (int)one_of(VIEWS);
    shms_view *old = me->views[i];
    me->views[i] = v, me->marks[i] = mark;
    shms_view_release(old);
}

static void take_promise(actor *me, promise *p, uint32_t bit) {
    shms_view *v;
    shms_ref ref;
    promise before = *p;
    if (!(p->ranks & bit))
        return;
    weak_empty_of(p->by); /* the message with the reference came after its stores */
    shms_ref_unpack(&ref, before.ref);
    uint64_t mark = p->mark;
    bool found = not_deleted(p), is_private = one_of(8) == 0;
    uint64_t life = actors[p->by].life;
    int rc = one_of(4) ? 1 : shms_reader_has(me->r, &before.key, 1);
#define SAME (!memcmp(p->ref, before.ref, SHMS_REF_SIZE) && p->ranks & bit)
    if (found && SAME && not_deleted(p) && life == actors[p->by].life)
        MUST("has what was promised", 1, rc);
    if (!SAME)
        return;
    p->taking |= bit;
    if (!p->held && one_of(4) == 0) {
        rc = shms_reader_release(me->r, before.ref);
        MUST("release", true, rc == 1 || !SAME);
        p->ranks &= SAME ? ~bit : UINT32_MAX;
        p->taking &= ~bit;
        return;
    }
    me->refused = false;
    rc = (is_private ? shms_reader_acquire_private : shms_reader_acquire)(me->r, before.ref, &v);
    p->taking &= ~bit;
    if (rc == SHMS_OK) {
        counted.reads++;
        if (SAME && !p->held)
            p->ranks &= ~bit;
        MUST("id of a view", ref.id, v->id);
        mark = mark ? mark : mark_of(v);
        if (is_private) { /* what is written there is nobody else's */
            is_object(v, before.key, mark);
            memset((char *)v->payload, 0, v->payload_size);
            shms_view_release(v);
        } else
            keep(me, v, before.key, mark);
    } else if (rc == SHMS_EMAP)
        MUST("a private view without a failure of the system", true, me->refused);
    else if (rc == SHMS_ESTALE) /* then its writer has ended it, or died with it, meanwhile */
        MUST("a promised object", 0, SAME);
    else
        MUST("a read of a stopped writer's", SHMS_EBUSY, rc);
#undef SAME
}

static void read_once(actor *me, uint32_t rank) {
    uint8_t ref[SHMS_REF_SIZE];
    shms_view *v, *again;
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
            uint64_t mark = mark_of(v);
            is_object(v, key, mark);
            MUST("valid while it is held", 1, one_of(8) ? 1 : shms_reader_validate(me->r, ref));
            rc = one_of(8) ? SHMS_EBUSY : shms_reader_acquire(me->r, ref, &again);
            if (rc == SHMS_OK) {
                MUST("the same object", (uintptr_t)v->payload, (uintptr_t)again->payload);
                shms_view_release(again);
            } else
                MUST("what is held already", SHMS_EBUSY, rc);
            keep(me, v, key, mark);
        } else
            MUST("find", SHMS_ENOTFOUND, rc);
    } else {
        promise *p = &promises[one_of(PROMISES)];
        for (int i = 0; i < PROMISES && !(p->ranks & 1u << rank); i++)
            p = &promises[one_of(PROMISES)];
        take_promise(me, p, 1u << rank);
    }
}

static bool begin_again(actor *me) {
    step("");
    me->since = me->attached = now;
    me->refused = false;
    return true;
}

/* What the predecessors of a writer have left is its model's beginning. */
static void begin_model(actor *me) {
    shms_writer *w = me->w;
    alone(true);
    memset(me->own, 0, sizeof me->own);
    memset(me->put, 0, sizeof me->put);
    me->kept = 0;
    MUST("events", true, shms_writer_track_events(w, SHMS_MIN_LOG) >= 0);
    for (uint32_t i = 0; i < slots; i++) {
        const shms_slot *o = shms_writer_slot(w, i);
        const uint8_t *at = w->seg.data + shms_get(&o->offset);
        if (shms_get(&o->state) == SHMS_LIVE && !shms_slot_deleted(o))
            me->own[*at - 'a'] = (stored){shms_get(&o->id), *(const uint64_t *)(at + SHMS_ALIGN), 0};
    }
    me->events = shms_event_position(w);
    shms_words_read(w->seg.writer->counters, &me->counters, sizeof me->counters);
    me->kind = 0;
    if (quota) {
        MUST("kind", 1, me->kind = (uint32_t)shms_writer_kind(w, "kind", 4));
        MUST("quota", SHMS_OK, shms_writer_quota(w, me->kind, quota * unit));
    }
    alone(false);
}

static void join(actor *me, int number) {
    shms_expected e = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID, .end_leases = (uint32_t)one_of(2)};
    if (e.end_leases)
        promises_end(number, false);
    shms_writer *w;
    while (begin_again(me) && shms_writer_join(&w, name, number, &e) != SHMS_OK)
        MUST("join without a failure of the system", true, me->refused);
    me->w = w;
    begin_model(me);
}
static void leave_arena(actor *me, int number) {
    promises_end(number, true);
    me->life++;
    shms_writer *w = me->w;
    me->w = NULL;
    MUST("close", SHMS_OK, shms_writer_close(w, one_of(2) ? 0 : SHMS_AS_IT_WAS));
    shms_writer_free(w);
}

static void attach(actor *me, int rank) {
    shms_expected e = {.store = SHMS_ANY_STORE, .allow_uid = SHMS_OWN_UID, .finds = rank == FINDER};
    shms_reader *r;
    while (begin_again(me) && shms_reader_attach(&r, name, (uint32_t)rank, &e) != SHMS_OK)
        MUST("attach without a failure of the system", true, me->refused);
    me->closing = false;
    me->r = r;
}
/* Its views stay for a while. */
static void detach(actor *me, int rank) {
    me->closing = true;
    me->life++;
    rank_forgets(rank);
    MUST("close", SHMS_OK, shms_reader_close(me->r));
    for (int i = 0; i < VIEWS; i++) {
        shms_view *v = me->views[i];
        me->views[i] = NULL;
        shms_view_release(v);
    }
    shms_reader_free(me->r);
    me->r = NULL;
}

static void live(void) {
    actor *me = self();
    int number = current, rank = number - WRITERS;
    do {
        if (rank < 0 && !me->w)
            join(me, number);
        else if (rank >= 0 && !me->r)
            attach(me, rank);
        weak_empty(); /* as others learn of it */
        step("");
        me->since = now;
        counted.calls++;
        bool ends = !ending && one_of(256) == 0;
        if (rank < 0)
            ends ? leave_arena(me, number) : write_once(me, me->w);
        else
            ends ? detach(me, rank) : read_once(me, (uint32_t)rank);
    } while (!ending || !(me->w || me->r));
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
    if (number < WRITERS) {
        promises_end(number, true);
        are_deleted(a, a->deleting);
        a->deleting = 0;
    } else
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

static shms_inspector *findings(void) {
    shms_finding found;
    shms_inspector *inspector;
    MUST("inspect", SHMS_OK, shms_inspector_open(&inspector, name));
    MUST("findings", 0, shms_inspector_verify(inspector, &found, 1));
    return inspector;
}

/* Each key of a model, in all that look for it; and no other. */
static void stored_is_found(void) {
    uint8_t ref[SHMS_REF_SIZE];
    for (int a = 0; a < WRITERS; a++) {
        current = a;
        books(self());
    }
    alone(true);
    for (uint64_t k = 0; k < keys; k++) {
        char key = (char)('a' + k);
        const stored *one = &actors[0].own[k], *other = &actors[1].own[k];
        bool there = one->id || other->id;
        for (int a = 0; a < WRITERS; a++)
            MUST("has what is stored", there, shms_writer_has(actors[a].w, &key, 1) > 0);
        shms_view *v;
        int rc = shms_reader_find(actors[WRITERS + FINDER].r, &key, 1, ref, &v);
        MUST("finds what is stored", there ? SHMS_OK : SHMS_ENOTFOUND, rc);
        if (!there)
            continue;
        MUST("the object that is stored", true, v->id == one->id || v->id == other->id);
        is_object(v, key, mark_of(v));
        shms_view_release(v);
    }
}

/* Arguments that no caller may pass change nothing. */
static void nonsense_is_refused(void) {
    shms_writer *w = actors[0].w;
    shms_reader *r = actors[WRITERS].r, *out;
    shms_view *v;
    shms_ticket t;
    uint8_t ref[SHMS_REF_SIZE] = {1};
    MUST("closed", SHMS_ECLOSED, shms_writer_has(NULL, "a", 1));
    MUST("closed", SHMS_ECLOSED, shms_reader_has(NULL, "a", 1));
    MUST("no key", SHMS_EINVAL, shms_writer_has(w, "", 0));
    MUST("no key", SHMS_EINVAL, shms_writer_touch(w, NULL, 1));
    MUST("no key", SHMS_EINVAL, shms_reader_find(r, "", 0, ref, &v));
    MUST("no such rank", SHMS_EINVAL, shms_writer_retire(w, RANKS));
    MUST("no such rank", SHMS_EINVAL, shms_reader_attach(&out, name, RANKS, NULL));
    MUST("rank in use", SHMS_ERANKINUSE, shms_reader_attach(&out, name, 0, NULL));
    MUST("no such group", SHMS_EINVAL, verb_hit_of(w, "a", 1, groups + 1, false, ref));
    MUST("larger than the arena", SHMS_ETOOLARGE, verb_begin(w, "z", 1, NULL, 0, units * unit, &t));
    MUST("no reference", SHMS_ESTALE, shms_reader_acquire(r, ref, &v));
    MUST("no reference", SHMS_ESTALE, shms_writer_cancel(w, ref));
    MUST("close of nothing", SHMS_OK, shms_reader_close(NULL));
}

/* An inspector agrees, and finds nothing broken. */
static void nothing_is_held(void) {
    shms_rank_record ranks[RANKS];
    shms_slot_record objects[WRITERS * 8];
    shms_finding found;
    uint64_t at = 0;
    shms_inspector *inspector = findings();
    MUST("ranks", SHMS_OK, shms_inspector_ranks(inspector, ranks));
    for (int r = 0; r < RANKS; r++)
        MUST("pins and leases", 0, ranks[r].pins + ranks[r].owed_leases + ranks[r].held_bytes);
    int64_t n = shms_inspector_slots(inspector, &at, objects, WRITERS * 8);
    for (int64_t i = 0; i < n; i++) {
        int rc = shms_inspector_check(inspector, objects[i].slot, objects[i].id, &found);
        MUST("checksum", checksums ? 1 : SHMS_ENOTFOUND, rc);
    }
    shms_inspector_free(inspector);
}

/* So a refusal after this would last longer than its reason. */
static void all_know_what_is_held(void) {
    for (int a = 0; a < WRITERS; a++)
        put_the_longest(&actors[a], actors[a].w);
    alone(true);
}

/* Everything that was taken comes back. */
static void end_all(void) {
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
    nonsense_is_refused();
    shms_inspector_free(findings());
    stored_is_found();
    for (int i = 0; i < PROMISES; i++)
        for (int r = 0; r < FINDER; r++)
            if (promises[i].ranks & 1u << r) {
                current = WRITERS + r;
                MUST("valid for a rank", 1, shms_reader_validate(self()->r, promises[i].ref));
                take_promise(self(), &promises[i], 1u << r);
            }
    for (int a = 0; a < WRITERS; a++) {
        shms_writer_cancel_all(actors[a].w);
        all_know_what_is_held();
    }
    for (int r = 0; r < RANKS; r++)
        for (int i = 0; i < VIEWS; i++)
            shms_view_release(actors[WRITERS + r].views[i]);
    nothing_is_held();
    for (int a = 0; a < WRITERS; a++) { /* while all ranks live */
        shms_writer *w = actors[a].w;
        for (char k = 'a'; k < 'a' + KEYS; k++)
            if (actors[a].kept >> (k - 'a') & 1)
                MUST("unprotect", SHMS_OK, verb_unprotect(w, &k, 1));
        for (int i = 0; i < 2; i++) {
            const char *key = key_of("all", (uint64_t)(2 * a + i));
            MUST("all of an arena", SHMS_OK, put_marked(w, key, units * unit - SHMS_ALIGN, 1, NULL));
            MUST("the last of one's own", SHMS_OK, shms_writer_clear(w, "", 0));
        }
        MUST("the books", SHMS_OK, shms_writer_valid(w));
    }
    for (int r = 0; r < RANKS; r++)
        shms_reader_free(actors[WRITERS + r].r);
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
    for (int a = 0; a < WRITERS; a++) /* hits always, and puts, unless the writer is one that takes what others put */
        calls[a] = (one_of(1 << 16) | 3 << 9) & (a && one_of(2) ? (1 << 10) - 1 : (1 << 16) - 1);
    steps_a_life = UINT64_C(200) << one_of(6);
    one_fails_of = one_of(2) ? 0 : 4 << one_of(6);
    weak_begin(mode < 0 ? (enum weak_mode)(of % 3) : (enum weak_mode)mode, UINT64_C(1) << one_of(7));
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
    o.flags = (checksums ? SHMS_CHECKSUMS : 0) | (one_of(4) ? 0 : SHMS_FIFO);
    if (groups == 2)
        o.n_groups = 2, o.group_sizes[0] = 1, o.group_sizes[1] = RANKS - 1;
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
           " failures of the system; nothing found\n",
           first, s - 1, counted.steps, counted.calls, counted.deaths, counted.stops, counted.reads, counted.finds,
           counted.adopted, counted.refused, counted.failed);
    return 0;
}
