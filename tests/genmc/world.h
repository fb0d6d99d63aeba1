/*
 * world.h - a store of a few words, around the real sources of the core, for a checker that explores all executions.
 *
 * A program includes this, and has a function for each process, which is a thread. What is not
 * real is here: the system's locks, the clock, the mutex, the ring, what zones remember, and the tags of references.
 * Each object has one plain word as its payload, so a race on it is an error. The bytes of keys are relaxed atomics,
 * because a look-up compares them without a pin, and believes the answer only if the object is still there.
 *
 * ThreadSanitizer runs the same programs, each some thousand times, with the schedules that come.
 */
#ifndef SHMS_GENMC_WORLD_H
#define SHMS_GENMC_WORLD_H

#include <assert.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#ifndef WRITERS
#define WRITERS 1
#endif
#ifndef RANKS
#define RANKS 1
#endif
#ifndef SLOTS /* of an arena, as are the entries */
#define SLOTS 1
#endif
#ifndef ENTRIES
#define ENTRIES 1
#endif
#ifndef GROUPS
#define GROUPS 1 /* the ranks are in the first */
#endif
#define ZONES (SLOTS + 1) /* of one object each */
#define UNIT 64

/* What a round begins with again. */
#ifdef SHMS_GENMC
#define WORLD static __attribute__((unused))
/* its own headers lack these */
typedef uint64_t dev_t, ino_t;
typedef int pthread_cond_t;
#define pthread_cond_broadcast(c) ((void)(c))
struct stat;
void *calloc(size_t n, size_t size);
void *realloc(void *at, size_t size);
#else
#define WORLD static __attribute__((unused, section("shms_world")))
#endif

/* A process with a `doom` dies before that step of its own. */
static _Thread_local int steps, doom, role;
static void step(void);
#define SHMS_STEP_H
#define SHMS_STEP(label) step()
#define SHMS_LOOK(label)

/* The checker has no loops over bytes, and no system. */
static inline void *copy_bytes(void *to, const void *from, size_t n) {
    for (size_t i = 0; i < n; i++)
        atomic_store_explicit((_Atomic uint8_t *)to + i,
                              atomic_load_explicit((_Atomic uint8_t *)from + i, memory_order_relaxed),
                              memory_order_relaxed);
    return to;
}
static inline int compare_bytes(const void *a, const void *b, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (atomic_load_explicit((_Atomic uint8_t *)a + i, memory_order_relaxed) !=
            atomic_load_explicit((_Atomic uint8_t *)b + i, memory_order_relaxed))
            return 1;
    return 0;
}
static inline void *fill_bytes(void *at, int byte, size_t n) {
    for (size_t i = 0; i < n / sizeof(uint32_t); i++)
        ((uint32_t *)at)[i] = byte ? UINT32_MAX : 0;
    return at;
}
#define memcpy copy_bytes
#define memcmp compare_bytes
#define memset fill_bytes
static _Thread_local time_t elapsed; /* each look at the clock takes two seconds */
#define clock_gettime(clock, t) ((void)(clock), *(t) = (struct timespec){.tv_sec = elapsed += 2})
#define nanosleep(t, rest) ((void)(t))
#define getpid() 1
#define __builtin_prefetch(at) ((void)(at))

#include "store/batch.h"
#include "store/directory.h"
#include "store/drops.h"
#include "store/find.h"
#include "store/hand.h"
#include "store/holders.h"
#include "store/monitor.h"
#include "store/reclaim.h"
#include "store/remote.h"
#include "store/room.h"

