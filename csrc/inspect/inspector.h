/*
 * inspector.h - what inspect.c (snapshots) and verify.c (invariants) share.
 */
#ifndef SHMS_INSPECTOR_H
#define SHMS_INSPECTOR_H

#include "inspect.h"
#include "store/readers.h"
#include "store/segment.h"

struct shms_inspector {
    shms_segment seg;
};

/* What the writer would find if it asked now: the ranks' locks, each after its epoch (W1b, W1c). */
typedef struct shms_attendance {
    bool here[SHMS_MAX_READERS]; /* the lock is held: its pins count */
    bool gone[SHMS_MAX_READERS]; /* has attached once, and the lock is free: its leases are over */
} shms_attendance;

/* Says why the handle is of no use, or that its file has been cut short since it was mapped. */
int shms_inspector_enter(const shms_inspector *i);
void shms_inspector_attend(const shms_inspector *i, shms_attendance *out);
/* One record; false: nothing is there. */
bool shms_inspector_slot(const shms_inspector *i, const shms_attendance *who, uint32_t slot, shms_slot_record *out);
bool shms_inspector_lease(const shms_inspector *i, const shms_attendance *who, uint32_t entry, shms_lease_record *out);
/* Is the object still in its slot, so that bytes read before this call were its own? */
bool shms_inspector_still(const shms_inspector *i, uint64_t slot, uint64_t id);

static inline bool shms_has_bit(const uint64_t bits[4], uint32_t r) { return bits[r / 64] >> r % 64 & 1; }
static inline bool shms_no_bits(const uint64_t bits[4]) { return !(bits[0] | bits[1] | bits[2] | bits[3]); }

#endif
