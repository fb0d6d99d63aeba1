/*
 * cpu.h - what an x86-64 processor and its kernel can do.
 *
 * __builtin_cpu_supports would do, but it needs a part of the compiler's run-time library. The wheels are linked
 * without that library, since zig's also has a memcpy, at half the speed of glibc's.
 */
#ifndef SHMS_CPU_H
#define SHMS_CPU_H

#include <cpuid.h>
#include <stdatomic.h>

/* Return the word of CPUID that has bit_SSE4_2, and bit_AVX if the kernel saves the registers. */
static inline unsigned shms_cpu_features(void) {
    static _Atomic unsigned known; /* CPUID traps in a virtual machine; threads that ask at once store the same word */
    unsigned a, b, c = atomic_load_explicit(&known, memory_order_relaxed), d;
    if (c == 0) {
        __cpuid(1, a, b, c, d);
        if (c & bit_OSXSAVE)
            __asm__ volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
        if (!(c & bit_OSXSAVE) || (a & 6) != 6)
            c &= ~(unsigned)bit_AVX;
        atomic_store_explicit(&known, c, memory_order_relaxed);
    }
    return c;
}

#endif
