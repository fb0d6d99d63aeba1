/*
 * layout.h - the layout of a segment: what is where, and which process may write it.
 *
 *   file offset 0
 *   +-------------------+----------------------------------------------------------------------------+
 *   | superblock        | written by the creator, once: geometry                                      |
 *   +=== page ==========+----------------------------------------------------------------------------+
 *   | arena 0           | written by writer 0 alone:                                                  |
 *   |   writer table    |   ids, hands, statistics, retirements, kinds, tier                          |
 *   |=== page ==========|                                                                             |
 *   |   slot table      |   64 bytes an object                                                        |
 *   |   lease table     |   32 bytes a hand-out                                                       |
 *   |   key index       |   cache lines with 7 keys each (index.h)                                    |
 *   |   holds           |   16 bytes an object of any arena; absent with one writer                   |
 *   |   zone counts     |   8 bytes a zone of any arena; likewise                                     |
 *   +=== page ==========+----------------------------------------------------------------------------+
 *   | arena 1 ...       | written by writer 1 alone                                                   |
 *   +=== page ==========+----------------------------------------------------------------------------+
 *   | reader table 0    | written by rank 0 alone: header, pins[all objects], acks[all leases],       |
 *   |                   | zone_releases[all zones]                                                    |
 *   +=== page ==========+----------------------------------------------------------------------------+
 *   | reader table 1 ...| written by rank 1 alone                                                     |
 *   +=== page or 2 MiB =+----------------------------------------------------------------------------+
 *   | data of arena 0   | written by writer 0 alone: objects in address order, with gaps              |
 *   +=== page or 2 MiB =+----------------------------------------------------------------------------+
 *   | data of arena 1...| written by writer 1 alone                                                   |
 *   +-------------------+----------------------------------------------------------------------------+
 *
 * Each writer has an arena: its control block, and its part of the data. Capacity and the numbers of objects, leases and
 * zones are those of one arena. A reference, a lease and a rank's table number the slots, entries and zones of all
 * arenas: number within the arena + arena * numbers in an arena. All else counts within the arena, offsets too.
 *
 * An object in the data region starts at slot.offset, a multiple of 64:
 *
 *     | key | metadata | zero to 63 bytes | payload ... | extra | zero to 63 bytes |
 *     ^ offset         ^ multiple of 64 -^                     ^ offset + length  ^ the next object at the earliest
 *
 * The extra bytes are the writer's own, and no reader gets them.
 *
 * An example, which tests/c/test_layout.c checks: key "k", metadata "mm" and a payload of 5 bytes, at offset 128:
 *
 *     128: 6b 6d 6d 00 ...       192: payload[0..4]      length = 69, span = 128: the next object starts at 256
 *
 * Every word that two processes share is a naturally aligned little-endian atomic: 32 bits for a pin, else 64. The
 * segment contains no pointers. Positions are offsets or indices, and are checked before use.
 *
 * A *zone* is 2^zone_shift bytes of an arena's data. Each rank, and each other writer, counts its releases in each zone.
 * The counts tell the writer which zones to scan again (zones.h).
 */
#ifndef SHMS_LAYOUT_H
#define SHMS_LAYOUT_H

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core.h"

#define SHMS_LAYOUT_VERSION 16u                 /* incremented also if the same options give other sizes */
#define SHMS_MAGIC UINT64_C(0x31524f54534d4853) /* "SHMSTOR1" as little-endian bytes */
#define SHMS_PAGE 4096u                         /* the smallest */
#define SHMS_LARGEST_PAGE (UINT64_C(2) << 20)
#define SHMS_MAX_ZONES 4096u
#define SHMS_DROPS 128u                         /* how many dropped objects an owner finds without a scan */

typedef _Atomic uint64_t shms_word;

/* Which word of a writer's or a rank's `counters` a field of its record is. They are statistics only, so every access
 * is relaxed. */
#define SHMS_C(field) (offsetof(shms_counters, field) / sizeof(shms_word))
#define SHMS_R(field) (offsetof(shms_reader_counters, field) / sizeof(shms_word))

