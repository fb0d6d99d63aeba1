/* test_layout.c - the geometry, the example of the header, and damaged or forged segments. */
#include <fcntl.h>
#include <stddef.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "fixture.h"

/* Replaces the C library's function: the file system is as full as the test says. */
static uint64_t space = UINT64_MAX;
int fstatvfs(int fd, struct statvfs *fs) {
    (void)fd;
    *fs = (struct statvfs){.f_frsize = 4096, .f_blocks = 1, .f_bavail = space / 4096};
    return 0;
}

TEST(regions_are_adjacent_and_large_enough) {
    static const uint64_t capacities[] = {
        1, 64, 65, 4096, 100000, 2 << 20, (2 << 20) + 1, UINT64_C(1) << 40, SHMS_MAX_CAPACITY};
    static const uint32_t objects[] = {0, 1, 2, 63, 1000, SHMS_MAX_OBJECTS}, readers[] = {1, 2, 7, SHMS_MAX_READERS};
    for (uint64_t page = 4096; page <= 65536; page *= 16)
        for (size_t i = 0; i < sizeof capacities / 8; i++)
            for (size_t j = 0; j < sizeof objects / 4; j++)
                for (size_t k = 0; k < sizeof readers / 4; k++) {
                    shms_options o = {.capacity = capacities[i], .max_objects = objects[j], .n_readers = readers[k]};
                    shms_layout l;
                    CHECK_EQ(SHMS_OK, shms_layout_compute(&l, &o, page));
                    CHECK(l.capacity >= o.capacity && l.capacity < o.capacity + 64 && l.capacity % 64 == 0);
                    CHECK_EQ(l.capacity, l.max_object_size);
                    CHECK(objects[j] ? l.max_objects == objects[j] : l.max_objects >= 1);
                    CHECK(l.writer_at >= sizeof(shms_superblock) && l.writer_at % page == 0);
                    CHECK(l.slots_at >= l.writer_at + sizeof(shms_writer_table) && l.slots_at % page == 0);
                    CHECK(l.leases_at >= l.slots_at + l.max_objects * sizeof(shms_slot));
                    CHECK(l.readers_at >= l.leases_at + l.max_leases * sizeof(shms_lease));
                    shms_reader_table *t = NULL;
                    uint64_t acks = (uint64_t)((uint8_t *)shms_reader_acks(t, &l) - (uint8_t *)t);
                    CHECK(acks % 8 == 0 && acks >= sizeof *t + 4 * l.max_objects);
                    CHECK(l.reader_stride >= acks + 8 * l.max_leases);
                    CHECK(l.data_at >= l.readers_at + l.n_readers * l.reader_stride);
                    CHECK_EQ(l.data_at + shms_align_up(l.capacity, page), l.file_size);
                    CHECK(l.readers_at % page == 0 && l.reader_stride % page == 0 && l.data_at % page == 0);
                    CHECK(l.capacity < 2 << 20 || l.data_at % (2 << 20) == 0);
                }
}

