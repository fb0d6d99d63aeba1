/*
 * slots.c - the invariants of the slot table.
 *
 * The table has no order and no links. A successor must be able to use it after a death between any two stores. So no
 * two stores may have to agree. The address order is computed.
 */
#include "slots.h"

#include <stdlib.h>
#include <string.h>

bool shms_slot_bounded(const shms_slot *s, uint64_t capacity) {
    uint64_t offset = shms_get(&s->offset), length = shms_get(&s->length);
    return offset % SHMS_ALIGN == 0 && length <= capacity && offset <= capacity - shms_span(length) &&
           shms_span(length) <= capacity &&
           shms_payload_at(shms_slot_key_len(s), shms_slot_meta_len(s)) <= shms_span(length) &&
           (uint64_t)shms_slot_key_len(s) + shms_slot_meta_len(s) <= length &&
           (shms_slot_extra_len(s) == 0 ||
            shms_payload_at(shms_slot_key_len(s), shms_slot_meta_len(s)) + shms_slot_extra_len(s) <= length);
}

typedef struct at {
    uint64_t key;
    uint32_t slot;
} at;

/* Sorts by key: merges runs that already ascend. There are few runs, since slots are taken in the order of the hands.
 * `spare` is as large as `a`. */
static void sort(at *a, at *spare, uint32_t n) {
    for (uint32_t runs = 2; runs > 1;) {
        runs = 0;
        for (uint32_t from = 0, middle, to; from < n; from = to, runs++) {
            for (middle = from + 1; middle < n && a[middle - 1].key <= a[middle].key;)
                middle++;
            for (to = middle < n ? middle + 1 : n; to < n && a[to - 1].key <= a[to].key;)
                to++;
            uint32_t left = from, right = middle;
            for (uint32_t k = from; k < to; k++)
                spare[k] = right == to || (left < middle && a[left].key <= a[right].key) ? a[left++] : a[right++];
            memcpy(a + from, spare + from, (to - from) * sizeof *a);
        }
    }
}

static uint32_t occupied(const shms_slot *slots, uint32_t n, uint32_t *out, bool by_age) {
    at *order = malloc(2 * ((size_t)n + 1) * sizeof *order);
    if (!order)
        return SHMS_NONE;
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i++)
        if (shms_get(&slots[i].state) != SHMS_FREE)
            order[count++] = (at){shms_get(by_age ? &slots[i].id : &slots[i].offset), i};
    sort(order, order + n, count);
    for (uint32_t i = 0; i < count; i++)
        out[i] = order[i].slot;
    free(order);
    return count;
}

uint32_t shms_slots_sorted(const shms_slot *slots, uint32_t n, uint32_t *out) { return occupied(slots, n, out, false); }
uint32_t shms_slots_by_age(const shms_slot *slots, uint32_t n, uint32_t *out) { return occupied(slots, n, out, true); }

int shms_slots_valid(const shms_slot *slots, uint32_t n, uint64_t capacity, uint64_t next_id) {
    uint32_t *order = malloc(((size_t)n + 1) * sizeof *order);
    uint32_t count = order ? shms_slots_sorted(slots, n, order) : SHMS_NONE;
    int rc = count == SHMS_NONE ? SHMS_ENOMEM : SHMS_OK;
    uint64_t end = 0, last = 0;
    for (uint32_t i = 0; rc == SHMS_OK && i < count; i++) {
        const shms_slot *s = &slots[order[i]];
        if (shms_get(&s->state) > SHMS_EVICTING || !shms_slot_bounded(s, capacity) || shms_get(&s->offset) < end ||
            shms_get(&s->id) >= next_id || !shms_slot_flags_valid(shms_get(&s->flags)))
            rc = SHMS_ECORRUPT;
        end = shms_slot_end(s);
    }
    if (rc == SHMS_OK && shms_slots_by_age(slots, n, order) == SHMS_NONE)
        rc = SHMS_ENOMEM;
    for (uint32_t i = 0; rc == SHMS_OK && i < count; i++) {
        uint64_t id = shms_get(&slots[order[i]].id);
        if (id <= last) /* 0, or one that another slot has */
            rc = SHMS_ECORRUPT;
        last = id;
    }
    free(order);
    return rc;
}