/* A kind of objects; number 0 counts those without a kind. See kinds.h. */
typedef struct shms_kind {
    shms_word name[3]; /* UTF-8, padded with zeros; written once, its first word last; 0: none yet */
    shms_word bytes;   /* as in used_bytes: spans of occupied slots */
    shms_word objects; /* occupied slots, also of unfinished puts */
    shms_word quota;   /* what `bytes` may be at most; 0: no limit */
} shms_kind;

/* The geometry that follows from options. It has no padding, so two can be compared by their bytes. */
typedef struct shms_layout {
    uint64_t page;                      /* alignment of the regions */
    uint64_t file_size;
    uint64_t capacity;
    uint64_t max_object_size;
    uint64_t n_readers;
    uint64_t max_objects;
    uint64_t max_leases;
    uint64_t flags;
    uint64_t n_writers;
    uint64_t writer_at;                 /* file offsets of arena 0's tables */
    uint64_t slots_at;
    uint64_t leases_at;
    uint64_t index_at;
    uint64_t holds_at;
    uint64_t counts_at;
    uint64_t arena_stride;              /* from a table of one arena to that of the next */
    uint64_t readers_at;
    uint64_t reader_stride;
    uint64_t data_at;
    uint64_t data_stride;
    uint64_t zone_shift;
    uint64_t n_groups;
    uint8_t group_of[SHMS_MAX_READERS]; /* by rank; a group is a range of ranks */
} shms_layout;

typedef struct shms_superblock {
    uint64_t magic;
    shms_word stamp;     /* shms_layout_stamp(); stored last at creation, release; pairs with shms_segment_read */
    shms_layout layout;  /* from here on written once, before the stamp */
    uint64_t store;      /* random 32-bit number that references carry */
    uint64_t created_ns; /* CLOCK_REALTIME */
    uint64_t boot;       /* shms_segment.boot: nobody knows what a disk has of a store of an earlier one */
    uint64_t secret;     /* random; half of the key of the tag of every reference */
    uint64_t owner;      /* pid of a creator that has no arena, and a lock of its own; 0: writer 0 was the creator */
    uint64_t check;      /* shms_layout_check(): all that the creation wrote */
} shms_superblock;

typedef struct shms_writer_table {
    shms_word pid;          /* informative; the lock decides liveness; 0: it has closed */
    shms_word epoch;        /* incremented by create and by each recover; 0: its data may be a hole */
    shms_word next_id;      /* P1; the id of the next object */
    shms_word next_lease;   /* L1; the number of the next lease */
    shms_word hand;         /* offset where the next search for large objects starts */
    shms_word used_bytes;   /* bytes of the data region under live and unfinished objects */
    shms_word objects;      /* live objects */
    shms_word open_leases;
    shms_word published;    /* L3, V4; every lease below it is in the table or has ended; pairs with A4 */
    shms_word small_hand;   /* the same for small objects */
    shms_word stays;        /* SHMS_UNTIL_CLOSED to SHMS_BEYOND_CLOSE */
    shms_word pinning;     /* B1, B5: the slot that this writer pins in another's arena, + 1; pairs with W3h */
    shms_word releases;     /* B5, C2: releases of other arenas' objects, stored after the zone's count */
    shms_word retirements;  /* how many times shms_writer_retire was called; other writers poll it */
    shms_word more[2];
    shms_word counters[24]; /* shms_counters */
    /* T1: epoch[r] + 1 as of shms_writer_retire; void once A3 raises the epoch; pairs with A4 */
    shms_word retired[SHMS_MAX_READERS];
    shms_kind kinds[SHMS_KINDS];
    /* how many times this writer has dropped an object of another; after shms_holds.dropped */
    shms_word drops;
    shms_word reserved[7];  /* other writers poll `drops`, so its cache line has nothing that changes often */
    shms_word tier[15];     /* shms_tier_figures; 0 until this process has a tier */
    shms_word cleared;      /* shms_writer_clear_tier: its last moment, also of a predecessor */
    /* D2: where the objects dropped last are; number n is in cell n % SHMS_DROPS */
    _Atomic uint32_t dropped_at[SHMS_DROPS];
} shms_writer_table;

enum shms_state { SHMS_FREE = 0, SHMS_WRITING = 1, SHMS_LIVE = 2, SHMS_EVICTING = 3 };

