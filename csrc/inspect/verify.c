/*
 * verify.c - checks the invariants of a segment from outside.
 *
 * The writer's own checks (shms_slots_valid and its like) answer only yes or no, under the mutex. These report what and
 * where, and take no lock. So a pass may combine halves of different moments.
 *
 * 1. Several passes run, some time apart. Only a finding that is in each of them, in the same place and with the same
 *    value, counts. A healthy store that is working changes its values.
 * 2. A word that must stay below a counter (an id, a number, an acknowledgement) is read before the counter.
 * 3. A writer may die or stop between two stores. It leaves sums that do not agree, leases of objects that were removed, or
 *    that are not in the list of their holds, an index that is not complete, and a slot in WRITING or EVICTING. `recover`
 *    repairs all of that. The two states are not findings; the others are. The caller knows whether the writer runs, and
 *    so what they mean. While it runs, the caller looks again for as long as a busy machine may keep it from going on.
 *    Leases of a dead writer on objects of others are void, so their objects may have been removed.
 */
#include "inspector.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "store/crc.h"
#include "store/index.h"
#include "store/step.h"

#define PAUSE_NS 2000000 /* between passes */

typedef struct findings {
    shms_finding *out;
    uint64_t n, room;
} findings;

static void add(findings *f, uint64_t kind, uint32_t arena, uint64_t where, uint64_t value, uint64_t expected) {
    if (f->n < f->room)
        f->out[f->n++] =
            (shms_finding){.kind = kind, .arena = arena, .where = where, .value = value, .expected = expected};
}

typedef struct object {
    uint64_t slot, offset, end, id;
    uint64_t key_hash, key_len;
    bool keyed;
} object;

static int compare(uint64_t x, uint64_t y) { return x < y ? -1 : x > y; }
static int by_offset(const void *a, const void *b) {
    return compare(((const object *)a)->offset, ((const object *)b)->offset);
}
static int by_id(const void *a, const void *b) { return compare(((const object *)a)->id, ((const object *)b)->id); }
static int by_key(const void *a, const void *b) {
    const object *x = a, *y = b;
    return x->keyed != y->keyed ? (x->keyed ? -1 : 1) : compare(x->key_hash, y->key_hash);
}
static int by_number(const void *a, const void *b) {
    return compare(((const shms_lease_record *)a)->number, ((const shms_lease_record *)b)->number);
}

static uint64_t next_id(const shms_writer_table *t) { return atomic_load_explicit(&t->next_id, memory_order_acquire); }
static uint64_t next_lease(const shms_writer_table *t) {
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&t->next_lease, memory_order_acquire);
}

/* Checks one slot by itself. Returns whether it can be compared with other slots. */
static bool check_slot(const shms_inspector *i, const shms_writer_table *t, const shms_slot_record *s, uint64_t flags,
                       findings *f) {
    uint32_t arena = (uint32_t)s->writer;
    uint64_t limit = next_id(t), kind = flags >> SHMS_SLOT_KIND_SHIFT & SHMS_SLOT_KIND_MASK;
    if (s->state > SHMS_EVICTING) {
        add(f, SHMS_F_STATE, arena, s->slot, s->state, 0);
        return false;
    }
    if (s->moving)
        return false;
    if (s->id == 0 || s->id >= limit)
        add(f, SHMS_F_ID, arena, s->slot, s->id, limit);
    if (!shms_slot_flags_valid(flags))
        add(f, SHMS_F_FLAGS, arena, s->slot, flags, 0);
    else if (kind && !shms_kind_named(&t->kinds[kind]))
        add(f, SHMS_F_KIND, arena, s->slot, kind, 0);
    if (!s->bounded || s->length > i->seg.layout.max_object_size) {
        add(f, SHMS_F_BOUNDS, arena, s->slot, s->offset, s->length);
        return false;
    }
    if (s->key_len == 0 || s->key_len > SHMS_MAX_KEY)
        add(f, SHMS_F_KEY, arena, s->slot, s->key_len, SHMS_MAX_KEY);
    return true;
}

/* Would another writer find the object by its key? A key is in the index before its object is LIVE, and is removed after
 * it has been deleted or evicted. */
static bool is_indexed(const shms_inspector *i, const shms_slot_record *s, uint64_t hash) {
    uint32_t n_slots = (uint32_t)i->seg.layout.max_objects, slot;
    const shms_index x = shms_index_shape(n_slots, 0);
    shms_candidates c =
        shms_index_look(&x, shms_segment_at(&i->seg, i->seg.layout.index_at, (uint32_t)s->writer), hash);
    do
        slot = shms_candidates_next(&c);
    while (slot != SHMS_NONE && slot != s->slot % n_slots);
    return slot != SHMS_NONE;
}

