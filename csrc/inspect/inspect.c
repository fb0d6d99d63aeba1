/*
 * inspect.c - see inspect.h: how to copy records while another process changes them.
 *
 * Three kinds of records, and how the inspector knows that a copy is consistent:
 *
 * 1. A slot. Its words change only in WRITING, except for one bit of the flags (D1) and the mark in `head`, which no record
 *    has. The writer puts a release fence between WRITING (P2) and the first of them. The inspector reads state and id, then the words, then an acquire
 *    fence, then state and id again. If it has read a word of a later object, it then sees WRITING or a later state. A
 *    later state has another id, because ids are never reused. So if LIVE and the id are the same, the words are that
 *    object's. The same holds for its bytes, since W4 comes before the first of them is reused.
 * 2. A lease entry. The number becomes 0 (C1), then a release fence follows, and then the slot and id of the next lease
 *    are stored. Numbers are never reused. So if the number is the same, the words are of one lease.
 * 3. A rank's table, and the superblock. Their words are independent counters. The epoch, or all of the words, are read
 *    twice. So two processes of a rank, or two operations of the writer, do not mix.
 *
 * Retries are bounded: the inspector does not wait for a writer that changes records faster than it can read them. The
 * hot path pays only for the two fences, which are not instructions on x86-64.
 */
#include "inspector.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "store/step.h"

static uint64_t get_acquire(const shms_word *w) { return atomic_load_explicit(w, memory_order_acquire); }

int shms_inspector_open(shms_inspector **out, const char *name, int64_t allow_uid) {
    struct shms_inspector *i = calloc(1, sizeof *i);
    if (!i)
        return SHMS_ENOMEM;
    int rc = shms_segment_open(&i->seg, name, SHMS_ROLE_INSPECTOR, &(shms_expected){.allow_uid = allow_uid});
    if (rc) {
        free(i);
        return rc;
    }
    *out = i;
    return SHMS_OK;
}

void shms_inspector_free(shms_inspector *i) {
    if (!i)
        return;
    shms_segment_close(&i->seg);
    free(i);
}

void shms_inspector_drop(shms_inspector **i) { shms_inspector_free(*i); }

const uint8_t *shms_inspector_bytes(const shms_inspector *i, const shms_slot_record *s) {
    const shms_layout *l = &i->seg.layout;
    return i->seg.all_data + shms_address(l, shms_arena_of(l, (uint32_t)s->slot), s->offset);
}

int shms_inspector_enter(const shms_inspector *i) {
    struct stat st;
    if (!i)
        return SHMS_ECLOSED;
    if (atomic_load_explicit(&i->seg.forked, memory_order_relaxed))
        return SHMS_EFORKED;
    if (fstat(i->seg.fd, &st))
        return SHMS_ESYS;
    return (uint64_t)st.st_size < i->seg.layout.file_size ? SHMS_ECORRUPT : SHMS_OK;
}

int shms_inspector_who_is_alive(const shms_inspector *i, shms_liveness *out) {
    int rc = shms_inspector_enter(i);
    if (rc)
        return rc;
    for (uint32_t r = 0; r < i->seg.layout.n_readers; r++) {
        uint64_t epoch = atomic_load_explicit(&shms_segment_reader(&i->seg, r)->epoch, memory_order_seq_cst);
        out->here[r] = shms_segment_held(&i->seg, (int)r);
        out->gone[r] = epoch > 0 && !out->here[r];
    }
    for (uint32_t w = 0; w < i->seg.layout.n_writers; w++)
        out->writer_gone[w] = !shms_segment_held(&i->seg, SHMS_ROLE_OF_WRITER(w));
    return SHMS_OK;
}

static int enter_arena(const shms_inspector *i, uint64_t arena) {
    int rc = shms_inspector_enter(i);
    return rc == SHMS_OK && arena >= i->seg.layout.n_writers ? SHMS_EINVAL : rc;
}

