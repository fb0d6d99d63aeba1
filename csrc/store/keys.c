/*
 * keys.c - the calls that protect, delete and list objects by key.
 */
#include <string.h>

#include "directory.h"
#include "drops.h"
#include "holders.h"
#include "monitor.h"
#include "reclaim.h"
#include "step.h"

#define AT_ONCE 64 /* objects between two yields of the mutex */
#define NO_PREFIX "the prefix is NULL: pass its bytes, or NULL and 0 for all keys"

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
    bool remote = shms_drop_remote(w, hash, key, key_len);
    return shms_writer_leave(w, slot != SHMS_NONE || remote);
}

/* Does the slot's key begin with these bytes? */
static bool begins(const struct shms_writer *w, const shms_slot *s, const char *prefix, uint32_t prefix_len) {
    return shms_slot_key_len(s) >= prefix_len && memcmp(w->seg.data + shms_get(&s->offset), prefix, prefix_len) == 0;
}

int shms_writer_clear(shms_writer *w, const char *prefix, uint32_t prefix_len) {
    int rc = prefix || prefix_len == 0 ? shms_writer_enter(w) : shms_fail(SHMS_EINVAL, NO_PREFIX);
    if (rc)
        return rc;
    shms_settle(w);
    prefix = prefix ? prefix : "";
    shms_reclaim_begin(w);
    uint64_t end = shms_get(&w->seg.writer->next_id); /* what is put meanwhile stays */
    for (uint32_t s = w->ring.first, next, n = 1; s != SHMS_NONE; s = next, n++) {
        const shms_slot *slot = shms_writer_slot(w, s);
        uint64_t behind = shms_ring_end(&w->ring, s);
        next = w->ring.next[s];
        if (shms_get(&slot->state) == SHMS_LIVE && shms_get(&slot->id) < end && begins(w, slot, prefix, prefix_len))
            (shms_slot_deleted(slot) ? shms_reclaim_slot : shms_delete_slot)(w, s);
        if (n % AT_ONCE == 0 && shms_reclaim_yield(w)) {
            if (w->closed)
                return shms_writer_leave(w, SHMS_ECLOSED);
            next = shms_ring_at(&w->ring, behind);
        }
    }
    shms_drop_all_remote(w, prefix, prefix_len);
    if (w->closed)
        return shms_writer_leave(w, SHMS_ECLOSED);
    if (prefix_len == 0)
        shms_ghosts_clear(&w->ghosts);
    return shms_writer_leave(w, SHMS_OK);
}

int64_t shms_writer_count(shms_writer *w) {
    int rc = shms_writer_enter_to_list(w);
    return rc ? rc : shms_writer_leave(w, (int)(w->index.count - w->unfinished - w->indexed_free));
}

static bool listed(const struct shms_writer *w, uint32_t slot, const char *prefix, uint32_t prefix_len) {
    const shms_slot *s = &w->seg.slots[slot];
    return shms_get(&s->state) == SHMS_LIVE && !shms_slot_deleted(s) && begins(w, s, prefix, prefix_len);
}

int shms_writer_keys(shms_writer *w, const char *prefix, uint32_t prefix_len, uint8_t *out, uint64_t *size) {
    if (!size || (!out && *size) || (!prefix && prefix_len))
        return shms_fail(SHMS_EINVAL, size && (out || !*size) ? NO_PREFIX : SHMS_NO_OUT);
    int rc = shms_writer_enter_to_list(w);
    if (rc)
        return rc;
    prefix = prefix ? prefix : "";
    uint64_t room = *size, used = 0;
    for (uint32_t i = 0; i < w->seg.layout.max_objects; i++) {
        if (i % AT_ONCE == AT_ONCE - 1 && shms_writer_yield(w) && w->closed)
            return shms_writer_leave(w, SHMS_ECLOSED);
        if (!listed(w, i, prefix, prefix_len))
            continue;
        SHMS_LOOK("list");
        const shms_slot *s = &w->seg.slots[i];
        uint64_t id = shms_get(&s->id);
        uint32_t len = shms_slot_key_len(s);
        if (used + sizeof id + sizeof len + len <= room) {
            memcpy(out + used, &id, sizeof id);
            memcpy(out + used + sizeof id, &len, sizeof len);
            memcpy(out + used + sizeof id + sizeof len, w->seg.data + shms_get(&s->offset), len);
        }
        used += sizeof id + sizeof len + len;
    }
    *size = used;
    return shms_writer_leave(w, SHMS_OK);
}