TEST(options_out_of_range_are_refused) {
    static const shms_options bad[] = {
        {.capacity = 0, .n_readers = 1},
        {.capacity = SHMS_MAX_CAPACITY + 1, .n_readers = 1},
        {.capacity = UINT64_MAX, .n_readers = 1},
        {.capacity = 4096, .n_readers = 0},
        {.capacity = 4096, .n_readers = SHMS_MAX_READERS + 1},
        {.capacity = 4096, .n_readers = 1, .max_objects = SHMS_MAX_OBJECTS + 1},
        {.capacity = 4096, .n_readers = 1, .max_object_size = 4097},
        {.capacity = 4096, .n_readers = 1, .flags = 256},
        {.capacity = 4096, .n_readers = 1, .mode = 01600},
        {.capacity = 4096, .n_readers = 1, .flags = 1 << 16},
        {.capacity = 4096, .n_readers = 4, .n_groups = SHMS_MAX_GROUPS + 1},
        {.capacity = 4096, .n_readers = 4, .n_groups = 2, .group_sizes = {2, 1}},
        {.capacity = 4096, .n_readers = 4, .n_groups = 2, .group_sizes = {2, 3}},
        {.capacity = 4096, .n_readers = 4, .n_groups = 3, .group_sizes = {2, 0, 2}},
        {.capacity = 4096, .n_readers = 4, .n_groups = 3, .group_sizes = {2, 2, 0}},
        {.capacity = 4096, .n_readers = 4, .n_groups = 1, .group_sizes = {UINT16_MAX}},
        {.capacity = 4096, .n_readers = 1, .n_writers = 2, .max_objects = SHMS_MAX_OBJECTS},
        {.capacity = 4096, .n_readers = 1, .n_writers = SHMS_MAX_WRITERS + 1},
        {.capacity = SHMS_MAX_CAPACITY, .n_readers = 1, .n_writers = 2, .max_objects = 8},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        shms_layout l;
        CHECK_EQ(SHMS_EINVAL, shms_layout_compute(&l, &bad[i], 4096));
        CHECK_EQ(0, shms_space_needed(&bad[i], "/dev/shm"));
    }
}

TEST(each_rank_is_in_one_group) {
    shms_options o = {.capacity = 4096, .n_readers = 6, .n_groups = 3, .group_sizes = {1, 3, 2}}, back;
    shms_layout l, one;
    CHECK_EQ(SHMS_OK, shms_layout_compute(&l, &o, 4096));
    CHECK_EQ(3, l.n_groups);
    static const uint8_t expected[SHMS_MAX_READERS] = {0, 1, 1, 1, 2, 2};
    CHECK(!memcmp(expected, l.group_of, sizeof expected));
    shms_layout_options(&back, &l);
    CHECK(back.n_groups == 3 && back.group_sizes[0] == 1 && back.group_sizes[1] == 3 && back.group_sizes[2] == 2);
    o.n_groups = 1, o.group_sizes[0] = 6;
    CHECK_EQ(SHMS_OK, shms_layout_compute(&l, &o, 4096));
    o.n_groups = 0;
    CHECK_EQ(SHMS_OK, shms_layout_compute(&one, &o, 4096));
    CHECK_EQ(0, memcmp(&l, &one, sizeof l)); /* no groups are one group of all */
    o = (shms_options){.capacity = 4096, .n_readers = SHMS_MAX_READERS, .n_groups = SHMS_MAX_GROUPS};
    for (int g = 0; g < SHMS_MAX_GROUPS; g++)
        o.group_sizes[g] = g ? 1 : 2;
    CHECK_EQ(SHMS_OK, shms_layout_compute(&l, &o, 4096));
    o.n_groups++, o.group_sizes[0] = 1;
    memcpy((char *)(o.group_sizes + SHMS_MAX_GROUPS), &(uint16_t){1}, 2); /* padding */
    CHECK_EQ(SHMS_EINVAL, shms_layout_compute(&one, &o, 4096));
    CHECK(l.group_of[1] == 0 && l.group_of[2] == 1 && l.group_of[SHMS_MAX_READERS - 1] == SHMS_MAX_GROUPS - 1);
}

static bool in_order(const size_t *offsets, size_t n, size_t at) {
    for (size_t i = 0; i < n; i++)
        if (offsets[i] != at + 8 * i)
            return false;
    return true;
}

