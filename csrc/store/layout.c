/*
 * layout.c - geometry of a segment, from options or from a superblock that may lie.
 *
 * The same function computes both, so that what is read back is accepted only if this build would have laid it out
 * the same way.  Some changes leave every offset where it was (a capacity within its last page, a flag): those the
 * check word finds.  It is there against accidents; a forger gets a geometry that is sound, if not the true one.  Lengths are at most 2^48 + tables of 2^24
 * entries for 2^8 ranks, so no sum here comes near 2^64.
 */
#include "layout.h"

#include <string.h>

#define HUGE_PAGE (UINT64_C(2) << 20)
#define MIN_LEASES 64
#define SMALL_STORE 1024 /* objects: below, the tables are small whatever an object's share of them is */

uint32_t shms_layout_version(void) { return SHMS_LAYOUT_VERSION; }

/* Few enough zones to go through all of them for one refusal, of few enough objects to ask all ranks about all of one.  A
 * zone costs more memory the more ranks there are. */
static uint64_t zone_shift(uint64_t capacity, uint64_t max_objects, uint64_t n_readers) {
    uint64_t zones = max_objects / (n_readers < 4 ? 32 : n_readers < 16 ? 16 : n_readers), shift = 12;
    zones = zones < 64 ? 64 : zones > SHMS_MAX_ZONES ? SHMS_MAX_ZONES : zones;
    while (((capacity - 1) >> shift) + 1 > zones)
        shift++;
    return shift;
}

/* Lease entries cost 32 bytes, 16 in the writer's heap and 8 a rank; slots and their books at most 117 and 4 a rank;
 * each rank's table has a head and ends with part of a page; five pages are the superblock, the end of the writer's
 * tables and the writer itself; a zone takes 96 bytes, and 24 a rank.  One entry an object is wanted; in a large store
 * of many ranks there are fewer, so that an object's share stays in its promise. */
static uint64_t default_leases(uint64_t max_objects, uint64_t n_readers, uint64_t n_zones, uint64_t page) {
    uint64_t spare = max_objects * (256 - 117), once = n_readers * (page + sizeof(shms_reader_table) + 48) + 5 * page;
    once += n_zones * (96 + 24 * n_readers);
    uint64_t affordable = spare > once ? (spare - once) / (48 + 8 * n_readers) : 0;
    uint64_t least = max_objects < SMALL_STORE ? max_objects : SMALL_STORE;
    uint64_t leases = affordable < max_objects ? affordable : max_objects;
    leases = leases < least ? least : leases;
    return leases < MIN_LEASES ? MIN_LEASES : leases;
}

/* An object every 16 KiB: bookkeeping then stays below 2 % of the capacity. */
static uint64_t default_objects(uint64_t capacity) {
    uint64_t n = capacity / 16384;
    return n < 256 ? 256 : n > 1048576 ? 1048576 : n;
}

int shms_layout_compute(shms_layout *out, const shms_options *options, uint64_t page) {
    if (options->capacity == 0 || options->capacity > SHMS_MAX_CAPACITY || options->n_readers == 0 ||
        options->n_readers > SHMS_MAX_READERS || options->max_objects > SHMS_MAX_OBJECTS ||
        (options->flags & ~(uint32_t)(SHMS_PREFAULT | SHMS_HUGE_PAGES | SHMS_FIFO | SHMS_CHECKSUMS)))
        return SHMS_EINVAL;
    shms_layout l = {.page = page, .n_readers = options->n_readers, .flags = options->flags};
    l.capacity = shms_align_up(options->capacity, SHMS_ALIGN);
    l.max_object_size = options->max_object_size ? options->max_object_size : l.capacity;
    if (l.max_object_size > l.capacity)
        return SHMS_EINVAL;
    l.max_objects = options->max_objects ? options->max_objects : default_objects(l.capacity);
    l.zone_shift = zone_shift(l.capacity, l.max_objects, l.n_readers);
    l.max_leases = default_leases(l.max_objects, l.n_readers, shms_n_zones(&l), page);
    l.slots_at = SHMS_SUPERBLOCK_SIZE;
    l.leases_at = l.slots_at + l.max_objects * sizeof(shms_slot);
    l.readers_at = shms_align_up(l.leases_at + l.max_leases * sizeof(shms_lease), page);
    l.reader_stride = shms_align_up(sizeof(shms_reader_table) + shms_align_up(l.max_objects * sizeof(shms_pin), 8) +
                                        (l.max_leases + shms_n_zones(&l)) * sizeof(shms_word),
                                    page);
    /* A huge page must start at a multiple of its size in the file, too. */
    l.data_at = shms_align_up(l.readers_at + l.n_readers * l.reader_stride, l.capacity >= HUGE_PAGE ? HUGE_PAGE : page);
    l.file_size = l.data_at + shms_align_up(l.capacity, page);
    *out = l;
    return SHMS_OK;
}

