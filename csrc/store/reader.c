/*
 * reader.c - a reader's lifetime, and its views.
 *
 * - No waiting: a reader takes no lock. It waits only if it meets an eviction between W2 and W4 or W5.
 * - No trust: a reference comes from another process, and must match the slot table. A slot must stay within the data
 *   region.
 * - The rank's lock is held until the reader is closed *and* its last view is released. Otherwise the writer would find
 *   the lock free and ignore the pins of those views.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "claims.h"
#include "file.h"
#include "find.h"
#include "readers.h"
#include "ref.h"
#include "step.h"

struct shms_reader {
    shms_segment seg;
    shms_reader_table *table;
    shms_index index; /* the shape of the published ones */
    uint32_t rank;
    bool finds;
    _Atomic int closed;
    _Atomic uint64_t live; /* views, plus calls in progress */
    /* the handle, plus views; the last one frees, because a garbage collector releases them in any order */
    _Atomic uint64_t refs;
};

/* A view, and what its release needs. Callers see `shown` alone. */
typedef struct held_view {
    shms_view shown;
    uint32_t slot;
    shms_reader *owner;
    void *map; /* of _acquire_private, or NULL */
    uint64_t map_size;
} held_view;

static int take_rank(struct shms_reader *r) {
    SHMS_STEP("A1");
    int rc = shms_segment_lock(&r->seg, (int)r->rank);
    if (rc)
        return rc;
    r->table = shms_segment_reader(&r->seg, r->rank);
    r->index = shms_index_shape((uint32_t)r->seg.layout.max_objects, r->seg.sb->secret);
    shms_reader_table_attach(r->table, &r->seg.layout, r->seg.writer, r->rank, r->finds, (uint64_t)getpid(),
                             shms_clock_ns(CLOCK_REALTIME));
    return SHMS_OK;
}

int shms_reader_attach(shms_reader **out, const char *name, uint32_t rank, const shms_expected *expected) {
    if (!out)
        return shms_fail(SHMS_EINVAL, SHMS_NO_OUT);
    *out = NULL;
    if (rank >= SHMS_MAX_READERS)
        return shms_fail(SHMS_EINVAL, "rank must be below %d, not %u", SHMS_MAX_READERS, rank);
    struct shms_reader *r = calloc(1, sizeof *r);
    if (!r)
        return SHMS_ENOMEM;
    r->rank = rank;
    r->finds = expected && expected->finds;
    uint32_t turns = 0;
    int rc;
    do {
        rc = shms_segment_open(&r->seg, name, (int)rank, expected);
        if (rc == SHMS_OK && ((rc = shms_segment_is(&r->seg, expected)) || (rc = take_rank(r))))
            shms_segment_close(&r->seg);
    } while (rc == SHMS_ERANKINUSE && !(expected && expected->at_once) && shms_lock_again(&turns));
    if (rc) {
        free(r);
        return rc;
    }
    atomic_store(&r->refs, 1);
    *out = r;
    return SHMS_OK;
}

#ifdef SHMS_STEPS
/* For tests: its count of views and calls. */
_Atomic uint64_t *shms_reader_live(shms_reader *r);
_Atomic uint64_t *shms_reader_live(shms_reader *r) { return &r->live; }
#endif

static void leave(struct shms_reader *r) {
    if (atomic_fetch_sub(&r->live, 1) == 1 && atomic_load(&r->closed))
        shms_segment_unlock(&r->seg, 0);
}

/* Counts a call as in progress, so that the rank's lock outlives it. */
static int enter(struct shms_reader *r) {
    if (!r)
        return SHMS_ECLOSED;
    if (atomic_load_explicit(&r->seg.forked, memory_order_relaxed))
        return SHMS_EFORKED;
    bool many = atomic_fetch_add(&r->live, 1) >= SHMS_PIN_COUNT / 2; /* the pins of one slot stay within their bits */
    if (!many && !atomic_load(&r->closed))
        return SHMS_OK;
    leave(r);
    return many ? SHMS_ENOMEM : SHMS_ECLOSED;
}

/* Is the reference's lease open? Then its object stays, even if the writer of the slot is asking who holds it. Without a
 * lease it may be one that another rank has pinned. */
static bool promised(const struct shms_reader *r, const shms_ref *ref) {
    SHMS_STEP("R2n"); /* pairs with L2 and C1: as long as the number stands, the object is promised */
    return ref->lease == 0 || shms_get(&shms_segment_lease(&r->seg, ref->entry)->number) == ref->lease;
}

static uint64_t address_of(const struct shms_reader *r, uint32_t slot, const shms_slot *s) {
    return shms_address(&r->seg.layout, shms_arena_of(&r->seg.layout, slot), shms_get(&s->offset));
}