#define SHMS_SLOT_DELETED UINT64_C(1) /* not handed out any more; reclaimed once nothing holds it */
#define SHMS_SLOT_CHECKED UINT64_C(2) /* bits 32 to 63: CRC-32C of the object, without padding */
#define SHMS_SLOT_KIND_SHIFT 2        /* bits 2 to 7: the kind, below SHMS_KINDS */
#define SHMS_SLOT_KIND_MASK UINT64_C(0x3f)
#define SHMS_SLOT_EXTRA_SHIFT 8       /* bits 8 to 31: how many extra bytes */
#define SHMS_SLOT_CRC_SHIFT 32

/* Eight words, a cache line, and no room: `flags` has no bit left. What is new of an object goes to whoever writes it, by
 * slot: of the owner, a table of its own in the arena; of another writer, shms_holds; of a rank, next to its pins. */
typedef struct shms_slot {
    shms_word state;  /* enum shms_state */
    shms_word id;     /* P2; stored before P4 makes the object LIVE */
    shms_word secret; /* random; the other half of the key of the tags */
    shms_word offset; /* offset of the key */
    shms_word length; /* bytes from the key to the end of the payload and of the extra bytes */
    /* key_len | mark << 20 | meta_len << 32; the owner's CLOCK changes the mark while the object is there */
    shms_word head;
    shms_word flags;  /* SHMS_SLOT_*; the upper half is the checksum if SHMS_SLOT_CHECKED is set */
    shms_word put_ns; /* CLOCK_REALTIME of the commit */
} shms_slot;

/* What a writer does with an object of another writer. One for each slot of all arenas, in the row of the writer. */
typedef struct shms_holds {
    _Atomic uint32_t first; /* B4, C2: the first of its open leases there, + 1; 0: none; pairs with W3f */
    _Atomic uint32_t used;  /* the slot's mark as of its last use; the owner's CLOCK reads it */
    shms_word dropped;      /* the id of an object that no writer may hand out any more */
} shms_holds;

typedef struct shms_lease {
    shms_word number;    /* 0: the entry is free; L2 stores it last (release), C1 clears it; pairs with R3a */
    shms_word what;      /* slots.h packs it: slot; held (H1); group (G1); one word, so all is of one moment */
    shms_word id;
    shms_word opened_ns; /* CLOCK_REALTIME */
} shms_lease;

typedef struct shms_reader_table {
    /* cache lines that writers read at W1; only attaching and closing change them */
    shms_word epoch;       /* A3: how many times this rank has attached; pairs with W1b and T2 */
    shms_word pid;         /* informative */
    shms_word attached_ns;
    /* by writer. A4: older leases do not expect this process; or SHMS_FINDS; E1: SHMS_CLOSED; pairs with W1a */
    shms_word base[SHMS_MAX_WRITERS];
    shms_word reserved[5];
    /* another cache line, which every get writes */
    /* R3b, R4: releases so far, stored after the zone's count; the writer reads it before scans */
    shms_word releases;
    shms_word counters[7]; /* shms_reader_counters */
    /* shms_pin pins[all slots], shms_word acks[all entries], shms_word zone_releases[all zones] */
} shms_reader_table;

/* How often the process has pinned an object, and above that the slot's mark as of its last use. */
typedef _Atomic uint32_t shms_pin;

#define SHMS_PIN_COUNT UINT32_C(0x7fffff)
#define SHMS_PIN_MARK_SHIFT 23

/* A slot's mark, from 1 on: whoever uses its object copies the mark into a word of its own. The owner's CLOCK asks whether
 * any word has it, and if one has, takes a mark for the slot that no word has. So any number of uses is a use, and those
 * of an earlier object in the slot are none. */
#define SHMS_MARKS 512u

_Static_assert(SHMS_MARKS > SHMS_MAX_READERS + SHMS_MAX_WRITERS, "one is always free");

#define SHMS_CLOSED UINT64_MAX      /* bases above every lease: the reader is closed */
#define SHMS_FINDS (UINT64_MAX - 1) /* or it only finds, so that no lease waits for it */