/* The checker cannot copy a record through a pointer: __main__.py has the lines that call these instead. */
static inline void copy_slot(shms_slot *to, const shms_slot *from) {
    shms_set(&to->id, shms_get(&from->id));
    shms_set(&to->offset, shms_get(&from->offset));
    shms_set(&to->length, shms_get(&from->length));
    shms_set(&to->head, shms_get(&from->head));
    shms_set(&to->flags, shms_get(&from->flags));
}
static inline void copy_peer(shms_peer *to, const shms_peer *from) {
    to->asked = from->asked;
    to->gone = from->gone;
    to->turned = from->turned;
    to->blamed = from->blamed;
    to->epoch = from->epoch;
    to->releases = from->releases;
    to->retired = from->retired;
    to->base = from->base;
}

/* ---- the segment ---- */

WORLD struct world {
    shms_superblock sb;
    struct arena {
        shms_writer_table writer;
        shms_slot slots[SLOTS];
        shms_lease leases[ENTRIES];
        shms_index_line line;
        shms_holds holds[WRITERS * SLOTS];
        shms_word counts[WRITERS * ZONES];
    } arenas[WRITERS];
    struct rank {
        shms_reader_table table;
        shms_pin pins[(WRITERS * SLOTS + 1) / 2 * 2];
        shms_word acks[WRITERS * ENTRIES];
        shms_word zone_releases[WRITERS * ZONES];
    } ranks[RANKS];
    uint64_t data[WRITERS][ZONES][UNIT / 8];
} world;

#define LAYOUT                                                                                                         \
    {.capacity = ZONES * UNIT,                                                                                         \
     .max_object_size = UNIT,                                                                                          \
     .n_readers = RANKS,                                                                                               \
     .max_objects = SLOTS,                                                                                             \
     .max_leases = ENTRIES,                                                                                            \
     .n_writers = WRITERS,                                                                                             \
     .writer_at = offsetof(struct world, arenas[0].writer),                                                            \
     .slots_at = offsetof(struct world, arenas[0].slots),                                                              \
     .leases_at = offsetof(struct world, arenas[0].leases),                                                            \
     .index_at = offsetof(struct world, arenas[0].line),                                                               \
     .holds_at = offsetof(struct world, arenas[0].holds),                                                              \
     .counts_at = offsetof(struct world, arenas[0].counts),                                                            \
     .arena_stride = sizeof(struct arena),                                                                             \
     .readers_at = offsetof(struct world, ranks),                                                                      \
     .reader_stride = sizeof(struct rank),                                                                             \
     .data_stride = ZONES * UNIT,                                                                                      \
     .zone_shift = 6,                                                                                                  \
     .n_groups = GROUPS}

/* ---- a writer's private memory; a successor has its own ---- */

typedef struct private {
    struct shms_writer w;
    uint64_t place; /* where its next object goes */
    shms_batch batch;
    shms_batch_item items[4];
    void (*other_thread)(struct private *);
    bool held; /* what the zone of slot 0 remembers */
    shms_peer peers[RANKS + WRITERS];
    uint64_t polled[(RANKS + WRITERS) * ZONES];
    shms_zone zones[ZONES];
    uint32_t links[4 * ENTRIES + SLOTS], ring[2 * SLOTS], free_slots[SLOTS + 1];
    uint8_t protected[SLOTS], used[SLOTS];
}
private
;

