/*
 * slots.c - what must hold between the entries of a slot table.
 *
 * The table itself has no order and no links: a writer that takes a segment over must be able to believe it after a
 * death between any two stores, and two stores that have to agree would be one too many.  Address order is computed.
 */
#include "slots.h"

#include <stdlib.h>
#include <string.h>

bool shms_slot_bounded(const shms_slot *s, uint64_t capacity) {
    uint64_t offset = shms_get(&s->offset), length = shms_get(&s->length);
    return offset % SHMS_ALIGN == 0 && length <= capacity && offset <= capacity - shms_span(length) &&
           shms_span(length) <= capacity &&
           shms_payload_at(shms_slot_key_len(s), shms_slot_meta_len(s)) <= shms_span(length) &&
           (uint64_t)shms_slot_key_len(s) + shms_slot_meta_len(s) <= length;
}

typedef struct at {
    uint64_t offset;
    uint32_t slot;
} at;

static int by_offset(const void *a, const void *b) {
    uint64_t x = ((const at *)a)->offset, y = ((const at *)b)->offset;
    return x < y ? -1 : x > y;
}

uint32_t shms_slots_sorted(const shms_slot *slots, uint32_t n, uint32_t *out) {
    at *order = malloc(((size_t)n + 1) * sizeof *order);
    if (!order)
        return SHMS_NONE;
    uint32_t count = 0;
    bool sorted = true;
    for (uint32_t i = 0; i < n; i++)
        if (shms_get(&slots[i].state) != SHMS_FREE) {
            order[count] = (at){shms_get(&slots[i].offset), i};
            sorted = sorted && (count == 0 || order[count - 1].offset <= order[count].offset);
            count++;
        }
    if (!sorted)
        qsort(order, count, sizeof *order, by_offset);
    for (uint32_t i = 0; i < count; i++)
        out[i] = order[i].slot;
    free(order);
    return count;
}

static int by_value(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

int shms_slots_valid(const shms_slot *slots, uint32_t n, uint64_t capacity, uint64_t next_id) {
    uint32_t *order = malloc(((size_t)n + 1) * sizeof *order);
    uint64_t *ids = malloc(((size_t)n + 1) * sizeof *ids);
    int rc = order && ids ? SHMS_OK : SHMS_ENOMEM;
    uint32_t count = rc ? 0 : shms_slots_sorted(slots, n, order);
    if (count == SHMS_NONE)
        rc = SHMS_ENOMEM, count = 0;
    uint64_t end = 0;
    for (uint32_t i = 0; rc == SHMS_OK && i < count; i++) {
        const shms_slot *s = &slots[order[i]];
        uint64_t id = shms_get(&s->id);
        if (shms_get(&s->state) > SHMS_EVICTING || !shms_slot_bounded(s, capacity) || shms_get(&s->offset) < end ||
            id == 0 || id >= next_id || !shms_slot_flags_valid(shms_get(&s->flags)))
            rc = SHMS_ECORRUPT;
        end = shms_slot_end(s);
        ids[i] = id;
    }
    if (rc == SHMS_OK) {
        qsort(ids, count, sizeof *ids, by_value);
        for (uint32_t i = 1; i < count; i++)
            if (ids[i] == ids[i - 1])
                rc = SHMS_ECORRUPT;
    }
    free(order);
    free(ids);
    return rc;
}
