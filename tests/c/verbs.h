/* verbs.h - puts and hits without a record of what they did. The batch of each call is kept at once. */
#ifndef SHMS_TEST_VERBS_H
#define SHMS_TEST_VERBS_H

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "store/directory.h"
#include "store/drops.h"
#include "store/holders.h"
#include "store/reclaim.h"

/* The batch after a call: nothing of it will be undone. `out` gets the reference, if there is one. */
static inline int verb_kept(shms_batch *b, int rc, uint8_t *out) {
    if (rc == SHMS_OK && out)
        memcpy(out, b->ref, SHMS_REF_SIZE);
    free(b->items);
    return rc;
}

static inline int verb_put(shms_writer *w, const char *key, uint32_t key_len, const char *meta, uint32_t meta_len,
                           uint64_t payload_size, const shms_piece *pieces, uint32_t n_pieces, uint8_t *out) {
    shms_batch b = {0};
    shms_put put = {.key = key,
                    .key_len = key_len,
                    .meta = meta,
                    .meta_len = meta_len,
                    .payload_size = payload_size,
                    .pieces = pieces,
                    .n_pieces = n_pieces};
    return verb_kept(&b, shms_batch_put(w, &b, &put), out);
}

/* With all options of a put; `why` may be NULL. */
static inline int verb_begin_of(shms_writer *w, const char *key, uint32_t key_len, const char *meta, uint32_t meta_len,
                                uint64_t payload_size, uint32_t kind, bool leased, shms_pending *out,
                                shms_refusal *why) {
    shms_batch b = {0};
    shms_put options = {.kind = kind, .unleased = !leased};
    int rc = shms_batch_put_lent(w, &b, &options, key, key_len, meta, meta_len, NULL, 0, payload_size, NULL, 0);
    verb_kept(&b, rc, NULL);
    if (rc == SHMS_OK)
        *out = b.pending;
    else if (why)
        *why = b.refusal;
    return rc;
}
static inline int verb_begin(shms_writer *w, const char *key, uint32_t key_len, const char *meta, uint32_t meta_len,
                             uint64_t payload_size, shms_pending *out) {
    return verb_begin_of(w, key, key_len, meta, meta_len, payload_size, 0, true, out, NULL);
}
static inline int verb_reserve(shms_writer *w, const char *key, uint32_t key_len, const char *meta, uint32_t meta_len,
                               uint64_t payload_size, shms_pending *out) {
    return verb_begin_of(w, key, key_len, meta, meta_len, payload_size, 0, false, out, NULL);
}

/* A batch that has begun the pending put. Its memory is a test's, so test_limits.c does not refuse it. */
static inline shms_batch verb_begun(shms_writer *w, const shms_pending *t) {
    shms_batch b = {.pending = *t, .items = aligned_alloc(64, 64), .n_items = 1, .room = 1};
    _Static_assert(sizeof *b.items <= 64, "");
    if (w)
        b.items[0] = (shms_batch_item){t->id, 0, shms_writer_global(w, t->slot), t->entry, 1};
    return b;
}
static inline int verb_copy(shms_writer *w, const shms_pending *t, const shms_piece *pieces, uint32_t n_pieces) {
    shms_batch b = {.pending = *t};
    return shms_batch_copy(w, &b, pieces, n_pieces);
}
static inline int verb_commit(shms_writer *w, const shms_pending *t, uint8_t *out) {
    shms_batch b = verb_begun(w, t);
    return verb_kept(&b, shms_batch_commit(w, &b), out);
}
/* SHMS_EINVAL: the pending put has ended. */
static inline int verb_abort(shms_writer *w, const shms_pending *t) {
    int rc = verb_copy(w, t, NULL, 0);
    shms_batch b = verb_begun(w, t);
    if (rc == SHMS_OK || (rc == SHMS_ECLOSED && w && w->unfinished)) {
        shms_batch_undo(w, &b);
        rc = SHMS_OK;
    }
    return verb_kept(&b, rc, NULL);
}

/* A hit for a group; `hold`: only the writer ends its lease. */
static inline int verb_hit_of(shms_writer *w, const char *key, uint32_t key_len, uint32_t group, bool hold,
                              uint8_t *out) {
    shms_batch b = {0};
    return verb_kept(&b, shms_batch_hit(w, &b, key, key_len, group, hold), out);
}
static inline int verb_hit(shms_writer *w, const char *key, uint32_t key_len, uint8_t *out) {
    return verb_hit_of(w, key, key_len, 0, false, out);
}

static inline int verb_hold(shms_writer *w, const uint8_t *ref) {
    shms_batch b = {0};
    return verb_kept(&b, shms_batch_hold(w, &b, ref), NULL);
}

static inline int verb_protect(shms_writer *w, const char *key, uint32_t key_len) {
    int rc = shms_writer_enter_with_key(w, key, key_len);
    return rc ? rc : shms_writer_leave(w, shms_protect_key(w, key, key_len) ? SHMS_OK : SHMS_ENOMEM);
}
static inline int verb_unprotect(shms_writer *w, const char *key, uint32_t key_len) {
    int rc = shms_writer_enter_with_key(w, key, key_len);
    if (rc)
        return rc;
    shms_reclaim_begin(w);
    shms_unprotect_key(w, key, key_len);
    shms_reclaim_unprotected(w);
    return shms_writer_leave(w, SHMS_OK);
}

/* A reader's view, or NULL and errno. */
static inline shms_view *view_of(shms_reader *r, const uint8_t *ref) {
    shms_view *v;
    int rc = shms_reader_acquire(r, ref, &v);
    if (rc)
        errno = -rc;
    return v;
}

#endif
