/*
 * keys.c - finds, protects, deletes and lists objects by key, and records what comes and goes.
 */
#include <stdlib.h>
#include <string.h>

#include "adopt.h"
#include "step.h"

#define AT_ONCE 64 /* objects between two yields of the mutex */

/* Yields the mutex to waiting threads. After that, the writer may be closed; nothing may be stored then. */
static bool let_others_in(struct shms_writer *w) {
    bool others = shms_writer_yield(w);
    if (others)
        shms_reclaim_begin(w);
    return others;
}

int shms_key_ok(const char *key, uint32_t key_len) {
    return key && key_len > 0 && key_len <= SHMS_MAX_KEY ? SHMS_OK : SHMS_EINVAL;
}

uint32_t shms_find(struct shms_writer *w, uint64_t hash, const char *key, uint32_t key_len) {
    uint32_t slot = shms_index_find(&w->index, hash, key, key_len);
    if (slot == SHMS_NONE || slot >= w->scan_left)
        return slot;
    shms_reclaim_begin(w);
    return shms_delete_if_dropped(w, slot) ? SHMS_NONE : slot;
}

uint32_t shms_find_live(struct shms_writer *w, uint64_t hash, const char *key, uint32_t key_len) {
    uint32_t slot = shms_find(w, hash, key, key_len);
    return slot != SHMS_NONE && shms_get(&shms_writer_slot(w, slot)->state) == SHMS_LIVE ? slot : SHMS_NONE;
}

int shms_writer_enter_with_key(struct shms_writer *w, const char *key, uint32_t key_len) {
    int rc = shms_key_ok(key, key_len);
    return rc ? rc : shms_writer_enter(w);
}

/* The position behind the last event; see events.h. */
static uint64_t position(const struct shms_writer *w) {
    const shms_word *c = w->seg.writer->counters;
    return w->seg.sb->created_ns / 1000 + shms_get(&c[SHMS_C_PUTS]) + shms_get(&c[SHMS_C_EVICTIONS]) +
           shms_get(&c[SHMS_C_DELETES]) + shms_get(&w->seg.writer->epoch);
}

void shms_event_now(struct shms_writer *w, int kind, uint32_t slot) {
    static const enum shms_counter counters[] = {
        [SHMS_EVENT_PUT] = SHMS_C_PUTS, [SHMS_EVENT_EVICTED] = SHMS_C_EVICTIONS, [SHMS_EVENT_DELETED] = SHMS_C_DELETES};
    const shms_slot *s = shms_writer_slot(w, slot);
    if (w->events.cells)
        shms_events_add(&w->events, position(w), kind, shms_get(&s->id), w->seg.data + shms_get(&s->offset),
                        shms_slot_key_len(s));
    shms_count(w, counters[kind], 1);
}

uint64_t shms_key_hash(const struct shms_writer *w, const char *key, uint32_t key_len) {
    return shms_hash_key(w->index.seed, key, key_len);
}

uint64_t shms_slot_hash(struct shms_writer *w, uint32_t slot) {
    const shms_slot *s = shms_writer_slot(w, slot);
    return shms_key_hash(w, (const char *)w->seg.data + shms_get(&s->offset), shms_slot_key_len(s));
}

void shms_forget_key(struct shms_writer *w, int kind, uint32_t slot) {
    uint64_t hash = shms_slot_hash(w, slot);
    shms_index_remove(&w->index, hash, slot);
    shms_event_now(w, kind, slot);
    if (kind == SHMS_EVENT_EVICTED) /* what was deleted would not be in a larger store either */
        shms_ghosts_add(&w->ghosts, hash, shms_span(shms_get(&shms_writer_slot(w, slot)->length)),
                        w->ring.used[slot] != 0);
}

/* Marks protected slots, so that a search need not look up keys. A slot is protected if its key is, or if it was
 * deleted while its key was: the caller may have handed the object out. */
