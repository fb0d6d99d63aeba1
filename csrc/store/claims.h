/*
 * claims.h - who makes an object that is not stored yet: one byte of the segment's file for each key, far behind its end.
 *
 * A claim is an open-file-description lock on that byte, on an opening of its own. So the kernel excludes the processes,
 * and ends a claim with its process. There is no shared word, no time-out and no successor. Within the process a table
 * excludes the threads, because a second lock on one opening succeeds.
 *
 * Claims spare work and guard nothing: two who make the same object store it twice. So a claim that cannot have its byte
 * is granted all the same: of a store whose file was removed, or beyond SHMS_MAX_CLAIMS, since the kernel looks through a
 * list of all locks of a file. Two keys whose bytes are the same exclude each other, which is a delay.
 */
#ifndef SHMS_CLAIMS_H
#define SHMS_CLAIMS_H

#include <stdint.h>

/* cdef: begin */
#define SHMS_MAX_CLAIMS 256 /* with their bytes, of one shms_claims */

typedef struct shms_claims shms_claims;

/* A claim; zeroed before it is taken. Any thread may end it. */
typedef struct shms_claim {
    shms_claims *of; /* NULL: ended */
    uint64_t byte; /* 0: it has none */
} shms_claim;

/* The claims of a process in the store of that name and number. SHMS_ENOMEM */
int shms_claims_open(shms_claims **out, const char *name, uint64_t store);
/* Claims that were taken go on. */
void shms_claims_drop(shms_claims **c);
/* 1: granted to this thread. 0: a living process, or another thread of this one, has it. SHMS_EFORKED */
int shms_claim_take(shms_claims *c, uint64_t thread, const char *key, uint32_t key_len, shms_claim *out);
void shms_claim_end(shms_claim *claim); /* idempotent */
/* 1: a claim on that key is held; 0. SHMS_EFORKED */
int shms_claimed(shms_claims *c, const char *key, uint32_t key_len);
/* How many claims that thread has taken and not ended. */
uint32_t shms_claims_of(shms_claims *c, uint64_t thread);
/* cdef: end */

#endif
