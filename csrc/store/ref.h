/*
 * ref.h - references: 40 bytes that travel between processes, and the tag that tells a true one from any other.
 *
 *     0      4     7     10      16      24      32     40
 *     | store| slot|entry| addr. |  id   | lease |  tag |     little-endian
 *
 * The tag is SipHash-2-4 (Aumasson, Bernstein 2012) of the first 32 bytes under a key of two random words, one of the
 * store and one of the object: a reference with one bit changed, of another store, of an object that is gone, or made
 * up, does not verify.  That is also what lets a reader trust the lease number of a lease that is long over.  Every
 * attached rank can read both words: the tag guards against accidents and outsiders, not against such a rank.
 */
#ifndef SHMS_REF_H
#define SHMS_REF_H

#include "slots.h"

/* Packs `ref`, with the tag computed from the two secrets. */
void shms_ref_seal(uint8_t *out, shms_ref *ref, uint64_t store_secret, uint64_t object_secret);
/* Is the packed reference's tag the one of these secrets? */
bool shms_ref_sealed(const uint8_t *packed, uint64_t store_secret, uint64_t object_secret);
/* Unpacks.  SHMS_ESTALE where it names another store, or a slot or entry that this one does not have. */
int shms_ref_read(shms_ref *out, const uint8_t *packed, const shms_superblock *sb, const shms_layout *l);

#endif