static void read_facts(const shms_inspector *i, uint32_t arena, shms_facts *out) {
    const shms_layout *l = &i->seg.layout;
    const shms_superblock *sb = i->seg.sb;
    const shms_writer_table *t = shms_segment_writer(&i->seg, arena);
    *out = (shms_facts){.store = sb->store,
                        .created_ns = sb->created_ns,
                        .file_size = l->file_size,
                        .capacity = l->capacity,
                        .max_object_size = l->max_object_size,
                        .max_objects = l->max_objects,
                        .max_leases = l->max_leases,
                        .n_readers = l->n_readers,
                        .n_writers = l->n_writers,
                        .flags = l->flags,
                        .control_bytes = l->readers_at + l->n_readers * l->reader_stride,
                        .device = i->seg.dev,
                        .inode = i->seg.ino,
                        .writer_pid = shms_get(&t->pid),
                        .writer_epoch = shms_get(&t->epoch),
                        .next_id = shms_get(&t->next_id),
                        .next_lease = shms_get(&t->next_lease),
                        .hand = shms_get(&t->hand),
                        .used_bytes = shms_get(&t->used_bytes),
                        .objects = shms_get(&t->objects)};
    shms_words_read(t->counters, &out->counters, sizeof out->counters);
    shms_words_read(t->tier, &out->tier, sizeof out->tier);
    memcpy(out->group_of, l->group_of, sizeof out->group_of);
    for (uint32_t r = 0; r < l->n_readers; r++) {
        const shms_reader_table *rank = shms_segment_reader(&i->seg, r);
        out->finds += shms_get(&rank->counters[SHMS_R(finds)]);
        out->find_misses += shms_get(&rank->counters[SHMS_R(find_misses)]);
    }
}

int shms_inspector_facts(shms_inspector *i, uint64_t arena, shms_facts *out) {
    shms_facts again;
    int rc = enter_arena(i, arena);
    if (rc)
        return rc;
    read_facts(i, (uint32_t)arena, out);
    bool steady = false;
    for (int t = 0; t < SHMS_INSPECT_TRIES && !steady; t++) {
        SHMS_LOOK("facts");
        atomic_thread_fence(memory_order_acquire);
        read_facts(i, (uint32_t)arena, &again);
        steady = memcmp(out, &again, sizeof again) == 0;
        *out = again;
    }
    out->writer_alive = shms_segment_held(&i->seg, SHMS_ROLE_OF_WRITER(arena));
    out->owner_pid = shms_segment_held(&i->seg, SHMS_ROLE_OF_WRITER(SHMS_OWNER)) ? i->seg.sb->owner : 0;
    out->moving = !steady;
    return SHMS_OK;
}

static void set_bit(uint64_t bits[4], uint32_t r) { bits[r / 64] |= UINT64_C(1) << r % 64; }

bool shms_inspector_slot(const shms_inspector *i, const shms_liveness *who, uint32_t slot, shms_slot_record *out) {
    const shms_layout *l = &i->seg.layout;
    const shms_slot *s = shms_segment_slot(&i->seg, slot);
    for (int t = 0;; t++) {
        uint64_t state = get_acquire(&s->state), id = get_acquire(&s->id);
        if (state == SHMS_FREE)
            return false;
        SHMS_LOOK("slot");
        shms_slot copy = shms_slot_copy(s, id);
        uint64_t flags = shms_get(&copy.flags);
        *out = (shms_slot_record){.slot = slot,
                                  .writer = shms_arena_of(l, slot),
                                  .state = state,
                                  .id = id,
                                  .offset = shms_get(&copy.offset),
                                  .length = shms_get(&copy.length),
                                  .key_len = shms_slot_key_len(&copy),
                                  .meta_len = shms_slot_meta_len(&copy),
                                  .extra_len = shms_slot_extra_len(&copy),
                                  .put_ns = state == SHMS_WRITING ? 0 : shms_get(&s->put_ns),
                                  .deleted = (flags & SHMS_SLOT_DELETED) != 0,
                                  .checked = (flags & SHMS_SLOT_CHECKED) != 0,
                                  .kind = flags >> SHMS_SLOT_KIND_SHIFT & SHMS_SLOT_KIND_MASK,
                                  .crc = flags >> SHMS_SLOT_CRC_SHIFT,
                                  .bounded = shms_get(&shms_segment_writer(&i->seg, shms_arena_of(l, slot))->epoch) &&
                                             shms_slot_bounded(&copy, l->capacity)};
        out->span = out->bounded ? shms_span(out->length) : 0;
        for (uint32_t r = 0; r < l->n_readers; r++)
            if (who->here[r] &&
                shms_pin_count(&shms_reader_pins(shms_segment_reader(&i->seg, r))[slot], memory_order_relaxed))
                set_bit(out->pinned, r);
        atomic_thread_fence(memory_order_acquire);
        bool steady = get_acquire(&s->state) == state && get_acquire(&s->id) == id;
        if (steady || t == SHMS_INSPECT_TRIES) {
            out->moving = !steady || state == SHMS_WRITING;
            return true;
        }
    }
}

/* The same check as the writer's W1 (shms_lease_done in holders.c). */
static bool is_expected(const shms_inspector *i, const shms_liveness *who, uint32_t r, uint32_t entry, uint64_t number,
                        uint64_t what) {
    uint32_t writer = entry / (uint32_t)i->seg.layout.max_leases;
    return shms_reader_expected(shms_segment_reader(&i->seg, r), &i->seg.layout, r, writer,
                                shms_get(&shms_segment_writer(&i->seg, writer)->retired[r]), entry, number, what) &&
           !who->gone[r];
}

