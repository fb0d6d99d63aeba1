/*
 * leases.c - see leases.h.
 *
 * The order of the stores is what matters: L1 takes a number before anything names it, L2 stores it last, L3 is the
 * moment of the hand-out, and C1 clears the number first. docs/concepts/protocol.md says why, in points 3 and 4.
 */
#include "leases.h"

#include <string.h>

#include "step.h"

uint64_t shms_leases_memory(uint32_t n_entries, uint32_t n_slots) {
    return (4 * (uint64_t)n_entries + n_slots) * sizeof(uint32_t);
}

static bool is_own(const shms_leases *l, uint32_t slot) { return slot - l->base < l->n_slots; }

/* The list of a slot begins in private memory, or in the row of holds, where 0 is no entry. */
static uint32_t first_of(const shms_leases *l, uint32_t slot) {
    return is_own(l, slot) ? l->first[slot - l->base]
                           : atomic_load_explicit(&shms_holds_row(l->seg)[slot].first, memory_order_relaxed) - 1;
}
static void set_first(shms_leases *l, uint32_t slot, uint32_t entry) {
    if (is_own(l, slot)) {
        l->first[slot - l->base] = entry;
        return;
    }
    SHMS_STEP("B4"); /* or C2; release: pairs with W3f, which reads the entry that `first` names */
    atomic_store_explicit(&shms_holds_row(l->seg)[slot].first, entry + 1, memory_order_release);
}

/* For C2, which comes after C1: a writer that walks the list sees that an entry has ended, or is another slot's. */
static void set_next(shms_leases *l, uint32_t entry, uint32_t next) {
    l->next[entry] = next;
    if (is_own(l, l->slot[entry]))
        return;
    SHMS_STEP("C2"); /* release: pairs with W3f, so that its walk rarely meets an entry of another lease (W3n) */
    shms_word *what = &l->table[entry].what;
    atomic_store_explicit(what, shms_lease_with_next(shms_get(what), next + 1), memory_order_release);
}

static void link_in(shms_leases *l, uint32_t entry, uint32_t slot) {
    uint32_t first = first_of(l, slot);
    l->slot[entry] = slot;
    l->next[entry] = first;
    l->prev[entry] = first == SHMS_NONE ? SHMS_NONE : l->prev[first];
    if (first != SHMS_NONE)
        l->prev[first] = entry;
    set_first(l, slot, entry);
}

void shms_leases_init(shms_leases *l, void *memory, const shms_layout *layout, shms_writer_table *t, shms_lease *table,
                      const shms_slot *slots, const shms_segment *seg, bool keep) {
    *l = (shms_leases){.table = table,
                       .writer = t,
                       .seg = seg,
                       .base = seg ? seg->arena * (uint32_t)layout->max_objects : 0,
                       .n_entries = (uint32_t)layout->max_leases,
                       .n_slots = (uint32_t)layout->max_objects,
                       .n_groups = (uint32_t)layout->n_groups};
    l->free = memory;
    l->slot = l->free + l->n_entries;
    l->next = l->slot + l->n_entries;
    l->prev = l->next + l->n_entries;
    l->first = l->prev + l->n_entries;
    memset(l->prev, 0xff, (l->n_entries + l->n_slots) * sizeof *l->prev); /* SHMS_NONE, also in `first` */
    uint64_t open = 0;
    for (uint32_t i = l->n_entries; i-- > 0;) {
        shms_lease *e = &table[i];
        uint64_t number = shms_get(&e->number);
        uint32_t slot = shms_lease_slot(shms_get(&e->what)) - l->base;
        /* True if the writer died before L3: then nobody has the reference. */
        bool unknown = number >= shms_get(&l->writer->published) && number < shms_get(&l->writer->next_lease);
        if (number && keep && seg && slot >= l->n_slots) {
            l->slot[i] = slot + l->base;
            l->next[i] = shms_lease_next(shms_get(&e->what)) - 1;
            if (l->next[i] != SHMS_NONE)
                l->prev[l->next[i]] = i;
            open++;
            continue;
        }
        if (number && keep && !unknown && slot < l->n_slots && shms_get(&slots[slot].state) == SHMS_LIVE &&
            shms_get(&slots[slot].id) == shms_get(&e->id)) {
            link_in(l, i, slot + l->base);
            open++;
            continue;
        }
        if (number) {
            SHMS_STEP("V3"); /* not published, not live, or not to be kept */
            shms_set(&e->number, 0);
        }
        l->free[l->n_free++] = i;
    }
    SHMS_STEP("V4"); /* skips numbers that were taken and never published */
    atomic_store_explicit(&l->writer->published, shms_get(&l->writer->next_lease), memory_order_release);
    shms_set(&l->writer->open_leases, open);
}