static void check_slots(const shms_inspector *i, const shms_liveness *who, uint32_t arena, object *objects,
                        findings *f) {
    const shms_writer_table *t = shms_segment_writer(&i->seg, arena);
    const uint8_t *data = i->seg.all_data + shms_address(&i->seg.layout, arena, 0);
    uint32_t n_slots = (uint32_t)i->seg.layout.max_objects;
    uint64_t used = 0, occupied = 0, kinds[SHMS_SLOT_KIND_MASK + 1][2] = {0}; /* bytes, slots */
    size_t n = 0;
    for (uint32_t k = arena * n_slots; k < (arena + 1) * n_slots; k++) {
        shms_slot_record s;
        if (!shms_inspector_slot(i, who, k, &s))
            continue;
        uint64_t flags = shms_get(&shms_segment_slot(&i->seg, k)->flags);
        used += s.span;
        occupied += s.state != SHMS_WRITING;
        kinds[s.kind][0] += s.span;
        kinds[s.kind][1]++;
        if (!check_slot(i, t, &s, flags, f))
            continue;
        uint64_t hash = shms_hash_key(i->seg.sb->secret, (const char *)data + s.offset, (uint32_t)s.key_len);
        if (s.state == SHMS_LIVE && !s.deleted && !is_indexed(i, &s, hash))
            add(f, SHMS_F_INDEX, arena, k, s.id, 0);
        objects[n++] = (object){.slot = k,
                                .offset = s.offset,
                                .end = s.offset + s.span,
                                .id = s.id,
                                .key_hash = hash,
                                .key_len = s.key_len,
                                .keyed = !s.deleted};
    }
    qsort(objects, n, sizeof *objects, by_offset);
    for (size_t k = 1, widest = 0; k < n; k++) { /* widest: the object before k that extends furthest */
        if (objects[k].offset < objects[widest].end)
            add(f, SHMS_F_OVERLAP, arena, objects[k].slot, objects[widest].slot, 0);
        if (objects[k].end > objects[widest].end)
            widest = k;
    }
    qsort(objects, n, sizeof *objects, by_id);
    for (size_t k = 1; k < n; k++)
        if (objects[k].id == objects[k - 1].id)
            add(f, SHMS_F_SAME_ID, arena, objects[k].slot, objects[k - 1].slot, objects[k].id);
    qsort(objects, n, sizeof *objects, by_key);
    for (size_t k = 1; k < n && objects[k].keyed; k++)
        if (objects[k].key_hash == objects[k - 1].key_hash && objects[k].key_len == objects[k - 1].key_len &&
            memcmp(data + objects[k].offset, data + objects[k - 1].offset, objects[k].key_len) == 0)
            add(f, SHMS_F_SAME_KEY, arena, objects[k].slot, objects[k - 1].slot, 0);
    uint64_t said = shms_get(&t->used_bytes);
    if (said != used)
        add(f, SHMS_F_USED, arena, 0, said, used);
    said = shms_get(&t->objects);
    if (said != occupied)
        add(f, SHMS_F_OBJECTS, arena, 0, said, occupied);
    for (uint32_t k = 0; k < SHMS_KINDS; k++) {
        uint64_t bytes = shms_get(&t->kinds[k].bytes), slots = shms_get(&t->kinds[k].objects);
        if (bytes != kinds[k][0])
            add(f, SHMS_F_KIND_BYTES, arena, k, bytes, kinds[k][0]);
        if (slots != kinds[k][1])
            add(f, SHMS_F_KIND_OBJECTS, arena, k, slots, kinds[k][1]);
    }
}

/* Walks the lists of a writer's leases on objects of others, as their owners do (W3f). Sets `listed` for the entries, and
 * checks the pin. */
static void check_holds(const shms_inspector *i, uint32_t writer, bool *listed, findings *f) {
    const shms_layout *l = &i->seg.layout;
    uint32_t n_entries = (uint32_t)l->max_leases;
    uint64_t pinning = shms_get(&shms_segment_writer(&i->seg, writer)->pinning);
    if (pinning && (pinning > shms_all_slots(l) || shms_arena_of(l, (uint32_t)pinning - 1) == writer))
        add(f, SHMS_F_PINNING, writer, 0, pinning - 1, shms_all_slots(l));
    for (uint32_t s = 0; s < shms_all_slots(l); s++) {
        uint32_t first = atomic_load_explicit(&shms_segment_holds(&i->seg, writer)[s].first, memory_order_acquire);
        for (uint32_t next = first, n = 0, mark = 0; next; n++) {
            const shms_lease *e = shms_segment_lease(&i->seg, writer * n_entries + (next <= n_entries ? next - 1 : 0));
            SHMS_LOOK("holds");
            uint64_t number = shms_get(&e->number), what = shms_get(&e->what);
            if (next > n_entries || n == n_entries || shms_is_cyclic(&mark, n, next) || number == 0 ||
                shms_lease_slot(what) != s || shms_arena_of(l, s) == writer) {
                add(f, SHMS_F_HOLDS, writer, s, (uint64_t)writer * n_entries + next - 1, 0);
                break;
            }
            listed[next - 1] = true;
            next = shms_lease_next(what);
        }
    }
}

