/*
 * core.h - what the core offers besides shmstore.h: to its own files, and to Python, which is built together with it.
 */
#ifndef SHMS_CORE_H
#define SHMS_CORE_H

#include "last_error.h"
#include "shmstore.h"

static inline int shms_are_zero(const uint64_t *words, unsigned n) {
    while (n && words[n - 1] == 0)
        n--;
    return n == 0;
}
/* Has the caller asked for nothing that only a later version knows? `reserved` is an array. */
#define shms_is_unused(reserved) shms_are_zero(reserved, sizeof(reserved) / sizeof *(reserved))

static inline int shms_key_ok(const char *key, uint32_t key_len) {
    return key && key_len > 0 && key_len <= SHMS_MAX_KEY
               ? SHMS_OK
               : shms_fail(SHMS_EINVAL, "a key must have 1 to %d bytes, not %u, and not be NULL", SHMS_MAX_KEY,
                           key_len);
}

/* cdef: begin */
#define SHMS_KINDS 16 /* kinds of objects; number 0 is for those without one */
#define SHMS_MAX_EXTRA 0xffffff /* extra bytes of an object, which only the writer reads */

/* How long a store's name stays; of all writers' words the largest counts. */
#define SHMS_UNTIL_CLOSED 0
#define SHMS_UNTIL_DEATH 1 /* of writer 0, by the creator: the name was generated, so nobody asks for it */
#define SHMS_BEYOND_DEATH 2 /* a caller has named it to take it over, or has closed it so that it stays */
#define SHMS_BEYOND_CLOSE 3 /* a caller has created it or taken it over to outlive its processes */

/* A reference, unpacked; ref.h has the 40 bytes. A reader trusts no field, and compares each with the slot table. */
typedef struct shms_ref {
    uint32_t store; /* which store: the superblock's random number */
    uint32_t slot;
    uint32_t entry; /* of the lease table */
    uint64_t address; /* the object's offset in the data region */
    uint64_t id; /* monotonic, never reused */
    uint64_t lease; /* number of the hand-out; never reused */
    uint64_t tag; /* keyed hash of the other fields; its key is the store's and the object's secret */
} shms_ref;

/* Space that is being written, between shms_batch_begin and shms_batch_commit or _undo. */
typedef struct shms_pending {
    char *payload;
    uint64_t payload_size;
    uint64_t id;
    uint64_t hash; /* of the key */
    uint32_t slot;
    uint32_t entry;
    uint32_t group; /* as in shms_put */
    int32_t hold;
} shms_pending;

/* Bytes of the caller's, and where in the payload they go. If size is not 0, address is not 0. */
typedef struct shms_piece {
    uint64_t offset;
    uint64_t size;
    uint64_t address;
} shms_piece;

/* The bytes of a stored object. */
typedef struct shms_stored {
    const char *meta, *payload, *extra;
    uint64_t payload_size;
    uint32_t meta_len, extra_len;
} shms_stored;

/* A kind of objects, as in the writer table. */
typedef struct shms_kind_info {
    uint64_t name[3]; /* UTF-8, padded with zeros; all 0: no name */
    uint64_t bytes, objects, quota; /* of the data region and of slots, with unfinished puts; quota 0: no limit */
} shms_kind_info;

/* What a refusal (SHMS_EFULL, SHMS_ENOSLOT, SHMS_ENOLEASE, SHMS_EQUOTA) has found, in bytes of the data region. From
 * `kept` on, shms_writer_holders fills it in; after SHMS_EQUOTA, about objects of the kind only. */
typedef struct shms_refusal {
    uint64_t capacity, used_bytes, max_objects, max_leases; /* as in shms_stats */
    uint64_t reclaimable; /* of objects that nobody holds */
    /* Longest run of these and of gaps: an object of that size would have had room. After SHMS_EQUOTA: the longest
     * object for which its kind would have had it. */
    uint64_t longest;
    uint64_t kind, quota, kind_bytes; /* SHMS_EQUOTA: the kind, its quota and its bytes; else 0 */
    uint64_t kept; /* of objects that only this writer holds: protected, or unfinished */
    uint64_t held[SHMS_MAX_READERS]; /* by rank: pinned, or promised and not yet read */
    uint64_t held_by_writer[SHMS_MAX_WRITERS]; /* by other writers: leased, or being leased */
    uint8_t awaited[SHMS_MAX_READERS]; /* by rank: 1 if it has never attached */
} shms_refusal;

/* ---- values ---- */

void shms_ref_unpack(shms_ref *out, const uint8_t *packed);
void shms_ref_pack(uint8_t *out, const shms_ref *ref);
void shms_copy(void *dst, const void *src, uint64_t n); /* memcpy; bypasses the caches if that is faster */
int shms_options_round(shms_options *options); /* to what a store created with them has; SHMS_EINVAL */
/* For a call that was refused because a process has a lock. Waits a millisecond, and says whether to make the call again:
 * 100 times, whoever has the lock. One that closes has it for microseconds. One that was killed has it for milliseconds,
 * until the kernel has taken its memory apart. `turns` is 0 at first. */
