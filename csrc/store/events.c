/* events.c - see events.h. */
#include "events.h"

#include <stdlib.h>
#include <string.h>

#define KIND_SHIFT 56

static uint64_t key_of(const shms_event_cell *c) { return c->key & (UINT64_MAX >> (64 - KIND_SHIFT)); }

int shms_events_start(shms_events *e, uint64_t bytes, uint64_t at) {
    bytes = bytes < SHMS_MIN_LOG ? SHMS_MIN_LOG : bytes;
    shms_event_cell *cells = malloc(bytes);
    if (!cells)
        return SHMS_ENOMEM;
    uint64_t n = bytes / 4 / sizeof *cells; /* a quarter of the log: keys of 48 bytes fill both rings */
    *e = (shms_events){.cells = cells, .keys = (uint8_t *)(cells + n), .n_cells = n, .first = at};
    e->n_bytes = bytes - n * sizeof *cells;
    return SHMS_OK;
}

void shms_events_stop(shms_events *e) {
    free(e->cells);
    *e = (shms_events){0};
}

void shms_events_add(shms_events *e, uint64_t at, int kind, uint64_t id, const void *key, uint32_t key_len) {
    while (at - e->first >= e->n_cells ||
           (e->first != at && e->key_end + key_len - key_of(&e->cells[e->first % e->n_cells]) > e->n_bytes))
        e->first++;
    e->cells[at % e->n_cells] = (shms_event_cell){id, e->key_end | (uint64_t)kind << KIND_SHIFT};
    uint64_t start = e->key_end % e->n_bytes, room = e->n_bytes - start, first = key_len < room ? key_len : room;
    memcpy(e->keys + start, key, first);
    memcpy(e->keys, (const uint8_t *)key + first, key_len - first);
    e->key_end += key_len;
}

void shms_event_pack(uint8_t **at, int kind, uint64_t id, uint32_t key_len) {
    shms_event head = {id, (uint32_t)kind, key_len};
    memcpy(*at, &head, sizeof head);
    *at += sizeof head;
}

uint64_t shms_events_read(const shms_events *e, uint64_t from, uint64_t end, uint8_t *out, uint64_t *size) {
    uint64_t used = 0, at = from;
    for (; at < end; at++) {
        const shms_event_cell *c = &e->cells[at % e->n_cells];
        uint64_t key = key_of(c), next = at + 1 < end ? key_of(&e->cells[(at + 1) % e->n_cells]) : e->key_end;
        uint32_t len = (uint32_t)(next - key);
        if (used + sizeof(shms_event) + len > *size) {
            used = used ? used : sizeof(shms_event) + len;
            break;
        }
        uint8_t *to = out + used;
        shms_event_pack(&to, (int)(c->key >> KIND_SHIFT), c->id, len);
        uint64_t start = key % e->n_bytes, room = e->n_bytes - start, first = len < room ? len : room;
        memcpy(to, e->keys + start, first);
        memcpy(to + first, e->keys, len - first);
        used += sizeof(shms_event) + len;
    }
    *size = used;
    return at;
}
