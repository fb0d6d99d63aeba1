/*
 * lock.h - the lock between the threads of a process, which get it in the order in which they ask.
 *
 * Each thread draws a number and waits until it is served. So a thread that wants to let others go first unlocks, and
 * locks again behind them. It spins for as long as a call takes, then it sleeps. Without the spin, two threads that fall
 * asleep wake each other from then on: in one run of five, 20,000 to 135,000 hits a second were left of a million.
 */
#ifndef SHMS_LOCK_H
#define SHMS_LOCK_H

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SHMS_LOCK_SPINS 100

typedef struct shms_lock {
    _Atomic uint32_t next, serving;
} shms_lock;

/* Who sleeps waits for this bit, so nearly always only the next thread wakes up. */
static inline uint32_t shms_lock_bit(uint32_t number) { return UINT32_C(1) << number % 32; }

/* Threads that have the lock or wait for it; for the one that has it. */
static inline uint32_t shms_lock_asked(const shms_lock *l) {
    return atomic_load_explicit(&l->next, memory_order_relaxed) -
           atomic_load_explicit(&l->serving, memory_order_relaxed);
}

static inline void shms_lock_take(shms_lock *l) {
    uint32_t number = atomic_fetch_add(&l->next, 1), now;
    for (int turn = 0; (now = atomic_load(&l->serving)) != number; turn++)
        if (turn < SHMS_LOCK_SPINS)
#if defined(__x86_64__)
            __builtin_ia32_pause();
#else
            __asm__ volatile("yield");
#endif
        else
            syscall(SYS_futex, &l->serving, FUTEX_WAIT_BITSET_PRIVATE, now, NULL, NULL, shms_lock_bit(number));
}

static inline void shms_lock_leave(shms_lock *l) {
    uint32_t now = atomic_load_explicit(&l->serving, memory_order_relaxed) + 1;
    atomic_store(&l->serving, now); /* before the load: who draws later sees its number, and does not sleep */
    if (atomic_load(&l->next) != now)
        syscall(SYS_futex, &l->serving, FUTEX_WAKE_BITSET_PRIVATE, INT_MAX, NULL, NULL, shms_lock_bit(now));
}

#endif
