/*
 * hand.h - the steps of hand-outs: how the calls that store and hand out open a lease, end it, end a pending put, and record
 * what they have done.
 */
#ifndef SHMS_HAND_H
#define SHMS_HAND_H

#include "writer.h"

/* Makes room for one more item, before the change that it will record. */
int shms_batch_ready(shms_batch *b);
/* Records the hand-out of b->ref. `fresh`: the batch has put its object. */
void shms_batch_note(shms_batch *b, int fresh);
/* SHMS_EINVAL, for a group that the store does not have. */
int shms_no_group(const struct shms_writer *w, uint32_t group);
/* SHMS_EINVAL: a piece is not within the payload. */
int shms_pieces_fit(const shms_piece *pieces, uint32_t n, uint64_t payload_size);

/* ---- for these, the mutex is held ---- */

/* Aborts the pending put of a slot in WRITING, and frees its lease entry. */
void shms_end_uncommitted(struct shms_writer *w, uint32_t slot, uint32_t entry);
/* Packs a reference to the object in `slot`, which has its number of all arenas; lease 0: none. */
void shms_refer(const struct shms_writer *w, uint32_t slot, uint32_t entry, uint64_t lease, uint8_t *out);
/* Opens a lease for a group on a taken entry, held if `hold`, and packs its reference; the slot has its number of all
 * arenas. */
void shms_open_lease(struct shms_writer *w, uint32_t slot, uint32_t entry, uint32_t group, bool hold, uint8_t *out);
/* The same, and then closes some leases that are complete. */
void shms_hand_out(struct shms_writer *w, uint32_t slot, uint32_t entry, uint32_t group, bool hold, uint8_t *out);
/* Ends an open lease on the object in `slot`. */
void shms_end_lease(struct shms_writer *w, uint32_t slot, uint32_t entry);

#endif
