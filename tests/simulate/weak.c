/* weak.c - the store buffers of the actors, and their memory. */
#define WEAK_C
#include "weak.h"

enum { ROOM = 100, ACTORS = 8, NOBODY = -1 };

typedef struct delayed {
    volatile void *at;
    size_t size; /* 0: a release fence */
    uint64_t before, value;
    bool release, seq_cst;
} delayed;

/* Before each piece of memory; in a ring with the others of its actor. */
typedef struct block {
    struct block *next, *before;
    size_t size;
    max_align_t memory[];
} block;

static struct {
    delayed of[ROOM];
    int n;
} buffers[ACTORS];
static enum weak_mode mode;
static int running = NOBODY;
static uint64_t rate; /* of so many chances, a store leaves in one */

static uint64_t get(const volatile void *at, size_t size) {
    uint64_t value = 0;
    memcpy(&value, (const void *)at, size);
    return value;
}
static void put(const delayed *s, uint64_t value) { memcpy((void *)s->at, &value, s->size); }

/* The first n stores of the actor that runs become others' too: they are in memory already. */
static void forget(int n) {
    if (n == 0)
        return;
    buffers[running].n -= n;
    memmove(buffers[running].of, buffers[running].of + n, (size_t)buffers[running].n * sizeof(delayed));
}

void weak_empty(void) {
    if (running != NOBODY)
        forget(buffers[running].n);
}

static void wait_for_seq_cst(void) {
    int n = buffers[running].n;
    while (n && !buffers[running].of[n - 1].seq_cst)
        n--;
    forget(n);
}

static void delay(volatile void *at, size_t size, uint64_t value, memory_order order) {
    bool release = order == memory_order_release || order == memory_order_acq_rel || order == memory_order_seq_cst;
    if (buffers[running].n == ROOM)
        forget(1);
    delayed *s = &buffers[running].of[buffers[running].n++];
    *s = (delayed){at, size, get(at, size), value, release, order == memory_order_seq_cst};
    put(s, value);
    if (mode == STRONG || (mode == TSO && s->seq_cst))
        weak_empty();
}

static bool delayed_at(const volatile void *at) {
    if (running == NOBODY || !in_segment(at))
        return false;
    before_access();
    return true;
}

void weak_load(const volatile void *at, memory_order order) {
    if (delayed_at(at) && mode == WEAK && order == memory_order_seq_cst)
        wait_for_seq_cst();
}

void weak_store(volatile void *at, size_t size, uint64_t value, memory_order order) {
    if (delayed_at(at))
        delay(at, size, value, order);
    else if (size == 8)
        __atomic_store_n((volatile uint64_t *)at, value, __ATOMIC_SEQ_CST);
    else
        __atomic_store_n((volatile uint32_t *)at, (uint32_t)value, __ATOMIC_SEQ_CST);
}

/* A store of a word that nobody else writes, or private memory: so the value that is read is the last. */
static void read_modify_write(volatile void *at, size_t size, uint64_t value, memory_order order) {
    if (running == NOBODY || !in_segment(at)) {
        memcpy((void *)at, &value, size);
        return;
    }
    delay(at, size, value, order);
    if (mode == TSO)
        weak_empty();
}
uint64_t weak_add(volatile void *at, size_t size, uint64_t value, memory_order order) {
    delayed_at(at);
    uint64_t before = get(at, size);
    read_modify_write(at, size, before + value, order);
    return before;
}
bool weak_swap(volatile void *at, size_t size, void *expected, uint64_t value, memory_order order) {
    delayed_at(at);
    if (get(at, size) != get(expected, size)) {
        memcpy(expected, (void *)at, size);
        return false;
    }
    read_modify_write(at, size, value, order);
    return true;
}

void weak_fence(memory_order order) {
    if (running == NOBODY)
        return;
    if (mode == WEAK && order == memory_order_release && buffers[running].n) {
        if (buffers[running].n == ROOM)
            forget(1);
        buffers[running].of[buffers[running].n++] = (delayed){.size = 0};
    } else if (order == memory_order_seq_cst)
        weak_empty();
}

void *weak_copy(void *to, const void *from, size_t size) {
    if (running == NOBODY || !in_segment(to))
        return memcpy(to, from, size);
    for (size_t i = 0, n; i < size; i += n) {
        n = 8 - ((uintptr_t)to + i) % 8;
        n = n < size - i ? n : size - i;
        delay((char *)to + i, n, get((const char *)from + i, n), memory_order_relaxed);
    }
    return to;
}

void weak_begin(enum weak_mode m, uint64_t of) { mode = m, rate = of; }

void weak_in(int actor) {
    running = actor;
    for (int i = 0; i < buffers[actor].n; i++)
        put(&buffers[actor].of[i], buffers[actor].of[i].value);
}
void weak_out(void) {
    for (int i = buffers[running].n; i-- > 0;)
        put(&buffers[running].of[i], buffers[running].of[i].before);
    running = NOBODY;
}
void weak_empty_of(int actor) {
    int was = running;
    if (was != actor)
        weak_in(actor);
    weak_empty();
    running = was;
}

static bool may_leave(int actor, int number) {
    const delayed *s = &buffers[actor].of[number];
    for (int i = 0; i < number; i++) {
        const delayed *older = &buffers[actor].of[i];
        if (mode == TSO || s->release || s->size == 0 || older->size == 0 ||
            (older->at < s->at + s->size && s->at < older->at + older->size))
            return false;
    }
    return true;
}

void weak_let_out(int actor, uint64_t chance) {
    int n = buffers[actor].n;
    if (n == 0 || chance % rate)
        return;
    int number = (int)((chance >> 16) % (uint64_t)n);
    while (!may_leave(actor, number))
        number--;
    put(&buffers[actor].of[number], buffers[actor].of[number].value);
    buffers[actor].n--;
    memmove(&buffers[actor].of[number], &buffers[actor].of[number + 1],
            (size_t)(buffers[actor].n - number) * sizeof(delayed));
}

static block *ring_of(int actor) {
    static block rings[ACTORS + 1];
    block *ring = &rings[actor + 1];
    if (!ring->next)
        ring->next = ring->before = ring;
    return ring;
}
static block *block_of(void *memory) { return (block *)((char *)memory - offsetof(block, memory)); }

void *weak_allocate(void *before, size_t size) {
    block *ring = ring_of(running), *made = calloc(1, sizeof *made + size);
    if (!made)
        abort();
    *made = (block){ring->next, ring, size};
    ring->next = ring->next->before = made;
    if (before) {
        size_t was = block_of(before)->size;
        memcpy(made->memory, before, was < size ? was : size);
        weak_free(before);
    }
    return made->memory;
}

void weak_free(void *memory) {
    if (!memory)
        return;
    block *b = block_of(memory);
    b->next->before = b->before;
    b->before->next = b->next;
    free(b);
}

void weak_free_all_of(int actor) {
    for (block *ring = ring_of(actor); ring->next != ring;)
        weak_free(ring->next->memory);
}