/* A change needs another SHMS_LAYOUT_VERSION. */
TEST(every_word_is_where_it_was) {
#define WORDS(at, ...) CHECK(in_order((size_t[]){__VA_ARGS__}, sizeof((size_t[]){__VA_ARGS__}) / sizeof(size_t), at))
#define S(field) offsetof(shms_superblock, field)
    WORDS(0, S(magic), S(stamp), S(layout.page), S(layout.file_size), S(layout.capacity), S(layout.max_object_size),
          S(layout.n_readers), S(layout.max_objects), S(layout.max_leases), S(layout.flags), S(layout.n_writers),
          S(layout.writer_at), S(layout.slots_at), S(layout.leases_at), S(layout.index_at), S(layout.holds_at),
          S(layout.counts_at), S(layout.arena_stride), S(layout.readers_at), S(layout.reader_stride), S(layout.data_at),
          S(layout.data_stride), S(layout.zone_shift), S(layout.n_groups), S(layout.group_of));
    WORDS(448, S(store), S(created_ns), S(boot), S(secret), S(owner), S(check));
#define W(field) offsetof(shms_writer_table, field)
    WORDS(0, W(pid), W(epoch), W(next_id), W(next_lease), W(hand), W(used_bytes), W(objects), W(open_leases),
          W(published), W(small_hand), W(stays), W(pinning), W(releases), W(retirements), W(more));
    CHECK(W(counters) == 128 && W(retired) == 320 && W(kinds) == 2368 && W(drops) == 3136 && W(reserved) == 3144 &&
          W(tier) == 3200);
    CHECK(W(cleared) == 3320 && W(dropped_at) == 3328);
#define K(field) offsetof(shms_kind, field)
    CHECK(K(name) == 0 && K(bytes) == 24 && K(objects) == 32 && K(quota) == 40);
#define T(field) offsetof(shms_tier_figures, field)
    WORDS(0, T(there), T(hits), T(hit_bytes), T(misses), T(declined), T(damaged), T(errors), T(skipped), T(published),
          T(published_bytes), T(refused), T(dropped), T(queued), T(saved_ns), T(open));
#define O(field) offsetof(shms_slot, field)
    WORDS(0, O(state), O(id), O(secret), O(offset), O(length), O(head), O(flags), O(put_ns));
#define H(field) offsetof(shms_holds, field)
    CHECK(H(first) == 0 && H(used) == 4 && H(dropped) == 8);
#define L(field) offsetof(shms_lease, field)
    WORDS(0, L(number), L(what), L(id), L(opened_ns));
#define R(field) offsetof(shms_reader_table, field)
    WORDS(0, R(epoch), R(pid), R(attached_ns), R(base));
    WORDS(576, R(releases), R(counters));
#define C(field) offsetof(shms_counters, field)
    WORDS(0, C(puts), C(put_bytes), C(hits), C(misses), C(evictions), C(evicted_bytes), C(deletes), C(refusals),
          C(cancels), C(more_hits_at_4x), C(more_hits_at_2x), C(more_hits_at_1_5x), C(remote_hits));
#define G(field) offsetof(shms_reader_counters, field)
    WORDS(0, G(gets), G(stale), G(released));
}

TEST(the_example_of_the_header_is_true_byte_for_byte) {
    char payload[5] = {1, 2, 3, 4, 5};
    shms_piece piece = {0, 5, (uint64_t)(uintptr_t)payload};
    open_store("example", (shms_options){.capacity = 4096, .n_readers = 1}, 0);
    CHECK(!memcmp(w->seg.sb, "SHMSTOR1", 8));
    memset(w->seg.data, 0, 4096);
    CHECK_EQ(SHMS_OK, put_marked(w, "first", 64, 1, ref));
    CHECK_EQ(SHMS_OK, verb_put(w, "k", 1, "mm", 2, 5, &piece, 1, ref));
    uint8_t expected[128] = {[0] = 0x6b, [1] = 0x6d, [2] = 0x6d, [64] = 1, [65] = 2, [66] = 3, [67] = 4, [68] = 5};
    CHECK(!memcmp(expected, w->seg.data + 128, 128));
    shms_ref unpacked;
    shms_ref_unpack(&unpacked, ref);
    CHECK_EQ(128, unpacked.address);
    const shms_slot *s = &w->seg.slots[unpacked.slot];
    CHECK_EQ(128, s->offset);
    CHECK_EQ(69, s->length);
    CHECK_EQ(128, shms_span(s->length));
    CHECK_EQ(shms_slot_head(1, 1, 2), s->head);
    CHECK_EQ(256, w->seg.writer->hand);
    end_writer(w);
}

