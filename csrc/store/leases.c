/*
 * leases.c - see leases.h.
 *
 * The order of the stores is what matters here:
 * 1. L1 takes the number before anything names it. If the writer dies after L1, one number is lost. If it published
 *    first, its successor would use the number again. A rank's old acknowledgement would then answer for a lease that
 *    the rank has never seen.
 * 2. L2 stores the number last. So a successor, and a reader in R3a, never see a number with another lease's slot.
 * 3. L3 is the moment of the hand-out. A rank whose A4 reads `published` before L3 is expected by the lease; a rank
 *    that attaches later is not. The reference goes out only after L3.
 * 4. C1 clears the number first. From then on slot and id mean nothing.
 */
#include "leases.h"

#include "step.h"

uint64_t shms_leases_memory(uint32_t n_entries, uint32_t n_slots) {
    return (4 * (uint64_t)n_entries + n_slots) * sizeof(uint32_t);
}

static void link_in(shms_leases *l, uint32_t entry, uint32_t slot) {
    l->slot[entry] = slot;
    l->next[entry] = l->first[slot];
    l->prev[entry] = SHMS_NONE;
    if (l->first[slot] != SHMS_NONE)
        l->prev[l->first[slot]] = entry;
    l->first[slot] = entry;
}

void shms_leases_init(shms_leases *l, void *memory, const shms_layout *layout, shms_superblock *sb, shms_lease *table,
                      const shms_slot *slots) {
    *l = (shms_leases){.table = table,
                       .next_lease = &sb->next_lease,
                       .published = &sb->published,
                       .open = &sb->open_leases,
                       .n_entries = (uint32_t)layout->max_leases,
                       .n_slots = (uint32_t)layout->max_objects};
    l->free = memory;
    l->slot = l->free + l->n_entries;
    l->next = l->slot + l->n_entries;
    l->prev = l->next + l->n_entries;
    l->first = l->prev + l->n_entries;
    for (uint32_t i = 0; i < l->n_slots; i++)
        l->first[i] = SHMS_NONE;
    uint64_t open = 0;
    for (uint32_t i = l->n_entries; i-- > 0;) {
        shms_lease *e = &table[i];
        uint64_t number = shms_get(&e->number), slot = shms_lease_slot(e);
        /* True if the writer died before L3: then nobody has the reference. */
        bool unknown = number >= shms_get(l->published) && number < shms_get(l->next_lease);
        if (number && !unknown && slot < l->n_slots && shms_get(&slots[slot].state) == SHMS_LIVE &&
            shms_get(&slots[slot].id) == shms_get(&e->id)) {
            link_in(l, i, (uint32_t)slot);
            open++;
            continue;
        }
        if (number) {
            SHMS_STEP("V3");
            atomic_store_explicit(&e->number, 0, memory_order_release);
        }
        l->free[l->n_free++] = i;
    }
    SHMS_STEP("V4"); /* skips numbers that were taken and never published */
    atomic_store_explicit(l->published, shms_get(l->next_lease), memory_order_seq_cst);
    shms_set(l->open, open);
}

uint32_t shms_leases_take(shms_leases *l) { return l->n_free ? l->free[--l->n_free] : SHMS_NONE; }

void shms_leases_untake(shms_leases *l, uint32_t entry) { l->free[l->n_free++] = entry; }

uint64_t shms_leases_open(shms_leases *l, uint32_t entry, uint32_t slot, uint64_t id, uint64_t now_ns) {
    shms_lease *e = &l->table[entry];
    uint64_t number = shms_get(l->next_lease);
    SHMS_STEP("L1");
    atomic_store_explicit(l->next_lease, number + 1, memory_order_release);
    atomic_thread_fence(
        /* orders L1, and the 0 of C1, before the stores below; pairs with the inspector's second read */
        memory_order_release);
    shms_set(&e->slot, slot);
    shms_set(&e->id, id);
    shms_set(&e->opened_ns, now_ns);
    SHMS_STEP("L2"); /* release; pairs with R3a */
    atomic_store_explicit(&e->number, number, memory_order_release);
    SHMS_STEP("L3"); /* pairs with A4: the base of a rank that attached earlier is not above this lease */
    atomic_store_explicit(l->published, number + 1, memory_order_seq_cst);
    link_in(l, entry, slot);
    shms_add(l->open, 1);
    return number;
}

void shms_leases_hold(shms_leases *l, uint32_t entry) {
    SHMS_STEP("H1"); /* only the writer, its successor and inspectors read the word */
    shms_set(&l->table[entry].slot, l->slot[entry] | SHMS_LEASE_HELD);
}

void shms_leases_close(shms_leases *l, uint32_t entry) {
    uint32_t slot = l->slot[entry];
    SHMS_STEP("C1"); /* pairs with R3a: a late reader acknowledges nothing */
    atomic_store_explicit(&l->table[entry].number, 0, memory_order_release);
    if (l->prev[entry] != SHMS_NONE)
        l->next[l->prev[entry]] = l->next[entry];
    else
        l->first[slot] = l->next[entry];
    if (l->next[entry] != SHMS_NONE)
        l->prev[l->next[entry]] = l->prev[entry];
    l->free[l->n_free++] = entry;
    shms_add(l->open, (uint64_t)-1);
}

int shms_leases_valid(const shms_leases *l, const shms_slot *slots, uint32_t taken) {
    uint32_t open = 0, listed = 0;
    uint64_t next = shms_get(l->next_lease);
    for (uint32_t i = 0; i < l->n_entries; i++)
        open += shms_get(&l->table[i].number) != 0;
    for (uint32_t s = 0; s < l->n_slots; s++) {
        uint32_t before = SHMS_NONE;
        for (uint32_t e = l->first[s]; e != SHMS_NONE; before = e, e = l->next[e]) {
            uint64_t number = e < l->n_entries ? shms_get(&l->table[e].number) : 0;
            if (number == 0 || number >= next || shms_lease_slot(&l->table[e]) != s || l->slot[e] != s ||
                l->prev[e] != before || shms_get(&slots[s].state) != SHMS_LIVE ||
                shms_get(&slots[s].id) != shms_get(&l->table[e].id) || ++listed > open)
                return SHMS_ECORRUPT;
        }
    }
    for (uint32_t i = 0; i < l->n_free; i++)
        if (l->free[i] >= l->n_entries || shms_get(&l->table[l->free[i]].number))
            return SHMS_ECORRUPT;
    return next == shms_get(l->published) && listed == open && open == shms_get(l->open) &&
                   open + l->n_free + taken == l->n_entries
               ? SHMS_OK
               : SHMS_ECORRUPT;
}