#define PRIVATE(p, a)                                                                                                  \
    {.w = {.seg = {.layout = LAYOUT,                                                                                   \
                   .sb = &world.sb,                                                                                    \
                   .arena = (a),                                                                                       \
                   .writer = &world.arenas[a].writer,                                                                  \
                   .slots = world.arenas[a].slots,                                                                     \
                   .leases = world.arenas[a].leases,                                                                   \
                   .data = (uint8_t *)world.data[a],                                                                   \
                   .control = (uint8_t *)&world,                                                                       \
                   .all_data = (uint8_t *)world.data},                                                                 \
           .ring = {.slots = world.arenas[a].slots,                                                                    \
                    .next = (p).ring,                                                                                  \
                    .prev = (p).ring + SLOTS,                                                                          \
                    .used = (p).used,                                                                                  \
                    .zones = (p).zones,                                                                                \
                    .n_zones = ZONES,                                                                                  \
                    .zone_shift = 6,                                                                                   \
                    .capacity = ZONES * UNIT},                                                                         \
           .zones = {.ring = &(p).w.ring},                                                                             \
           .operation = 1, /* no verdict is of it yet */                                                               \
           .peers = (p).peers,                                                                                         \
           .polled_zones = (p).polled,                                                                                 \
           .index = {.lines = &world.arenas[a].line,                                                                   \
                     .n_slots = SLOTS,                                                                                 \
                     .slots = world.arenas[a].slots,                                                                   \
                     .data = (uint8_t *)world.data[a]},                                                                \
           .leases = {.table = world.arenas[a].leases,                                                                 \
                      .writer = &world.arenas[a].writer,                                                               \
                      .seg = WRITERS > 1 ? &(p).w.seg : NULL,                                                          \
                      .base = (a) * SLOTS,                                                                             \
                      .n_entries = ENTRIES,                                                                            \
                      .n_slots = SLOTS,                                                                                \
                      .n_groups = GROUPS,                                                                              \
                      .free = (p).links,                                                                               \
                      .slot = (p).links + ENTRIES,                                                                     \
                      .next = (p).links + 2 * ENTRIES,                                                                 \
                      .prev = (p).links + 3 * ENTRIES,                                                                 \
                      .first = (p).links + 4 * ENTRIES},                                                               \
           .kinds = {.table = world.arenas[a].writer.kinds},                                                           \
           .protected = (p).protected,                                                                                 \
           .free_slots = (p).free_slots},                                                                              \
     .batch = {.items = (p).items, .room = 4}}

static void begin_private(private *p) {
    for (uint32_t e = ENTRIES; e-- > 0;)
        p->links[p->w.leases.n_free++] = e;
    for (uint32_t i = 3 * ENTRIES; i < 4 * ENTRIES + SLOTS; i++)
        p->links[i] = SHMS_NONE;
    for (uint32_t i = 0; i < 2 * SLOTS; i++)
        p->ring[i] = SHMS_NONE;
}

/* ---- objects ---- */

static uint64_t *payload(uint32_t arena, uint64_t offset) { return &world.data[arena][offset / UNIT][1]; }

/* The slot has an object of that id, at the place, with the id as its payload and its key. */
static void store_first(uint32_t arena, uint32_t slot, uint64_t id, uint64_t offset) {
    shms_slot *s = &world.arenas[arena].slots[slot];
    shms_set(&s->state, SHMS_LIVE);
    shms_set(&s->id, id);
    shms_set(&s->secret, id);
    shms_set(&s->offset, offset);
    shms_set(&s->length, UNIT);
    shms_set(&s->head, shms_slot_head(1, 0, 0));
    copy_bytes(world.data[arena][offset / UNIT], &(uint8_t){(uint8_t)id}, 1);
    *payload(arena, offset) = id;
    shms_word *next = &world.arenas[arena].writer.next_id;
    if (shms_get(next) <= id)
        shms_set(next, id + WRITERS);
}

/* ---- the kernel's locks: a list that a spin lock guards, so each probe is ordered with each change ---- */

WORLD _Atomic uint64_t locks[WRITERS + RANKS];

static _Atomic uint64_t *lock_of(int r) { return &locks[r < 0 ? -1 - r : WRITERS + r]; }
bool shms_segment_held(const shms_segment *seg, int r) {
    (void)seg;
    return atomic_fetch_add_explicit(lock_of(r), 0, memory_order_acq_rel) != 0;
}

/* ---- the end of a process ---- */

#ifdef SHMS_GENMC
#include <genmc.h>
#define assume(x) __VERIFIER_assume(x)
#else
WORLD _Atomic bool blocked; /* a thread waits for what does not come in this round */
#define assume(x)                                                                                                      \
    do {                                                                                                               \
        if (!(x)) {                                                                                                    \
            blocked = true;                                                                                            \
            pthread_exit(NULL);                                                                                        \
        }                                                                                                              \
    } while (0)