/* A complete lease on an object of another writer stays until that writer comes to it; the object may be evicted before. A void one
 * holds nothing either. */
static bool keeps_object(const shms_lease_record *e) { return e->owner == e->writer || shms_lease_waits(e); }

static void check_leases(const shms_inspector *i, const shms_liveness *who, uint32_t arena, shms_lease_record *open,
                         bool *listed, findings *f) {
    const shms_writer_table *t = shms_segment_writer(&i->seg, arena);
    uint32_t n_entries = (uint32_t)i->seg.layout.max_leases, n_slots = shms_all_slots(&i->seg.layout);
    size_t n = 0;
    for (uint32_t k = arena * n_entries; k < (arena + 1) * n_entries; k++) {
        shms_lease_record *e = &open[n];
        if (!shms_inspector_lease(i, who, k, e))
            continue;
        n++;
        if (e->moving)
            continue;
        uint64_t limit = next_lease(t);
        if (e->number >= limit)
            add(f, SHMS_F_LEASE_NUMBER, arena, k, e->number, limit);
        if (e->slot >= n_slots)
            add(f, SHMS_F_LEASE_SLOT, arena, k, e->slot, n_slots);
        else if (e->group > i->seg.layout.n_groups)
            add(f, SHMS_F_LEASE_GROUP, arena, k, e->group, i->seg.layout.n_groups);
        else if (keeps_object(e) && !shms_still_there(&i->seg, (uint32_t)e->slot, e->id))
            add(f, SHMS_F_LEASE_OBJECT, arena, k, e->slot, e->id);
    }
    memset(listed, 0, n_entries * sizeof *listed);
    if (i->seg.layout.n_writers > 1)
        check_holds(i, arena, listed, f);
    for (size_t k = 0; k < n; k++)
        if (open[k].owner != arena && !open[k].moving && open[k].slot < n_slots && !listed[open[k].entry % n_entries])
            add(f, SHMS_F_UNLISTED, arena, open[k].entry, open[k].number, open[k].slot);
    qsort(open, n, sizeof *open, by_number);
    for (size_t k = 1; k < n; k++)
        if (open[k].number == open[k - 1].number)
            add(f, SHMS_F_SAME_LEASE, arena, open[k].entry, open[k - 1].entry, open[k].number);
    uint64_t said = shms_get(&t->open_leases);
    if (said != n)
        add(f, SHMS_F_OPEN_LEASES, arena, 0, said, n);
}

static void check_rank(const shms_inspector *i, const shms_liveness *who, uint32_t r, findings *f) {
    const shms_layout *l = &i->seg.layout;
    shms_reader_table *t = shms_segment_reader(&i->seg, r);
    const shms_pin *pins = shms_reader_pins(t);
    const shms_word *acks = shms_reader_acks(t, l);
    bool used = false;
    for (uint32_t k = 0; k < shms_all_slots(l); k++) {
        uint32_t pin = shms_pin_count(&pins[k], memory_order_relaxed);
        if (pin == 0)
            continue;
        used = true;
        if (pin > SHMS_PIN_COUNT / 2)
            add(f, SHMS_F_PIN_COUNT, shms_arena_of(l, k), r, k, pin);
        else if (who->here[r] && shms_get(&shms_segment_slot(&i->seg, k)->state) == SHMS_FREE)
            add(f, SHMS_F_PIN_FREE, shms_arena_of(l, k), r, k, pin);
    }
    for (uint32_t w = 0; w < l->n_writers; w++) {
        const shms_writer_table *by = shms_segment_writer(&i->seg, w);
        uint64_t worst = 0, retired = shms_get(&by->retired[r]), base = shms_get(&t->base[w]);
        for (uint64_t k = w * l->max_leases; k < (w + 1) * l->max_leases; k++) {
            uint64_t ack = shms_get(&acks[k]);
            worst = ack > worst ? ack : worst;
        }
        used |= base || worst;
        uint64_t limit = next_lease(by);
        if (worst >= limit)
            add(f, SHMS_F_ACK, w, r, worst, limit);
        if (base > limit && base < SHMS_FINDS)
            add(f, SHMS_F_BASE, w, r, base, limit);
        uint64_t epoch = atomic_load_explicit(&t->epoch, memory_order_acquire);
        if (retired > epoch + 1)
            add(f, SHMS_F_RETIRED, w, r, retired, epoch + 1);
    }
    if (atomic_load_explicit(&t->epoch, memory_order_acquire) == 0 && used)
        add(f, SHMS_F_UNATTACHED, 0, r, 0, 0);
}