uint32_t shms_leases_take(shms_leases *l) { return l->n_free ? l->free[--l->n_free] : SHMS_NONE; }

void shms_leases_untake(shms_leases *l, uint32_t entry) {
    if (entry != SHMS_NONE)
        l->free[l->n_free++] = entry;
}

uint64_t shms_leases_open(shms_leases *l, uint32_t entry, uint32_t slot, uint64_t id, uint32_t group, uint64_t now_ns) {
    shms_lease *e = &l->table[entry];
    uint64_t number = shms_get(&l->writer->next_lease);
    SHMS_STEP("L1"); /* before L2: a crash loses only a number */
    atomic_store_explicit(&l->writer->next_lease, number + 1, memory_order_release);
    /* orders L1, and the 0 of C1, before the stores below; pairs with the inspector's second read */
    atomic_thread_fence(memory_order_release);
    /* of a list that others walk, also the next one; first_of() - 1 is SHMS_NONE at its end */
    shms_set(&e->what, shms_lease_what(slot, false, group, is_own(l, slot) ? 0 : first_of(l, slot) + 1));
    shms_set(&e->id, id);
    shms_set(&e->opened_ns, now_ns);
    SHMS_STEP("L2"); /* release, last of the entry; pairs with W3n; R3a asks for this number */
    atomic_store_explicit(&e->number, number, memory_order_release);
    link_in(l, entry, slot);
    SHMS_STEP("L3"); /* pairs with A4: the base of a rank that attached earlier is not above this lease */
    atomic_store_explicit(&l->writer->published, number + 1, memory_order_release);
    shms_add(&l->writer->open_leases, 1);
    return number;
}

void shms_leases_hold(shms_leases *l, uint32_t entry) {
    SHMS_STEP("H1"); /* another writer reads the word at W3n, which is after B5 or waits for the pin of a hold */
    shms_word *what = &l->table[entry].what;
    shms_set(what, shms_get(what) | shms_lease_what(0, true, 0, 0));
}

void shms_leases_assign_group(shms_leases *l, uint32_t entry, uint32_t group) {
    SHMS_STEP("G1"); /* one store; whoever reads the word before it expects more ranks; it is counted after it */
    shms_word *what = &l->table[entry].what;
    shms_set(what, shms_get(what) | shms_lease_what(0, false, group, 0));
}

void shms_leases_close(shms_leases *l, uint32_t entry) {
    uint32_t slot = l->slot[entry];
    SHMS_STEP("C1"); /* pairs with R3a: a late reader acknowledges nothing */
    shms_set(&l->table[entry].number, 0);
    uint32_t first = first_of(l, slot), before = l->prev[entry], after = l->next[entry];
    if (l->prev[first] == entry)
        l->prev[first] = after;
    if (entry == first) {
        before = l->prev[first];
        set_first(l, slot, after);
    } else {
        set_next(l, before, after);
    }
    if (!is_own(l, slot)) {
        atomic_thread_fence(memory_order_seq_cst); /* C2, and then the slot's offset: see shms_holds_count */
        shms_holds_count(l->seg, slot);
    }
    if (after != SHMS_NONE)
        l->prev[after] = before;
    l->free[l->n_free++] = entry;
    shms_add(&l->writer->open_leases, (uint64_t)-1);
}

