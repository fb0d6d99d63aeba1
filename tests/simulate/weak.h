/*
 * weak.h - stores that others see late; the simulator's build includes it before each file of the core.
 *
 * An actor's stores to a segment stay in its buffer until the simulator, or an order, lets them out.
 * - TSO, as on x86-64: first in, first out. A seq_cst store or fence, a read-modify-write and a system call empty it.
 * - WEAK, as C11 allows on aarch64: a store overtakes others, but none of the same word. A release waits for all before
 *   it, and a release fence holds back all after it. A seq_cst load or fence waits for the seq_cst stores before it.
 *
 * The actor sees its own stores: they are in memory while it runs, and are taken back when it leaves (weak_out). That
 * is right because each shared word has one writing process. Loads are neither early nor late.
 *
 * What an actor has allocated is freed when it dies.
 */
#ifndef SHMS_TEST_WEAK_H
#define SHMS_TEST_WEAK_H

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum weak_mode { STRONG, TSO, WEAK };

/* What the core calls. Outside an actor, and for private memory, it is the plain access. */
void weak_load(const volatile void *at, memory_order order); /* before the load itself */
void weak_store(volatile void *at, size_t size, uint64_t value, memory_order order);
uint64_t weak_add(volatile void *at, size_t size, uint64_t value, memory_order order);
bool weak_swap(volatile void *at, size_t size, void *expected, uint64_t value, memory_order order);
void weak_fence(memory_order order);
void *weak_copy(void *to, const void *from, size_t size);
void weak_empty(void); /* lets out all of the actor that runs */
void *weak_allocate(void *before, size_t size); /* as realloc, but new bytes are 0 */
void weak_free(void *memory);

/* What the simulator calls. */
void weak_begin(enum weak_mode mode, uint64_t of);
void weak_in(int actor);
void weak_out(void);
void weak_empty_of(int actor); /* which does not run */
void weak_let_out(int actor, uint64_t chance); /* perhaps one store */
void weak_free_all_of(int actor);

/* What the simulator has for it. */
bool in_segment(const volatile void *at);
void before_access(void);
bool refused(int error); /* by the system: the call is not made */

#ifndef WEAK_C
#undef atomic_load_explicit
#undef atomic_store_explicit
#undef atomic_fetch_add_explicit
#undef atomic_fetch_sub_explicit
#undef atomic_compare_exchange_weak_explicit
#undef atomic_thread_fence
#define atomic_load_explicit(p, order)                                                                                 \
    ({                                                                                                                 \
        __auto_type at_ = (p);                                                                                         \
        __typeof__((void)0, *at_) loaded_;                                                                             \
        weak_load(at_, order);                                                                                         \
        __atomic_load(at_, &loaded_, __ATOMIC_SEQ_CST);                                                                \
        loaded_;                                                                                                       \
    })
#define atomic_store_explicit(p, v, order) weak_store(p, sizeof *(p), (uint64_t)(v), order)
#define atomic_fetch_add_explicit(p, v, order) weak_add(p, sizeof *(p), (uint64_t)(v), order)
#define atomic_fetch_sub_explicit(p, v, order) weak_add(p, sizeof *(p), -(uint64_t)(v), order)
#define atomic_compare_exchange_weak_explicit(p, expected, v, order, failed)                                           \
    weak_swap(p, sizeof *(p), expected, v, order)
#define atomic_thread_fence(order) weak_fence(order)
#define memcpy(to, from, size) weak_copy(to, from, size)
#define fcntl(...) (weak_empty(), refused(ENOLCK) ? -1 : fcntl(__VA_ARGS__))
#define munmap(...) (weak_empty(), munmap(__VA_ARGS__))
#define mprotect(...) (weak_empty(), refused(ENOMEM) ? -1 : mprotect(__VA_ARGS__))
#define mmap(...) (refused(ENOMEM) ? MAP_FAILED : mmap(__VA_ARGS__))
#define open(...) (refused(EMFILE) ? -1 : open(__VA_ARGS__))
#define malloc(size) weak_allocate(NULL, size)
#define calloc(n, size) (refused(ENOMEM) ? NULL : weak_allocate(NULL, (n) * (size)))
#define realloc(memory, size) weak_allocate(memory, size)
#define aligned_alloc(alignment, size) weak_allocate(NULL, size) /* tests align more than they need */
#define free(memory) weak_free(memory)
#endif

#endif
