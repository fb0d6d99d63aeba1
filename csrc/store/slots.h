/*
 * slots.h - the slot table: one slot for each object. The writer writes it, and every process reads it.
 *
 * A slot goes FREE -> WRITING (P2) -> LIVE (P4) -> EVICTING (W2) -> FREE (W4). It goes back from EVICTING to LIVE (W5)
 * if a reader has pinned the object. P4 publishes the other words, so they need no order of their own.
 */
#ifndef SHMS_SLOTS_H
#define SHMS_SLOTS_H

#include <stdbool.h>

#include "layout.h"

#define SHMS_NONE UINT32_MAX /* not a slot and not a lease entry */

static inline uint64_t shms_get(const shms_word *w) { return atomic_load_explicit(w, memory_order_relaxed); }
static inline void shms_set(shms_word *w, uint64_t v) { atomic_store_explicit(w, v, memory_order_relaxed); }
/* one writing process, so this need not be atomic */
static inline void shms_add(shms_word *w, uint64_t v) { shms_set(w, shms_get(w) + v); }

static inline uint64_t shms_slot_end(const shms_slot *s) {
    return shms_get(&s->offset) + shms_span(shms_get(&s->length));
}
static inline uint32_t shms_slot_key_len(const shms_slot *s) { return shms_get(&s->head) & 0xfffff; }
static inline uint32_t shms_slot_mark(const shms_slot *s) { return shms_get(&s->head) >> 20 & (SHMS_MARKS - 1); }
static inline uint64_t shms_slot_head(uint32_t key_len, uint32_t mark, uint32_t meta_len) {
    return key_len | mark << 20 | (uint64_t)meta_len << 32;
}
static inline uint32_t shms_slot_meta_len(const shms_slot *s) { return (uint32_t)(shms_get(&s->head) >> 32); }

static inline uint32_t shms_slot_kind(const shms_slot *s) {
    return (uint32_t)(shms_get(&s->flags) >> SHMS_SLOT_KIND_SHIFT & SHMS_SLOT_KIND_MASK);
}
static inline uint32_t shms_slot_extra_len(const shms_slot *s) {
    return (uint32_t)shms_get(&s->flags) >> SHMS_SLOT_EXTRA_SHIFT;
}
/* Bytes of the payload of an object that is bounded. */
static inline uint64_t shms_slot_payload_size(const shms_slot *s) {
    uint64_t at = shms_payload_at(shms_slot_key_len(s), shms_slot_meta_len(s)) + shms_slot_extra_len(s);
    return shms_get(&s->length) > at ? shms_get(&s->length) - at : 0;
}

/* What the id names, as it is now: read only once, since a faulty writer may change the words between two reads. */
static inline shms_slot shms_slot_copy(const shms_slot *s, uint64_t id) {
    return (shms_slot){.id = id,
                       .offset = shms_get(&s->offset),
                       .length = shms_get(&s->length),
                       .head = shms_get(&s->head),
                       .flags = shms_get(&s->flags)};
}

/* Does the slot have a committed object? Its bytes are then its own. */
static inline bool shms_slot_whole(const shms_slot *s) {
    uint64_t state = atomic_load_explicit(&s->state, memory_order_acquire);
    return state == SHMS_LIVE || state == SHMS_EVICTING;
}
static inline bool shms_slot_deleted(const shms_slot *s) { return shms_get(&s->flags) & SHMS_SLOT_DELETED; }
/* Can this build have written these flags? Without a checksum, the upper half is zero. */
static inline bool shms_slot_flags_valid(uint64_t flags) {
    return (flags & 0xff) < SHMS_KINDS << SHMS_SLOT_KIND_SHIFT &&
           (flags & SHMS_SLOT_CHECKED || flags >> SHMS_SLOT_CRC_SHIFT == 0);
}

/* Do the slot's offset and lengths stay within the data region, and within each other? For processes that do not trust
 * the writer. */
bool shms_slot_bounded(const shms_slot *s, uint64_t capacity);

/* Checks that no two objects overlap, all are bounded, and ids are unique and below next_id. Allocates memory for a
 * sort. */
int shms_slots_valid(const shms_slot *slots, uint32_t n, uint64_t capacity, uint64_t next_id);

/* Stores the occupied slots (not FREE) in address order in `out`, which has room for n. Returns how many. */
uint32_t shms_slots_sorted(const shms_slot *slots, uint32_t n, uint32_t *out);
/* The same in the order of their ids. */
uint32_t shms_slots_by_age(const shms_slot *slots, uint32_t n, uint32_t *out);

/* A record of plain words that is part of a table: counters, or the figures of a tier. */
static inline void shms_words_read(const shms_word *words, void *out, size_t size) {
    for (size_t i = 0; i < size / sizeof *words; i++)
        ((uint64_t *)out)[i] = shms_get(&words[i]);
}
static inline void shms_words_write(shms_word *words, const void *record, size_t size) {
    for (size_t i = 0; i < size / sizeof *words; i++)
        shms_set(&words[i], ((const uint64_t *)record)[i]);
}

static inline bool shms_kind_named(const shms_kind *kind) { return shms_get(&kind->name[0]) != 0; }
static inline void shms_kind_read(const shms_kind *kind, shms_kind_info *out) {
    *out = (shms_kind_info){.name = {atomic_load_explicit(&kind->name[0], memory_order_acquire)},
                            .bytes = shms_get(&kind->bytes),
                            .objects = shms_get(&kind->objects),
                            .quota = shms_get(&kind->quota)};
    out->name[1] = shms_get(&kind->name[1]); /* after the first word, which is written last */
    out->name[2] = shms_get(&kind->name[2]);
}

/* The word `what` of a lease: slot (24 bits), held (1), group (8), next entry (24). A group is 0 for all ranks, else 1 +
 * its number. `next` is 1 + the next lease of the same writer on the slot, if the slot is another's; else 0. */
static inline uint64_t shms_lease_what(uint32_t slot, bool held, uint32_t group, uint32_t next) {
    return slot | (uint64_t)held << 24 | (uint64_t)group << 25 | (uint64_t)next << 33;
}
static inline uint32_t shms_lease_slot(uint64_t what) { return what & 0xffffff; }
static inline bool shms_lease_held(uint64_t what) { return what >> 24 & 1; }
static inline uint32_t shms_lease_group(uint64_t what) { return what >> 25 & 0xff; }
static inline uint64_t shms_lease_with_next(uint64_t what, uint32_t next) {
    return (what & ((UINT64_C(1) << 33) - 1)) | (uint64_t)next << 33;
}
static inline uint32_t shms_lease_next(uint64_t what) { return what >> 33 & 0xffffff; }

/* Has a walk along a list that another process writes come round? It has taken n steps, and comes to `next`. `*mark`, at
 * first 0, is where it was at the last power of two (Brent's algorithm). So a circle costs at most four times its way. */
static inline bool shms_is_cyclic(uint32_t *mark, uint32_t n, uint32_t next) {
    if (next == *mark)
        return true;
    if ((n & (n - 1)) == 0)
        *mark = next;
    return false;
}

#endif
