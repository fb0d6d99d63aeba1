/*
 * directory.c - which key is in which slot, and which keys are protected.
 */
#include "directory.h"

#include <stdlib.h>

#include "find.h"
#include "monitor.h"

uint64_t shms_key_hash(const struct shms_writer *w, const char *key, uint32_t key_len) {
    return shms_hash_key(w->index.seed, key, key_len);
}

uint64_t shms_slot_hash(struct shms_writer *w, uint32_t slot) {
    const shms_slot *s = shms_writer_slot(w, slot);
    return shms_key_hash(w, (const char *)w->seg.data + shms_get(&s->offset), shms_slot_key_len(s));
}

bool shms_is_dropped(const struct shms_writer *w, uint32_t slot) {
    const shms_slot *s = &w->seg.slots[slot];
    return shms_get(&s->state) == SHMS_LIVE && !shms_slot_deleted(s) &&
           shms_dropped(&w->seg, shms_writer_global(w, slot), shms_get(&s->id));
}

uint32_t shms_find_live(const struct shms_writer *w, uint64_t hash, const char *key, uint32_t key_len) {
    uint32_t slot = shms_index_find(&w->index, hash, key, key_len);
    if (slot == SHMS_NONE || shms_get(&w->seg.slots[slot].state) != SHMS_LIVE)
        return SHMS_NONE;
    return slot < w->scan_left && shms_is_dropped(w, slot) ? SHMS_NONE : slot;
}

void shms_forget_key(struct shms_writer *w, uint32_t slot, bool evicted) {
    uint64_t hash = shms_slot_hash(w, slot);
    shms_index_remove(&w->index, hash, slot);
    shms_count(w, evicted ? SHMS_C(evictions) : SHMS_C(deletes), 1);
    if (evicted) /* what was deleted would not be in a larger store either */
        shms_ghosts_add(&w->ghosts, hash, shms_span(shms_get(&shms_writer_slot(w, slot)->length)),
                        w->ring.used[slot] != 0);
}

void shms_protect_slot(struct shms_writer *w, uint32_t slot, bool on) {
    w->protected[slot] = on;
    shms_ring_stale_slot(&w->ring, slot);
    if (!on)
        shms_room_made(w);
}

static shms_kept *find_kept(const struct shms_writer *w, uint64_t hash) {
    hash |= 1;
    uint32_t i = (uint32_t)(hash >> 1) & (w->kept_cells - 1);
    while (w->kept[i].hash && w->kept[i].hash != hash)
        i = (i + 1) & (w->kept_cells - 1);
    return &w->kept[i];
}

bool shms_key_kept(const struct shms_writer *w, uint64_t hash) { return w->n_kept && find_kept(w, hash)->times; }

/* Rebuilds the table without keys that are no longer protected, so that at most half of it is in use. */
static bool grow_kept(struct shms_writer *w) {
    shms_kept *before = w->kept;
    uint32_t cells = w->kept_cells, wanted = 16;
    if (2 * (w->kept_used + 1) <= cells)
        return true;
    while (wanted < 4 * (w->n_kept + 1))
        wanted *= 2;
    shms_kept *table = calloc(wanted, sizeof *table);
    if (!table)
        return false;
    w->kept = table;
    w->kept_cells = wanted;
    w->kept_used = w->n_kept;
    for (uint32_t i = 0; i < cells; i++)
        if (before[i].times)
            *find_kept(w, before[i].hash) = before[i];
    free(before);
    return true;
}

bool shms_protect_key(struct shms_writer *w, const char *key, uint32_t key_len) {
    if (!grow_kept(w))
        return false;
    uint64_t hash = shms_key_hash(w, key, key_len);
    shms_kept *cell = find_kept(w, hash);
    w->kept_used += cell->hash == 0;
    w->n_kept += cell->times++ == 0;
    cell->hash = hash | 1;
    uint32_t slot = shms_index_find(&w->index, hash, key, key_len);
    if (slot != SHMS_NONE) /* of an object that is removed just now it means nothing: each put sets it */
        shms_protect_slot(w, slot, true);
    return true;
}

bool shms_unprotect_key(struct shms_writer *w, const char *key, uint32_t key_len) {
    uint64_t hash = shms_key_hash(w, key, key_len);
    if (!shms_key_kept(w, hash) || --find_kept(w, hash)->times)
        return true;
    w->n_kept--;
    uint32_t slot = shms_index_find(&w->index, hash, key, key_len);
    if (slot != SHMS_NONE)
        shms_protect_slot(w, slot, false);
    return true;
}