/* Bookkeeping of n objects a writer: the segment's as it reports it, a writer's heap as the sum of its parts. */
static void books_stay_within(uint32_t n, uint32_t readers, uint32_t writers) {
    shms_options o = {.capacity = (uint64_t)n * 64, .n_readers = readers, .max_objects = n, .n_writers = writers};
    shms_layout l;
    CHECK_EQ(SHMS_OK, shms_layout_compute(&l, &o, 4096));
    uint64_t control = l.readers_at + readers * l.reader_stride, zones = shms_n_zones(&l), peers = readers + writers;
    uint64_t heap = shms_leases_memory((uint32_t)l.max_leases, n) +
                    shms_align_up(shms_ring_memory(n, (uint32_t)zones), 8) + shms_zones_memory((uint32_t)zones) +
                    peers * (sizeof(shms_peer) + zones * sizeof(uint64_t)) + shms_ghosts_memory(n) + 5 * (uint64_t)n +
                    sizeof(struct shms_writer);
    uint64_t promised = 256 + 4 * readers + (writers > 1 ? 48 + 16 * writers : 0);
    CHECK(control / writers + heap <= n * promised);
    CHECK(l.max_leases >= 1024);
    static const char opened[SHMS_MAX_READERS + 1] = {[1] = 1, [2] = 1, [8] = 1, [16] = 1, [64] = 1, [256] = 1};
    if (n != 32768 || writers > 2 || !opened[readers])
        return;
    shms_stats stats;
    open_store("books", o, 0); /* there is nothing besides these parts */
    CHECK_EQ(SHMS_OK, shms_writer_stats(w, &stats));
    CHECK_EQ(control, stats.control_bytes);
    CHECK_EQ(heap, stats.heap_bytes);
    end_writer(w);
}

TEST(an_object_s_books_stay_within_256_bytes_4_a_rank_and_16_a_writer) {
    /* Just above 3.5 times a power of two, the index has twice the lines. Just above a multiple of 1,024, each rank's pins start
     * a new page. */
    static const uint32_t sizes[] = {32768, 32769, 36865, 57345, 65537, 100000, 114689, 458753, 917505};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (uint32_t readers = 1; readers <= SHMS_MAX_READERS; readers++)
            for (uint32_t writers = 1; writers <= SHMS_MAX_WRITERS; writers++)
                if (writers * sizes[i] <= SHMS_MAX_OBJECTS)
                    books_stay_within(sizes[i], readers, writers);
}

/* ---- a segment with one bit wrong ---- */

static const char *victim;
static uint8_t *file; /* the whole segment, writable */
static uint64_t file_size;

