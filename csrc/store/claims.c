/*
 * claims.c - see claims.h.
 */
#include "claims.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "file.h"
#include "index.h"

#define BYTES_AT (UINT64_C(1) << 61) /* past the end of any file */

/* The claims of this process that have a byte: which holder has taken each, and in which process, as shms_forks says.
 * A cell of a parent's is free, like one of 0. */
static _Atomic uint64_t takers[SHMS_MAX_CLAIMS];

static uint64_t taker(uint32_t holder) { return (uint64_t)shms_forks() << 32 | holder; }

static uint32_t take_cell(uint64_t by) {
    for (uint32_t i = 0; i < SHMS_MAX_CLAIMS; i++) {
        uint64_t seen = atomic_load(&takers[i]);
        if ((seen == 0 || seen >> 32 != by >> 32) && atomic_compare_exchange_strong(&takers[i], &seen, by))
            return i;
    }
    return SHMS_MAX_CLAIMS;
}

static uint64_t byte_of(const shms_segment *seg, const char *key, uint32_t key_len) {
    return BYTES_AT + (shms_hash_key(seg->sb->secret, key, key_len) & (BYTES_AT / 2 - 1));
}

int shms_claim_take(const shms_segment *seg, uint32_t holder, const char *key, uint32_t key_len, shms_claim *out) {
    if (shms_claimed(seg, key, key_len)) /* at the cost of one call */
        return 0;
    uint32_t cell = take_cell(taker(holder));
    if (cell == SHMS_MAX_CLAIMS)
        return 1;
    void *page = shms_segment_lock_byte(seg, byte_of(seg, key, key_len));
    if (page) {
        *out = (shms_claim){.page = page, .unit = seg->unit, .cell = cell, .forks = shms_forks()};
        return 1;
    }
    bool granted = errno != EAGAIN; /* else a process has it */
    atomic_store(&takers[cell], 0);
    return granted;
}

int shms_claim_held(const shms_claim *claim) {
    return __atomic_load_n(&claim->page, __ATOMIC_RELAXED) && claim->forks == shms_forks();
}

void shms_claim_drop(shms_claim *claim) {
    void *page = __atomic_exchange_n(&claim->page, NULL, __ATOMIC_ACQ_REL);
    if (!page || claim->forks != shms_forks()) /* a child has no such page */
        return;
    munmap(page, claim->unit);
    atomic_store(&takers[claim->cell], 0);
}

bool shms_claimed(const shms_segment *seg, const char *key, uint32_t key_len) {
    struct flock fl = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_len = 1};
    fl.l_start = (off_t)byte_of(seg, key, key_len);
    int fd = seg->fd;
    bool kept = shms_file_is(seg, fd); /* else foreign code has closed it */
    shms_forks_stop();                 /* no child gets the other descriptor */
    if (!kept)
        fd = shms_file_again(seg, SHMS_ROLE_INSPECTOR);
    bool claimed = fcntl(fd, F_OFD_GETLK, &fl) == 0 && fl.l_type != F_UNLCK;
    if (!kept && fd >= 0)
        close(fd);
    shms_forks_go_on();
    return claimed;
}

uint32_t shms_claims_number(void) {
    static _Atomic uint32_t last;
    return atomic_fetch_add(&last, 1) + 1;
}

uint32_t shms_claims_of(uint32_t holder) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < SHMS_MAX_CLAIMS; i++)
        n += atomic_load(&takers[i]) == taker(holder);
    return n;
}