static void set_protected(struct shms_writer *w, uint32_t slot, bool on) {
    w->protected[slot] = on;
    shms_zones_stale_slot(&w->zones, slot);
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
static bool room_for_kept(struct shms_writer *w) {
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
    if (!room_for_kept(w))
        return false;
    uint64_t hash = shms_key_hash(w, key, key_len);
    shms_kept *cell = find_kept(w, hash);
    w->kept_used += cell->hash == 0;
    w->n_kept += cell->times++ == 0;
    cell->hash = hash | 1;
    uint32_t slot = shms_index_find(&w->index, hash, key, key_len);
    if (slot != SHMS_NONE && shms_get(&shms_writer_slot(w, slot)->state) != SHMS_FREE)
        set_protected(w, slot, true);
    return true;
}

bool shms_unprotect_key(struct shms_writer *w, const char *key, uint32_t key_len) {
    uint64_t hash = shms_key_hash(w, key, key_len);
    if (!shms_key_kept(w, hash) || --find_kept(w, hash)->times)
        return true;
    w->n_kept--;
    uint32_t slot = shms_index_find(&w->index, hash, key, key_len);
    if (slot != SHMS_NONE)
        set_protected(w, slot, false);
    return true;
}

/* The slots of deleted objects that are protected, behind the stack of free slots, which has room for all. */
static uint32_t *lingering(const struct shms_writer *w, uint32_t i) {
    return &w->free_slots[w->seg.layout.max_objects - 1 - i];
}

void shms_reclaim_lingering(struct shms_writer *w) {
    for (uint32_t i = w->lingering, n = 1; i-- > 0; n++) {
        uint32_t s = *lingering(w, i);
        if (!shms_key_kept(w, shms_slot_hash(w, s))) {
            *lingering(w, i) = *lingering(w, --w->lingering);
            set_protected(w, s, false);
            shms_reclaim_slot(w, s);
        }
        if (n % AT_ONCE == 0 && let_others_in(w)) {
            if (w->closed)
                return;
            i = i < w->lingering ? i : w->lingering;
        }
    }
}

int shms_writer_protect(shms_writer *w, const char *key, uint32_t key_len) {
    int rc = shms_writer_enter_with_key(w, key, key_len);
    return rc ? rc : shms_writer_leave(w, shms_protect_key(w, key, key_len) ? SHMS_OK : SHMS_ENOMEM);
}

int shms_writer_unprotect(shms_writer *w, const char *key, uint32_t key_len) {
    int rc = shms_writer_enter_with_key(w, key, key_len);
    if (rc)
        return rc;
    shms_reclaim_begin(w);
    shms_unprotect_key(w, key, key_len);
    shms_reclaim_lingering(w);
    return shms_writer_leave(w, SHMS_OK);
}

int shms_writer_look(shms_writer *w, const char *key, uint32_t key_len, shms_stored *out) {
    int rc = shms_writer_enter_with_key(w, key, key_len);
    if (rc)
        return rc;
    uint32_t slot = shms_find_live(w, shms_key_hash(w, key, key_len), key, key_len);
    if (slot == SHMS_NONE || !w->protected[slot])
        return shms_writer_leave(w, SHMS_ENOTFOUND);
    const shms_slot *s = shms_writer_slot(w, slot);
    const char *at = (const char *)w->seg.data + shms_get(&s->offset);
    *out = (shms_stored){.meta = at + key_len,
                         .payload = at + shms_payload_at(key_len, shms_slot_meta_len(s)),
                         .extra = at + shms_get(&s->length) - shms_slot_extra_len(s),
                         .payload_size = shms_slot_payload_size(s),
                         .meta_len = shms_slot_meta_len(s),
                         .extra_len = shms_slot_extra_len(s)};
    return shms_writer_leave(w, SHMS_OK);
}

void shms_delete_slot(struct shms_writer *w, uint32_t slot) {
    shms_slot *s = shms_writer_slot(w, slot);
    shms_forget_key(w, SHMS_EVENT_DELETED, slot);
    SHMS_STEP("D1"); /* before the key can be put again: a successor must not find it twice */
    atomic_store_explicit(&s->flags, shms_get(&s->flags) | SHMS_SLOT_DELETED, memory_order_release);
    w->ring.used[slot] = 0;
    if (w->protected[slot])
        *lingering(w, w->lingering++) = slot;
    shms_reclaim_slot(w, slot);
}

int shms_writer_delete(shms_writer *w, const char *key, uint32_t key_len) {
    int rc = shms_writer_enter_with_key(w, key, key_len);
    if (rc)
        return rc;
    uint64_t hash = shms_key_hash(w, key, key_len);
    uint32_t slot = shms_find_live(w, hash, key, key_len);
    shms_reclaim_begin(w);
    if (slot != SHMS_NONE)
        shms_delete_slot(w, slot);
    else
        shms_ghosts_forget(&w->ghosts, hash);
    bool elsewhere = shms_drop_elsewhere(w, hash, key, key_len);
    return shms_writer_leave(w, slot != SHMS_NONE || elsewhere);
}

/* Does the slot's key begin with these bytes? */
static bool begins(const struct shms_writer *w, const shms_slot *s, const char *prefix, uint32_t prefix_len) {
    return shms_slot_key_len(s) >= prefix_len && memcmp(w->seg.data + shms_get(&s->offset), prefix, prefix_len) == 0;
}

int shms_writer_clear(shms_writer *w) { return shms_writer_clear_prefix(w, "", 0); }

int shms_writer_clear_prefix(shms_writer *w, const char *prefix, uint32_t prefix_len) {
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    shms_reclaim_begin(w);
    uint64_t end = shms_get(&w->seg.writer->next_id); /* what is put meanwhile stays */
    for (uint32_t s = w->ring.first, next, n = 1; s != SHMS_NONE; s = next, n++) {
        const shms_slot *slot = shms_writer_slot(w, s);
        uint64_t behind = shms_ring_end(&w->ring, s);
        next = w->ring.next[s];
        if (shms_get(&slot->state) == SHMS_LIVE && shms_get(&slot->id) < end && begins(w, slot, prefix, prefix_len))
            (shms_slot_deleted(slot) ? shms_reclaim_slot : shms_delete_slot)(w, s);
        if (n % AT_ONCE == 0 && let_others_in(w)) {
            if (w->closed)
                return shms_writer_leave(w, SHMS_ECLOSED);
            next = behind < w->ring.capacity ? shms_ring_at(&w->ring, behind) : SHMS_NONE;
        }
    }
    shms_drop_all_elsewhere(w, prefix, prefix_len);
    if (w->closed)
        return shms_writer_leave(w, SHMS_ECLOSED);
    if (prefix_len == 0)
        shms_ghosts_clear(&w->ghosts);
    return shms_writer_leave(w, SHMS_OK);
}

static int enter_to_list(struct shms_writer *w) {
    int rc = shms_writer_enter(w);
    if (rc == SHMS_OK && (rc = shms_delete_all_dropped(w)))
        shms_writer_leave(w, rc);
    return rc;
}

int64_t shms_writer_count(shms_writer *w) {
    int rc = enter_to_list(w);
    return rc ? rc : shms_writer_leave(w, (int)(w->index.count - w->unfinished - w->indexed_free));
}

static bool listed(const struct shms_writer *w, uint32_t slot, const char *prefix, uint32_t prefix_len) {
    const shms_slot *s = &w->seg.slots[slot];
    return shms_get(&s->state) == SHMS_LIVE && !shms_slot_deleted(s) && begins(w, s, prefix, prefix_len);
}

/* Copies the keys that begin with `prefix`, in order of age, each behind its length, or behind the head of an event. */
static int list_keys(struct shms_writer *w, bool events, const char *prefix, uint32_t prefix_len, uint8_t *out,
                     uint64_t *size) {
    uint64_t room = *size;
    *size = 0;
    for (uint32_t i = w->ring.first; i != SHMS_NONE; i = w->ring.next[i])
        if (listed(w, i, prefix, prefix_len))
            *size += (events ? sizeof(shms_event) : 4) + shms_slot_key_len(&w->seg.slots[i]);
    if (*size == 0 || *size > room)
        return SHMS_OK;
    uint32_t slots = (uint32_t)w->seg.layout.max_objects, *order = malloc(slots * sizeof *order);
    uint32_t n = order ? shms_slots_by_age(w->seg.slots, slots, order) : SHMS_NONE;
    int rc = n == SHMS_NONE ? SHMS_ENOMEM : SHMS_OK;
    for (uint32_t i = 0; rc == SHMS_OK && i < n; i++) {
        const shms_slot *s = &w->seg.slots[order[i]];
        uint32_t len = shms_slot_key_len(s);
        if (!listed(w, order[i], prefix, prefix_len))
            continue;
        if (events) {
            shms_event_pack(&out, SHMS_EVENT_PUT, shms_get(&s->id), len);
        } else {
            memcpy(out, &len, 4);
            out += 4;
        }
        memcpy(out, w->seg.data + shms_get(&s->offset), len);
        out += len;
    }
    free(order);
    return rc;
}

int shms_writer_keys(shms_writer *w, uint8_t *out, uint64_t *size) {
    return shms_writer_keys_prefix(w, "", 0, out, size);
}

int shms_writer_keys_prefix(shms_writer *w, const char *prefix, uint32_t prefix_len, uint8_t *out, uint64_t *size) {
    int rc = enter_to_list(w);
    return rc ? rc : shms_writer_leave(w, list_keys(w, false, prefix, prefix_len, out, size));
}

int shms_writer_stored(shms_writer *w, uint8_t *out, uint64_t *size) {
    int rc = enter_to_list(w);
    if (rc)
        return rc;
    size[1] = position(w);
    return shms_writer_leave(w, list_keys(w, true, "", 0, out, size));
}

int64_t shms_writer_track_events(shms_writer *w, uint64_t bytes) {
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    if (bytes == 0)
        shms_events_stop(&w->events);
    else if (!w->events.cells)
        rc = shms_events_start(&w->events, bytes, position(w));
    uint64_t end = position(w);
    shms_writer_leave(w, rc);
    return rc ? rc : (int64_t)end;
}

int shms_writer_events(shms_writer *w, uint64_t from, uint8_t *out, uint64_t *size) {
    int rc = shms_writer_enter(w);
    if (rc)
        return rc;
    uint64_t end = position(w), room = size[0];
    size[0] = 0;
    size[1] = from;
    size[2] = w->events.cells ? w->events.first : end;
    if (from > end)
        return shms_writer_leave(w, SHMS_EINVAL);
    if (from >= size[2] && from < end) {
        size[0] = room;
        size[1] = shms_events_read(&w->events, from, end, out, size);
    }
    return shms_writer_leave(w, SHMS_OK);
}
