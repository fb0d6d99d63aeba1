/*
 * readers.h - the table of one rank: its pins, acknowledgements and epoch. Slots and lease entries have their numbers of
 * all arenas here.
 *
 * Only that rank's process writes the table, from any of its threads. The read-modify-write atomics here are for those
 * threads, and never cross a process. The writer only reads the table: W1 and W3 in holders.c.
 *
 * Either the writer sees the pin (R1, W3) or the reader sees EVICTING (W2, R2a): docs/concepts/protocol.md has the
 * argument, and the orders that are enough for it.
 */
#ifndef SHMS_READERS_H
#define SHMS_READERS_H

#include <stdbool.h>

#include "slots.h"

static inline shms_pin *shms_reader_pins(shms_reader_table *t) { return (shms_pin *)(t + 1); }
static inline shms_word *shms_reader_acks(shms_reader_table *t, const shms_layout *l) {
    return (shms_word *)((uint8_t *)(t + 1) + shms_align_up(shms_all_slots(l) * sizeof(shms_pin), 8));
}
/* Of the zones of an arena. */
static inline shms_word *shms_reader_zone_releases(shms_reader_table *t, const shms_layout *l, uint32_t arena) {
    return shms_reader_acks(t, l) + shms_all_leases(l) + (uint64_t)arena * shms_n_zones(l);
}

/* Does the lease `number` in `entry`, opened by `writer`, expect this rank, unless the rank has died? `what` is the
 * lease's word, and `retired` the rank's word in the table of that writer.
 *
 * Orders: the acknowledgement pairs with R3b, and the base with A4 and E1; whoever sees A4 sees the epoch of A3. An older
 * value of any of them expects the rank once more, or is of a rank that nobody can know to have attached. */
static inline bool shms_reader_expected(shms_reader_table *t, const shms_layout *l, uint32_t rank, uint32_t writer,
                                        uint64_t retired, uint32_t entry, uint64_t number, uint64_t what) {
    uint32_t group = shms_lease_group(what);
    return (group == 0 || group == l->group_of[rank] + 1u) &&
           atomic_load_explicit(&shms_reader_acks(t, l)[entry], memory_order_acquire) != number &&
           atomic_load_explicit(&t->base[writer], memory_order_acquire) <= number && shms_get(&t->epoch) + 1 != retired;
}

/* A2, A3, A4: takes the rank over from its last process, and trusts only the epoch of the table. The rank's lock is
 * held. `w`: the table of writer 0, which those of the others follow. If it only `finds`, no lease expects it. */
void shms_reader_table_attach(shms_reader_table *t, const shms_layout *l, const shms_writer_table *w, uint32_t rank,
                              bool finds, uint64_t pid, uint64_t now_ns);
/* E1: no lease waits for the rank until it attaches again.  The rank's lock is still held. */
void shms_reader_table_close(shms_reader_table *t, const shms_layout *l);

/* How many pins this is. */
static inline uint32_t shms_pin_count(const shms_pin *pin, memory_order order) {
    return atomic_load_explicit(pin, order) & SHMS_PIN_COUNT;
}

/* R1, R2. SHMS_LIVE: pinned, and the slot holds this object. SHMS_EVICTING: pinned, and the writer will store LIVE if it
 * saw the pin, else FREE. SHMS_FREE: not pinned, because the object is not there. */
enum shms_state shms_reader_table_pin(shms_reader_table *t, const shms_layout *l, const shms_slot *slot, uint32_t i,
                                      uint64_t id);
/* A use of what is pinned, which the CLOCK of the owner sees. */
void shms_reader_table_use(shms_reader_table *t, const shms_slot *slot, uint32_t i);
/* R4, for an object that was taken, at `offset` of its arena. */
void shms_reader_table_unpin(shms_reader_table *t, const shms_layout *l, uint32_t i, uint64_t offset);
/* R4, for a pin that did not get its object: the slot may hold another one. */
void shms_reader_table_unpin_failed(shms_reader_table *t, const shms_layout *l, const shms_slot *slot, uint32_t i);
/* R3, for a reference with a valid tag, to the object in slot `i` at `offset`. 1: acknowledged now. 0: the lease has
 * ended, or was acknowledged before. */
int shms_reader_table_ack(shms_reader_table *t, const shms_layout *l, const shms_lease *lease, uint32_t entry,
                          uint64_t number, uint32_t i, uint64_t offset);

#endif
