/*
 * outlast.h - waits until the owner of an object in EVICTING has decided; the caller has pinned the object.
 */
#ifndef SHMS_OUTLAST_H
#define SHMS_OUTLAST_H

#include "segment.h"

/* SHMS_OK: the object stays. SHMS_ESTALE: it is gone. SHMS_EBUSY: the owner has not decided for a second, or if the caller
 * is not `patient`, for 1,000 turns: it was stopped. `slot` has its number of all arenas. */
int shms_outlast_eviction(const shms_segment *seg, uint32_t slot, uint64_t id, bool patient);

#endif
