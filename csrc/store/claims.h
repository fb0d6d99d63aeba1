/*
 * claims.h - who makes an object that is not stored yet: one byte of the segment's file for each key, far past its end.
 *
 * A claim is an open-file-description lock on that byte, on an opening of its own, which one mapped page keeps (locks.c).
 * So the kernel excludes processes and threads alike, ends a claim with its process, and no close of a descriptor ends
 * it. There is no shared word, no time-out and no successor.
 *
 * Claims spare work and guard nothing: two processes that make the same object store it twice. So a claim that cannot have its byte
 * is granted all the same: of a store whose file was removed, of a process without descriptors, or beyond SHMS_MAX_CLAIMS,
 * since the kernel looks through a list of all locks of a file. Two keys whose bytes are the same exclude each other,
 * which is a delay.
 */
#ifndef SHMS_CLAIMS_H
#define SHMS_CLAIMS_H

#include "shmstore.h"

/* cdef: begin */
#define SHMS_MAX_CLAIMS 64 /* with their bytes, of one process in all stores */

/* A claim; zeroed before it is taken. Any thread may end it. */
typedef struct shms_claim {
    void *page; /* keeps the lock; NULL: it has none, or has ended */
    uint64_t unit;
    uint32_t cell;
    uint32_t forks;
} shms_claim;

/* 1: granted to this holder, a thread or a task. 0: a living process, or another holder of this one, has it.
 * SHMS_ECLOSED, EFORKED, ENOARENA */
int shms_writer_claim_for(shms_writer *w, uint32_t holder, const char *key, uint32_t key_len, shms_claim *out);
int shms_reader_claim_for(shms_reader *r, uint32_t holder, const char *key, uint32_t key_len, shms_claim *out);
void shms_claim_drop(shms_claim *claim); /* ends it, without freeing it; idempotent */
int shms_claim_held(const shms_claim *claim); /* 1: it has a byte, and is this process's, not its parent's; 0 */
/* A number that no holder of this process has had. */
uint32_t shms_claims_number(void);
/* How many claims with their bytes that holder has taken and not ended. */
uint32_t shms_claims_of(uint32_t holder);
/* cdef: end */

#include "segment.h"

int shms_claim_take(const shms_segment *seg, uint32_t holder, const char *key, uint32_t key_len, shms_claim *out);
bool shms_claimed(const shms_segment *seg, const char *key, uint32_t key_len);

#endif