_Static_assert(sizeof(shms_word) == 8 && sizeof(shms_pin) == 4, "atomics are plain words");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "a lock would be private to a process");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "references and tables are little-endian");
/* tests/c/test_layout.c checks every offset, so that swapping two words of one size does not go unnoticed. */
_Static_assert(sizeof(shms_layout) == 432, "layout");
_Static_assert(sizeof(shms_superblock) == 496, "superblock");
_Static_assert(sizeof(shms_writer_table) == 3840, "writer table");
_Static_assert(sizeof(shms_superblock) <= SHMS_PAGE && sizeof(shms_writer_table) <= SHMS_PAGE, "one page each");
_Static_assert(sizeof(shms_counters) <= 24 * 8 && sizeof(shms_reader_counters) <= 7 * 8, "counters");
_Static_assert(sizeof(shms_kind) == 48, "kind");
_Static_assert(sizeof(shms_tier_figures) == 120, "its fields are the words of shms_writer_table.tier");
_Static_assert(sizeof(shms_slot) == 64, "one cache line an object");
_Static_assert(sizeof(shms_holds) == 16, "holds");
_Static_assert(sizeof(shms_lease) == 32, "lease");
_Static_assert(sizeof(shms_reader_table) == 640, "reader table");

/* Computes the geometry. SHMS_EINVAL if an option is out of range. There is one lease entry for each object. Above
 * 1,024 entries, there are as many as fit the promise for large stores: 256 + 4 * n_readers bytes of bookkeeping for
 * each object, and if there are several writers, 48 + 16 * n_writers more. Quotas add 8 bytes for each. */
int shms_layout_compute(shms_layout *out, const shms_options *options, uint64_t page);

/* The options of a store with this geometry. */
void shms_layout_options(shms_options *out, const shms_layout *l);

/* A number that differs if two builds would read a segment differently: version, sizes or architecture. */
uint64_t shms_layout_stamp(void);

/* A hash of the words from the layout to the check word. */
uint64_t shms_layout_check(const shms_superblock *sb);

/* Reads the geometry from a copy of a superblock, and checks it against itself and the size of the file. SHMS_ELAYOUT:
 * another version or architecture, or never published. SHMS_ECORRUPT: our version, but inconsistent. */
int shms_layout_read(shms_layout *out, const shms_superblock *sb, uint64_t file_size);

/* Ids and leases count up, and would take centuries to reach 2^61, so a larger value is damage. No call needs to look
 * for an overflow afterwards. A death between L1 and L3 leaves one lease number that is not published, and V4 publishes
 * it. */
bool shms_counters_valid(const shms_writer_table *t);

static inline uint64_t shms_align_up(uint64_t n, uint64_t to) { return (n + to - 1) & ~(to - 1); }

static inline uint32_t shms_zone_of(const shms_layout *l, uint64_t offset) {
    return (uint32_t)(offset >> l->zone_shift);
}
static inline uint32_t shms_n_zones(const shms_layout *l) { return shms_zone_of(l, l->capacity - 1) + 1; }

/* How many there are in all arenas. */
static inline uint32_t shms_all_slots(const shms_layout *l) { return (uint32_t)(l->n_writers * l->max_objects); }
static inline uint32_t shms_all_leases(const shms_layout *l) { return (uint32_t)(l->n_writers * l->max_leases); }
static inline uint32_t shms_all_zones(const shms_layout *l) { return (uint32_t)l->n_writers * shms_n_zones(l); }

/* Where in the data of all arenas an offset of an arena is. */
static inline uint64_t shms_address(const shms_layout *l, uint32_t arena, uint64_t offset) {
    return arena * l->data_stride + offset;
}

/* The arena of a slot. A division takes some nanoseconds, which one writer does not pay. */
static inline uint32_t shms_arena_of(const shms_layout *l, uint32_t slot) {
    return l->n_writers == 1 ? 0 : slot / (uint32_t)l->max_objects;
}

/* Where the payload of an object starts, and how many bytes of the data region an object takes. */
static inline uint64_t shms_payload_at(uint32_t key_len, uint32_t meta_len) {
    return shms_align_up((uint64_t)key_len + meta_len, SHMS_ALIGN);
}
static inline uint64_t shms_span(uint64_t length) { return length ? shms_align_up(length, SHMS_ALIGN) : SHMS_ALIGN; }

#endif
