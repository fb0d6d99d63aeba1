/* ref.c - see ref.h. */
#include "ref.h"

#include <string.h>

#define SEALED_BYTES 32

static uint64_t rotl(uint64_t x, int b) { return (x << b) | (x >> (64 - b)); }

static void sip_round(uint64_t v[4]) {
    v[0] += v[1], v[1] = rotl(v[1], 13) ^ v[0], v[0] = rotl(v[0], 32);
    v[2] += v[3], v[3] = rotl(v[3], 16) ^ v[2];
    v[0] += v[3], v[3] = rotl(v[3], 21) ^ v[0];
    v[2] += v[1], v[1] = rotl(v[1], 17) ^ v[2], v[2] = rotl(v[2], 32);
}

static uint64_t sip_hash(const uint8_t *bytes, uint64_t k0, uint64_t k1) {
    uint64_t v[4] = {k0 ^ UINT64_C(0x736f6d6570736575), k1 ^ UINT64_C(0x646f72616e646f6d),
                     k0 ^ UINT64_C(0x6c7967656e657261), k1 ^ UINT64_C(0x7465646279746573)};
    for (int i = 0; i <= SEALED_BYTES; i += 8) {
        uint64_t m = (uint64_t)SEALED_BYTES << 56; /* the last word has only the length */
        if (i < SEALED_BYTES)
            memcpy(&m, bytes + i, 8);
        v[3] ^= m;
        sip_round(v), sip_round(v);
        v[0] ^= m;
    }
    v[2] ^= 0xff;
    sip_round(v), sip_round(v), sip_round(v), sip_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

void shms_ref_pack(uint8_t *out, const shms_ref *ref) {
    uint64_t place = (uint64_t)(ref->slot & 0xffffff) | (uint64_t)(ref->entry & 0xffffff) << 24;
    memcpy(out, &ref->store, 4);
    memcpy(out + 4, &place, 6);
    memcpy(out + 10, &ref->address, 6);
    memcpy(out + 16, &ref->id, 8);
    memcpy(out + 24, &ref->lease, 8);
    memcpy(out + 32, &ref->tag, 8);
}

void shms_ref_unpack(shms_ref *out, const uint8_t *packed) {
    uint64_t place = 0;
    *out = (shms_ref){0};
    memcpy(&out->store, packed, 4);
    memcpy(&place, packed + 4, 6);
    out->slot = (uint32_t)(place & 0xffffff);
    out->entry = (uint32_t)(place >> 24);
    memcpy(&out->address, packed + 10, 6);
    memcpy(&out->id, packed + 16, 8);
    memcpy(&out->lease, packed + 24, 8);
    memcpy(&out->tag, packed + 32, 8);
}

void shms_ref_seal(uint8_t *out, shms_ref *ref, uint64_t store_secret, uint64_t object_secret) {
    shms_ref_pack(out, ref);
    ref->tag = sip_hash(out, store_secret, object_secret);
    memcpy(out + SEALED_BYTES, &ref->tag, 8);
}

bool shms_ref_sealed(const uint8_t *packed, uint64_t store_secret, uint64_t object_secret) {
    uint64_t tag;
    memcpy(&tag, packed + SEALED_BYTES, 8);
    return tag == sip_hash(packed, store_secret, object_secret);
}

int shms_ref_read(shms_ref *out, const uint8_t *packed, const shms_superblock *sb, const shms_layout *l) {
    if (!packed)
        return shms_fail(SHMS_EINVAL, SHMS_NO_REF);
    shms_ref_unpack(out, packed);
    return out->store == (uint32_t)sb->store && out->slot < shms_all_slots(l) && out->entry < shms_all_leases(l)
               ? SHMS_OK
               : SHMS_ESTALE;
}