int shms_lock_again(uint32_t *turns);

/* ---- the writer ---- */

/* Does _join, up to its last step, which is _stay. Arena 0 is that of _recover. */
int shms_writer_take(shms_writer **out, const char *name, int arena, const shms_expected *expected);
/* Has the name stay until the writer closes, and records for how long beyond that, if not 0. For a caller with whom nothing
 * else can fail. SHMS_ENOSTORE: the name was removed meanwhile. */
int shms_writer_stay(shms_writer *w, int how);
/* The same for the variable that has the handle, so that an owner can exist before the handle does. */
void shms_writer_drop(shms_writer **w);
/* Its part of the data region: the address, or 0 for NULL; place[0] is its size, and place[1] its offset in the file. */
uint64_t shms_writer_data(const shms_writer *w, uint64_t *place);
/* The options, as rounded; the number of its arena (SHMS_MAX_WRITERS: none), and the arenas that _join has passed by, one bit each. Returns the
 * store's number, or 0 for NULL. */
uint64_t shms_writer_options(shms_writer *w, shms_options *out, uint64_t *place);
const char *shms_writer_path(const shms_writer *w); /* of the store's file, or of a descriptor of it */

/* Copies the extra bytes of the object of `ref`. *size is the room, and is set to the bytes needed. SHMS_ESTALE: it has
 * been evicted. */
int shms_writer_extra(shms_writer *w, const uint8_t *ref, uint8_t *out, uint64_t *size);
/* 1: the object of `ref` is here with this metadata, this size of payload and these pieces of it; 0; or an error. It pins
 * nothing: what was compared counts only if the object is still there afterwards. */
int shms_writer_equals(shms_writer *w, const uint8_t *ref, const char *meta, uint32_t meta_len, uint64_t payload_size,
                       const shms_piece *pieces, uint32_t n_pieces);
/* The bytes of this writer's own object of a key that is protected: they stay until _unprotect. */
int shms_writer_look(shms_writer *w, const char *key, uint32_t key_len, shms_stored *out);
/* 1: the object of `ref` is here, and has this key if `key` is not NULL; 0; or an error. */
int shms_writer_validate(shms_writer *w, const uint8_t *ref, const char *key, uint32_t key_len);
/* The number of the kind of that name (1 to 23 bytes without a 0), from 1 on; 0: all numbers have other names. */
int shms_writer_kind(shms_writer *w, const char *name, uint32_t len);
/* Sets how many bytes objects of a kind may take; 0: no limit. */
int shms_writer_quota(shms_writer *w, uint32_t kind, uint64_t quota);
int shms_writer_kinds(shms_writer *w, shms_kind_info *out); /* SHMS_KINDS records, by number */
/* Replaces the figures that this writer shows of its tier. A successor starts without any. */
int shms_writer_tier(shms_writer *w, const shms_tier_figures *figures);
/* Tells all writers of the store not to use what a tier got up to this moment; it holds for successors, too. */
int shms_writer_clear_tier(shms_writer *w, uint64_t moment);
/* Sets *out to the last moment that a writer of the store has told; 0: none. */
int shms_writer_tier_cleared(shms_writer *w, uint64_t *out);
/* Adds to a refusal who holds how much now. It asks each rank about each object, which the refusal
 * need not: with 256 ranks and 10^5 objects it takes half a second, and yields. If nothing was released since the last
 * call, its sums are used again. */
int shms_writer_holders(shms_writer *w, shms_refusal *why);
int shms_writer_valid(shms_writer *w); /* checks every invariant; SHMS_ECORRUPT at the first broken one */

/* ---- a reader ---- */

uint64_t shms_reader_store(const shms_reader *r); /* the store's number, or 0 for NULL */
const char *shms_reader_path(const shms_reader *r);
uint64_t shms_reader_writer_epoch(const shms_reader *r); /* 1 + number of takeovers; 0 for NULL */
int shms_reader_named(const shms_reader *r); /* 1: the name still names this store; 0: it was removed */
/* An arena's data: its address, and its size; 0 if it has never been taken. Address 0: no such arena, or a closed reader. */
uint64_t shms_reader_data(const shms_reader *r, uint32_t arena, uint64_t *size);
/* The process that last attached as `rank`; 0: none, or no store. */
uint64_t shms_reader_pid(const char *name, uint32_t rank);
void shms_reader_drop(shms_reader **r); /* like shms_writer_drop */
void shms_view_drop(shms_view **v); /* likewise */
/* cdef: end */

#endif
