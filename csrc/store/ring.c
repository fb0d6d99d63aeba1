/*
 * ring.c - see ring.h.
 *
 * The second chance. `used` holds the lap of the object's zone at its last use. The object counts as used as long as
 * its zone is in that lap. So a hand that passes a zone of a thousand objects ends all their second chances with one
 * increment.
 */
#include "ring.h"

#include <string.h>

/* Fractions of the capacity. */
#define SMALL_AREA 128    /* the area for small objects is at least 1/128, and at most twice that */
#define SMALL_OBJECT 4096 /* a small object is at most 1/4096 */

#define USED_BEFORE UINT8_MAX /* in an earlier lap; the laps are below it */

uint64_t shms_ring_memory(uint32_t n_slots, uint32_t n_zones) {
    return n_zones * sizeof(shms_zone) + (uint64_t)n_slots * (2 * sizeof(uint32_t) + 1);
}

static void enter_zones(shms_ring *r, uint32_t slot) {
    shms_ring_stale_slot(r, slot);
    for (uint32_t z = shms_ring_zone(r, shms_ring_start(r, slot)); z <= shms_ring_zone(r, shms_ring_end(r, slot) - 1);
         z++) {
        shms_zone *zone = &r->zones[z];
        zone->moved = true;
        if (zone->first == SHMS_NONE || shms_ring_start(r, zone->first) > shms_ring_start(r, slot))
            zone->first = slot;
    }
}

static uint32_t area_start(const shms_ring *r, enum shms_area_name area) {
    return shms_ring_at(r, r->areas[area].from);
}

/* Sets the hand of an area. If the offset is inside an object, the hand goes to the end of that object. */
static void set_hand(shms_ring *r, enum shms_area_name name, uint64_t hand) {
    shms_area *area = &r->areas[name];
    hand = hand % SHMS_ALIGN == 0 && hand >= area->from && hand <= area->to ? hand : area->from;
    area->hand_next = hand < r->capacity ? shms_ring_at(r, hand) : SHMS_NONE;
    if (area->hand_next != SHMS_NONE && shms_ring_start(r, area->hand_next) < hand) {
        hand = shms_ring_end(r, area->hand_next);
        area->hand_next = r->next[area->hand_next];
    }
    area->hand = hand < area->to ? hand : area->to;
}

/* Splits the area for small objects off the area for large ones. Large objects in it are evicted when small ones
 * come. */
static void split(shms_ring *r, uint64_t hand) {
    uint64_t at = shms_zone_start(r, shms_ring_zone(r, r->capacity - r->capacity / SMALL_AREA));
    r->areas[SHMS_LARGE].to = r->areas[SHMS_SMALL].from = at;
    set_hand(r, SHMS_SMALL, hand);
    if (r->areas[SHMS_LARGE].hand > at)
        set_hand(r, SHMS_LARGE, at);
}

void shms_ring_init(shms_ring *r, void *memory, const shms_layout *l, const shms_slot *slots, const uint64_t hands[2],
                    const uint32_t *order, uint32_t count) {
    uint32_t n_slots = (uint32_t)l->max_objects;
    *r = (shms_ring){.slots = slots,
                     .first = SHMS_NONE,
                     .last = SHMS_NONE,
                     .n_zones = shms_n_zones(l),
                     .zone_shift = (uint32_t)l->zone_shift,
                     .capacity = l->capacity,
                     .changes = 1};
    r->zones = memory;
    r->next = (uint32_t *)(r->zones + r->n_zones);
    r->prev = r->next + n_slots;
    r->used = (uint8_t *)(r->prev + n_slots);
    for (uint32_t z = 0; z < r->n_zones; z++)
        r->zones[z] = (shms_zone){.first = SHMS_NONE, .stale = true, .moved = true, .lap = 1};
    for (uint32_t i = 0; i < count; i++) {
        r->prev[order[i]] = i ? order[i - 1] : SHMS_NONE;
        r->next[order[i]] = i + 1 < count ? order[i + 1] : SHMS_NONE;
        enter_zones(r, order[i]);
    }
    r->count = count;
    if (count) {
        r->first = order[0];
        r->last = order[count - 1];
    }
    /* else a zone would be too large a fraction */
    r->small = r->n_zones >= SMALL_AREA / 2 ? r->capacity / SMALL_OBJECT : 0;
    r->areas[SHMS_LARGE] = (shms_area){.to = r->capacity, .gap = r->capacity};
    r->areas[SHMS_SMALL] = (shms_area){.from = r->capacity, .to = r->capacity, .hand = r->capacity, .gap = r->capacity};
    set_hand(r, SHMS_LARGE, hands[SHMS_LARGE]);
    set_hand(r, SHMS_SMALL, r->capacity);
    for (uint32_t i = 0; i < count; i++)
        if (shms_ring_end(r, order[i]) - shms_ring_start(r, order[i]) <= r->small) {
            split(r, hands[SHMS_SMALL]);
            break;
        }
}