static void make_victim(void) {
    shms_options o = {.capacity = 10000, .max_object_size = 5000, .n_readers = 2, .max_objects = 21};
    open_store("victim", o, 1);
    victim = name;
    for (int i = 0; i < 5; i++)
        CHECK_EQ(SHMS_OK, put_marked(w, key_of("k", i), 300, (uint64_t)i, ref));
    CHECK_EQ(SHMS_OK, put_marked(w, "cached", 300, 9, NULL));
    CHECK_EQ(1, shms_writer_delete(w, "k1", 2));
    CHECK_EQ(1, shms_writer_delete(w, "cached", 6));
    detach(0);
    file_size = w->seg.layout.file_size;
    shms_writer_close(w, 0);
    shms_writer_free(w);
    int fd = shm_open(victim, O_RDWR, 0);
    file = mmap(NULL, file_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(fd >= 0 && file != MAP_FAILED);
    close(fd);
}

static int recovered(void) {
    shms_writer *w;
    int rc = shms_writer_recover(&w, victim, NULL);
    if (rc == SHMS_OK) {
        if (shms_writer_valid(w) != SHMS_OK)
            rc = 1;
        shms_writer_free(w);
    }
    return rc;
}

static int attached(void) {
    shms_reader *r;
    int rc = shms_reader_attach(&r, victim, 1, NULL);
    if (rc == SHMS_OK)
        shms_reader_free(r);
    return rc;
}

TEST(no_bit_of_the_geometry_can_be_changed) {
    make_victim();
    shms_superblock *sb = (shms_superblock *)file;
    CHECK_EQ(SHMS_OK, recovered());
    for (uint64_t *word = &sb->magic; word <= &sb->check; word++) {
        for (int bit = 0; bit < 64; bit++) {
            *word ^= UINT64_C(1) << bit;
            int rc = recovered(), rc2 = attached();
            CHECK_EQ(rc, rc2);
            if (word <= &sb->magic + 1)
                CHECK_EQ(SHMS_ELAYOUT, rc);
            else if (rc != SHMS_ECORRUPT && rc != SHMS_ELAYOUT)
                fprintf(stderr, "word %d bit %d: ", (int)(word - &sb->magic), bit);
            CHECK(rc == SHMS_ECORRUPT || rc == SHMS_ELAYOUT);
            *word ^= UINT64_C(1) << bit;
        }
        static const uint64_t odd[] = {0, 1, 3, 4097, UINT32_MAX, UINT64_MAX, UINT64_C(1) << 48};
        uint64_t good = *word;
        for (size_t i = 0; i < sizeof odd / 8; i++) {
            *word = odd[i];
            int rc = recovered();
            CHECK(odd[i] == good || rc == SHMS_ECORRUPT || rc == SHMS_ELAYOUT);
        }
        *word = good;
    }
    CHECK_EQ(SHMS_OK, recovered());
    CHECK_EQ(SHMS_OK, attached());
}

TEST(what_a_disk_has_of_a_store_of_before_the_host_started_is_no_store) {
    shms_superblock *sb = (shms_superblock *)file, before = *sb;
    sb->boot++;
    sb->check = shms_layout_check(sb);
    CHECK_EQ(SHMS_ELAYOUT, recovered());
    CHECK_EQ(SHMS_ELAYOUT, attached());
    *sb = before;
}

/* Words that change while a store lives cannot all be refused. But whatever is accepted must be safe. */
TEST(with_any_table_bit_wrong_a_successor_is_valid_or_refuses) {
    shms_superblock *sb = (shms_superblock *)file;
    shms_writer_table *t = (shms_writer_table *)(file + sb->layout.writer_at);
    uint8_t *saved = malloc(file_size), *tables_end = file + sb->layout.readers_at;
    memcpy(saved, file, file_size);
    uint64_t refused = 0, accepted = 0;
    for (uint64_t *word = (uint64_t *)t; (uint8_t *)word < tables_end; word++) {
        if ((uint8_t *)word >= (uint8_t *)(t->counters + 3) && (uint8_t *)word < (uint8_t *)&t->retired[2] - 8)
            continue; /* more such bits */
        if ((uint8_t *)word >= (uint8_t *)&t->retired[2] && (uint8_t *)word < file + sb->layout.slots_at)
            continue;
        for (int bit = 0; bit < 64; bit += bit < 16 ? 1 : 5) {
            *word ^= UINT64_C(1) << bit;
            int rc = recovered();
            if (rc != SHMS_OK && rc != SHMS_ECORRUPT)
                fprintf(stderr, "offset %d bit %d: ", (int)((uint8_t *)word - file), bit);
            CHECK(rc == SHMS_OK || rc == SHMS_ECORRUPT);
            refused += rc != SHMS_OK;
            accepted += rc == SHMS_OK;
            memcpy(t, saved + sb->layout.writer_at, sb->layout.readers_at - sb->layout.writer_at);
        }
    }
    CHECK(refused > 100 && accepted > 100);
    free(saved);
}

/* Bytes that are no groups, even with the right check word. */
TEST(forged_groups_are_refused) {
    static const uint8_t forged[][3] = {{1, 0, 0}, {1, 1, 0}, {0, 2, 0}, {0, 255, 0}, {0, 0, 1}, {255, 255, 0}};
    shms_superblock *sb = (shms_superblock *)file;
    uint64_t check = sb->check;
    for (size_t i = 0; i < sizeof forged / sizeof *forged; i++) {
        memcpy(sb->layout.group_of, forged[i], 3); /* of two ranks */
        sb->check = shms_layout_check(sb);
        CHECK_EQ(SHMS_ECORRUPT, recovered());
        CHECK_EQ(SHMS_ECORRUPT, attached());
    }
    memset(sb->layout.group_of, 0, 3);
    CHECK_EQ(check, shms_layout_check(sb));
    sb->check = check;
    CHECK_EQ(SHMS_OK, recovered());
}

TEST(a_file_that_is_not_a_segment_is_refused) {
    const char *name = store_name("file");
    int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    shms_writer *w;
    shms_reader *r;
    CHECK(fd >= 0);
    static const off_t sizes[] = {0, 1, 511, 4095, 4096, 100000};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        CHECK(ftruncate(fd, sizes[i]) == 0);
        for (int old = 0; old < 2; old++) { /* else its creator may be about to lock it */
            int empty = sizes[i] ? SHMS_ELAYOUT : SHMS_ECREATING;
            CHECK_EQ(old ? SHMS_ELAYOUT : empty, shms_writer_recover(&w, name, NULL));
            CHECK_EQ(old ? SHMS_ELAYOUT : empty, shms_writer_join(&w, name, SHMS_ANY_ARENA, NULL));
            CHECK_EQ(empty, shms_reader_attach(&r, name, 0, NULL)); /* which waits for the next creator */
            CHECK_EQ(0, futimens(fd, (struct timespec[2]){{0}, {0}}));
        }
    }
    /* A truncated segment, and one that has grown. */
    for (int delta = -1; delta <= 1; delta++) {
        CHECK(ftruncate(fd, 0) == 0 && ftruncate(fd, (off_t)file_size) == 0);
        CHECK(write(fd, file, file_size) == (ssize_t)file_size && lseek(fd, 0, SEEK_SET) == 0);
        CHECK(ftruncate(fd, (off_t)file_size + delta * 4096) == 0);
        int rc = shms_reader_attach(&r, name, 0, NULL);
        CHECK_EQ(delta ? SHMS_ELAYOUT : SHMS_OK, rc);
        if (rc == SHMS_OK)
            shms_reader_free(r);
    }
    close(fd);
}