static uint64_t hash_words(const uint64_t *words, ptrdiff_t n) {
    uint64_t h = UINT64_C(0xcbf29ce484222325); /* FNV-1a over words */
    for (ptrdiff_t i = 0; i < n; i++)
        h = (h ^ words[i]) * UINT64_C(0x100000001b3);
    return h;
}

/* Offsets are asserted in layout.h, and cannot change without the version. */
uint64_t shms_layout_stamp(void) {
    static const uint64_t facts[] = {
        SHMS_LAYOUT_VERSION,
        SHMS_REF_SIZE,
        SHMS_ALIGN,
        sizeof(shms_superblock),
        sizeof(shms_slot),
        sizeof(shms_lease),
        sizeof(shms_reader_table),
#if defined(__x86_64__)
        0x8664,
#elif defined(__aarch64__)
        0xaa64,
#else
#error "shmstore supports x86-64 and aarch64"
#endif
    };
    return hash_words(facts, sizeof facts / sizeof *facts);
}

uint64_t shms_layout_check(const shms_superblock *sb) { return hash_words(&sb->page, &sb->check - &sb->page); }

int shms_layout_read(shms_layout *out, const shms_superblock *sb, uint64_t file_size) {
    if (sb->magic != SHMS_MAGIC)
        return SHMS_ELAYOUT;
    /* Pairs with the release of the creation: what the stamp promises is there. */
    if (atomic_load_explicit(&sb->stamp, memory_order_acquire) != shms_layout_stamp())
        return SHMS_ELAYOUT;
    if (sb->page < 4096 || sb->page > HUGE_PAGE || (sb->page & (sb->page - 1)) || sb->n_readers > SHMS_MAX_READERS ||
        sb->max_objects == 0 || sb->max_objects > SHMS_MAX_OBJECTS || sb->max_leases == 0 || sb->flags > UINT32_MAX ||
        sb->store > UINT32_MAX || sb->check != shms_layout_check(sb))
        return SHMS_ECORRUPT;
    shms_options options = {.capacity = sb->capacity,
                            .max_object_size = sb->max_object_size,
                            .n_readers = (uint32_t)sb->n_readers,
                            .max_objects = (uint32_t)sb->max_objects,
                            .flags = (uint32_t)sb->flags};
    shms_layout l;
    if (shms_layout_compute(&l, &options, sb->page) != SHMS_OK || l.capacity != sb->capacity ||
        l.max_leases != sb->max_leases || l.slots_at != sb->slots_at || l.leases_at != sb->leases_at ||
        l.readers_at != sb->readers_at || l.reader_stride != sb->reader_stride || l.data_at != sb->data_at ||
        l.zone_shift != sb->zone_shift || l.file_size != sb->file_size)
        return SHMS_ECORRUPT;
    if (file_size != l.file_size)
        return SHMS_ELAYOUT;
    *out = l;
    return SHMS_OK;
}