/* R1, R2 and all other checks of a reference. SHMS_OK: the object is pinned, and `seen` has the place and lengths that
 * were checked. */
static int pin(struct shms_reader *r, const uint8_t *packed, shms_ref *ref, shms_slot *seen) {
    const shms_superblock *sb = r->seg.sb;
    int rc = shms_ref_read(ref, packed, sb, &r->seg.layout);
    if (rc)
        return rc;
    const shms_slot *s = shms_segment_slot(&r->seg, ref->slot);
    enum shms_state state = shms_reader_table_pin(r->table, &r->seg.layout, s, ref->slot, ref->id);
    if (state == SHMS_FREE)
        return SHMS_ESTALE;
    rc = state == SHMS_EVICTING ? shms_wait_for_eviction(&r->seg, ref->slot, ref->id, true) : SHMS_OK;
    if (rc == SHMS_EBUSY && !promised(r, ref)) /* only another writer's lease can be open during EVICTING */
        rc = SHMS_ESTALE;
    if (rc) {
        shms_reader_table_unpin_failed(r->table, &r->seg.layout, s, ref->slot);
        return rc;
    }
    *seen = shms_slot_copy(s, ref->id);
    rc = !shms_ref_sealed(packed, sb->secret, shms_get(&s->secret)) || address_of(r, ref->slot, seen) != ref->address
             ? SHMS_ESTALE
         : shms_slot_bounded(seen, r->seg.layout.capacity) ? SHMS_OK
                                                           : SHMS_ECORRUPT;
    if (rc)
        shms_reader_table_unpin_failed(r->table, &r->seg.layout, s, ref->slot);
    else if (ref->lease == 0)
        shms_reader_table_use(r->table, s, ref->slot);
    return rc;
}

/* The offset within its arena of an object that starts at `at`. */
static uint64_t offset_of(const struct shms_reader *r, uint32_t slot, const uint8_t *at) {
    return (uint64_t)(at - r->seg.all_data) - shms_address(&r->seg.layout, shms_arena_of(&r->seg.layout, slot), 0);
}

/* R3, for a reference whose tag was verified. */
static int acknowledge(struct shms_reader *r, const shms_ref *ref) {
    return shms_reader_table_ack(r->table, &r->seg.layout, shms_segment_lease(&r->seg, ref->entry), ref->entry,
                                 ref->lease, ref->slot, offset_of(r, ref->slot, r->seg.all_data + ref->address));
}

/* Fills in the view of an object that this call has pinned. */
static void show(struct shms_reader *r, uint32_t slot, const shms_slot *seen, held_view *v) {
    uint32_t key_len = shms_slot_key_len(seen), meta_len = shms_slot_meta_len(seen);
    const char *at = (const char *)r->seg.all_data + address_of(r, slot, seen);
    v->shown = (shms_view){.key = at,
                           .meta = at + key_len,
                           .payload = at + shms_payload_at(key_len, meta_len),
                           .payload_size = shms_slot_payload_size(seen),
                           .key_len = key_len,
                           .meta_len = meta_len,
                           .id = shms_get(&seen->id)};
    v->slot = slot;
    v->owner = r;
    v->map = NULL;
    atomic_fetch_add(&r->refs, 1);
}

static void count(const struct shms_reader *r, size_t c) {
    atomic_fetch_add_explicit(&r->table->counters[c], 1, memory_order_relaxed);
}

/* Puts a mapping of its own in the place of the payload. */
static int map_private(const struct shms_reader *r, held_view *v) {
    shms_view *shown = &v->shown;
    if (shown->payload_size == 0)
        return SHMS_OK;
    char *at = shms_segment_map_private(&r->seg, shown->payload, shown->payload_size, &v->map, &v->map_size);
    if (!at)
        return SHMS_EMAP;
    shown->payload = at;
    return SHMS_OK;
}

static int acquire(shms_reader *r, const uint8_t *packed, bool private, shms_view **out) {
    held_view *v;
    shms_ref ref;
    shms_slot seen;
    if (!out)
        return shms_fail(SHMS_EINVAL, SHMS_NO_OUT);
    int rc = enter(r);
    *out = NULL;
    if (rc)
        return rc;
    if (!(v = malloc(sizeof *v)))
        rc = SHMS_ENOMEM;
    else
        rc = pin(r, packed, &ref, &seen);
    if (rc) {
        if (rc == SHMS_ESTALE)
            count(r, SHMS_R(stale));
        free(v);
        leave(r);
        return rc;
    }
    show(r, ref.slot, &seen, v);
    if (private && (rc = map_private(r, v))) {
        shms_view_release(&v->shown);
        return rc;
    }
    acknowledge(r, &ref);
    count(r, SHMS_R(gets));
    *out = &v->shown;
    return SHMS_OK;
}

