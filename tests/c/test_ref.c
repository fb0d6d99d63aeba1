/* test_ref.c - references: 40 bytes that return what was packed. No bit of them can be changed. */
#include "store/ref.h"

#include "fixture.h"

TEST(packing_is_little_endian_and_loses_nothing) {
    static const uint8_t expected[SHMS_REF_SIZE] = {0x04, 0x03, 0x02, 0x01, 0x0a, 0x0b, 0x0c, 0x1a, 0x1b, 0x1c,
                                                    0x26, 0x25, 0x24, 0x23, 0x22, 0x21, 0x38, 0x37, 0x36, 0x35,
                                                    0x34, 0x33, 0x32, 0x31, 0x48, 0x47, 0x46, 0x45, 0x44, 0x43,
                                                    0x42, 0x41, 0x58, 0x57, 0x56, 0x55, 0x54, 0x53, 0x52, 0x51};
    shms_ref ref = {.store = 0x01020304,
                    .slot = 0x0c0b0a,
                    .entry = 0x1c1b1a,
                    .address = 0x212223242526,
                    .id = 0x3132333435363738,
                    .lease = 0x4142434445464748,
                    .tag = 0x5152535455565758};
    uint8_t packed[SHMS_REF_SIZE];
    shms_ref_pack(packed, &ref);
    CHECK(!memcmp(expected, packed, sizeof packed));
    uint64_t seed = 5;
    for (int i = 0; i < 100000; i++) {
        shms_ref back;
        ref = (shms_ref){.store = (uint32_t)chance(&seed),
                         .slot = (uint32_t)below(&seed, 1 << 24),
                         .entry = (uint32_t)below(&seed, 1 << 24),
                         .address = chance(&seed) >> 16,
                         .id = chance(&seed),
                         .lease = chance(&seed),
                         .tag = chance(&seed)};
        shms_ref_pack(packed, &ref);
        shms_ref_unpack(&back, packed);
        CHECK(back.store == ref.store && back.slot == ref.slot && back.entry == ref.entry &&
              back.address == ref.address && back.id == ref.id && back.lease == ref.lease && back.tag == ref.tag);
        for (int k = 0; k < SHMS_REF_SIZE; k++) /* any 40 bytes, unpacked and packed again, are the same */
            packed[k] = (uint8_t)(chance(&seed) >> 30);
        uint8_t again[SHMS_REF_SIZE];
        shms_ref_unpack(&back, packed);
        shms_ref_pack(again, &back);
        CHECK(!memcmp(packed, again, sizeof again));
    }
}

/* The published test vector, for the bytes 0 to 31 under the key 0 to 15. */
TEST(the_tag_is_siphash_2_4) {
    static const uint8_t expected[8] = {0xce, 0x7c, 0xf2, 0x72, 0x2f, 0x51, 0x27, 0x71};
    uint8_t packed[SHMS_REF_SIZE];
    for (int i = 0; i < SHMS_REF_SIZE; i++)
        packed[i] = (uint8_t)i;
    uint64_t k0, k1;
    memcpy(&k0, packed, 8);
    memcpy(&k1, packed + 8, 8);
    shms_ref ref;
    shms_ref_unpack(&ref, packed);
    CHECK(!shms_ref_sealed(packed, k0, k1));
    shms_ref_seal(packed, &ref, k0, k1);
    CHECK(!memcmp(expected, packed + 32, 8));
    CHECK(!memcmp(&ref.tag, expected, 8));
    CHECK(shms_ref_sealed(packed, k0, k1));
    for (int bit = 0; bit < 64; bit++)
        CHECK(!shms_ref_sealed(packed, k0 ^ UINT64_C(1) << bit, k1) &&
              !shms_ref_sealed(packed, k0, k1 ^ UINT64_C(1) << bit));
}

TEST(no_bit_of_a_reference_can_be_changed) {
    enum { SLOTS = 64 };
    open_store("ref", (shms_options){.capacity = 1 << 16, .n_readers = 1, .max_objects = SLOTS}, 1);
    shms_reader *r = readers[0];
    uint8_t first[SHMS_REF_SIZE];
    CHECK_EQ(SHMS_OK, put_marked(w, "first", 100, 1, first));
    CHECK_EQ(SHMS_OK, put_marked(w, "second", 100, 2, ref));
    CHECK_EQ(1, shms_reader_validate(r, ref));
    for (int bit = 0; bit < 8 * SHMS_REF_SIZE; bit++) {
        uint8_t forged[SHMS_REF_SIZE];
        memcpy(forged, ref, sizeof forged);
        forged[bit / 8] ^= (uint8_t)(1 << bit % 8);
        errno = 0;
        CHECK(view_of(r, forged) == NULL);
        CHECK_EQ(-SHMS_ESTALE, errno);
        CHECK_EQ(0, shms_reader_validate(r, forged));
        int rc = shms_reader_release(r, forged);
        CHECK(rc == 0 || rc == SHMS_ESTALE);
        rc = shms_writer_cancel(w, forged);
        CHECK(rc == 0 || rc == SHMS_ESTALE);
    }
    shms_rank_stats stats;
    CHECK_EQ(SHMS_OK, shms_reader_stats(r, &stats));
    CHECK_EQ(8 * SHMS_REF_SIZE, stats.counters.stale);
    CHECK_EQ(0, stats.counters.gets);
    CHECK_EQ(0, stats.live_views);
    shms_stats books;
    CHECK_EQ(SHMS_OK, shms_writer_stats(w, &books));
    CHECK_EQ(2, books.open_leases); /* no forged release or cancel ended a lease */
    for (uint32_t i = 0; i < SLOTS; i++)
        CHECK_EQ(0, shms_pin_count(&shms_reader_pins(shms_segment_reader(&w->seg, 0))[i], memory_order_relaxed));
    CHECK_EQ(1, shms_reader_release(r, ref));
    CHECK_EQ(0, shms_reader_release(r, ref));
    CHECK_EQ(1, shms_writer_cancel(w, first));
    CHECK_EQ(0, shms_writer_cancel(w, first));
    end();
}