bool shms_inspector_lease(const shms_inspector *i, const shms_liveness *who, uint32_t entry, shms_lease_record *out) {
    const shms_lease *e = shms_segment_lease(&i->seg, entry);
    uint32_t writer = entry / (uint32_t)i->seg.layout.max_leases;
    for (int t = 0;; t++) {
        uint64_t number = get_acquire(&e->number);
        if (number == 0)
            return false;
        SHMS_LOOK("lease");
        uint64_t what = shms_get(&e->what);
        uint32_t owner = shms_arena_of(&i->seg.layout, shms_lease_slot(what));
        *out = (shms_lease_record){.entry = entry,
                                   .writer = writer,
                                   .number = number,
                                   .slot = shms_lease_slot(what),
                                   .owner = owner,
                                   .is_void = owner != writer && who->writer_gone[writer],
                                   .held = shms_lease_held(what),
                                   .group = shms_lease_group(what),
                                   .id = shms_get(&e->id),
                                   .opened_ns = shms_get(&e->opened_ns)};
        for (uint32_t r = 0; r < i->seg.layout.n_readers; r++)
            if (!out->is_void && is_expected(i, who, r, entry, number, what))
                set_bit(out->owed, r);
        atomic_thread_fence(memory_order_acquire);
        bool steady = get_acquire(&e->number) == number;
        if (steady || t == SHMS_INSPECT_TRIES) {
            out->moving = !steady;
            return true;
        }
    }
}

/* Entries in use lie in front, as for shms_reclaim_open, and the writer counts them. One that died may have opened a
 * lease that it has not counted, so all of its entries are read. */
int64_t shms_inspector_open_leases(shms_inspector *i, uint64_t arena) {
    shms_liveness who;
    shms_lease_record e;
    int64_t open = 0;
    int rc = shms_inspector_who_is_alive(i, &who);
    if (rc || arena >= i->seg.layout.n_writers)
        return rc ? rc : SHMS_EINVAL;
    uint64_t n_entries = i->seg.layout.max_leases;
    uint64_t in_use = shms_get(&shms_segment_writer(&i->seg, (uint32_t)arena)->open_leases);
    for (uint64_t k = 0; k < n_entries && (in_use || who.writer_gone[arena]); k++)
        if (shms_inspector_lease(i, &who, (uint32_t)(arena * n_entries + k), &e)) {
            in_use -= in_use > 0;
            open += shms_lease_waits(&e);
        }
    return open;
}

int64_t shms_inspector_slots(shms_inspector *i, uint64_t *at, shms_slot_record *out, uint64_t room) {
    shms_liveness who;
    uint64_t n = 0;
    int rc = shms_inspector_who_is_alive(i, &who);
    if (rc)
        return rc;
    for (; *at < shms_all_slots(&i->seg.layout) && n < room; ++*at)
        n += shms_inspector_slot(i, &who, (uint32_t)*at, &out[n]);
    return (int64_t)n;
}

int64_t shms_inspector_leases(shms_inspector *i, uint64_t *at, shms_lease_record *out, uint64_t room) {
    shms_liveness who;
    uint64_t n = 0;
    int rc = shms_inspector_who_is_alive(i, &who);
    if (rc)
        return rc;
    for (; *at < shms_all_leases(&i->seg.layout) && n < room; ++*at)
        n += shms_inspector_lease(i, &who, (uint32_t)*at, &out[n]);
    return (int64_t)n;
}

int shms_inspector_kinds(shms_inspector *i, uint64_t arena, shms_kind_info *out) {
    int rc = enter_arena(i, arena);
    for (int k = 0; rc == SHMS_OK && k < SHMS_KINDS; k++)
        shms_kind_read(&shms_segment_writer(&i->seg, (uint32_t)arena)->kinds[k], &out[k]);
    return rc;
}

/* Has every writer that there has been retired the rank's process of that epoch? */
static bool is_retired(const shms_inspector *i, uint32_t r, uint64_t epoch) {
    bool all = false;
    for (uint32_t w = 0; w < i->seg.layout.n_writers; w++) {
        const shms_writer_table *t = shms_segment_writer(&i->seg, w);
        if (shms_get(&t->epoch) == 0)
            continue;
        if (shms_get(&t->retired[r]) != epoch + 1)
            return false;
        all = true;
    }
    return all;
}

