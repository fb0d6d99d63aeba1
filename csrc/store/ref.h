/*
 * ref.h - references: 40 bytes that travel between processes, with a tag that authenticates them.
 *
 *     0      4     7     10      16      24      32     40
 *     | store| slot|entry| addr. |  id   | lease |  tag |     little-endian
 *
 * The tag is SipHash-2-4 (Aumasson, Bernstein 2012) of the first 32 bytes. Its key is two random words: one of the
 * store, and one of the object. So a tag fails to verify if a bit has changed, or if the reference is made up. It also
 * fails for a reference of another store, or of an object that was evicted. Hence a reader can trust the lease number, even
 * of a lease that ended long ago. Every attached rank can read both words (SECURITY.md).
 */
#ifndef SHMS_REF_H
#define SHMS_REF_H

#include "slots.h"

/* Packs `ref`, with the tag computed from the two secrets. */
void shms_ref_seal(uint8_t *out, shms_ref *ref, uint64_t store_secret, uint64_t object_secret);
/* Does the tag of the packed reference verify with these secrets? */
bool shms_ref_sealed(const uint8_t *packed, uint64_t store_secret, uint64_t object_secret);
/* Unpacks. SHMS_EINVAL if there is no reference, SHMS_ESTALE if the reference names another store, or a slot or entry that this store does not have. */
int shms_ref_read(shms_ref *out, const uint8_t *packed, const shms_superblock *sb, const shms_layout *l);

#endif