static void an_unfinished_creation_by(int role) {
    const char *name = store_name("half");
    shms_segment creator = {.fd = -1};
    shms_writer *w;
    shms_reader *r;
    CHECK_EQ(SHMS_OK, shms_segment_name(&creator, name));
    CHECK(shms_segment_open_file(&creator, O_CREAT | O_EXCL, false, false) >= 0);
    int fd = shms_segment_open_path(&creator, O_RDWR);
    CHECK_EQ(SHMS_OK, shms_segment_lock(&creator, role));
    for (off_t size = 0; size <= 8192; size += 4096) {
        CHECK(ftruncate(fd, size) == 0);
        CHECK_EQ(SHMS_ECREATING, shms_reader_attach(&r, name, 0, NULL));
        CHECK_EQ(role == SHMS_ROLE_WRITER ? SHMS_EWRITERACTIVE : SHMS_ECREATING, shms_writer_recover(&w, name, NULL));
    }
    shms_word stamp = shms_layout_stamp() + 1; /* finished, and of another version */
    CHECK(pwrite(fd, &stamp, sizeof stamp, offsetof(shms_superblock, stamp)) == sizeof stamp);
    CHECK_EQ(SHMS_ELAYOUT, shms_reader_attach(&r, name, 0, NULL));
    CHECK_EQ(SHMS_ELAYOUT, shms_writer_recover(&w, name, NULL));
    close(fd);
    shms_segment_unlink(&creator);
    shms_segment_close(&creator);
}