static void read_rank(const shms_inspector *i, uint32_t r, shms_rank_record *out) {
    shms_reader_table *t = shms_segment_reader(&i->seg, r);
    uint64_t pins = 0;
    for (uint32_t k = 0; k < shms_all_slots(&i->seg.layout); k++)
        pins += shms_pin_count(&shms_reader_pins(t)[k], memory_order_relaxed);
    for (int tries = 0;; tries++) {
        uint64_t epoch = get_acquire(&t->epoch);
        SHMS_LOOK("rank");
        *out = (shms_rank_record){.rank = r,
                                  .group = i->seg.layout.group_of[r],
                                  .alive = shms_segment_held(&i->seg, (int)r),
                                  .pid = shms_get(&t->pid),
                                  .epoch = epoch,
                                  .attached_ns = shms_get(&t->attached_ns),
                                  .retired = is_retired(i, r, epoch),
                                  .closed = shms_get(&t->base[0]) == SHMS_CLOSED,
                                  .pins = pins};
        shms_words_read(t->counters, &out->counters, sizeof out->counters);
        atomic_thread_fence(memory_order_acquire);
        bool steady = get_acquire(&t->epoch) == epoch;
        if (steady || tries == SHMS_INSPECT_TRIES) {
            out->moving = !steady;
            return;
        }
    }
}

/* Sums what the ranks hold. It reads each lease once, then each slot. A rank that reads an object goes from owed to
 * pinned, in the same order, so nothing that it holds is missed. `owed`, zeroed by the caller, is for the ranks that
 * the leases of each slot expect. An object counts once for each rank, even if several of its leases expect that
 * rank. */
static void sum_holdings(const shms_inspector *i, const shms_liveness *who, uint64_t (*owed)[4],
                         shms_rank_record *out) {
    const shms_layout *l = &i->seg.layout;
    shms_lease_record e;
    shms_slot_record s;
    for (uint32_t k = 0; k < shms_all_leases(l); k++) {
        if (!shms_inspector_lease(i, who, k, &e))
            continue;
        for (uint32_t r = 0; r < l->n_readers; r++)
            if (shms_has_bit(e.owed, r)) {
                out[r].owed_leases++;
                if (out[r].oldest_owed_ns == 0 || e.opened_ns < out[r].oldest_owed_ns)
                    out[r].oldest_owed_ns = e.opened_ns;
            }
        for (int word = 0; e.slot < shms_all_slots(l) && word < 4; word++)
            owed[e.slot][word] |= e.owed[word];
    }
    for (uint32_t k = 0; k < shms_all_slots(l); k++) {
        if (!shms_inspector_slot(i, who, k, &s))
            continue;
        for (uint32_t r = 0; r < l->n_readers; r++) {
            bool pinned = shms_has_bit(s.pinned, r), expected = shms_has_bit(owed[k], r);
            out[r].pinned_objects += pinned;
            out[r].pinned_bytes += pinned ? s.span : 0;
            out[r].owed_bytes += expected ? s.span : 0;
            out[r].held_bytes += pinned || expected ? s.span : 0;
        }
    }
}

int shms_inspector_ranks(shms_inspector *i, shms_rank_record *out) {
    shms_liveness who;
    int rc = shms_inspector_who_is_alive(i, &who);
    if (rc)
        return rc;
    uint64_t (*owed)[4] = calloc(shms_all_slots(&i->seg.layout), sizeof *owed);
    if (!owed)
        return SHMS_ENOMEM;
    for (uint32_t r = 0; r < i->seg.layout.n_readers; r++)
        read_rank(i, r, &out[r]);
    sum_holdings(i, &who, owed, out);
    free(owed);
    return SHMS_OK;
}

int shms_inspector_object(const shms_inspector *i, uint64_t slot, uint64_t id, shms_slot_record *out) {
    static const shms_liveness nobody;
    int rc = shms_inspector_enter(i);
    if (rc)
        return rc;
    if (slot >= shms_all_slots(&i->seg.layout))
        return SHMS_EINVAL;
    if (!shms_inspector_slot(i, &nobody, (uint32_t)slot, out) || out->id != id || out->moving)
        return SHMS_ESTALE;
    return out->bounded ? SHMS_OK : SHMS_ECORRUPT;
}

int shms_inspector_copy(shms_inspector *i, uint64_t slot, uint64_t id, uint64_t from, uint64_t size, uint8_t *out) {
    shms_slot_record s;
    int rc = shms_inspector_object(i, slot, id, &s);
    if (rc)
        return rc;
    if (from > s.length || size > s.length - from)
        return SHMS_EINVAL;
    SHMS_LOOK("copy");
    memcpy(out, shms_inspector_bytes(i, &s) + from, size);
    return shms_still_there(&i->seg, (uint32_t)slot, id) ? SHMS_OK : SHMS_ESTALE;
}
