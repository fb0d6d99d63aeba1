/* CRC-32C: published values; the two implementations compared with each other and with the definition, bit by bit. */
#include <string.h>

#include "check.h"
#include "store/crc.h"
#include "store/layout.h"
#include "support.h"

static uint32_t by_definition(const uint8_t *p, size_t n) {
    uint32_t c = UINT32_MAX;
    for (size_t i = 0; i < n; i++)
        for (int bit = 0; bit < 8; bit++)
            c = c >> 1 ^ ((c ^ (uint32_t)p[i] >> bit) & 1 ? UINT32_C(0x82f63b78) : 0);
    return ~c;
}

TEST(published_values_are_reproduced) {
    uint8_t zeros[32] = {0}, ones[32];
    memset(ones, 0xff, sizeof ones);
    CHECK_EQ(0xe3069283, shms_crc32c(0, "123456789", 9));
    CHECK_EQ(0x8a9136aa, shms_crc32c(0, zeros, 32)); /* RFC 3720, B.4 */
    CHECK_EQ(0x62a8ab43, shms_crc32c(0, ones, 32));
    CHECK_EQ(0, shms_crc32c(0, zeros, 0));
}

TEST(every_length_and_alignment_matches_the_definition_in_one_part_or_two) {
    static uint8_t bytes[40000];
    uint64_t seed = 1;
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)below(&seed, 256);
    for (int round = 0; round < 300; round++) {
        size_t n = below(&seed, round % 2 ? 200 : 20000), at = below(&seed, 64), cut = below(&seed, n + 1);
        uint32_t expected = by_definition(bytes + at, n);
        CHECK_EQ(expected, shms_crc32c(0, bytes + at, n));
        CHECK_EQ(expected, shms_crc32c_portable(0, bytes + at, n));
        CHECK_EQ(expected, shms_crc32c(shms_crc32c(0, bytes + at, cut), bytes + at + cut, n - cut));
    }
}

TEST(an_object_checksum_covers_all_but_the_padding) {
    uint8_t data[512] = {0};
    uint64_t seed = 2, at = 64, length = 100; /* key 3, metadata 5, padding to 64, payload 36 */
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)below(&seed, 256);
    uint32_t before = shms_object_crc(data, at, 3, 5, length);
    for (uint64_t i = 0; i < sizeof data; i++) {
        data[i] ^= 1;
        bool part = (i >= at && i < at + 8) || (i >= at + 64 && i < at + length);
        CHECK_EQ(part, shms_object_crc(data, at, 3, 5, length) != before);
        data[i] ^= 1;
    }
    /* without a payload; a damaged length that ends in the padding must not underflow */
    for (length = 8; length <= 64; length++)
        CHECK_EQ(shms_crc32c(0, data + at, 8), shms_object_crc(data, at, 3, 5, length));
}