uint32_t shms_ring_at(const shms_ring *r, uint64_t at) {
    for (uint32_t z = shms_ring_zone(r, at); z < r->n_zones; z++)
        for (uint32_t s = r->zones[z].first; s != SHMS_NONE; s = r->next[s])
            if (shms_ring_end(r, s) > at)
                return s;
    return SHMS_NONE;
}

uint64_t shms_ring_gap(const shms_ring *r, enum shms_area_name name) {
    const shms_area *area = &r->areas[name];
    uint64_t end = area->hand_next == SHMS_NONE ? area->to : shms_ring_start(r, area->hand_next);
    return (end < area->to ? end : area->to) - area->hand;
}

/* `s`, or the first object of the area if `s` lies after the area. SHMS_NONE: the area has no object. */
static uint32_t wrapped(const shms_ring *r, enum shms_area_name name, uint32_t s) {
    const shms_area *area = &r->areas[name];
    if (s == SHMS_NONE || shms_ring_start(r, s) >= area->to)
        s = area_start(r, name);
    return s == SHMS_NONE || shms_ring_start(r, s) >= area->to ? SHMS_NONE : s;
}

/* The object that the area's hand reaches next. SHMS_NONE: the area has no object. */
static uint32_t next_victim(const shms_ring *r, enum shms_area_name name) {
    return wrapped(r, name, r->areas[name].hand_next);
}

uint32_t shms_ring_victim(shms_ring *r, enum shms_level level, uint32_t limit, shms_evictable_fn *evictable,
                          void *context) {
    uint32_t oldest = SHMS_NONE;
    for (int a = 0; a < SHMS_AREAS; a++) {
        uint32_t first = next_victim(r, a), s = first, left = limit;
        while (s != SHMS_NONE && ((level == SHMS_LEVEL_COLD && shms_ring_is_used(r, s)) || !evictable(context, s))) {
            s = wrapped(r, a, r->next[s]);
            if (--left == 0 || s == first)
                s = SHMS_NONE;
        }
        if (s != SHMS_NONE && (oldest == SHMS_NONE || shms_get(&r->slots[s].id) < shms_get(&r->slots[oldest].id)))
            oldest = s;
    }
    return oldest;
}

enum shms_area_name shms_ring_area(shms_ring *r, uint64_t span) {
    const shms_area *large = &r->areas[SHMS_LARGE];
    if (span > r->small)
        return SHMS_LARGE;
    if (large->to == r->capacity)
        split(r, 0);
    if (shms_ring_gap(r, SHMS_SMALL) >= span)
        return SHMS_SMALL;
    bool last = large->hand_next == SHMS_NONE || shms_ring_start(r, large->hand_next) >= large->to;
    /* free room: next to the other small objects, or room to spare */
    if (shms_ring_gap(r, SHMS_LARGE) >= (last ? span : r->capacity / SMALL_AREA))
        return SHMS_LARGE;
    uint32_t here = next_victim(r, SHMS_SMALL), there = next_victim(r, SHMS_LARGE);
    if (here == SHMS_NONE || there == SHMS_NONE) /* an area without objects has room */
        return here == SHMS_NONE ? SHMS_SMALL : SHMS_LARGE;
    return shms_get(&r->slots[here].id) <= shms_get(&r->slots[there].id) ? SHMS_SMALL : SHMS_LARGE;
}

