/*
 * filesystem.c - which file systems can have a store, and the size of their pages.
 */
#include <unistd.h>

#include "file.h"

/* of statfs(2) */
#define HUGETLBFS 0x958458f6
#define TMPFS 0x01021994
#define EXT 0xef53 /* 2 to 4 */
#define XFS 0x58465342

uint64_t shms_page_size(void) { return (uint64_t)sysconf(_SC_PAGESIZE); }

uint64_t shms_file_unit(const struct statfs *fs) {
    return (uint32_t)fs->f_type == HUGETLBFS ? (uint64_t)fs->f_bsize : shms_page_size();
}

bool shms_file_is_on_disk(const struct statfs *fs) {
    return (uint32_t)fs->f_type == EXT || (uint32_t)fs->f_type == XFS;
}
bool shms_file_serves(const struct statfs *fs) {
    return (uint32_t)fs->f_type == TMPFS || shms_file_is_on_disk(fs) ||
           ((uint32_t)fs->f_type == HUGETLBFS && (uint64_t)fs->f_bsize <= SHMS_LARGEST_PAGE);
}
