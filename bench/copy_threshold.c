/*
 * copy_threshold.c - measures from which size on a copy past the caches pays: the basis of csrc/store/copy.c.
 *
 * - Copies cycle through 512 MiB of warm shared memory, so that the destination is as cold as in a ring.
 * - The source is one buffer, like a tensor that was just made.
 * - A second thread, on another core, reads each copy at once, because a reader profits from what the caches keep of
 *   it.
 * - Both kinds of copy take turns.
 *
 * Run it with `make copy-threshold` on two idle cores. Both threads spin, so with a third they would wait for the
 * scheduler.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

static unsigned long long threshold; /* of the copy under test */
#define NON_TEMPORAL_FROM threshold
#include "../csrc/store/copy.c"

#define RING (512ull << 20)
#define MAX_ROUNDS 2001

static _Atomic(const unsigned char *) copied; /* for the reader, which takes it by writing NULL */
static _Atomic int stopped;
static size_t size;
static volatile uint64_t sink;

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Spins, because waking it would take longer than the copy of a small object. */
static void *read_all(void *unused) {
    (void)unused;
    while (!stopped) {
        const unsigned char *from = copied;
        if (!from)
            continue;
        uint64_t x = 0, word;
        for (size_t i = 0; i < size; i += 64) { /* each cache line once */
            memcpy(&word, from + i, sizeof word);
            x ^= word;
        }
        sink = x;
        copied = NULL;
    }
    return NULL;
}

static double median(double *times, int rounds) {
    qsort(times, (size_t)rounds, sizeof *times, by_value);
    return times[rounds / 2];
}

int main(void) {
    unsigned char *ring = mmap(NULL, RING, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    static double copy[2][MAX_ROUNDS], total[2][MAX_ROUNDS];
    pthread_t reader;
    if (ring == MAP_FAILED || pthread_create(&reader, NULL, read_all, NULL) != 0)
        return 1;
    memset(ring, 1, RING);
    printf("%10s | %12s %10s %6s | %12s %10s %6s\n", "", "copy, cached", "past, us", "ratio", "and read it", "past, us",
           "ratio");
    for (size = 64 << 10; size <= 64 << 20; size *= 2) {
        unsigned char *source = malloc(size);
        size_t at = 0;
        int rounds = size > 8 << 20 ? 41 : size > 1 << 20 ? 401 : MAX_ROUNDS;
        memset(source, 1, size);
        for (int i = 0; i < rounds; i++)
            for (int past = 0; past < 2; past++) {
                threshold = past ? 0 : ~0ull;
                at = at + 2 * size > RING ? 0 : at + size;
                double start = now_us();
                shms_copy(ring + at, source, size);
                copy[past][i] = now_us() - start;
                copied = ring + at;
                while (copied)
                    ;
                total[past][i] = now_us() - start;
            }
        double c[2], t[2];
        for (int past = 0; past < 2; past++) {
            c[past] = median(copy[past], rounds);
            t[past] = median(total[past], rounds);
        }
        printf("%6zu KiB | %12.1f %10.1f %6.2f | %12.1f %10.1f %6.2f\n", size >> 10, c[0], c[1], c[1] / c[0], t[0],
               t[1], t[1] / t[0]);
        free(source);
    }
    stopped = 1;
    pthread_join(reader, NULL);
    return 0;
}