#endif

static void leave_lock(void) { atomic_exchange_explicit(lock_of(role), 0, memory_order_acq_rel); }

static void step(void) {
    if (doom && ++steps == doom) {
        leave_lock();
        pthread_exit(NULL);
    }
}

/* A process that does not die, one that may, and one that comes after another's death. */
static inline void live(int as) {
    role = as;
    doom = 0;
}
#ifndef STEPS
#define STEPS 0 /* how many a mortal process takes at most */
#endif
WORLD _Atomic int fate; /* any value up to STEPS + 1 may be read of it */
static inline void fates(void) {
    for (int n = 1; n <= STEPS + 1; n++)
        atomic_store_explicit(&fate, n, memory_order_relaxed);
}
static inline void be_mortal(int as) {
    role = as;
    steps = 0;
    doom = atomic_load_explicit(&fate, memory_order_relaxed);
}
static inline void live_through(void) { assert(doom == 0 || steps <= STEPS); /* STEPS is large enough */ }
static inline void succeed(int as) {
    live(as);
    assume(atomic_exchange_explicit(lock_of(as), 1, memory_order_acq_rel) == 0);
}

/* ---- what is not real ---- */

int shms_writer_enter(struct shms_writer *w) { return w ? SHMS_OK : SHMS_ECLOSED; }
int shms_writer_enter_to_place(struct shms_writer *w) { return shms_writer_enter(w); }
int shms_writer_enter_to_end(struct shms_writer *w) { return shms_writer_enter(w); }
int shms_writer_leave(struct shms_writer *w, int rc) { return (void)w, rc; }
int shms_writer_leave_place(struct shms_writer *w, int rc) { return (void)w, rc; }
void shms_writer_refused(struct shms_writer *w, int rc, shms_batch *b) { (void)w, (void)rc, (void)b; }
bool shms_writer_yield(struct shms_writer *w) { /* another thread has the mutex, and does that */
    void (*other)(private *) = ((private *)w)->other_thread;
    if (other)
        other((private *)w);
    return other;
}
void shms_writer_pending_ended(struct shms_writer *w, uint32_t entry) { (void)w, (void)entry; }
bool shms_room_await(struct shms_writer *w, shms_put *put) { return (void)w, (void)put, false; }

void shms_ring_insert(shms_ring *r, uint32_t slot, uint32_t behind) { (void)r, (void)slot, (void)behind; }
void shms_ring_cut(shms_ring *r, uint32_t first, uint32_t last, uint32_t n) {
    (void)r, (void)first, (void)last, (void)n;
}
void shms_ring_gap_before(shms_ring *r, uint32_t behind) { (void)r, (void)behind; }
void shms_kinds_enter(shms_kinds *k, uint32_t slot) { (void)k, (void)slot; }
void shms_kinds_leave(shms_kinds *k, uint32_t slot) { (void)k, (void)slot; }
void shms_ring_move_hand(shms_ring *r, enum shms_area_name area, uint32_t slot, bool lap) {
    (void)r, (void)area, (void)slot, (void)lap;
}
void shms_ring_use(shms_ring *r, uint32_t slot) { (void)r, (void)slot; }
void shms_ghosts_add(shms_ghosts *g, uint64_t hash, uint64_t span, bool used) {
    (void)g, (void)hash, (void)span, (void)used;
}
int shms_ghosts_put(shms_ghosts *g, uint64_t hash, uint64_t span) { return (void)g, (void)hash, (void)span, 0; }
void shms_zones_stale(shms_zones *z, uint32_t zone) { shms_ring_stale(z->ring, zone); }
void shms_zones_stale_all(shms_zones *z) {
    for (uint32_t zone = 0; zone < ZONES; zone++)
        shms_ring_stale(z->ring, zone);
}

