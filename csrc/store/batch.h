/*
 * batch.h - a record of what one call has done to a store, and its rollback. It is for languages in which a signal
 * handler may end a call at any point.
 *
 * A batch exists before the first change. Each call below makes a change and records it, and no signal comes between
 * the two. One call undoes all of it, by object id and lease number. These are never used twice. So undoing twice is
 * the same as undoing once, and objects that no longer exist are skipped. The commit point is a store of 1 to `keep`.
 *
 *     batch = ...; try: shms_batch_hit(w, batch, ...); ...; batch.keep = 1; return
 *                  except: shms_batch_undo(w, batch); raise
 *
 * A batch whose bytes are 0 is empty. A batch that was kept or undone can be used again, unless it protects keys and
 * was kept. Only one thread may use it at a time.
 */
#ifndef SHMS_BATCH_H
#define SHMS_BATCH_H

#include "core.h"

/* cdef: begin */
/* What is put, and how; zeros but for what is asked for. */
typedef struct shms_put {
    const char *key, *meta, *extra; /* `extra` is for shms_writer_extra */
    const shms_piece *pieces; /* of _put */
    uint32_t key_len, meta_len, extra_len, n_pieces;
    uint64_t payload_size;
    uint64_t timeout; /* nanoseconds to wait for room, from the first refusal on */
    uint64_t waits_since; /* private: when that was, or 0 */
    uint32_t kind; /* from shms_writer_kind, or 0 */
    uint32_t group; /* whom the lease waits for, as in shms_writer_assign_group */
    int32_t hold; /* 1: only the writer ends the lease */
    int32_t unleased; /* 1: the commit opens no lease */
    int32_t unless_stored; /* 1: SHMS_EEXISTS also for what another writer has stored */
} shms_put;

#define SHMS_AGAIN 1 /* the call has waited for room, and may wait on: make it again with the same record */

typedef struct shms_batch_item {
    uint64_t id;    /* of the object */
    uint64_t lease; /* the lease that was opened, or 0 */
    uint32_t slot, entry;
    int32_t fresh; /* 1: the batch has put the object */
} shms_batch_item;

typedef struct shms_batch {
    int32_t keep; /* 1: committed, or nothing to undo */
    uint8_t ref[SHMS_REF_SIZE]; /* of the last hand-out */
    shms_pending pending; /* of the last _begin */
    shms_refusal refusal; /* why the last call was refused */
    shms_batch_item *items; /* private from here */
    uint32_t n_items, room;
    uint8_t *keys; /* protected: uint32_t length, bytes; repeated */
    uint64_t keys_size;
} shms_batch;

/* Stores and hands out: begin, copy and commit in one call. If there is no room, this and _begin wait for it up to
 * put->timeout, but for 50 ms at most: SHMS_AGAIN, also when there may be room now. */
int shms_batch_put(shms_writer *w, shms_batch *b, shms_put *put);
/* Takes space for a payload, which the caller writes until _commit, _undo or shms_writer_close, and an entry for its
 * lease. The key is taken, but no process can see the object yet. */
int shms_batch_begin(shms_writer *w, shms_batch *b, shms_put *put);
/* Does _put, or _begin if `pieces` is NULL, with these for the fields of the same names. It is for Python: cffi lends the
 * bytes of an object to a call and not to a record, and to fill one would take a sixth of the time of a small put. */
int shms_batch_put_lent(shms_writer *w, shms_batch *b, shms_put *put, const char *key, uint32_t key_len,
                        const char *meta, uint32_t meta_len, const char *extra, uint32_t extra_len,
                        uint64_t payload_size, const shms_piece *pieces, uint32_t n_pieces);
int shms_batch_copy(shms_writer *w, shms_batch *b, const shms_piece *pieces, uint32_t n_pieces);
/* Publishes what _begin of this batch has begun, the last call before it but for _copy, and hands it out. If that was
 * `unleased`, it is cached like an object that was read, and the reference has no lease, like that of
 * shms_reader_find. */
int shms_batch_commit(shms_writer *w, shms_batch *b);
/* Hands an object out once more, which is a use; `group` and `hold` are as in shms_put. */
int shms_batch_hit(shms_writer *w, shms_batch *b, const char *key, uint32_t key_len, uint32_t group, int hold);
/* 1: that lease is open, and only the writer ends it from now on, or undoing the batch; 0: it has ended; or an error.
 * SHMS_EBUSY: the object is another writer's, which was stopped; the lease is as it was. */
int shms_batch_hold(shms_writer *w, shms_batch *b, const uint8_t *ref);
/* Protects keys (uint32_t length, bytes; repeated) until the batch is undone; once for each batch. Objects of these keys,
 * now or later, are not reclaimed; an object that is deleted meanwhile stays, too. What another writer
 * has under one of them now is kept by a lease of this one. SHMS_ENOLEASE: there is no entry for it; undo the batch. */
int shms_batch_protect(shms_writer *w, shms_batch *b, const uint8_t *keys, uint64_t size);
/* Ends leases, deletes objects, and aborts puts that are not committed. Does nothing for a batch that was kept, or in a
 * forked child. On a closed writer it only aborts. */
void shms_batch_undo(shms_writer *w, shms_batch *b);
void shms_batch_drop(shms_writer *w, shms_batch *b); /* undoes, and frees the memory of the batch */
/* cdef: end */

#endif
