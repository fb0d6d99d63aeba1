/*
 * ring.c - see ring.h.
 *
 * Why a search ends, and misses nothing.  It visits at most `count` objects a lap, a second lap only where the first
 * stepped over something merely for having been used, and then goes on while a run is unbroken, at most to the end of
 * the region: so a run that lies across the hand is seen whole.  That holds also where the last object of the lap is a
 * held one: the gap behind it is the hand's (the object in front of the hand may be gone), and the first step saw only
 * the part beyond the hand.  Every maximal run begins right behind a held object or at offset 0, and the search starts
 * a new run at each of these.
 */
#include "ring.h"

#include <string.h>

uint64_t shms_ring_memory(uint32_t n_slots) { return (uint64_t)n_slots * (2 * sizeof(uint32_t) + 1); }

void shms_ring_init(shms_ring *r, void *memory, uint32_t n_slots, const shms_slot *slots, uint64_t capacity, bool fifo,
                    uint64_t hand, const uint32_t *order, uint32_t count) {
    *r = (shms_ring){.slots = slots, .first = SHMS_NONE, .last = SHMS_NONE, .hand_next = SHMS_NONE,
                     .count = count, .capacity = capacity, .fifo = fifo};
    r->next = memory;
    r->prev = r->next + n_slots;
    r->used = (uint8_t *)(r->prev + n_slots);
    memset(r->used, 0, n_slots);
    for (uint32_t i = 0; i < count; i++) {
        r->prev[order[i]] = i ? order[i - 1] : SHMS_NONE;
        r->next[order[i]] = i + 1 < count ? order[i + 1] : SHMS_NONE;
    }
    if (count) {
        r->first = order[0];
        r->last = order[count - 1];
    }
    /* A hand that a dying writer left inside an object goes to its end. */
    r->hand = hand <= capacity && hand % SHMS_ALIGN == 0 ? hand : 0;
    for (uint32_t i = 0; i < count && r->hand_next == SHMS_NONE; i++) {
        const shms_slot *s = &slots[order[i]];
        if (shms_get(&s->offset) >= r->hand)
            r->hand_next = order[i];
        else if (shms_slot_end(s) > r->hand)
            r->hand = shms_slot_end(s);
    }
}

bool shms_ring_find(const shms_ring *r, uint64_t span, bool need_slot, bool (*may_go)(void *, uint32_t), void *context,
                    shms_place *out) {
    uint64_t start = r->hand, gap = start, visited = 0, laps = 1;
    uint32_t cur = r->hand_next, wraps = 0;
    bool found = false;
    *out = (shms_place){.first = SHMS_NONE, .extra = SHMS_NONE, .behind = SHMS_NONE};
    if (span > r->capacity)
        return false;
    for (;;) {
        uint64_t end = cur == SHMS_NONE ? r->capacity : shms_get(&r->slots[cur].offset);
        if (!found && end - start >= span) {
            found = true;
            if (!need_slot && end - gap >= span) { /* the last gap alone will do: nothing has to go */
                start = gap;
                out->victims = 0;
                out->first = SHMS_NONE;
            }
            out->at = start;
            if (out->victims)
                out->extra = SHMS_NONE;
            /* `extra` may have been met on the way out, in front of the gap that is found on the way back. */
            out->behind = cur != SHMS_NONE && cur == out->extra ? r->next[cur] : cur;
            out->passed = (uint32_t)visited - out->victims - (out->extra != SHMS_NONE);
        }
        if (found && (!need_slot || out->victims || out->extra != SHMS_NONE))
            return true;
        if (cur == SHMS_NONE) {
            if (++wraps == 3)
                return false;
            start = gap = 0;
            cur = r->first;
            if (!found) {
                out->victims = 0;
                out->first = SHMS_NONE;
            }
            continue;
        }
        bool goes = may_go(context, cur);
        if (goes && visited < r->count && r->used[cur] && !r->fifo) {
            laps = 2;
            goes = false;
        }
        visited++;
        gap = shms_slot_end(&r->slots[cur]);
        if (goes && need_slot && out->extra == SHMS_NONE)
            out->extra = cur;
        if (found) { /* the bytes are there, a slot is still wanted */
            if (goes && cur == out->behind)
                out->behind = r->next[cur];
        } else if (goes) {
            if (out->victims++ == 0)
                out->first = cur;
        } else {
            start = gap;
            out->victims = 0;
            out->first = SHMS_NONE;
        }
        /* Once round, only a run in progress is worth going on for; the one behind the last object of the lap, too. */
        if (!goes && visited > laps * r->count)
            return false;
        cur = r->next[cur];
    }
}

void shms_ring_insert(shms_ring *r, const shms_place *place, uint32_t slot) {
    uint32_t behind = r->hand_next;
    for (uint32_t i = 0; i < place->passed && i < r->count; i++) { /* the hand goes by */
        if (behind == SHMS_NONE)
            behind = r->first;
        r->used[behind] = 0;
        behind = r->next[behind];
    }
    behind = place->behind;
    uint32_t before = behind == SHMS_NONE ? r->last : r->prev[behind];
    r->prev[slot] = before;
    r->next[slot] = behind;
    if (before != SHMS_NONE)
        r->next[before] = slot;
    else
        r->first = slot;
    if (behind != SHMS_NONE)
        r->prev[behind] = slot;
    else
        r->last = slot;
    r->used[slot] = 0;
    r->count++;
    r->hand = shms_slot_end(&r->slots[slot]);
    r->hand_next = behind;
}

void shms_ring_remove(shms_ring *r, uint32_t slot) {
    uint32_t before = r->prev[slot], behind = r->next[slot];
    if (before != SHMS_NONE)
        r->next[before] = behind;
    else
        r->first = behind;
    if (behind != SHMS_NONE)
        r->prev[behind] = before;
    else
        r->last = before;
    if (r->hand_next == slot)
        r->hand_next = behind;
    r->count--;
}

int shms_ring_valid(const shms_ring *r, uint32_t n_slots) {
    uint32_t count = 0, before = SHMS_NONE, hand_next = SHMS_NONE;
    uint64_t end = 0;
    for (uint32_t s = r->first; s != SHMS_NONE; before = s, s = r->next[s]) {
        if (s >= n_slots || ++count > r->count || r->prev[s] != before || !shms_slot_bounded(&r->slots[s], r->capacity) ||
            shms_get(&r->slots[s].state) == SHMS_FREE || shms_get(&r->slots[s].offset) < end)
            return SHMS_ECORRUPT;
        if (hand_next == SHMS_NONE && shms_get(&r->slots[s].offset) >= r->hand)
            hand_next = s;
        if (shms_get(&r->slots[s].offset) < r->hand && shms_slot_end(&r->slots[s]) > r->hand)
            return SHMS_ECORRUPT; /* the hand lies inside an object */
        end = shms_slot_end(&r->slots[s]);
    }
    return count == r->count && before == r->last && hand_next == r->hand_next && r->hand <= r->capacity ? SHMS_OK
                                                                                                     : SHMS_ECORRUPT;
}
