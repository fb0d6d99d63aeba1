/*
 * verify.c - checks the invariants of a segment from outside.
 *
 * The writer's own checks (shms_slots_valid and its like) answer only yes or no, under the mutex. These report what and
 * where, and take no lock. So a pass may combine halves of different moments.
 *
 * 1. Several passes run, some time apart. Only a finding that is in each of them, in the same place and with the same
 *    value, counts. A healthy store that is working changes its values.
 * 2. A word that must stay below a counter (an id, a number, an acknowledgement) is read before the counter.
 * 3. A writer may die or stop between two stores. It leaves sums that do not agree, leases of objects that are gone,
 *    and a slot in WRITING or EVICTING. `recover` repairs all of that. The two states are not findings; the others are.
 *    The caller knows whether the writer runs, and so what they mean.
 */
#include "inspector.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "store/crc.h"
#include "store/step.h"

#define PAUSE_NS 2000000 /* between passes */

typedef struct findings {
    shms_finding *out;
    uint64_t n, room;
} findings;

static void add(findings *f, uint64_t kind, uint64_t where, uint64_t value, uint64_t expected) {
    if (f->n < f->room)
        f->out[f->n++] = (shms_finding){.kind = kind, .where = where, .value = value, .expected = expected};
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

static uint64_t hash(const uint8_t *p, uint64_t n) {
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (uint64_t k = 0; k < n; k++)
        h = (h ^ p[k]) * UINT64_C(0x100000001b3);
    return h;
}

static uint64_t next_id(const shms_inspector *i) {
    return atomic_load_explicit(&i->seg.sb->next_id, memory_order_acquire);
}
static uint64_t next_lease(const shms_inspector *i) {
    atomic_thread_fence(memory_order_acquire);
    return atomic_load_explicit(&i->seg.sb->next_lease, memory_order_acquire);
}

/* Checks one slot by itself. Returns whether it can be compared with other slots. */
static bool check_slot(const shms_inspector *i, const shms_slot_record *s, uint64_t flags, findings *f) {
    uint64_t limit = next_id(i);
    if (s->state > SHMS_EVICTING) {
        add(f, SHMS_F_STATE, s->slot, s->state, 0);
        return false;
    }
    if (s->moving)
        return false;
    if (s->id == 0 || s->id >= limit)
        add(f, SHMS_F_ID, s->slot, s->id, limit);
    if (!shms_slot_flags_valid(flags))
        add(f, SHMS_F_FLAGS, s->slot, flags, 0);
    else if (s->kind >= SHMS_KINDS || (s->kind && !shms_kind_named(&i->seg.sb->kinds[s->kind])))
        add(f, SHMS_F_KIND, s->slot, s->kind, 0);
    if (!s->bounded || s->length > i->seg.layout.max_object_size) {
        add(f, SHMS_F_BOUNDS, s->slot, s->offset, s->length);
        return false;
    }
    if (s->key_len == 0 || s->key_len > SHMS_MAX_KEY)
        add(f, SHMS_F_KEY, s->slot, s->key_len, SHMS_MAX_KEY);
    return true;
}

static void check_slots(const shms_inspector *i, const shms_attendance *who, object *objects, findings *f) {
    const uint8_t *data = i->seg.data;
    uint64_t used = 0, occupied = 0, kinds[SHMS_SLOT_KIND_MASK + 1][2] = {0}; /* bytes, slots */
    size_t n = 0;
    for (uint32_t k = 0; k < i->seg.layout.max_objects; k++) {
        shms_slot_record s;
        if (!shms_inspector_slot(i, who, k, &s))
            continue;
        uint64_t flags = shms_get(&i->seg.slots[k].flags);
        used += s.span;
        occupied += s.state != SHMS_WRITING;
        kinds[s.kind][0] += s.span;
        kinds[s.kind][1]++;
        if (check_slot(i, &s, flags, f))
            objects[n++] = (object){.slot = k,
                                    .offset = s.offset,
                                    .end = s.offset + s.span,
                                    .id = s.id,
                                    .key_hash = s.deleted ? 0 : hash(data + s.offset, s.key_len),
                                    .key_len = s.key_len,
                                    .keyed = !s.deleted};
    }
    qsort(objects, n, sizeof *objects, by_offset);
    for (size_t k = 1, widest = 0; k < n; k++) { /* widest: the object before k that extends furthest */
        if (objects[k].offset < objects[widest].end)
            add(f, SHMS_F_OVERLAP, objects[k].slot, objects[widest].slot, 0);
        if (objects[k].end > objects[widest].end)
            widest = k;
    }
    qsort(objects, n, sizeof *objects, by_id);
    for (size_t k = 1; k < n; k++)
        if (objects[k].id == objects[k - 1].id)
            add(f, SHMS_F_SAME_ID, objects[k].slot, objects[k - 1].slot, objects[k].id);
    qsort(objects, n, sizeof *objects, by_key);
    for (size_t k = 1; k < n && objects[k].keyed; k++)
        if (objects[k].key_hash == objects[k - 1].key_hash && objects[k].key_len == objects[k - 1].key_len &&
            memcmp(data + objects[k].offset, data + objects[k - 1].offset, objects[k].key_len) == 0)
            add(f, SHMS_F_SAME_KEY, objects[k].slot, objects[k - 1].slot, 0);
    uint64_t said = shms_get(&i->seg.sb->used_bytes);
    if (said != used)
        add(f, SHMS_F_USED, 0, said, used);
    said = shms_get(&i->seg.sb->objects);
    if (said != occupied)
        add(f, SHMS_F_OBJECTS, 0, said, occupied);
    for (uint32_t k = 0; k < SHMS_KINDS; k++) {
        uint64_t bytes = shms_get(&i->seg.sb->kinds[k].bytes), slots = shms_get(&i->seg.sb->kinds[k].objects);
        if (bytes != kinds[k][0])
            add(f, SHMS_F_KIND_BYTES, k, bytes, kinds[k][0]);
        if (slots != kinds[k][1])
            add(f, SHMS_F_KIND_OBJECTS, k, slots, kinds[k][1]);
    }
}

static void check_leases(const shms_inspector *i, const shms_attendance *who, shms_lease_record *open, findings *f) {
    size_t n = 0;
    for (uint32_t k = 0; k < i->seg.layout.max_leases; k++) {
        shms_lease_record *e = &open[n];
        if (!shms_inspector_lease(i, who, k, e))
            continue;
        n++;
        if (e->moving)
            continue;
        uint64_t limit = next_lease(i);
        if (e->number >= limit)
            add(f, SHMS_F_LEASE_NUMBER, k, e->number, limit);
        if (e->slot >= i->seg.layout.max_objects)
            add(f, SHMS_F_LEASE_SLOT, k, e->slot, i->seg.layout.max_objects);
        else if (!shms_inspector_still(i, e->slot, e->id))
            add(f, SHMS_F_LEASE_OBJECT, k, e->slot, e->id);
    }
    qsort(open, n, sizeof *open, by_number);
    for (size_t k = 1; k < n; k++)
        if (open[k].number == open[k - 1].number)
            add(f, SHMS_F_SAME_LEASE, open[k].entry, open[k - 1].entry, open[k].number);
    uint64_t said = shms_get(&i->seg.sb->open_leases);
    if (said != n)
        add(f, SHMS_F_OPEN_LEASES, 0, said, n);
}

static void check_rank(const shms_inspector *i, const shms_attendance *who, uint32_t r, findings *f) {
    const shms_layout *l = &i->seg.layout;
    shms_reader_table *t = shms_segment_reader(&i->seg, r);
    const shms_pin *pins = shms_reader_pins(t);
    const shms_word *acks = shms_reader_acks(t, l->max_objects);
    uint64_t retired = shms_get(&i->seg.sb->retired[r]), base = shms_get(&t->base);
    bool used = base != 0;
    for (uint64_t k = 0; k < l->max_objects; k++) {
        uint32_t pin = atomic_load_explicit(&pins[k], memory_order_relaxed);
        if (pin == 0)
            continue;
        used = true;
        if (pin > INT32_MAX)
            add(f, SHMS_F_PIN_COUNT, r, k, pin);
        else if (who->here[r] && shms_get(&i->seg.slots[k].state) == SHMS_FREE)
            add(f, SHMS_F_PIN_FREE, r, k, pin);
    }
    uint64_t worst = 0;
    for (uint64_t k = 0; k < l->max_leases; k++) {
        uint64_t ack = shms_get(&acks[k]);
        worst = ack > worst ? ack : worst;
    }
    uint64_t limit = next_lease(i);
    if (worst >= limit)
        add(f, SHMS_F_ACK, r, worst, limit);
    if (base > limit && base != SHMS_CLOSED)
        add(f, SHMS_F_BASE, r, base, limit);
    uint64_t epoch = atomic_load_explicit(&t->epoch, memory_order_acquire);
    if (retired > epoch + 1)
        add(f, SHMS_F_RETIRED, r, retired, epoch + 1);
    if (epoch == 0 && (used || worst))
        add(f, SHMS_F_UNATTACHED, r, 0, 0);
}

static void pass(const shms_inspector *i, object *objects, shms_lease_record *open, findings *f) {
    shms_attendance who;
    shms_inspector_attend(i, &who);
    uint64_t hands[] = {shms_get(&i->seg.sb->hand), shms_get(&i->seg.sb->small_hand)};
    for (uint64_t k = 0; k < 2; k++)
        if (hands[k] > i->seg.layout.capacity || hands[k] % SHMS_ALIGN)
            add(f, SHMS_F_HAND, k, hands[k], i->seg.layout.capacity);
    uint64_t published = atomic_load_explicit(&i->seg.sb->published, memory_order_acquire), limit = next_lease(i);
    if (published > limit)
        add(f, SHMS_F_PUBLISHED, 0, published, limit);
    check_slots(i, &who, objects, f);
    check_leases(i, &who, open, f);
    for (uint32_t r = 0; r < i->seg.layout.n_readers; r++)
        check_rank(i, &who, r, f);
}

/* Are two findings the same? For a sum, `expected` must also be the same. Elsewhere it is a limit that keeps
 * growing. */
static bool same_finding(const shms_finding *a, const shms_finding *b) {
    bool sum = a->kind == SHMS_F_USED || a->kind == SHMS_F_OBJECTS || a->kind == SHMS_F_OPEN_LEASES ||
               a->kind == SHMS_F_KIND_BYTES || a->kind == SHMS_F_KIND_OBJECTS;
    return a->kind == b->kind && a->where == b->where && a->value == b->value && (!sum || a->expected == b->expected);
}

int64_t shms_inspector_verify(shms_inspector *i, shms_finding *out, uint64_t room) {
    int rc = shms_inspector_enter(i);
    if (rc)
        return rc;
    object *objects = malloc((i->seg.layout.max_objects + 1) * sizeof *objects);
    shms_lease_record *open = malloc((i->seg.layout.max_leases + 1) * sizeof *open);
    shms_finding *again = malloc((2 * room + 1) * sizeof *again);
    findings f = {.out = out, .room = room};
    if (objects && open && again)
        pass(i, objects, open, &f);
    else
        rc = SHMS_ENOMEM;
    for (int k = 1; rc == SHMS_OK && f.n && k < SHMS_VERIFY_PASSES; k++) {
        nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
        findings g = {.out = again, .room = 2 * room};
        pass(i, objects, open, &g);
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
    uint32_t crc = shms_object_crc(i->seg.data, s.offset, (uint32_t)s.key_len, (uint32_t)s.meta_len, s.length);
    if (!shms_inspector_still(i, slot, id))
        return SHMS_ESTALE;
    *out = (shms_finding){.kind = SHMS_F_CRC, .where = slot, .value = crc, .expected = s.crc};
    return crc == s.crc;
}
