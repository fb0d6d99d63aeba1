/*
 * copy_threshold.c - from which size on copying past the caches pays: the measurement behind csrc/copy.c.
 *
 * Copies go round in 512 MiB of warm shared memory, so that the destination is as cold as a ring's; the source is one
 * buffer, as a tensor just made is.  Both ways take turns.  Run it with `make copy-threshold`.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static unsigned long long threshold; /* of the copy under test */
#define NON_TEMPORAL_FROM threshold
#include "../csrc/copy.c"

#define RING (512ull << 20)
#define ROUNDS 201

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

int main(void) {
    unsigned char *ring = mmap(NULL, RING, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (ring == MAP_FAILED)
        return 1;
    printf("%10s %12s %14s %7s\n", "KiB", "cached, us", "past it, us", "ratio");
    for (unsigned long long size = 64 << 10; size <= 64 << 20; size *= 2) {
        unsigned char *source = malloc(size);
        double times[2][ROUNDS];
        unsigned long long at = 0;
        int rounds = size > 8 << 20 ? 21 : ROUNDS;
        memset(source, 1, size);
        for (int i = 0; i < rounds; i++)
            for (int past = 0; past < 2; past++) {
                threshold = past ? 0 : ~0ull;
                at = at + 2 * size > RING ? 0 : at + size;
                double start = now_us();
                shms_copy(ring + at, source, size);
                times[past][i] = now_us() - start;
            }
        for (int past = 0; past < 2; past++)
            qsort(times[past], (size_t)rounds, sizeof(double), by_value);
        double cached = times[0][rounds / 2], streamed = times[1][rounds / 2];
        printf("%10llu %12.1f %14.1f %7.2f\n", size >> 10, cached, streamed, streamed / cached);
        free(source);
    }
    return 0;
}
