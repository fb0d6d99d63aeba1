/* inspections.h - every call that looks at a segment through an inspector. */
#ifndef SHMS_TEST_INSPECTIONS_H
#define SHMS_TEST_INSPECTIONS_H

#include "inspect/inspect.h"
#include "support.h"

enum { INSPECTIONS = 9 };

/* Makes the nth of them: of arena 0, and of object 1 in slot 0, which has a checksum. */
static inline int64_t inspection(shms_inspector *i, int nth) {
    static shms_slot_record slots[8];
    static shms_lease_record leases[8];
    static shms_rank_record ranks[SHMS_MAX_READERS];
    static shms_kind_info kinds[SHMS_KINDS];
    static shms_finding findings[8];
    shms_facts facts;
    uint8_t byte;
    switch (nth) {
    case 0:
        return shms_inspector_facts(i, 0, &facts);
    case 1:
        return shms_inspector_open_leases(i, 0);
    case 2:
        return shms_inspector_ranks(i, ranks);
    case 3:
        return shms_inspector_slots(i, &(uint64_t){0}, slots, 8);
    case 4:
        return shms_inspector_leases(i, &(uint64_t){0}, leases, 8);
    case 5:
        return shms_inspector_kinds(i, 0, kinds);
    case 6:
        return shms_inspector_copy(i, 0, 1, 0, 1, &byte);
    case 7:
        return shms_inspector_verify(i, findings, 8);
    default:
        return shms_inspector_check(i, 0, 1, &findings[0]);
    }
}

#endif
