/*
 * mapping.c - the mappings of a segment and their rights.
 *
 * Core dumps. A process that dumps core is alive until the dump is written. No segment goes into the dump
 * (MADV_DONTDUMP). So the locks are free sooner, and the objects, which other processes share, stay out of the file.
 */
#include <errno.h>
#include <sys/mman.h>

#include "file.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define HUGE_PAGE ((uint64_t)2 << 20)

/* Maps the data region at an address that huge pages can use. */
static uint8_t *map_data(int fd, const shms_layout *l, uint64_t size) {
    if (l->capacity < HUGE_PAGE) {
        void *p = mmap(NULL, size, PROT_READ, SHMS_SHARED, fd, (off_t)l->data_at);
        return p == MAP_FAILED ? NULL : p;
    }
    uint8_t *room = mmap(NULL, size + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED)
        return NULL;
    uint8_t *at = (uint8_t *)shms_align_up((uint64_t)room, HUGE_PAGE);
    if (mmap(at, size, PROT_READ, SHMS_SHARED | MAP_FIXED, fd, (off_t)l->data_at) == MAP_FAILED) {
        munmap(room, size + HUGE_PAGE);
        return NULL;
    }
    if (at > room)
        munmap(room, (size_t)(at - room));
    munmap(at + size, (size_t)(room + HUGE_PAGE - at));
    return at;
}

int shms_segment_map(shms_segment *seg, int fd, int role) {
    const shms_layout *l = &seg->layout;
    seg->control_size = l->readers_at + l->n_readers * l->reader_stride;
    seg->data_size = l->n_writers * l->data_stride;
    void *control = mmap(NULL, seg->control_size, PROT_READ, SHMS_SHARED, fd, 0);
    if (control == MAP_FAILED)
        return SHMS_ESYS;
    seg->control = control;
    seg->sb = control;
    if (role >= 0 && mprotect(shms_segment_reader(seg, (uint32_t)role), l->reader_stride, PROT_READ | PROT_WRITE))
        return SHMS_ESYS;
    seg->all_data = map_data(fd, l, seg->data_size);
    if (!seg->all_data)
        return SHMS_ESYS;
    shms_segment_select(seg, 0);
    return madvise(seg->control, seg->control_size, MADV_DONTDUMP) ||
                   madvise(seg->all_data, seg->data_size, MADV_DONTDUMP)
               ? SHMS_ESYS
               : SHMS_OK;
}

char *shms_segment_map_private(const shms_segment *seg, const char *at, uint64_t size, void **map, uint64_t *map_size) {
    uint64_t page = seg->layout.page; /* of the file: its data begins where a page does */
    uint64_t offset = seg->layout.data_at + (uint64_t)(at - (const char *)seg->all_data), skip = offset % page;
    if (!shms_file_is(seg, seg->fd)) {
        errno = EBADF;
        return NULL;
    }
    uint64_t n = shms_align_up(skip + size, page);
    void *span = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE, seg->fd, (off_t)(offset - skip));
    if (span == MAP_FAILED)
        return NULL;
    madvise(span, n, MADV_DONTDUMP);
    *map = span;
    *map_size = n;
    return (char *)span + skip;
}

int shms_segment_own(shms_segment *seg, uint32_t arena) {
    const shms_layout *l = &seg->layout;
    int rights = arena == SHMS_OWNER ? PROT_READ : PROT_READ | PROT_WRITE;
    shms_segment_select(seg, arena == SHMS_OWNER ? 0 : arena);
    seg->arena = arena;
    return mprotect(seg->control + l->writer_at, l->readers_at - l->writer_at, PROT_READ) ||
                   mprotect(seg->writer, l->arena_stride, rights) || mprotect(seg->data, l->data_stride, rights)
               ? SHMS_ESYS
               : SHMS_OK;
}

void shms_segment_warm(shms_segment *seg) {
    const shms_layout *l = &seg->layout;
    if (l->flags & SHMS_HUGE_PAGES) { /* best effort: both fail if shared huge pages are off */
        madvise(seg->data, l->data_stride, MADV_HUGEPAGE);
        madvise(seg->data, l->data_stride, MADV_COLLAPSE);
    }
    if ((l->flags & SHMS_PREFAULT) && madvise(seg->data, l->data_stride, MADV_POPULATE_WRITE))
        for (uint64_t i = 0; i < l->data_stride; i += l->page) /* kernels before 5.14 */
            *(volatile uint8_t *)(seg->data + i) = *(volatile uint8_t *)(seg->data + i);
}
