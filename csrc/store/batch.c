/* batch.c - see batch.h. */
#include "batch.h"

#include <stdlib.h>
#include <string.h>

#include "remote.h"
#include "directory.h"
#include "drops.h"
#include "hand.h"
#include "holders.h"
#include "monitor.h"
#include "reclaim.h"

static uint32_t key_at(const uint8_t *packed) {
    uint32_t len;
    memcpy(&len, packed, 4);
    return len;
}

/* Visits packed keys until `visit` returns false, and returns how many bytes it has visited. */
static uint64_t each_key(struct shms_writer *w, const uint8_t *keys, uint64_t size,
                         bool (*visit)(struct shms_writer *, const char *, uint32_t)) {
    uint64_t at = 0;
    for (uint32_t len; at < size; at += 4 + len) {
        len = key_at(keys + at);
        if (!visit(w, (const char *)keys + at + 4, len))
            break;
    }
    return at;
}

int shms_batch_protect(shms_writer *w, shms_batch *b, const uint8_t *keys, uint64_t size) {
    int rc = shms_batch_ready(b);
    if (rc || (rc = shms_writer_enter(w)))
        return rc;
    shms_settle(w);
    b->keys = malloc(size + 1);
    if (!b->keys)
        return shms_writer_leave(w, SHMS_ENOMEM);
    memcpy(b->keys, keys, size);
    b->keys_size = each_key(w, keys, size, shms_protect_key); /* a part of them can be undone, too */
    if (b->keys_size < size)
        return shms_writer_leave(w, SHMS_ENOMEM);
    for (uint64_t at = 0; at < size && rc == SHMS_OK; at += 4 + key_at(keys + at)) {
        if ((rc = shms_batch_ready(b)) == SHMS_OK)
            rc = shms_keep_remote(w, (const char *)keys + at + 4, key_at(keys + at), b->ref);
        if (rc == 1) {
            shms_batch_note(b, 0);
            rc = SHMS_OK;
        }
    }
    shms_writer_refused(w, rc, b);
    return shms_writer_leave(w, rc); /* after an error the caller undoes the batch */
}

static void undo_item(struct shms_writer *w, const shms_batch_item *item) {
    shms_slot *s = shms_segment_slot(&w->seg, item->slot);
    uint64_t state = shms_get(&s->state);
    uint32_t slot = item->slot - w->leases.base, entry = item->entry - w->seg.arena * w->leases.n_entries;
    if (state == SHMS_FREE || shms_get(&s->id) != item->id) /* the object was removed, and its leases ended before it */
        return;
    if (state == SHMS_WRITING) {
        if (!item->lease) /* else it is the next object in the slot, whose id is not stored yet */
            shms_end_uncommitted(w, slot, item->entry);
        return;
    }
    if (w->closed)
        return;
    if (item->lease && shms_get(&w->leases.table[entry].number) == item->lease)
        shms_end_lease(w, item->slot, entry);
    if (item->fresh && !shms_slot_deleted(s))
        shms_delete_slot(w, slot);
}

void shms_batch_undo(shms_writer *w, shms_batch *b) {
    if (b->keep)
        return;
    if (shms_writer_enter_to_end(w) == SHMS_OK) {
        shms_reclaim_begin(w);
        for (uint32_t i = b->n_items; i-- > 0;) /* the object after its leases */
            undo_item(w, &b->items[i]);
        if (!w->closed && b->keys_size) {
            each_key(w, b->keys, b->keys_size, shms_unprotect_key);
            shms_reclaim_unprotected(w);
        }
        shms_writer_leave(w, SHMS_OK);
    }
    free(b->keys);
    b->keys = NULL;
    b->keys_size = 0;
    b->keep = 1;
}

void shms_batch_drop(shms_writer *w, shms_batch *b) {
    shms_batch_undo(w, b);
    free(b->items);
    b->items = NULL;
    b->room = 0;
}
