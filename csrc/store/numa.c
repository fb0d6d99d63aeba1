/*
 * numa.c - on which NUMA node the data of a store is.
 *
 * Preferred, not bound: if a node is full, the rest is on the next one. A bound file would have the kernel end a process.
 */
#include <errno.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "segment.h"

int shms_prefer_node(void *at, uint64_t size, uint64_t node) {
    uint64_t nodes[SHMS_NODES / 64] = {0};
    nodes[node / 64] = UINT64_C(1) << node % 64;
    /* the kernel reads one bit less than it is told */
    return syscall(SYS_mbind, at, size, MPOL_PREFERRED, nodes, SHMS_NODES + 1, 0) ? SHMS_ESYS : SHMS_OK;
}

int shms_node_check(uint32_t node) {
    void *page = mmap(NULL, SHMS_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return SHMS_ESYS;
    int rc = shms_prefer_node(page, SHMS_PAGE, node), saved = errno;
    munmap(page, SHMS_PAGE);
    errno = saved;
    return rc;
}