int shms_reclaim_space(struct shms_writer *w, uint64_t span, uint32_t kind, bool waits, shms_placement *out) {
    (void)span, (void)kind, (void)waits;
    out->at = ((private *)w)->place;
    out->behind = SHMS_NONE;
    out->moves = false;
    return SHMS_OK;
}

/* A key is a byte, and its hash is too. A tag is the object's secret. */
uint64_t shms_hash_key(uint64_t seed, const char *key, uint32_t len) {
    return seed + ((uint64_t)len * atomic_load_explicit((_Atomic uint8_t *)key, memory_order_relaxed) << 25);
}
WORLD shms_ref sealed[8]; /* a packed reference is the number of one of these */
bool shms_ref_sealed(const uint8_t *packed, uint64_t store_secret, uint64_t object_secret) {
    return (void)store_secret, sealed[*packed].tag == object_secret;
}
static void copy_ref(shms_ref *to, const shms_ref *from) {
    to->slot = from->slot;
    to->entry = from->entry;
    to->address = from->address;
    to->id = from->id;
    to->lease = from->lease;
    to->tag = from->tag;
}
void shms_ref_unpack(shms_ref *out, const uint8_t *packed) { copy_ref(out, &sealed[*packed]); }
int shms_ref_read(shms_ref *out, const uint8_t *packed, const shms_superblock *sb, const shms_layout *l) {
    (void)sb, (void)l;
    copy_ref(out, &sealed[*packed]);
    return SHMS_OK;
}
void shms_ref_seal(uint8_t *out, shms_ref *ref, uint64_t store_secret, uint64_t object_secret) {
    (void)store_secret;
    ref->tag = object_secret;
    copy_ref(&sealed[*out], ref);
}

/* ---- what is real; names that two files use for themselves are told apart ---- */

#include "store/slots.c"

#define shms_hash_key hash_of_many_bytes
#include "store/index.c"
#undef shms_hash_key
#include "store/leases.c"
#include "store/readers.c"
#include "store/wait.c"

#include "store/find.c"
#include "store/holders.c"
#define shms_reclaim_space space_of_ring
#include "store/reclaim.c"
#undef shms_reclaim_space

#define pin pin_of_writer
#include "store/remote.c"
#undef pin
#undef SHMS_DROPS
#define SHMS_DROPS 2u /* so that the ring goes round */
#include "store/drops.c"
#include "store/directory.c"
#include "store/hand.c"
#include "store/handouts.c"
#include "store/pending.c"
#define shms_slots_valid(slots, n, capacity, next) SHMS_OK
#include "store/writer.c"
#undef shms_slots_valid
#define pin pin_of_rank
#define look look_of_rank
#include "store/reader.c"
#undef pin
#undef look

/* ---- what processes do ---- */

#define READER(r)                                                                                                      \
    {.seg = {.layout = LAYOUT,                                                                                         \
             .sb = &world.sb,                                                                                          \
             .writer = &world.arenas[0].writer,                                                                        \
             .control = (uint8_t *)&world,                                                                             \
             .all_data = (uint8_t *)world.data},                                                                       \
     .table = &world.ranks[r].table,                                                                                   \
     .index = {.n_slots = SLOTS}, /* one line, and no seed */                                                          \
     .rank = (r)}

/* The owner of all objects, another writer, and who comes after the death of the last one. */
WORLD private a = PRIVATE(a, 0), successor = PRIVATE(successor, WRITERS - 1);
#if WRITERS > 1
WORLD private b = PRIVATE(b, 1);
#endif
WORLD struct shms_reader first = READER(0), last = READER(RANKS - 1);

/* A reference without a lease to what `store_first` has stored. */
static inline void refer(uint8_t ref, uint32_t slot, uint64_t id, uint64_t address) {
    copy_ref(&sealed[ref], &(shms_ref){.slot = slot, .id = id, .address = address, .tag = id});
}

