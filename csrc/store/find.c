/*
 * find.c - see find.h.
 */
#include "find.h"

#include <string.h>

bool shms_dropped(const shms_segment *seg, uint32_t slot, uint64_t id) {
    for (uint32_t o = 0; seg->layout.n_writers > 1 && o < seg->layout.n_writers; o++)
        if (shms_get(&shms_segment_holds(seg, o)[slot].dropped) == id)
            return true;
    return false;
}

const uint8_t *shms_object_of(const shms_segment *seg, uint32_t slot, shms_slot *seen) {
    const shms_layout *l = &seg->layout;
    const shms_slot *s = shms_segment_slot(seg, slot);
    uint64_t id = atomic_load_explicit(&s->id, memory_order_acquire);
    if (!shms_slot_whole(s)) /* after the id, and before the words: they are of that object, or of a later one */
        return NULL;
    *seen = shms_slot_copy(s, id);
    return shms_slot_bounded(seen, l->capacity)
               ? seg->all_data + shms_address(l, shms_arena_of(l, slot), shms_get(&seen->offset))
               : NULL;
}

bool shms_still_there(const shms_segment *seg, uint32_t slot, uint64_t id) {
    const shms_slot *s = shms_segment_slot(seg, slot);
    atomic_thread_fence(memory_order_acquire);
    return shms_slot_whole(s) && shms_get(&s->id) == id;
}

bool shms_matches(const shms_segment *seg, uint32_t slot, const char *key, uint32_t key_len, bool whole,
                  shms_slot *seen) {
    const uint8_t *at = shms_object_of(seg, slot, seen);
    return at && !shms_slot_deleted(seen) &&
           (whole ? shms_slot_key_len(seen) == key_len : shms_slot_key_len(seen) >= key_len) &&
           memcmp(at, key, key_len) == 0 && !shms_dropped(seg, slot, shms_get(&seen->id)) &&
           shms_still_there(seg, slot, shms_get(&seen->id));
}

static const shms_index_line *lines_of(const shms_segment *seg, uint32_t arena) {
    return shms_segment_at(seg, seg->layout.index_at, arena);
}

/* Comes to the next arena that is asked. */
static void enter_arena(shms_lookup *l) {
    l->arena += l->arena == l->without;
    if (l->arena < l->seg->layout.n_writers)
        l->in_arena = shms_index_look(l->index, lines_of(l->seg, l->arena), l->hash);
}

shms_lookup shms_find_begin(const shms_segment *seg, const shms_index *index, uint32_t without, uint64_t hash) {
    shms_lookup l = {.seg = seg, .index = index, .hash = hash, .without = without};
    for (uint32_t a = 0; a < seg->layout.n_writers; a++) /* one wait for the lines of all, instead of one for each */
        shms_index_prefetch(index, lines_of(seg, a), hash);
    enter_arena(&l);
    return l;
}

uint32_t shms_find_next(shms_lookup *l) {
    for (; l->arena < l->seg->layout.n_writers; l->arena++, enter_arena(l)) {
        uint32_t slot = shms_candidates_next(&l->in_arena);
        if (slot != SHMS_NONE)
            return l->arena * (uint32_t)l->seg->layout.max_objects + slot;
    }
    return SHMS_NONE;
}

uint32_t shms_find_key(const shms_segment *seg, const shms_index *index, uint32_t without, uint64_t hash,
                       const char *key, uint32_t key_len, shms_slot *seen) {
    shms_lookup l = shms_find_begin(seg, index, without, hash);
    uint32_t slot;
    do
        slot = shms_find_next(&l);
    while (slot != SHMS_NONE && !(shms_matches(seg, slot, key, key_len, true, seen) &&
                                  shms_get(&shms_segment_slot(seg, slot)->state) == SHMS_LIVE));
    return slot;
}