bool shms_ring_near(shms_ring *r, enum shms_area_name name, enum shms_level level, uint32_t limit,
                    shms_evictable_fn *evictable, void *context, shms_place *place) {
    const shms_area *area = &r->areas[name];
    uint64_t start = area->hand, gap = start;
    uint32_t s = area->hand_next, first = s; /* first object of the run */
    bool wrapped = false;
    for (uint32_t left = limit < r->count ? limit : r->count;;) {
        uint64_t end = s == SHMS_NONE || shms_ring_start(r, s) > area->to ? area->to : shms_ring_start(r, s);
        if (end > gap && end - gap >= place->span) { /* the last gap is enough: no object has to go */
            place->at = gap;
            place->first = s;
            return true;
        }
        if (end > start && end - start >= place->span) {
            place->at = start;
            place->first = first;
            return true;
        }
        if (s == SHMS_NONE || shms_ring_start(r, s) >= area->to) {
            if (wrapped)
                return false;
            wrapped = true;
            start = gap = area->from;
            first = s = area_start(r, name);
            if (s != SHMS_NONE && shms_ring_start(r, s) < start) { /* it extends into the area */
                start = gap = shms_ring_end(r, s);
                first = s = r->next[s];
            }
            continue;
        }
        if (left-- == 0)
            return false;
        gap = shms_ring_end(r, s);
        bool fits = (level == SHMS_LEVEL_ANY || !shms_ring_is_used(r, s)) && evictable(context, s);
        s = r->next[s];
        if (!fits) {
            start = gap;
            first = s;
        }
    }
}

/* Notes a gap that is not at a hand, or not any more. */
static void note_gap(shms_ring *r, uint64_t from, uint64_t to) {
    for (int a = 0; to > from && a < SHMS_AREAS; a++) {
        shms_area *area = &r->areas[a];
        uint64_t start = from > area->from ? from : area->from, end = to < area->to ? to : area->to;
        if (end > start && end - start > area->gap)
            area->gap = end - start;
    }
}

void shms_ring_insert(shms_ring *r, uint32_t slot, uint32_t behind) {
    uint32_t before = behind == SHMS_NONE ? r->last : r->prev[behind];
    uint64_t start = shms_ring_start(r, slot), end = shms_ring_end(r, slot);
    if (r->used_remotely)
        r->used_remotely(r->context, slot); /* the objects before it */
    r->prev[slot] = before;
    r->next[slot] = behind;
    *(before == SHMS_NONE ? &r->first : &r->next[before]) = slot;
    *(behind == SHMS_NONE ? &r->last : &r->prev[behind]) = slot;
    r->used[slot] = 0;
    r->count++;
    enter_zones(r, slot);
    note_gap(r, before == SHMS_NONE ? 0 : shms_ring_end(r, before), start);
    for (int a = 0; a < SHMS_AREAS; a++) {
        shms_area *area = &r->areas[a];
        if (area->hand_next != behind || end <= area->hand)
            continue;
        if (start >= area->hand) {
            area->hand_next = slot;
        } else { /* the object covers the hand, which was in a gap */
            area->hand = end < area->to ? end : area->to;
        }
    }
}

/* Ends the second chance of the objects that begin within [from, to). */
static void end_second_chances(shms_ring *r, uint64_t from, uint64_t to) {
    for (uint64_t at = from, end; at < to; at = end) {
        uint32_t z = shms_ring_zone(r, at);
        shms_zone *zone = &r->zones[z];
        end = shms_zone_start(r, z + 1);
        if (!zone->uses)
            continue;
        for (uint32_t k = z; k == z || (k < r->n_zones && r->zones[k].first != SHMS_NONE &&
                                        shms_ring_start(r, r->zones[k].first) < end);
             k++)
            shms_ring_stale(r, k); /* the last object that begins here may extend far */
        bool whole = at == shms_zone_start(r, z) && end <= to;
        if (whole) {
            zone->uses = false;
            if (zone->lap++ < USED_BEFORE - 1)
                continue;
            zone->lap = 1; /* laps start again, so no old lap may match */
        }
        for (uint32_t s = zone->first; s != SHMS_NONE && shms_ring_start(r, s) < (end < to ? end : to); s = r->next[s])
            if (shms_ring_start(r, s) >= at)
                r->used[s] = r->used[s] ? USED_BEFORE : 0;
    }
}

void shms_ring_move_hand(shms_ring *r, enum shms_area_name name, uint32_t slot, bool lap) {
    shms_area *area = &r->areas[name];
    uint64_t start = shms_ring_start(r, slot), end = shms_ring_end(r, slot);
    note_gap(r, area->hand, area->hand_next == SHMS_NONE ? area->to : shms_ring_start(r, area->hand_next));
    if (lap) {
        end_second_chances(r, area->from, area->to);
    } else if (start >= area->hand) {
        end_second_chances(r, area->hand, start);
    } else {
        end_second_chances(r, area->hand, area->to);
        end_second_chances(r, area->from, start);
    }
    area->hand = end < area->to ? end : area->to;
    area->hand_next = r->next[slot];
}

