/* test_fold.c - metadata that nobody wrote is measured before it is read, and what is folded is the same bytes. */
#include "serde/fold.h"

#include <stdbool.h>
#include <string.h>

#include "support.h"

static uint64_t seed = 1;
static uint32_t next(uint32_t n) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33) % n;
}

/* Folds a copy that ends where its memory ends, and returns how many parts it has. */
static int fold(const uint8_t *bytes, uint64_t size) {
    uint8_t *meta = malloc(size ? size : 1), *out = malloc(3 * size + 16);
    memcpy(meta, bytes, size);
    uint64_t length = shms_meta_fold(meta, size, out), at = 0;
    int parts = 0;
    CHECK(length <= 2 * size);
    for (uint64_t i = 0; i < length; i++, at++) {
        if (length - i > 6 && out[i] == 0xc9 && (out[i + 5] == SHMS_PART_PLAIN || out[i + 5] == SHMS_PART_TUPLES)) {
            i += 6;
            parts++;
        }
        CHECK(at < size && out[i] == meta[at]);
    }
    CHECK(length == 0 || (at == size && parts > 0));
    free(meta);
    free(out);
    return parts;
}

static uint8_t bytes[4096];
static uint64_t made;
static void add(int byte) { bytes[made++] = (uint8_t)byte; }

/* A value of every kind of token, nested at most `depth` deep. */
static void add_value(unsigned depth) {
    static const uint8_t tokens[] = {0x00, 0x7f, 0xa0, 0xc0, 0xc2, 0xc4, 0xca, 0xcb, 0xcc, 0xd3, 0xd4, 0xd9, 0xe0};
    uint32_t kind = next(depth && made < sizeof bytes / 2 ? 9 : 3);
    if (kind < 3) {
        uint8_t b = tokens[next(sizeof tokens)];
        unsigned data = b == 0xca                ? 4
                        : b == 0xcb || b == 0xd3 ? 8
                        : b == 0xd4              ? 2
                                                 : b == 0xcc || b == 0xc4 || b == 0xd9;
        add(b);
        while (data--)
            add(0);
        return;
    }
    bool map = kind == 3;
    uint32_t items = next(7), mark = !map && items && next(2);
    add((map ? 0x80 : 0x90) + (int)items);
    for (uint32_t i = 0; i < items; i++) {
        if (map)
            add((int)next(128));
        if (i == 0 && mark) {
            add(0xc7);
            add(0);
            add(next(4) ? 1 : 1 + (int)next(7));
        } else {
            add_value(depth - 1);
        }
    }
}

TEST(what_is_folded_is_the_same_bytes_whatever_they_are) {
    int parts = 0;
    for (int round = 0; round < 20000 / EACH; round++) {
        made = 0;
        add_value(6);
        parts += fold(bytes, made);
        if (round % 20 == 0)
            for (uint64_t size = 0; size < made; size++)
                fold(bytes, size);
        for (int i = 0; i < 4 && made; i++) {
            bytes[next((uint32_t)made)] = (uint8_t)next(256);
            fold(bytes, made);
        }
    }
    CHECK(parts > 1000 / EACH);
}

TEST(long_bytes_are_not_copied) {
    static uint8_t out[3 * sizeof bytes + 16];
    made = 0;
    add(0x92); /* a part, and bytes up to the end */
    add(0x95);
    for (int i = 0; i < 5; i++)
        add(0x90);
    add(0xc5);
    add((sizeof bytes - made - 2) >> 8);
    add((sizeof bytes - made - 1) & 255);
    memset(out, 7, sizeof out);
    CHECK_EQ(0, shms_meta_fold(bytes, sizeof bytes, out));
    CHECK(out[0] == 7 && memcmp(out, out + 1, sizeof bytes) == 0);
}

TEST(each_part_at_most_doubles) {
    made = 0;
    add(0x9f); /* a list of 15: 14 parts as short as any, and a mark that keeps them apart */
    for (int i = 0; i < 14; i++)
        for (int byte = 0; byte < 6; byte++)
            add(byte ? 0x90 : 0x95);
    add(0xc7);
    add(0);
    add(3);
    CHECK_EQ(14, fold(bytes, made));
}

TEST(a_part_has_at_most_so_many_levels_and_keys_that_are_numbers) {
    for (int more = 0; more < 2; more++) {
        memset(bytes, 0x91, SHMS_MAX_DEPTH + 1);
        bytes[SHMS_MAX_DEPTH + more] = 0;
        CHECK_EQ(!more, fold(bytes, SHMS_MAX_DEPTH + 1 + (unsigned)more));
        made = 0;
        add(0xde);
        add(0);
        add(SHMS_MAX_NUMBERS + more);
        for (int i = 0; i < SHMS_MAX_NUMBERS + more; i++) {
            add(i ? i : 0xc0); /* None counts, too */
            add(0xc0);
        }
        CHECK_EQ(!more, fold(bytes, made));
    }
}
