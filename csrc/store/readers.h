/*
 * readers.h - the table of one rank: its pins, acknowledgements and epoch.
 *
 * Written by that rank's process alone, from any of its threads (hence read-modify-write atomics here, which never
 * cross a process).  The writer only reads it: W1 and W3 in reclaim.c.
 *
 * The handshake.  R1 (pin) then R2 (state), both sequentially consistent, against the writer's W2 (state) then W3
 * (pins), both sequentially consistent: in the one total order of these four, either R1 comes before W3, and the
 * writer sees the pin, or W2 comes before R2, and the reader sees EVICTING.  Both may happen; that neither does cannot.
 *
 * R3 (acknowledge) is a release after R1: a writer that sees the acknowledgement (W1, acquire) sees the pin.
 * R4 (unpin) is a release: whatever the views read came before it, and W3's acquire puts the reuse of the bytes after.
 */
#ifndef SHMS_READERS_H
#define SHMS_READERS_H

#include <stdbool.h>

#include "slots.h"

static inline shms_pin *shms_reader_pins(shms_reader_table *t) { return (shms_pin *)(t + 1); }
static inline shms_word *shms_reader_acks(shms_reader_table *t, uint64_t max_objects) {
    return (shms_word *)((uint8_t *)(t + 1) + shms_align_up(max_objects * sizeof(shms_pin), 8));
}
static inline shms_word *shms_reader_zone_releases(shms_reader_table *t, const shms_layout *l) {
    return shms_reader_acks(t, l->max_objects) + l->max_leases;
}

/* Whom a lease waits for: does the lease `number` in `entry` expect this rank, unless the rank has died?  `retired` is
 * the rank's word in the superblock.  The acknowledgement pairs with R3b.  The other two are sequentially consistent: a
 * base goes down when the rank attaches (A4), and the lease that is opened next (L3) must not meet the one before. */
static inline bool shms_reader_expected(shms_reader_table *t, const shms_layout *l, uint64_t retired, uint32_t entry,
                                        uint64_t number) {
    return atomic_load_explicit(&shms_reader_acks(t, l->max_objects)[entry], memory_order_acquire) != number &&
           atomic_load_explicit(&t->base, memory_order_seq_cst) <= number &&
           atomic_load_explicit(&t->epoch, memory_order_seq_cst) + 1 != retired;
}

/* A2, A3, A4: takes over from whoever had the rank, and believes nothing of what is in the table but its epoch.  The
 * rank's lock is held. */
void shms_reader_table_attach(shms_reader_table *t, const shms_layout *l, const shms_superblock *sb, uint32_t rank,
                              uint64_t pid, uint64_t now_ns);
/* E1: no lease waits for the rank until it attaches again.  The rank's lock is still held. */
void shms_reader_table_close(shms_reader_table *t);

/* R1, R2.  SHMS_LIVE: pinned, and the slot holds this object.  SHMS_EVICTING: pinned; the writer will say LIVE if it
 * saw the pin, else FREE.  SHMS_FREE: not pinned; the object is not there. */
enum shms_state shms_reader_table_pin(shms_reader_table *t, const shms_layout *l, const shms_slot *slot, uint32_t i,
                                      uint64_t id);
/* R4, of an object that was taken, at `offset`. */
void shms_reader_table_unpin(shms_reader_table *t, const shms_layout *l, uint32_t i, uint64_t offset);
/* R4 of a pin that was in vain: on whatever is in the slot. */
void shms_reader_table_unpin_vain(shms_reader_table *t, const shms_layout *l, const shms_slot *slot, uint32_t i);
/* R3, for a reference whose tag was found right, to an object at `offset`: 1, or 0 where the lease is over or was
 * acknowledged before. */
int shms_reader_table_ack(shms_reader_table *t, const shms_layout *l, const shms_lease *leases, uint32_t entry,
                          uint64_t number, uint64_t offset);

#endif