/* Every process is there, each rank has attached once, and `a` has an object, which `sealed[0]` names. */
static inline void begin(void) {
    begin_private(&a);
#if WRITERS > 1
    begin_private(&b);
#endif
    for (uint32_t slot = 0; slot < SLOTS; slot++) {
        store_first(0, slot, 1 + slot * WRITERS, slot * UNIT);
        shms_index_add(&a.w.index, shms_slot_hash(&a.w, slot), slot);
        shms_ring_stale_slot(&a.w.ring, slot);
    }
    refer(0, 0, 1, 0);
    for (int i = 0; i < WRITERS + RANKS; i++)
        locks[i] = 1;
    for (int i = 0; i < RANKS; i++)
        shms_set(&world.ranks[i].table.epoch, 1);
    for (int i = 0; i < WRITERS; i++) {
        shms_set(&world.arenas[i].writer.next_lease, 1);
        shms_set(&world.arenas[i].writer.published, 1);
        shms_set(&world.arenas[i].writer.epoch, 1);
    }
}
/* The same, but the object has gone. */
static inline void begin_empty(void) {
    begin();
    shms_index_remove(&a.w.index, shms_slot_hash(&a.w, 0), 0);
    shms_set(&world.arenas[0].slots[0].state, SHMS_FREE);
    a.w.free_slots[a.w.n_free_slots++] = 0;
}

/* Opens a lease on an object that is there, for a group or all ranks, and hands it out as `sealed[ref]`. */
static inline void lease(private *p, uint32_t slot, uint32_t group, uint8_t ref) {
    shms_open_lease(&p->w, slot, shms_leases_take(&p->w.leases), group, false, &ref);
}

/* Puts an object, whose payload is its id, into the writer's free slot, and hands it out as `sealed[ref]`; or does not,
 * if there is no `ref`. */
enum { UNLEASED = 7 };
static inline void put(private *p, uint8_t key, uint64_t offset, uint8_t ref) {
    p->place = offset;
    p->batch.ref[0] = ref;
    p->w.random[p->w.n_random++] = shms_get(&p->w.seg.writer->next_id);
    int rc = shms_batch_begin(&p->w, &p->batch,
                              &(shms_put){.key = (const char *)&key, .key_len = 1, .unleased = ref == UNLEASED});
    assert(rc == SHMS_OK);
    *payload(p->w.seg.arena, offset) = p->batch.pending.id;
    rc = shms_batch_commit(&p->w, &p->batch);
    assert(rc == SHMS_OK);
}

/* Polls, perhaps yields, and scans the zone of the object in slot 0 if it is stale, as zones.c does. */
static inline void survey(private *p) {
    shms_poll(&p->w);
    shms_reclaim_yield(&p->w);
    shms_zone *zone = &p->w.ring.zones[shms_ring_zone(&p->w.ring, shms_ring_start(&p->w.ring, 0))];
    if (!zone->stale)
        return;
    zone->stale = false;
    p->held = !shms_evictable(&p->w, 0);
}
static inline void owner_surveys(void) {
    survey(&a);
    survey(&a);
}
/* What was remembered as held is held still, or the next poll has its zone scanned again. */
static inline void nothing_is_stuck(void) {
    shms_poll(&a.w);
    uint32_t zone = shms_ring_zone(&a.w.ring, shms_ring_start(&a.w.ring, 0));
    assert(!a.held || a.w.ring.zones[zone].stale || !shms_evictable(&a.w, 0));
}

/* Evicts the object in slot 0 if that is allowed, and reuses its bytes. */
static inline bool evict_first(private *p) {
    victims_of(&p->w)[0] = 0;
    if (!shms_evictable(&p->w, 0) || vacate(&p->w, 1) != SHMS_OK)
        return false;
    *payload(0, shms_get(&world.arenas[0].slots[0].offset)) = 0;
    return true;
}
static inline void owner_evicts(void) { evict_first(&a); }

