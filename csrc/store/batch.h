/*
 * batch.h - what one call of a caller's has done to a store, and its undoing: for languages in which a signal's handler
 * may end a call at any place.
 *
 * A batch is there before anything is done.  Each call below adds what it does, so that between the two there is no place
 * for a signal.  One call undoes all of it, by object id and lease number, which are never used twice: to undo twice is
 * to undo once, and what has gone is left alone.  The commit point is a store of 1 to `keep`.
 *
 *     batch = ...; try: shms_batch_hit(w, batch, ...); ...; batch.keep = 1; return
 *                  except: shms_batch_undo(w, batch); raise
 *
 * A batch whose bytes are 0 is empty.  One that was kept or undone can be used again, but not if it protects keys and was
 * kept.  It is one thread's at a time.
 */
#ifndef SHMS_BATCH_H
#define SHMS_BATCH_H

#include "shmstore.h"

/* cdef: begin */
typedef struct shms_batch_item {
    uint64_t id;    /* of the object */
    uint64_t lease; /* that was opened; 0: none */
    uint32_t slot, entry;
    int32_t fresh; /* the batch has put the object */
} shms_batch_item;

typedef struct shms_batch {
    int32_t keep;                /* 1: nothing is to be undone */
    uint8_t ref[SHMS_REF_SIZE]; /* of the last hand-out */
    shms_ticket ticket;          /* of the last _begin */
    shms_refusal refusal;        /* where the last call has run out of something */
    shms_batch_item *items;      /* private from here */
    uint32_t n_items, room;
    uint8_t *keys; /* protected: uint32_t length, bytes; repeated */
    uint64_t keys_size;
} shms_batch;

/* As shms_writer_put, _begin or (where it is not `leased`) _reserve, _commit and _hit. */
int shms_batch_put(shms_writer *w, shms_batch *b, const char *key, uint32_t key_len, const char *meta,
                   uint32_t meta_len, uint64_t payload_size, const shms_piece *pieces, uint32_t n_pieces);
int shms_batch_begin(shms_writer *w, shms_batch *b, const char *key, uint32_t key_len, const char *meta,
                     uint32_t meta_len, uint64_t payload_size, int leased);
int shms_batch_copy(shms_writer *w, shms_batch *b, const shms_piece *pieces, uint32_t n_pieces);
int shms_batch_commit(shms_writer *w, shms_batch *b);
int shms_batch_hit(shms_writer *w, shms_batch *b, const char *key, uint32_t key_len);
/* Protects keys (uint32_t length, bytes; repeated) until the undoing; once a batch. */
int shms_batch_protect(shms_writer *w, shms_batch *b, const uint8_t *keys, uint64_t size);
/* Ends leases, deletes objects, and aborts puts that are not committed.  Does nothing to a batch that was kept, and nothing
 * in a forked child.  On a closed writer it only aborts. */
void shms_batch_undo(shms_writer *w, shms_batch *b);
void shms_batch_drop(shms_writer *w, shms_batch *b); /* undoes, and frees what the batch has allocated */
/* cdef: end */

#endif