static int pass(const shms_inspector *i, object *objects, shms_lease_record *open, bool *listed, findings *f) {
    shms_liveness who;
    int rc = shms_inspector_who_is_alive(i, &who);
    if (rc)
        return rc;
    for (uint32_t w = 0; w < i->seg.layout.n_writers; w++) {
        const shms_writer_table *t = shms_segment_writer(&i->seg, w);
        uint64_t hands[] = {shms_get(&t->hand), shms_get(&t->small_hand)};
        for (uint64_t k = 0; k < 2; k++)
            if (hands[k] > i->seg.layout.capacity || hands[k] % SHMS_ALIGN)
                add(f, SHMS_F_HAND, w, k, hands[k], i->seg.layout.capacity);
        if (!shms_counters_valid(t))
            add(f, SHMS_F_COUNTERS, w, 0, shms_get(&t->next_id), shms_get(&t->next_lease));
        check_slots(i, &who, w, objects, f);
        check_leases(i, &who, w, open, listed, f);
    }
    for (uint32_t r = 0; r < i->seg.layout.n_readers; r++)
        check_rank(i, &who, r, f);
    return SHMS_OK;
}

/* Are two findings the same? For a sum, `expected` must also be the same. Elsewhere it is a limit that keeps
 * growing. */
static bool same_finding(const shms_finding *a, const shms_finding *b) {
    bool sum = a->kind == SHMS_F_USED || a->kind == SHMS_F_OBJECTS || a->kind == SHMS_F_OPEN_LEASES ||
               a->kind == SHMS_F_KIND_BYTES || a->kind == SHMS_F_KIND_OBJECTS;
    return a->kind == b->kind && a->arena == b->arena && a->where == b->where && a->value == b->value &&
           (!sum || a->expected == b->expected);
}

int64_t shms_inspector_verify(shms_inspector *i, shms_finding *out, uint64_t room) {
    int rc = shms_inspector_enter(i);
    if (rc)
        return rc;
    object *objects = malloc((i->seg.layout.max_objects + 1) * sizeof *objects);
    shms_lease_record *open = malloc((i->seg.layout.max_leases + 1) * sizeof *open);
    bool *listed = malloc(i->seg.layout.max_leases * sizeof *listed);
    shms_finding *again = malloc((2 * room + 1) * sizeof *again);
    findings f = {.out = out, .room = room};
    if (objects && open && listed && again)
        rc = pass(i, objects, open, listed, &f);
    else
        rc = SHMS_ENOMEM;
    for (int k = 1; rc == SHMS_OK && f.n && k < SHMS_VERIFY_PASSES; k++) {
        nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
        findings g = {.out = again, .room = 2 * room};
        rc = pass(i, objects, open, listed, &g);
        uint64_t kept = 0;
        for (uint64_t a = 0; a < f.n; a++)
            for (uint64_t b = 0; b < g.n; b++)
                if (same_finding(&f.out[a], &g.out[b])) {
                    f.out[kept++] = f.out[a];
                    break;
                }
        f.n = kept;
    }
    free(objects);
    free(open);
    free(listed);
    free(again);
    return rc ? rc : (int64_t)f.n;
}

int shms_inspector_check(shms_inspector *i, uint64_t slot, uint64_t id, shms_finding *out) {
    shms_slot_record s;
    int rc = shms_inspector_object(i, slot, id, &s);
    if (rc)
        return rc;
    if (!s.checked)
        return SHMS_ENOTFOUND;
    SHMS_LOOK("crc");
    uint32_t crc = shms_object_crc(shms_inspector_bytes(i, &s) - s.offset, s.offset, (uint32_t)s.key_len,
                                   (uint32_t)s.meta_len, s.length);
    if (!shms_still_there(&i->seg, (uint32_t)slot, id))
        return SHMS_ESTALE;
    *out =
        (shms_finding){.kind = SHMS_F_CRC, .arena = (uint32_t)s.writer, .where = slot, .value = crc, .expected = s.crc};
    return crc == s.crc;
}