/* A rank takes what a reference names, looks at it and acknowledges it. */
static inline int use(struct shms_reader *r, uint8_t number) {
    shms_ref ref;
    shms_slot seen;
    int rc = pin_of_rank(r, &number, &ref, &seen);
    if (rc)
        return rc;
    assert(*payload(0, shms_get(&seen.offset)) == ref.id);
    if (ref.lease)
        acknowledge(r, &ref);
    shms_reader_table_unpin(r->table, &r->seg.layout, ref.slot, shms_get(&seen.offset));
    return rc;
}
/* The same for what it finds by key, as shms_reader_find does. */
static inline void find_and_use(struct shms_reader *r, char key) {
    shms_slot seen;
    uint32_t slot = look_of_rank(r, &key, 1, &seen);
    if (slot == SHMS_NONE)
        return;
    const shms_slot *s = shms_segment_slot(&r->seg, slot);
    enum shms_state state = shms_reader_table_pin(r->table, &r->seg.layout, s, slot, shms_get(&seen.id));
    if (state == SHMS_EVICTING)
        shms_reader_table_unpin_failed(r->table, &r->seg.layout, s, slot);
    if (state != SHMS_LIVE)
        return;
    assert(*payload(0, shms_get(&seen.offset)) == shms_get(&seen.id));
    shms_reader_table_unpin(r->table, &r->seg.layout, slot, shms_get(&seen.offset));
}
static inline void rank_uses(void) { use(&first, 0); }
static inline void rank_misses(void) {
    int rc = use(&first, 0);
    assert(rc == SHMS_ESTALE);
}
static inline void attach(struct shms_reader *r) {
    shms_reader_table_attach(r->table, &r->seg.layout, &world.arenas[0].writer, r->rank, false, 1, 1);
}

/* A reference goes from one process to another by any channel. */
WORLD _Atomic int channel;
static inline void send(void) { atomic_store_explicit(&channel, 1, memory_order_release); }
static inline bool sent(void) { return atomic_load_explicit(&channel, memory_order_acquire); }
static inline void receive(void) { assume(sent()); }

/* ---- the program ---- */

#ifdef SHMS_GENMC
#define ROUNDS 1
#define KEEP()
#define RESTORE()
#define ENDED() true
#else
#ifndef ROUNDS
#define ROUNDS 500
#endif
extern char __start_shms_world[], __stop_shms_world[];
#define WORLD_SIZE ((size_t)(__stop_shms_world - __start_shms_world))
static char *kept;
#define KEEP() (kept = __builtin_memcpy(malloc(WORLD_SIZE), __start_shms_world, WORLD_SIZE))
#define RESTORE() __builtin_memcpy(__start_shms_world, kept, WORLD_SIZE)
#define ENDED() !blocked
#endif

static inline void *thread(void *part) {
    (*(void (**)(void))part)();
    return NULL;
}
static inline void nothing(void) {}

/* `before`, then the threads, then `afterwards`. */
#define RUN(before, afterwards, ...)                                                                                   \
    int main(void) {                                                                                                   \
        void (*parts[])(void) = {__VA_ARGS__};                                                                         \
        enum { THREADS = sizeof parts / sizeof *parts };                                                               \
        pthread_t ids[THREADS];                                                                                        \
        KEEP();                                                                                                        \
        for (int round = 0; round < ROUNDS; round++) {                                                                 \
            RESTORE();                                                                                                 \
            before();                                                                                                  \
            for (int i = 0; i < THREADS; i++)                                                                          \
                pthread_create(&ids[i], NULL, thread, &parts[i]);                                                      \
            for (int i = 0; i < THREADS; i++)                                                                          \
                pthread_join(ids[i], NULL);                                                                            \
            if (ENDED())                                                                                               \
                afterwards();                                                                                          \
        }                                                                                                              \
        return 0;                                                                                                      \
    }

#endif
