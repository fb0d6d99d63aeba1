/* hand.c - see hand.h. */
#include "hand.h"

#include <stdlib.h>

#include "directory.h"
#include "monitor.h"
#include "reclaim.h"
#include "step.h"

int shms_batch_ready(shms_batch *b) {
    if (b->keep) {
        b->keep = 0;
        b->n_items = 0;
    }
    if (b->n_items < b->room)
        return SHMS_OK;
    uint32_t room = b->room ? 2 * b->room : 4;
    shms_batch_item *items = realloc(b->items, room * sizeof *items);
    if (!items)
        return SHMS_ENOMEM;
    b->items = items;
    b->room = room;
    return SHMS_OK;
}

void shms_batch_note(shms_batch *b, int fresh) {
    shms_ref ref;
    shms_ref_unpack(&ref, b->ref);
    b->items[b->n_items++] = (shms_batch_item){ref.id, ref.lease, ref.slot, ref.entry, fresh};
}

int shms_no_group(const struct shms_writer *w, uint32_t group) {
    return shms_fail(SHMS_EINVAL, "group must be 0, or 1 + a number below n_groups, %u, not %u",
                     (unsigned)w->seg.layout.n_groups, group);
}

int shms_pieces_fit(const shms_piece *pieces, uint32_t n, uint64_t payload_size) {
    for (uint32_t i = 0; i < n; i++)
        if (pieces[i].offset > payload_size || pieces[i].size > payload_size - pieces[i].offset ||
            (pieces[i].size && !pieces[i].address))
            return shms_fail(SHMS_EINVAL, "the payload is NULL, or a piece of it is outside: pass payload_size bytes");
    return SHMS_OK;
}

void shms_end_uncommitted(struct shms_writer *w, uint32_t slot, uint32_t entry) {
    shms_slot *s = shms_writer_slot(w, slot);
    /* it was never in the store, so there is no eviction to log */
    shms_index_remove(&w->index, shms_slot_hash(w, slot), slot);
    SHMS_STEP("P5"); /* no reader has seen the object, so nobody is asked */
    atomic_store_explicit(&s->state, SHMS_FREE, memory_order_release);
    shms_add(&w->seg.writer->used_bytes, -shms_span(shms_get(&s->length)));
    shms_kinds_leave(&w->kinds, slot);
    shms_ring_remove(&w->ring, slot);
    w->free_slots[w->n_free_slots++] = slot;
    shms_leases_untake(&w->leases, entry);
    shms_room_made(w);
    shms_writer_pending_ended(w, entry);
}

void shms_refer(const struct shms_writer *w, uint32_t slot, uint32_t entry, uint64_t lease, uint8_t *out) {
    const shms_layout *l = &w->seg.layout;
    const shms_slot *s = shms_segment_slot(&w->seg, slot);
    shms_ref ref = {.store = (uint32_t)w->seg.sb->store,
                    .slot = slot,
                    .entry = entry,
                    .address = shms_address(l, shms_arena_of(l, slot), shms_get(&s->offset)),
                    .id = shms_get(&s->id),
                    .lease = lease};
    shms_ref_seal(out, &ref, w->seg.sb->secret, shms_get(&s->secret));
}

void shms_open_lease(struct shms_writer *w, uint32_t slot, uint32_t entry, uint32_t group, bool hold, uint8_t *out) {
    if (!shms_is_own(&w->seg, slot))
        shms_reclaim_list(w, slot);
    uint64_t id = shms_get(&shms_segment_slot(&w->seg, slot)->id);
    uint64_t lease = shms_leases_open(&w->leases, entry, slot, id, group, shms_now_ns());
    if (hold)
        shms_leases_hold(&w->leases, entry);
    shms_refer(w, slot, w->seg.arena * w->leases.n_entries + entry, lease, out);
}

void shms_hand_out(struct shms_writer *w, uint32_t slot, uint32_t entry, uint32_t group, bool hold, uint8_t *out) {
    shms_open_lease(w, slot, entry, group, hold, out);
    shms_reclaim_leases(w);
}

void shms_end_lease(struct shms_writer *w, uint32_t slot, uint32_t entry) {
    shms_leases_close(&w->leases, entry); /* counts the release of another's object */
    if (shms_is_own(&w->seg, slot))
        shms_ring_stale_slot(&w->ring, slot - w->leases.base);
    shms_room_made(w); /* at least for another lease */
}
