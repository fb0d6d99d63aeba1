/*
 * events.h - the log of what came into the store and what left it: a key and an id an event.
 *
 * A position is the microsecond in which the store was created, and a number of events since. So a position of a store
 * that was removed is below those of one that was created later, unless the clock was set back in between: then only the
 * store's number tells them apart. The writer table has the number already: each put,
 * eviction and delete is counted there. Each recovery counts, too, because a death may have swallowed the count of an event. So a
 * position of an earlier writer is always below the start of this writer's log: its listener is told.
 *
 * The log is two rings: cells of 16 bytes, one an event, and the bytes of the keys. If one of them is full, the oldest
 * events go. So recording never fails and never allocates. Nothing is recorded until somebody asks for a log.
 */
#ifndef SHMS_EVENTS_H
#define SHMS_EVENTS_H

#include <stdbool.h>
#include <stdint.h>

#include "core.h"

typedef struct shms_event_cell {
    uint64_t id;
    uint64_t key; /* position of its first byte among all bytes of keys so far; the kind is in the highest byte */
} shms_event_cell;

typedef struct shms_events {
    shms_event_cell *cells; /* NULL: there is no log */
    uint8_t *keys;
    uint64_t n_cells, n_bytes;
    uint64_t first;   /* position of the oldest event in the log */
    uint64_t key_end; /* of the last event's key */
} shms_events;

/* Makes a log of `bytes` bytes, at least SHMS_MIN_LOG, which starts at position `at`. SHMS_ENOMEM. */
int shms_events_start(shms_events *e, uint64_t bytes, uint64_t at);
void shms_events_stop(shms_events *e);
/* Records the event at position `at`, which follows that of the event before it. */
void shms_events_add(shms_events *e, uint64_t at, int kind, uint64_t id, const void *key, uint32_t key_len);
/* Copies whole events from position `from` on, which the log has, and returns the position behind them. *size is the
 * room, and is set to the bytes used, or to those that the first event needs. */
uint64_t shms_events_read(const shms_events *e, uint64_t from, uint64_t end, uint8_t *out, uint64_t *size);
/* Packs one event; *at moves behind it. */
void shms_event_pack(uint8_t **at, int kind, uint64_t id, uint32_t key_len);

#endif
