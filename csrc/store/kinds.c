/* kinds.c - see kinds.h. */
#include "kinds.h"

#include <stdlib.h>

static uint32_t kind_of(const shms_kinds *k, uint32_t slot) { return shms_slot_kind(&k->slots[slot]); }
static uint64_t span_of(const shms_kinds *k, uint32_t slot) { return shms_span(shms_get(&k->slots[slot].length)); }

/* The list of the slot's kind, or NULL if that has no quota. */
static shms_kind_list *list_of(shms_kinds *k, uint32_t slot) {
    uint32_t kind = kind_of(k, slot);
    return shms_get(&k->table[kind].quota) ? &k->lists[kind] : NULL;
}

static void append(shms_kinds *k, shms_kind_list *l, uint32_t slot) {
    k->next[slot] = SHMS_NONE;
    k->prev[slot] = l->last;
    *(l->last == SHMS_NONE ? &l->first : &k->next[l->last]) = slot;
    l->last = slot;
    l->count++;
}

static void unlink_slot(shms_kinds *k, shms_kind_list *l, uint32_t slot) {
    uint32_t before = k->prev[slot], behind = k->next[slot];
    *(before == SHMS_NONE ? &l->first : &k->next[before]) = behind;
    *(behind == SHMS_NONE ? &l->last : &k->prev[behind]) = before;
    l->count--;
}

static void count(shms_kind *kind, uint64_t bytes, uint64_t objects) {
    shms_add(&kind->bytes, bytes);
    shms_add(&kind->objects, objects);
}

void shms_kinds_enter(shms_kinds *k, uint32_t slot) {
    shms_kind_list *l = list_of(k, slot);
    count(&k->table[kind_of(k, slot)], span_of(k, slot), 1);
    if (l)
        append(k, l, slot);
}

void shms_kinds_leave(shms_kinds *k, uint32_t slot) {
    shms_kind_list *l = list_of(k, slot);
    count(&k->table[kind_of(k, slot)], -span_of(k, slot), -UINT64_C(1));
    if (l)
        unlink_slot(k, l, slot);
}

int shms_kinds_build(shms_kinds *k, uint32_t n_slots, uint64_t *allocated) {
    bool quotas = false;
    for (uint32_t kind = 0; kind < SHMS_KINDS; kind++)
        quotas |= shms_get(&k->table[kind].quota) != 0;
    for (uint32_t s = 0; s < n_slots; s++)
        if (shms_get(&k->slots[s].state) != SHMS_FREE && kind_of(k, s) && !shms_kind_named(&k->table[kind_of(k, s)]))
            return SHMS_ECORRUPT;
    uint32_t *order = malloc(((size_t)n_slots + 1) * sizeof *order);
    uint32_t n = order ? shms_slots_by_age(k->slots, n_slots, order) : SHMS_NONE;
    uint32_t *links = quotas && !k->next ? malloc(2 * (size_t)n_slots * sizeof *links) : k->next;
    if (n == SHMS_NONE || (quotas && !links)) {
        if (links != k->next)
            free(links);
        free(order);
        return SHMS_ENOMEM;
    }
    if (links != k->next)
        *allocated += 2 * (uint64_t)n_slots * sizeof *links;
    k->next = links;
    k->prev = links ? links + n_slots : NULL;
    for (uint32_t kind = 0; kind < SHMS_KINDS; kind++) {
        shms_set(&k->table[kind].bytes, 0);
        shms_set(&k->table[kind].objects, 0);
        k->lists[kind] = (shms_kind_list){SHMS_NONE, SHMS_NONE, 0};
    }
    for (uint32_t i = 0; i < n; i++)
        shms_kinds_enter(k, order[i]);
    free(order);
    return SHMS_OK;
}

void shms_kinds_begin(const shms_kinds *k, shms_kind_choice *c, uint32_t kind, uint64_t span) {
    uint32_t count = k->lists[kind].count;
    *c = (shms_kind_choice){.kind = kind, .span = span, .left = count, .skips = count, .changes = k->ring->changes};
}

/* Visits one object. False: it has moved to the end. */
static bool visit(shms_kinds *k, shms_kind_choice *c, uint32_t slot, shms_evictable_fn *evictable, void *context) {
    if (c->skips && shms_ring_is_used(k->ring, slot)) {
        uint64_t before = k->ring->changes;
        shms_ring_pass(k->ring, slot);
        c->changes += k->ring->changes - before;
        c->skips--;
    } else if (evictable(context, slot)) {
        return true;
    } else {
        c->left--;
    }
    unlink_slot(k, &k->lists[c->kind], slot);
    append(k, &k->lists[c->kind], slot);
    return false;
}

int shms_kinds_choose(shms_kinds *k, shms_kind_choice *c, shms_evictable_fn *evictable, void *context, uint32_t n_ranks,
                      int64_t *budget) {
    uint64_t over = shms_kinds_over(k, c->kind, c->span);
    c->n = 0;
    c->found = 0;
    for (uint32_t s = k->lists[c->kind].first, next; s != SHMS_NONE && c->found < over && c->n < c->left; s = next) {
        next = k->next[s];
        if (*budget <= 0)
            return -1;
        *budget -= n_ranks;
        if (visit(k, c, s, evictable, context)) {
            c->found += span_of(k, s);
            c->n++;
        } else if (next == SHMS_NONE) { /* the last one has become the last one */
            next = s;
        }
    }
    return c->found >= over;
}

int shms_kinds_valid(const shms_kinds *k, uint32_t n_slots) {
    uint64_t bytes[SHMS_KINDS] = {0}, objects[SHMS_KINDS] = {0};
    for (uint32_t s = 0; s < n_slots; s++)
        if (shms_get(&k->slots[s].state) != SHMS_FREE) {
            bytes[kind_of(k, s)] += span_of(k, s);
            objects[kind_of(k, s)]++;
        }
    for (uint32_t kind = 0; kind < SHMS_KINDS; kind++) {
        const shms_kind *t = &k->table[kind];
        const shms_kind_list *l = &k->lists[kind];
        bool listed = shms_get(&t->quota) != 0;
        if (bytes[kind] != shms_get(&t->bytes) || objects[kind] != shms_get(&t->objects) ||
            (kind && objects[kind] && !shms_kind_named(t)) || l->count != (listed ? objects[kind] : 0))
            return SHMS_ECORRUPT;
        uint32_t before = SHMS_NONE, n = 0;
        for (uint32_t s = l->first; s != SHMS_NONE; before = s, s = k->next[s], n++)
            if (s >= n_slots || k->prev[s] != before || kind_of(k, s) != kind ||
                shms_get(&k->slots[s].state) == SHMS_FREE)
                return SHMS_ECORRUPT;
        if (n != l->count || before != l->last)
            return SHMS_ECORRUPT;
    }
    return SHMS_OK;
}
