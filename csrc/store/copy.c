/*
 * copy.c - memcpy, and a copy that bypasses the caches.
 *
 * Why non-temporal stores:
 * - An ordinary store to a line that is not in cache first reads that line.
 * - A non-temporal store does not: it moves each line twice instead of three times, and evicts nothing from the caches.
 * - A small object is often in cache at one end. There memcpy is faster, above all for the readers.
 *
 * Their order. They may overtake stores before them, but not the fence after W2, after which nobody may read the old bytes.
 * W4 and P2, which they may overtake, matter to a successor alone, and it comes when the kernel has ended this process, with
 * all that it stored. So a fence is needed after them, and none before.
 *
 * `make copy-threshold` found the threshold (x86-64): from there on the copy is faster, and copy plus read is not
 * slower. Other architectures, and processors without AVX, use memcpy.
 */
#include "core.h"

#include <string.h>

#if defined(__x86_64__)
#include "cpu.h"

#include <immintrin.h>

#ifndef NON_TEMPORAL_FROM
#define NON_TEMPORAL_FROM (UINT64_C(1) << 20)
#endif

__attribute__((target("avx"))) static void stream_avx(uint8_t *d, const uint8_t *s, uint64_t n) {
    for (uint64_t i = 0; i < n; i += 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(s + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(s + i + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(s + i + 64));
        __m256i e = _mm256_loadu_si256((const __m256i *)(s + i + 96));
        _mm256_stream_si256((__m256i *)(d + i), a);
        _mm256_stream_si256((__m256i *)(d + i + 32), b);
        _mm256_stream_si256((__m256i *)(d + i + 64), c);
        _mm256_stream_si256((__m256i *)(d + i + 96), e);
    }
}

void shms_copy(void *dst, const void *src, uint64_t n) {
    uint8_t *d = dst;
    const uint8_t *s = src;
    if (n < NON_TEMPORAL_FROM || !(shms_cpu_features() & bit_AVX)) {
        memcpy(d, s, n);
        return;
    }
    uint64_t head = (64 - ((uintptr_t)d & 63)) & 63, body = (n - head) & ~UINT64_C(127);
    memcpy(d, s, head);
    stream_avx(d + head, s + head, body);
    _mm_sfence(); /* the release that publishes the object (P4) does not order streaming stores */
    memcpy(d + head + body, s + head + body, n - head - body);
}

#else

void shms_copy(void *dst, const void *src, uint64_t n) { memcpy(dst, src, n); }

#endif
