/*
 * inspector.h - what inspect.c (snapshots) and verify.c (invariants) share.
 */
#ifndef SHMS_INSPECTOR_H
#define SHMS_INSPECTOR_H

#include "inspect.h"
#include "store/find.h"
#include "store/readers.h"
#include "store/segment.h"

struct shms_inspector {
    shms_segment seg;
};

/* What a writer would find now: each rank's lock, probed after its epoch was read (W1b, W1c), and each writer's. */
typedef struct shms_liveness {
    bool here[SHMS_MAX_READERS]; /* the lock is held, so its pins count */
    bool gone[SHMS_MAX_READERS]; /* attached once, and the lock is free, so no lease expects it */
    bool writer_gone[SHMS_MAX_WRITERS]; /* the lock is free, so its leases on objects of others are void */
} shms_liveness;

/* Returns an error if the handle cannot be used, or if its file was truncated after it was mapped. */
int shms_inspector_enter(const shms_inspector *i);
/* The same, and who is there. */
int shms_inspector_who_is_alive(const shms_inspector *i, shms_liveness *out);
/* Reads one record. False: the slot or entry is free. */
bool shms_inspector_slot(const shms_inspector *i, const shms_liveness *who, uint32_t slot, shms_slot_record *out);
bool shms_inspector_lease(const shms_inspector *i, const shms_liveness *who, uint32_t entry, shms_lease_record *out);
/* Reads the slot of an object whose bytes the caller will read. SHMS_EINVAL, SHMS_ESTALE, SHMS_ECORRUPT. */
int shms_inspector_object(const shms_inspector *i, uint64_t slot, uint64_t id, shms_slot_record *out);
/* Where the object of a bounded record starts. */
const uint8_t *shms_inspector_bytes(const shms_inspector *i, const shms_slot_record *s);

/* Does a rank or its writer keep it? */
static inline bool shms_lease_waits(const shms_lease_record *e) {
    return !e->is_void && (e->held || e->owed[0] | e->owed[1] | e->owed[2] | e->owed[3]);
}

static inline bool shms_has_bit(const uint64_t bits[4], uint32_t r) { return bits[r / 64] >> r % 64 & 1; }

#endif
