/*
 * layout.c - the geometry of a segment, from options or from a superblock that is not trusted.
 *
 * 1. One function computes both. A superblock is accepted only if this build would have laid out the segment the same
 *    way.
 * 2. Some changes move no offset: a capacity within the same last page, a flag. The check word finds those. It protects
 *    against accidents: a forger can compute a valid one, but the geometry is then still safe to map.
 * 3. No sum overflows: the data of all arenas is at most 2^48 bytes, and their tables have at most 2^24 entries for
 *    2^8 ranks.
 */
#include "layout.h"

#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

#include "index.h"

#define FIXED_FLAGS (SHMS_PREFAULT | SHMS_HUGE_PAGES | SHMS_CHECKSUMS)
#define CALL_FLAGS (SHMS_EPHEMERAL | SHMS_OUTLIVES | SHMS_OWNS | SHMS_MEMFD) /* not of the geometry */
#define MIN_LEASES 64
#define SMALL_STORE 1024 /* objects; the tables of a smaller store are small in any case */

/* Chooses the size of a zone. A refusal visits every zone, so zones must be few. A scan asks every rank about each
 * object of a zone, so a zone must hold few objects. The memory for each zone grows with the number of ranks. */
static uint64_t zone_shift(uint64_t capacity, uint64_t max_objects, uint64_t n_readers) {
    uint64_t zones = max_objects / (n_readers < 4 ? 32 : n_readers < 16 ? 16 : n_readers), shift = 12;
    zones = zones < 64 ? 64 : zones > SHMS_MAX_ZONES ? SHMS_MAX_ZONES : zones;
    while (((capacity - 1) >> shift) + 1 > zones)
        shift++;
    return shift;
}

/* Chooses the number of lease entries: one for each object, or fewer in a large store of many ranks. The result keeps
 * the bookkeeping of each object within its promised size (see layout.h). The costs, in bytes:
 * - a lease entry: 32, plus 16 in the writer's heap, plus 8 for each rank;
 * - a slot with its private bookkeeping and its ghosts: at most 90, plus 4 for each rank, plus its share of the index: 18 to 37;
 * - a rank: a table header, and at most one page of rounding;
 * - once: six pages for the superblock, the writer's tables and the writer itself;
 * - a zone: 96, plus 24 for each rank. */
static uint64_t default_leases(uint64_t max_objects, uint64_t n_readers, uint64_t n_zones, uint64_t page) {
    uint64_t spare = max_objects * (256 - 90), once = n_readers * (page + sizeof(shms_reader_table) + 48) + 6 * page;
    once += n_zones * (96 + 24 * (n_readers + 1)) + shms_index_memory((uint32_t)max_objects);
    uint64_t affordable = spare > once ? (spare - once) / (48 + 8 * n_readers) : 0;
    uint64_t least = max_objects < SMALL_STORE ? max_objects : SMALL_STORE;
    uint64_t leases = affordable < max_objects ? affordable : max_objects;
    leases = leases < least ? least : leases;
    return leases < MIN_LEASES ? MIN_LEASES : leases;
}

/* One object for each 16 KiB, so that bookkeeping stays below 2 % of the capacity. */
static uint64_t default_objects(uint64_t capacity) {
    uint64_t n = capacity / 16384;
    return n < 256 ? 256 : n > 1048576 ? 1048576 : n;
}