void shms_ring_cut(shms_ring *r, uint32_t first, uint32_t last, uint32_t n) {
    uint32_t before = r->prev[first], behind = r->next[last];
    uint64_t start = shms_ring_start(r, first), end = shms_ring_end(r, last);
    for (uint32_t z = shms_ring_zone(r, start); z <= shms_ring_zone(r, end - 1); z++) {
        shms_zone *zone = &r->zones[z];
        shms_ring_stale(r, z);
        zone->moved = true;
        if (zone->first != SHMS_NONE && shms_ring_start(r, zone->first) >= start)
            zone->first =
                behind != SHMS_NONE && shms_ring_start(r, behind) < shms_zone_start(r, z + 1) ? behind : SHMS_NONE;
    }
    for (int a = 0; a < SHMS_AREAS; a++) {
        uint32_t s = r->areas[a].hand_next;
        if (s != SHMS_NONE && shms_ring_start(r, s) >= start && shms_ring_start(r, s) < end)
            r->areas[a].hand_next = behind;
    }
    r->count -= n;
    *(before == SHMS_NONE ? &r->first : &r->next[before]) = behind;
    *(behind == SHMS_NONE ? &r->last : &r->prev[behind]) = before;
}

void shms_ring_gap_before(shms_ring *r, uint32_t behind) {
    uint32_t before = behind == SHMS_NONE ? r->last : r->prev[behind];
    note_gap(r, before == SHMS_NONE ? 0 : shms_ring_end(r, before),
             behind == SHMS_NONE ? r->capacity : shms_ring_start(r, behind));
}

void shms_ring_remove(shms_ring *r, uint32_t slot) {
    shms_ring_cut(r, slot, slot, 1);
    shms_ring_gap_before(r, r->next[slot]);
}

void shms_ring_use(shms_ring *r, uint32_t slot) {
    shms_zone *zone = &r->zones[shms_ring_zone(r, shms_ring_start(r, slot))];
    r->used[slot] = zone->lap;
    zone->uses = true;
    shms_ring_stale_slot(r, slot); /* a process that is handed the object also holds it */
}

bool shms_ring_is_used(shms_ring *r, uint32_t slot) {
    if (r->used_remotely && r->used_remotely(r->context, slot)) { /* counts from now on, and until the hand passes */
        shms_zone *zone = &r->zones[shms_ring_zone(r, shms_ring_start(r, slot))];
        r->used[slot] = zone->lap;
        zone->uses = true;
    }
    return r->used[slot] == r->zones[shms_ring_zone(r, shms_ring_start(r, slot))].lap;
}

void shms_ring_pass(shms_ring *r, uint32_t slot) {
    r->used[slot] = USED_BEFORE;
    shms_ring_stale_slot(r, slot);
}

int shms_ring_valid(const shms_ring *r, uint32_t n_slots) {
    uint32_t count = 0, before = SHMS_NONE, z = 0;
    uint64_t end = 0;
    for (uint32_t s = r->first; s != SHMS_NONE; before = s, s = r->next[s]) {
        if (s >= n_slots || r->prev[s] != before || !shms_slot_bounded(&r->slots[s], r->capacity) ||
            shms_get(&r->slots[s].state) == SHMS_FREE || shms_ring_start(r, s) < end)
            return SHMS_ECORRUPT;
        count++;
        end = shms_ring_end(r, s);
        for (; z < r->n_zones && shms_zone_start(r, z) < end; z++)
            if (r->zones[z].first != (shms_ring_start(r, s) < shms_zone_start(r, z + 1) ? s : SHMS_NONE))
                return SHMS_ECORRUPT;
    }
    for (; z < r->n_zones; z++)
        if (r->zones[z].first != SHMS_NONE)
            return SHMS_ECORRUPT;
    for (int a = 0; a < SHMS_AREAS; a++) {
        const shms_area *area = &r->areas[a];
        uint32_t next = area->hand < r->capacity ? shms_ring_at(r, area->hand) : SHMS_NONE;
        if (next != SHMS_NONE && shms_ring_start(r, next) < area->hand) {
            if (area->hand < area->to)
                return SHMS_ECORRUPT; /* the hand lies inside an object */
            next = r->next[next];
        }
        if (area->hand < area->from || area->hand > area->to || next != area->hand_next)
            return SHMS_ECORRUPT;
    }
    return count == r->count && before == r->last ? SHMS_OK : SHMS_ECORRUPT;
}
