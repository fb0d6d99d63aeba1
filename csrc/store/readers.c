/*
 * readers.c - the steps of a rank, with the labels of the protocol. docs/concepts/protocol.md has the argument.
 */
#include "readers.h"

#include "step.h"

static const shms_writer_table *of_writer(const shms_writer_table *first, const shms_layout *l, uint32_t w) {
    return (const shms_writer_table *)((const uint8_t *)first + w * l->arena_stride);
}

void shms_reader_table_attach(shms_reader_table *t, const shms_layout *l, const shms_writer_table *w, uint32_t rank,
                              bool finds, uint64_t pid, uint64_t now_ns) {
    shms_pin *pins = shms_reader_pins(t);
    uint64_t epoch = shms_get(&t->epoch);
    SHMS_STEP("A2"); /* release: orders the reads of the dead predecessor before the reset; pairs with W3 */
    for (uint32_t i = 0; i < shms_all_slots(l); i++)
        if (shms_pin_count(&pins[i], memory_order_relaxed))
            atomic_store_explicit(&pins[i], atomic_load_explicit(&pins[i], memory_order_relaxed) & ~SHMS_PIN_COUNT,
                                  memory_order_release);
    /* a number that is not taken yet would make R3b, a maximum, drop the real one */
    for (uint32_t o = 0; o < l->n_writers; o++) {
        shms_word *acks = shms_reader_acks(t, l) + o * l->max_leases;
        uint64_t next_lease = shms_get(&of_writer(w, l, o)->next_lease);
        for (uint64_t i = 0; i < l->max_leases; i++)
            if (shms_get(&acks[i]) >= next_lease)
                shms_set(&acks[i], 0);
    }
    shms_set(&t->pid, pid);
    shms_set(&t->attached_ns, now_ns);
    /* pairs with W1b, which reads the epoch before W1c probes the lock, held since A1; and with T2 */
    SHMS_STEP("A3"); /* from here on a free lock means a death; pairs with T2 */
    atomic_store_explicit(&t->epoch, epoch + 1, memory_order_seq_cst);
    for (uint32_t o = 0; o < l->n_writers; o++) {
        SHMS_STEP("A4"); /* `retired` pairs with T1, `published` with L3, `base` with W1a */
        const shms_writer_table *by = of_writer(w, l, o);
        bool rebase = epoch > 0 || atomic_load_explicit(&by->retired[rank], memory_order_seq_cst) == epoch + 1;
        uint64_t base = rebase ? shms_get(&by->published) : 0;
        atomic_store_explicit(&t->base[o], finds ? SHMS_FINDS : base, memory_order_release);
    }
}

void shms_reader_table_close(shms_reader_table *t, const shms_layout *l) {
    for (uint32_t w = 0; w < l->n_writers; w++) {
        SHMS_STEP("E1"); /* pairs with W1a: no lease waits for a closed rank, and its pins stay */
        atomic_store_explicit(&t->base[w], SHMS_CLOSED, memory_order_release);
    }
}

/* Counts a release. The count follows the release itself, and is a release store; the writer reads it before it
 * scans. */
static void count_release(shms_reader_table *t, const shms_layout *l, uint32_t i, uint64_t offset) {
    if (offset < l->capacity) /* a slot in WRITING may have any offset */
        atomic_fetch_add_explicit(&shms_reader_zone_releases(t, l, shms_arena_of(l, i))[shms_zone_of(l, offset)], 1,
                                  memory_order_release);
    atomic_fetch_add_explicit(&t->releases, 1, memory_order_release);
}

enum shms_state shms_reader_table_pin(shms_reader_table *t, const shms_layout *l, const shms_slot *slot, uint32_t i,
                                      uint64_t id) {
    SHMS_STEP("R1"); /* pairs with W3: before R2a, so that one of the two sees the other */
    atomic_fetch_add_explicit(&shms_reader_pins(t)[i], 1, memory_order_seq_cst);
    SHMS_STEP("R2a"); /* pairs with W2: not LIVE means that the owner may not have seen the pin */
    uint64_t state = atomic_load_explicit(&slot->state, memory_order_seq_cst);
    SHMS_STEP("R2b"); /* after R2a: if LIVE was seen, an id that matches is the id of the live object */
    if (shms_get(&slot->id) == id && (state == SHMS_LIVE || state == SHMS_EVICTING))
        return (enum shms_state)state;
    shms_reader_table_unpin_failed(t, l, slot, i);
    return SHMS_FREE;
}

void shms_reader_table_use(shms_reader_table *t, const shms_slot *slot, uint32_t i) {
    shms_pin *pin = &shms_reader_pins(t)[i];
    uint32_t mark = shms_slot_mark(slot) << SHMS_PIN_MARK_SHIFT, seen = atomic_load_explicit(pin, memory_order_relaxed);
    while ((seen & ~SHMS_PIN_COUNT) != mark && /* relaxed: the pin goes on as it was */
           !atomic_compare_exchange_weak_explicit(pin, &seen, mark | (seen & SHMS_PIN_COUNT), memory_order_relaxed,
                                                  memory_order_relaxed))
        continue;
}

static void unpin(shms_reader_table *t, uint32_t i) {
    SHMS_STEP("R4"); /* pairs with W3: what the views read comes before the reuse of the bytes */
    atomic_fetch_sub_explicit(&shms_reader_pins(t)[i], 1, memory_order_release);
}

void shms_reader_table_unpin(shms_reader_table *t, const shms_layout *l, uint32_t i, uint64_t offset) {
    unpin(t, i);
    count_release(t, l, i, offset);
}

/* The pin may have been seen on an object that came into the slot in the meantime. So the offset is read after R4.
 * Either that object is still in the slot, or the writer has removed it and has marked its zone itself. */
void shms_reader_table_unpin_failed(shms_reader_table *t, const shms_layout *l, const shms_slot *slot, uint32_t i) {
    unpin(t, i);
    atomic_thread_fence(memory_order_seq_cst);
    count_release(t, l, i, shms_get(&slot->offset));
}

int shms_reader_table_ack(shms_reader_table *t, const shms_layout *l, const shms_lease *lease, uint32_t entry,
                          uint64_t number, uint32_t i, uint64_t offset) {
    SHMS_STEP("R3a"); /* pairs with L2 and C1: an old reference must not acknowledge the entry's next lease */
    if (shms_get(&lease->number) != number)
        return 0;
    shms_word *ack = &shms_reader_acks(t, l)[entry];
    /* pairs with W1a; a maximum, so that a thread that slept since R3a does not undo a newer one */
    SHMS_STEP("R3b"); /* after R1: whoever sees the acknowledgement sees the pin */
    uint64_t seen = atomic_load_explicit(ack, memory_order_relaxed);
    while (seen < number)
        if (atomic_compare_exchange_weak_explicit(ack, &seen, number, memory_order_release, memory_order_relaxed)) {
            count_release(t, l, i, offset);
            return 1;
        }
    return 0;
}