/* The slot may have another object by now, whose owner has met what this releases. After C2 the fence pairs with that of
 * shms_poll: an owner that still walks to the entry of a complete lease, and finds it moved, has stored its offset before
 * that is read here. After B5 no fence is needed: the owner has noted the zone where it met a pin alone
 * (note_transient_pin in holders.c), and a pin next to an open lease is on the object of that lease. G1 changes an
 * open lease, which keeps its object in the slot, or a complete one, which keeps nothing. */
void shms_holds_count(const shms_segment *seg, uint32_t slot) {
    const shms_layout *l = &seg->layout;
    uint64_t offset = shms_get(&shms_segment_slot(seg, slot)->offset);
    shms_word *counts = shms_segment_at(seg, l->counts_at, seg->arena), *total = &seg->writer->releases;
    if (offset < l->capacity) {
        shms_word *zone = &counts[shms_arena_of(l, slot) * shms_n_zones(l) + shms_zone_of(l, offset)];
        atomic_store_explicit(zone, shms_get(zone) + 1, memory_order_release);
    }
    atomic_store_explicit(total, shms_get(total) + 1, memory_order_release);
}

uint32_t shms_leases_next(shms_leases *l, uint32_t slot) {
    uint32_t first = first_of(l, slot);
    if (first == SHMS_NONE)
        return first;
    uint32_t entry = l->prev[first] == SHMS_NONE ? first : l->prev[first];
    l->prev[first] = l->next[entry];
    return entry;
}

int shms_leases_valid(const shms_leases *l, const shms_slot *slots, uint32_t taken) {
    uint32_t open = 0, listed = 0;
    uint64_t next = shms_get(&l->writer->next_lease);
    for (uint32_t i = 0; i < l->n_entries; i++)
        open += shms_get(&l->table[i].number) != 0;
    uint32_t all = l->seg ? shms_all_slots(&l->seg->layout) : l->n_slots;
    for (uint32_t s = 0; s < all; s++) {
        uint32_t before = SHMS_NONE, at = first_of(l, s) == SHMS_NONE ? SHMS_NONE : l->prev[first_of(l, s)];
        const shms_slot *object = l->seg ? shms_segment_slot(l->seg, s) : &slots[s];
        for (uint32_t e = first_of(l, s); e != SHMS_NONE; before = e, e = l->next[e]) {
            at = e == at ? SHMS_NONE : at;
            uint64_t number = e < l->n_entries ? shms_get(&l->table[e].number) : 0;
            uint64_t what = number ? shms_get(&l->table[e].what) : 0;
            if (number == 0 || number >= next || shms_lease_slot(what) != s || l->slot[e] != s ||
                shms_lease_group(what) > l->n_groups || (before != SHMS_NONE && l->prev[e] != before) ||
                (is_own(l, s) &&
                 (shms_get(&object->state) != SHMS_LIVE || shms_get(&object->id) != shms_get(&l->table[e].id))) ||
                shms_lease_next(what) != (is_own(l, s) ? 0 : l->next[e] + 1) || ++listed > open)
                return SHMS_ECORRUPT;
        }
        if (at != SHMS_NONE) /* it is not in the list */
            return SHMS_ECORRUPT;
    }
    for (uint32_t i = 0; i < l->n_free; i++)
        if (l->free[i] >= l->n_entries || shms_get(&l->table[l->free[i]].number))
            return SHMS_ECORRUPT;
    return next == shms_get(&l->writer->published) && listed == open && open == shms_get(&l->writer->open_leases) &&
                   open + l->n_free + taken == l->n_entries
               ? SHMS_OK
               : SHMS_ECORRUPT;
}
