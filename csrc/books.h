/* books.h: the one table of answers of the schedulers' books (hashlist, blockhash, blockpool, kvcache).
 *
 * 0 or a count is success; these are the refusals. Whoever gets one finds every structure as it was before the call. */
#ifndef SHMS_BOOKS_H
#define SHMS_BOOKS_H

/* cdef: begin */
enum {
    SHMS_BOOKS_FULL = -101,     /* fewer blocks are free than were asked for */
    SHMS_BOOKS_RANGE = -102,    /* a block id outside the pool, or the null block where it has no business */
    SHMS_BOOKS_UNUSED = -103,   /* a block is given back that nobody holds */
    SHMS_BOOKS_KEYED = -104,    /* a block that is to get a key bears one already */
    SHMS_BOOKS_WIDTH = -105,    /* a hash that is not 1 to 32 bytes, or hashes of unlike width in one list */
    SHMS_BOOKS_NOHASH = -106,   /* fewer block hashes than blocks to be cached */
    SHMS_BOOKS_COMPUTED = -107, /* computed blocks for a request that has a table, or with caching off */
    SHMS_BOOKS_BUSY = -108,     /* blocks are in use */
    SHMS_BOOKS_ARGUMENT = -109, /* a number that makes no sense here */
    SHMS_BOOKS_MEMORY = -110,   /* the host is out of memory */
    SHMS_BOOKS_NOLIB = -111,    /* no usable libcrypto on this host */
    SHMS_BOOKS_SHORT = -112,    /* a table has fewer blocks than are to be cached */
    SHMS_BOOKS_CORRUPT = -120,  /* a *_valid() found a broken invariant; the ones below say which */
    SHMS_BOOKS_BAD_QUEUE = -121,    /* the free queue is not one ring of valid ids */
    SHMS_BOOKS_BAD_COUNT = -122,    /* the free queue's length is not its counter */
    SHMS_BOOKS_BAD_STATE = -123,    /* a block is both free and referenced, or neither */
    SHMS_BOOKS_BAD_KEY = -124,      /* a key names a block that does not bear it, or a bearer is not found under it */
    SHMS_BOOKS_BAD_KEYS = -125,     /* the number of keys is not its counter */
    SHMS_BOOKS_BAD_TABLE =
        -126,    /* a request's table names a block that is free, or has a null block after a real one */
    SHMS_BOOKS_BAD_HOLDERS = -127   /* the number of requests that hold blocks of a group is not its counter */
};
const char *shms_books_meaning(int code); /* one line for a code; never NULL */
/* cdef: end */
#endif