int shms_reader_acquire(shms_reader *r, const uint8_t *packed, shms_view **out) {
    return acquire(r, packed, false, out);
}

int shms_reader_acquire_private(shms_reader *r, const uint8_t *packed, shms_view **out) {
    return acquire(r, packed, true, out);
}

/* The candidate of a key, without a pin; or SHMS_NONE. */
static uint32_t look(const struct shms_reader *r, const char *key, uint32_t key_len, shms_slot *seen) {
    uint64_t hash = shms_hash_key(r->index.seed, key, key_len);
    return shms_find_key(&r->seg, &r->index, SHMS_NONE, hash, key, key_len, seen);
}

int shms_reader_find(shms_reader *r, const char *key, uint32_t key_len, uint8_t *packed, shms_view **out) {
    if (!out)
        return shms_fail(SHMS_EINVAL, SHMS_NO_OUT);
    int rc = packed ? shms_key_ok(key, key_len) : shms_fail(SHMS_EINVAL, SHMS_NO_REF);
    *out = NULL;
    if (rc || (rc = enter(r)))
        return rc;
    shms_slot seen;
    held_view *v = malloc(sizeof *v);
    uint32_t slot = v ? look(r, key, key_len, &seen) : SHMS_NONE;
    enum shms_state state = SHMS_FREE;
    if (slot != SHMS_NONE) {
        const shms_slot *s = shms_segment_slot(&r->seg, slot);
        state = shms_reader_table_pin(r->table, &r->seg.layout, s, slot, shms_get(&seen.id));
        if (state == SHMS_EVICTING) /* nobody is promised it, so there is nothing to wait for */
            shms_reader_table_unpin_failed(r->table, &r->seg.layout, s, slot);
    }
    if (state != SHMS_LIVE) {
        rc = v ? SHMS_ENOTFOUND : SHMS_ENOMEM;
        if (v)
            count(r, SHMS_R(find_misses));
        free(v);
        leave(r);
        return rc;
    }
    shms_reader_table_use(r->table, shms_segment_slot(&r->seg, slot), slot);
    shms_ref ref = {.store = (uint32_t)r->seg.sb->store,
                    .slot = slot,
                    .address = address_of(r, slot, &seen),
                    .id = shms_get(&seen.id)};
    shms_ref_seal(packed, &ref, r->seg.sb->secret, shms_get(&shms_segment_slot(&r->seg, slot)->secret));
    show(r, slot, &seen, v);
    count(r, SHMS_R(finds));
    *out = &v->shown;
    return SHMS_OK;
}

int shms_reader_has(shms_reader *r, const char *key, uint32_t key_len) {
    shms_slot seen;
    int rc = shms_key_ok(key, key_len);
    if (rc || (rc = enter(r)))
        return rc;
    rc = look(r, key, key_len, &seen) != SHMS_NONE;
    leave(r);
    return rc;
}

int shms_reader_claim_for(shms_reader *r, uint32_t holder, const char *key, uint32_t key_len, shms_claim *out) {
    int rc = enter(r);
    if (rc)
        return rc;
    rc = shms_claim_take(&r->seg, holder, key, key_len, out);
    leave(r);
    return rc;
}

int shms_reader_claimed(shms_reader *r, const char *key, uint32_t key_len) {
    int rc = shms_key_ok(key, key_len);
    if (rc || (rc = enter(r)))
        return rc;
    rc = shms_claimed(&r->seg, key, key_len);
    leave(r);
    return rc;
}

static void unref(struct shms_reader *r) {
    if (atomic_fetch_sub(&r->refs, 1) != 1)
        return;
    shms_segment_close(&r->seg);
    free(r);
}

void shms_view_release(shms_view *shown) {
    held_view *v = (held_view *)shown; /* which begins with it */
    if (!v)
        return;
    struct shms_reader *r = v->owner;
    if (v->map) /* before R4: its pages that were not written would show the next object of this place */
        munmap(v->map, v->map_size);
    /* In a forked child, the view and its pin are the parent's. */
    if (!atomic_load_explicit(&r->seg.forked, memory_order_relaxed)) {
        shms_reader_table_unpin(r->table, &r->seg.layout, v->slot,
                                offset_of(r, v->slot, (const uint8_t *)v->shown.key));
        leave(r);
    }
    free(v);
    unref(r);
}

void shms_view_drop(shms_view **v) { shms_view_release(*v); }