/* Is each option in its range? */
static int check(const shms_options *o, uint64_t capacity) {
    const struct {
        const char *option;
        uint64_t value, least, most;
    } ranges[] = {
        {"capacity", o->capacity, 1, SHMS_MAX_CAPACITY},      {"n_readers", o->n_readers, 1, SHMS_MAX_READERS},
        {"max_objects", o->max_objects, 0, SHMS_MAX_OBJECTS}, {"n_writers", o->n_writers, 0, SHMS_MAX_WRITERS},
        {"max_object_size", o->max_object_size, 0, capacity},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if (ranges[i].value < ranges[i].least || ranges[i].value > ranges[i].most)
            return shms_fail(SHMS_EINVAL, "%s must be from %" PRIu64 " to %" PRIu64 ", not %" PRIu64, ranges[i].option,
                             ranges[i].least, ranges[i].most, ranges[i].value);
    if (o->flags & ~(uint32_t)(FIXED_FLAGS | CALL_FLAGS))
        return shms_fail(SHMS_EINVAL, "flags must be those of the header, not %#x", o->flags);
    if (o->mode && o->mode != 0600 && o->mode != 0660 && o->mode != 0606 && o->mode != 0666)
        return shms_fail(
            SHMS_EINVAL,
            "mode must be 0600, 0660, 0606 or 0666, not %#o: whoever shares a store must read and write it", o->mode);
    return shms_is_unused(o->reserved) ? SHMS_OK : shms_fail(SHMS_EINVAL, SHMS_RESERVED);
}

/* Gives each rank its group. SHMS_EINVAL: the sizes are no groups of these ranks. */
static int group_ranks(shms_layout *l, const shms_options *options) {
    uint64_t ranks = 0;
    if (options->n_groups > SHMS_MAX_GROUPS)
        return SHMS_EINVAL;
    for (uint32_t g = 0; g < options->n_groups; g++) {
        uint32_t size = options->group_sizes[g];
        if (size == 0 || size > l->n_readers - ranks)
            return SHMS_EINVAL;
        memset(l->group_of + ranks, (int)g, size);
        ranks += size;
    }
    l->n_groups = options->n_groups ? options->n_groups : 1;
    return options->n_groups && ranks != l->n_readers ? SHMS_EINVAL : SHMS_OK;
}

int shms_layout_compute(shms_layout *out, const shms_options *options, uint64_t page) {
    if (!options)
        return shms_fail(SHMS_EINVAL, SHMS_NO_OPTIONS);
    shms_layout l = {.page = page, .n_readers = options->n_readers, .flags = options->flags & FIXED_FLAGS};
    l.n_writers = options->n_writers ? options->n_writers : 1;
    l.capacity = shms_align_up(options->capacity, SHMS_ALIGN);
    l.max_object_size = options->max_object_size ? options->max_object_size : l.capacity;
    if (check(options, l.capacity))
        return SHMS_EINVAL;
    if (group_ranks(&l, options))
        return shms_fail(SHMS_EINVAL,
                         "the first n_groups group_sizes must each be at least 1, and together n_readers, %u",
                         options->n_readers);
    l.max_objects = options->max_objects ? options->max_objects : default_objects(l.capacity);
    l.zone_shift = zone_shift(l.capacity, l.max_objects, l.n_readers);
    l.max_leases = default_leases(l.max_objects, l.n_readers, shms_n_zones(&l), page);
    l.writer_at = page;
    l.slots_at = l.writer_at + page;
    l.leases_at = l.slots_at + l.max_objects * sizeof(shms_slot);
    l.index_at = shms_align_up(l.leases_at + l.max_leases * sizeof(shms_lease), SHMS_INDEX_LINE);
    l.holds_at = l.index_at + shms_index_memory((uint32_t)l.max_objects);
    /* a reference has 24 bits for each; an arena has no more leases than objects, or MIN_LEASES */
    if (l.n_writers * l.max_objects > SHMS_MAX_OBJECTS)
        return shms_fail(SHMS_EINVAL, "max_objects of all arenas together must be at most %d, not %" PRIu64,
                         SHMS_MAX_OBJECTS, l.n_writers * l.max_objects);
    bool others = l.n_writers > 1;
    l.counts_at = l.holds_at + (others ? shms_all_slots(&l) * sizeof(shms_holds) : 0);
    uint64_t arena_end = l.counts_at + (others ? shms_all_zones(&l) * sizeof(shms_word) : 0);
    l.arena_stride = shms_align_up(arena_end - l.writer_at, page);
    l.readers_at = l.writer_at + l.n_writers * l.arena_stride;
    l.reader_stride =
        shms_align_up(sizeof(shms_reader_table) + shms_align_up(shms_all_slots(&l) * sizeof(shms_pin), 8) +
                          ((uint64_t)shms_all_leases(&l) + shms_all_zones(&l)) * sizeof(shms_word),
                      page);
    /* The file offset of a huge page must also be a multiple of its size. */
    uint64_t data_page = l.capacity >= SHMS_LARGEST_PAGE ? SHMS_LARGEST_PAGE : page;
    l.data_at = shms_align_up(l.readers_at + l.n_readers * l.reader_stride, data_page);
    l.data_stride = shms_align_up(l.capacity, others ? data_page : page);
    if (l.n_writers * l.data_stride > SHMS_MAX_CAPACITY) /* a reference has 48 bits */
        return shms_fail(SHMS_EINVAL, "the capacity of all arenas together must be at most 2^48 bytes");
    l.file_size = l.data_at + l.n_writers * l.data_stride;
    *out = l;
    return SHMS_OK;
}

void shms_layout_options(shms_options *out, const shms_layout *l) {
    *out = (shms_options){.n_writers = (uint32_t)l->n_writers,
                          .capacity = l->capacity,
                          .max_object_size = l->max_object_size,
                          .n_readers = (uint32_t)l->n_readers,
                          .max_objects = (uint32_t)l->max_objects,
                          .flags = (uint32_t)l->flags,
                          .n_groups = (uint32_t)l->n_groups};
    for (uint64_t r = 0; r < l->n_readers; r++)
        out->group_sizes[l->group_of[r]]++;
}

static uint64_t hash_words(const uint64_t *words, ptrdiff_t n) {
    uint64_t h = UINT64_C(0xcbf29ce484222325); /* FNV-1a over words */
    for (ptrdiff_t i = 0; i < n; i++)
        h = (h ^ words[i]) * UINT64_C(0x100000001b3);
    return h;
}

/* Offsets need not be included: a test pins them, so they change only with the version. */
uint64_t shms_layout_stamp(void) {
    static const uint64_t facts[] = {
        SHMS_LAYOUT_VERSION,
        SHMS_REF_SIZE,
        SHMS_ALIGN,
        sizeof(shms_superblock),
        sizeof(shms_writer_table),
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

uint64_t shms_layout_check(const shms_superblock *sb) {
    return hash_words(&sb->layout.page, &sb->check - &sb->layout.page);
}

int shms_layout_read(shms_layout *out, const shms_superblock *sb, uint64_t file_size) {
    if (sb->magic != SHMS_MAGIC)
        return SHMS_ELAYOUT;
    if (shms_get(&sb->stamp) != shms_layout_stamp())
        return SHMS_ELAYOUT;
    const shms_layout *of = &sb->layout;
    if (of->page < 4096 || of->page > SHMS_LARGEST_PAGE || (of->page & (of->page - 1)) ||
        of->n_readers > SHMS_MAX_READERS || sb->store > UINT32_MAX || sb->check != shms_layout_check(sb))
        return SHMS_ECORRUPT;
    for (uint64_t r = 0; r < of->n_readers; r++)
        if (of->group_of[r] >= SHMS_MAX_GROUPS)
            return SHMS_ECORRUPT;
    shms_options options;
    shms_layout l;
    shms_layout_options(&options, of); /* if its groups are no ranges, those computed differ */
    if (shms_layout_compute(&l, &options, of->page) != SHMS_OK || memcmp(&l, of, sizeof l))
        return SHMS_ECORRUPT;
    if (file_size != l.file_size)
        return SHMS_ELAYOUT;
    *out = l;
    return SHMS_OK;
}

bool shms_counters_valid(const shms_writer_table *t) {
    uint64_t id = shms_get(&t->next_id), lease = shms_get(&t->next_lease);
    return id > 0 && lease > 0 && lease - shms_get(&t->published) <= 1 && (id | lease) <= INT64_MAX / 4;
}