TEST(an_unfinished_creation_is_not_a_store_and_not_another_version) {
    an_unfinished_creation_by(SHMS_ROLE_WRITER);
    an_unfinished_creation_by(SHMS_ROLE_OF_WRITER(SHMS_OWNER));
}

static _Atomic int created_all;

static void *create_and_close(void *name) {
    shms_options o = {.capacity = 4096, .n_readers = 1, .max_objects = 4};
    for (int i = 0; i < 2000; i++) {
        shms_writer *w;
        CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, &o));
        end_writer(w);
    }
    created_all = 1;
    return NULL;
}

TEST(an_open_during_a_creation_finds_a_whole_store_or_none) {
    const char *name = store_name("early");
    pthread_t creator;
    int found = 0, unfinished = 0;
    CHECK(pthread_create(&creator, NULL, create_and_close, (void *)name) == 0);
    while (!created_all) {
        shms_reader *r;
        int rc = shms_reader_attach(&r, name, 0, NULL);
        CHECK(rc == SHMS_OK || rc == SHMS_ENOSTORE || rc == SHMS_ECREATING);
        found += rc == SHMS_OK;
        unfinished += rc == SHMS_ECREATING;
        if (rc == SHMS_OK)
            shms_reader_free(r);
    }
    pthread_join(creator, NULL);
    CHECK(found + unfinished);
}

TEST(a_segment_that_lost_its_reservation_is_opened_by_nobody) {
    struct stat st;
    shms_reader *r;
    open_store("sparse", (shms_options){.capacity = 1 << 22, .n_readers = 1, .max_objects = 4}, 0);
    CHECK_EQ(SHMS_OK, put_marked(w, "k", 3000, 1, NULL));
    off_t data = (off_t)w->seg.layout.data_at;
    shms_writer_close(w, 0);
    shms_writer_free(w);
    int fd = shm_open(name, O_RDWR, 0);
    /* Like a sparse copy: holes everywhere except the first page and the object. */
    CHECK(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, data + 4096, (1 << 22) - 4096) == 0);
    CHECK(fstat(fd, &st) == 0);
    blkcnt_t sparse = st.st_blocks;
    CHECK_EQ(SHMS_ESPARSE, shms_writer_recover(&w, name, NULL));
    CHECK_EQ(SHMS_ESPARSE, shms_writer_join(&w, name, 0, NULL));
    CHECK_EQ(SHMS_ESPARSE, shms_reader_attach(&r, name, 0, NULL));
    CHECK(fstat(fd, &st) == 0 && st.st_blocks == sparse);
    CHECK_EQ(0, posix_fallocate(fd, 0, st.st_size)); /* what a user can do with a copy */
    CHECK_EQ(SHMS_OK, shms_writer_recover(&w, name, NULL));
    CHECK_EQ(1, shms_writer_has(w, "k", 1));
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    close(fd);
    end_writer(w);
}

TEST(a_refused_recovery_leaves_the_name_of_the_dead_writers_segment) {
    shms_writer *refused;
    open_store("refused", (shms_options){.capacity = 4096, .n_readers = 1, .max_objects = 4}, 0);
    CHECK_EQ(SHMS_OK, put_marked(w, "k", 10, 1, ref));
    CHECK_EQ(SHMS_OK, shms_writer_close(w, 0)); /* its mapping stays */
    shms_set(&w->seg.writer->pid, 1);
    shms_set(&w->leases.table[0].number, INT64_MAX); /* of a hand-out in the future */
    CHECK_EQ(SHMS_ECORRUPT, shms_writer_recover(&refused, name, NULL));
    CHECK_EQ(1, shms_get(&w->seg.writer->pid));
    CHECK_EQ(1, shms_get(&w->seg.writer->epoch));
    shms_writer_free(w);
    munmap(file, file_size);
    store_names_left();
}