int shms_reader_release(shms_reader *r, const uint8_t *packed) {
    shms_ref ref;
    int rc = enter(r);
    if (rc)
        return rc;
    if ((rc = shms_ref_read(&ref, packed, r->seg.sb, &r->seg.layout)) == SHMS_OK) {
        /* No pin is needed. As long as the lease is open, the slot keeps its object; once it has ended, there is
         * nothing to acknowledge. If the slot is another object's by now, its secret does not match the tag. */
        const shms_slot *s = shms_segment_slot(&r->seg, ref.slot);
        if (shms_get(&s->id) == ref.id) {
            /* acquire: before the second read of the id */
            uint64_t secret = atomic_load_explicit(&s->secret, memory_order_acquire);
            if (shms_ref_sealed(packed, r->seg.sb->secret, secret))
                rc = acknowledge(r, &ref);
            else if (shms_get(&s->id) == ref.id)
                rc = SHMS_ESTALE;
        }
    }
    if (rc == 1)
        atomic_fetch_add_explicit(&r->table->counters[SHMS_R(released)], 1, memory_order_relaxed);
    leave(r);
    return rc;
}

int shms_reader_validate(shms_reader *r, const uint8_t *packed) {
    shms_ref ref;
    int rc = packed ? enter(r) : shms_fail(SHMS_EINVAL, SHMS_NO_REF);
    if (rc)
        return rc;
    if (shms_ref_read(&ref, packed, r->seg.sb, &r->seg.layout) == SHMS_OK) {
        const shms_slot *s = shms_segment_slot(&r->seg, ref.slot);
        uint64_t state = atomic_load_explicit(&s->state, memory_order_acquire);
        rc = (state == SHMS_LIVE || state == SHMS_EVICTING) && shms_get(&s->id) == ref.id &&
             shms_ref_sealed(packed, r->seg.sb->secret, shms_get(&s->secret)) &&
             address_of(r, ref.slot, s) == ref.address;
    }
    leave(r);
    return rc;
}

int shms_reader_stats(shms_reader *r, shms_rank_stats *out) {
    int rc = out ? enter(r) : shms_fail(SHMS_EINVAL, SHMS_NO_OUT);
    if (rc)
        return rc;
    out->live_views = atomic_load(&r->live) - 1;
    shms_words_read(r->table->counters, &out->counters, sizeof out->counters);
    leave(r);
    return SHMS_OK;
}

const char *shms_reader_path(const shms_reader *r) { return r->seg.path; }

uint64_t shms_reader_store(const shms_reader *r) { return r ? r->seg.sb->store : 0; }

uint64_t shms_reader_writer_epoch(const shms_reader *r) {
    uint64_t takeovers = 0;
    for (uint32_t w = 0; r && w < r->seg.layout.n_writers; w++) {
        uint64_t epoch = shms_get(&shms_segment_writer(&r->seg, w)->epoch);
        takeovers += epoch ? epoch - 1 : 0; /* 0: nobody has joined there yet */
    }
    return r ? 1 + takeovers : 0;
}

int shms_reader_named(const shms_reader *r) { return r ? shms_segment_named(&r->seg) : SHMS_ECLOSED; }

uint64_t shms_reader_data(const shms_reader *r, uint32_t arena, uint64_t *size) {
    const shms_layout *l = r ? &r->seg.layout : NULL;
    bool more = r && arena < l->n_writers;
    *size = more && atomic_load_explicit(&shms_segment_writer(&r->seg, arena)->epoch, memory_order_acquire)
                ? l->capacity
                : 0;
    return more ? (uint64_t)(uintptr_t)(r->seg.all_data + shms_address(l, arena, 0)) : 0;
}

uint64_t shms_reader_pid(const char *name, uint32_t rank) {
    shms_segment seg = {.fd = -1};
    shms_superblock sb;
    uint64_t pid = 0;
    if (shms_segment_name(&seg, name) || shms_segment_open_file(&seg, 0, false, true) < 0)
        return 0;
    if (shms_segment_read(&seg, &sb) == SHMS_OK && rank < seg.layout.n_readers &&
        pread(seg.fd, &pid, sizeof pid,
              (off_t)(seg.layout.readers_at + rank * seg.layout.reader_stride + offsetof(shms_reader_table, pid))) < 0)
        pid = 0;
    shms_segment_close(&seg);
    return pid;
}

int shms_reader_close(shms_reader *r) {
    if (!r)
        return SHMS_OK;
    if (atomic_load_explicit(&r->seg.forked, memory_order_relaxed))
        return SHMS_EFORKED;
    atomic_fetch_add(&r->live, 1);
    if (!atomic_exchange(&r->closed, 1)) /* only once: later the rank may be another process's */
        shms_reader_table_close(r->table, &r->seg.layout);
    leave(r);
    return SHMS_OK;
}

void shms_reader_free(shms_reader *r) {
    if (!r)
        return;
    shms_reader_close(r);
    unref(r);
}

void shms_reader_drop(shms_reader **r) { shms_reader_free(*r); }
