/* errors.h: the error codes of the scheduler's structures (hashlist, blockhash, blockpool, kvcache).
 *
 * 0 or a count is success. A call that returns one of these codes leaves every structure as it was. */
#ifndef SHMS_KV_ERRORS_H
#define SHMS_KV_ERRORS_H

/* cdef: begin */
enum {
    SHMS_KV_EFULL = -101,     /* fewer blocks are free than were asked for */
    SHMS_KV_ERANGE = -102,    /* a block id outside the pool, or the null block */
    SHMS_KV_EUNUSED = -103,   /* a block is given back that no request holds */
    SHMS_KV_EKEYED = -104,    /* a block that is to get a key has one already */
    SHMS_KV_EWIDTH = -105,    /* a hash that is not 1 to 32 bytes, or hashes of different widths in one list */
    SHMS_KV_ENOHASH = -106,   /* fewer block hashes than blocks to be cached */
    SHMS_KV_ECOMPUTED = -107, /* computed blocks for a request that has a table, or with caching off */
    SHMS_KV_EBUSY = -108,     /* blocks are in use */
    SHMS_KV_EARGUMENT = -109, /* a number is out of range */
    SHMS_KV_EMEMORY = -110,   /* the host is out of memory */
    SHMS_KV_ENOLIB = -111,    /* no usable libcrypto on this host */
    SHMS_KV_ESHORT = -112,    /* a table has fewer blocks than are to be cached */
    SHMS_KV_ECORRUPT = -120   /* a *_valid() found a broken invariant */
};
/* cdef: end */
#endif
