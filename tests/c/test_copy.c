/* test_copy.c - the copy equals memcpy for every alignment and every size near its thresholds, and writes no other
 * byte. */
#include "support.h"

#define GUARD 128

static void copies_exactly(char *to, const char *from, uint64_t size, uint32_t to_shift, uint32_t from_shift) {
    char *d = to + GUARD + to_shift;
    const char *s = from + from_shift;
    memset(d - GUARD, 0x5a, GUARD);
    memset(d + size, 0x5a, GUARD);
    if (size < 4096)
        memset(d, 0x33, size);
    else
        memset(d, 0x33, 4096), memset(d + size - 4096, 0x33, 4096);
    shms_copy(d, s, size);
    CHECK(size == 0 || !memcmp(d, s, size));
    for (int i = 1; i <= GUARD; i++)
        CHECK(d[-i] == 0x5a);
    for (int i = 0; i < GUARD; i++)
        CHECK(d[size + (uint64_t)i] == 0x5a);
}

TEST(a_copy_is_exact_for_every_alignment_and_size) {
    /* The threshold depends on the machine; these sizes cover any threshold between 1 and 4 MiB. */
    static const uint64_t large[] = {1u << 20, 2u << 20, 4u << 20};
    static const uint32_t shifts[] = {0, 1, 8, 31, 32, 63};
    uint64_t room = (5u << 20) + 4 * GUARD, seed = 4;
    char *from = zeroed(room), *to = zeroed(room);
    for (uint64_t i = 0; i < room; i += 8) {
        uint64_t word = chance(&seed);
        memcpy(from + i, &word, 8);
    }
    for (uint32_t a = 0; a < 64; a++)
        for (uint32_t b = 0; b < 64; b++)
            for (uint64_t size = 0; size < 300; size += size < 140 ? 13 : 41)
                copies_exactly(to, from, size, a, b);
    for (size_t i = 0; i < 3; i++) {
        for (uint32_t a = 0; a < 64; a += i == 2 ? 7 : 1)
            copies_exactly(to, from, large[i] + 129, a, (a * 37) % 64);
        for (int delta = -130; delta <= 130; delta += 26)
            for (size_t k = 0; k < 6; k++)
                copies_exactly(to, from, large[i] + (uint64_t)(int64_t)delta, shifts[k], shifts[5 - k]);
        for (int delta = -2; delta <= 2; delta++)
            copies_exactly(to, from, large[i] + (uint64_t)(int64_t)delta, 0, 0);
    }
    free(from);
    free(to);
}

#if defined(__x86_64__)
#include "store/cpu.h"

TEST(the_processor_has_what_the_kernel_says_it_has) {
    char line[8192];
    FILE *file = fopen("/proc/cpuinfo", "r");
    CHECK(file);
    do
        CHECK(fgets(line, sizeof line, file));
    while (strncmp(line, "flags", 5));
    fclose(file);
    for (int again = 0; again < 2; again++) {
        CHECK(!strstr(line, " avx ") == !(shms_cpu_features() & bit_AVX));
        CHECK(!strstr(line, " sse4_2 ") == !(shms_cpu_features() & bit_SSE4_2));
    }
}
#endif
