/* shmstore.c - what shmstore.h offers to programs in C alone. */
#include "shmstore.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "batch.h"
#include "claims.h"
#include "monitor.h"

#define THREADS 1 /* as the holder of all claims: no call waits, so nothing asks which thread has one */

struct shms_uncommitted {
    shms_writer *w;
    shms_batch batch;
};

const char *shms_version(void) { return SHMSTORE_VERSION; }

const char *shms_strerror(int code) {
    static const char *const what[] = {
        [-SHMS_OK] = "done",
        [-SHMS_EINVAL] = "an argument is out of range, a pointer is NULL, or a key is not UTF-8",
        [-SHMS_ENOMEM] = "this process is out of memory",
        [-SHMS_ESYS] = "a system call failed, and errno says how",
        [-SHMS_ENOSPC] = "the folder has no room for a store of that size",
        [-SHMS_EFULL] =
            "the store is full of what readers or leases hold: try again later, put unleased, or raise capacity",
        [-SHMS_ETOOLARGE] = "the object is larger than the store allows",
        [-SHMS_EEXISTS] = "the key is already in the store",
        [-SHMS_ENOTFOUND] = "the key is not in the store",
        [-SHMS_ESTALE] = "the reference names no object of this store",
        [-SHMS_ENOSTORE] = "there is no store of that name",
        [-SHMS_ESTOREEXISTS] = "a store of that name exists",
        [-SHMS_EWRITERACTIVE] = "a living writer has the arena: create the store with more of them (n_writers)",
        [-SHMS_ERANKINUSE] = "another reader has this rank",
        [-SHMS_ELAYOUT] = "the file is no store of this version",
        [-SHMS_ECORRUPT] = "the store's tables contradict each other",
        [-SHMS_ECLOSED] = "the handle is closed",
        [-SHMS_EFORKED] = "the handle belongs to the parent process",
        [-SHMS_EOTHERSTORE] = "the name is now another store's",
        [-SHMS_ENOSLOT] = "readers or leases hold max_objects objects: try again later, or raise max_objects",
        [-SHMS_ENOLEASE] = "every lease entry is an open lease's: try again later, or raise max_objects",
        [-SHMS_ECREATING] = "the store is still being created: try again later",
        [-SHMS_EFOREIGN] = "the store is another user's, or open to others",
        [-SHMS_ERANKS] = "the store has another number of ranks",
        [-SHMS_ESPARSE] = "parts of the store's file are missing",
        [-SHMS_EOPTIONS] = "the store has other options",
        [-SHMS_EQUOTA] = "readers or leases hold what the quota of the kind allows: try again later",
        [-SHMS_EBUSY] = "the object is promised, but its writer was stopped: try again later",
        [-SHMS_ENOARENA] = "the handle has no arena",
        [-SHMS_EMAP] = "the object cannot be mapped a second time",
    };
    return code <= 0 && code > -(int)(sizeof what / sizeof *what) ? what[-code] : "an unknown code";
}

/* Is it UTF-8 as Python knows it: each character in its shortest form, and no surrogate? */
static bool is_text(const uint8_t *s, uint32_t size) {
    static const uint32_t first[] = {0, 0, 0xc0, 0xe0, 0xf0}; /* the least first byte, by the character's bytes */
    static const uint32_t least[] = {0, 0, 1 << 7, 1 << 11, 1 << 16}; /* the least character of so many bytes */
    while (size) {
        uint32_t n = *s < 0x80 ? 1 : *s < 0xe0 ? 2 : *s < 0xf0 ? 3 : 4;
        if (n > size)
            return false;
        uint32_t c = *s - first[n];
        for (uint32_t i = 1; i < n; i++) {
            if (s[i] >> 6 != 2)
                return false;
            c = c << 6 | (s[i] & 0x3f);
        }
        if (c < least[n] || c > 0x10ffff || (c >= 0xd800 && c < 0xe000))
            return false;
        s += n;
        size -= n;
    }
    return true;
}

/* Can Python read the key? If not, its lists of keys would show another. Namespaces: shmstore/namespaces.py. */
static bool is_key(const uint8_t *key, uint32_t len) {
    if (key[0] != 0xff)
        return is_text(key, len);
    return len > 3 && key[1] > 0 && key[1] < len - 2 && is_text(key + 2, key[1]) &&
           is_text(key + 2 + key[1], len - 2 - key[1]);
}

static int begin(shms_writer *w, shms_batch *b, const shms_object *o) {
    if (!o || (!o->meta && o->meta_len))
        return shms_fail(SHMS_EINVAL, "the object or its metadata is NULL: pass their bytes");
    if (!shms_is_unused(o->reserved))
        return shms_fail(SHMS_EINVAL, SHMS_RESERVED);
    if (shms_key_ok(o->key, o->key_len))
        return SHMS_EINVAL;
    if (!is_key((const uint8_t *)o->key, o->key_len))
        return shms_fail(SHMS_EINVAL,
                         "a key must be UTF-8, after 0xFF, a length and a namespace if it begins with 0xFF");
    shms_put put = {.key = o->key,
                    .key_len = o->key_len,
                    .meta = o->meta,
                    .meta_len = o->meta_len,
                    .payload_size = o->payload_size,
                    .group = o->group,
                    .unleased = o->unleased != 0};
    int rc = shms_batch_begin(w, b, &put);
    if (rc == SHMS_ETOOLARGE)
        return shms_fail(
            rc, "%llu bytes, with %u of key and %u of metadata, exceed max_object_size, %llu, or metadata exceeds %d",
            (unsigned long long)o->payload_size, o->key_len, o->meta_len,
            (unsigned long long)w->seg.layout.max_object_size, SHMS_MAX_META);
    return rc;
}

/* Undoes what has failed, and frees the memory of the batch. */
static int end(shms_writer *w, shms_batch *b, int rc, uint8_t *ref) {
    const shms_refusal *r = &b->refusal; /* without who holds it: that takes long, and a refused call is made again */
    if (shms_is_refusal(rc))
        shms_fail(rc,
                  "%s; %llu of %llu bytes are in use, %llu of them reclaimable; at most %llu could be had in one piece",
                  shms_strerror(rc), (unsigned long long)r->used_bytes, (unsigned long long)r->capacity,
                  (unsigned long long)r->reclaimable, (unsigned long long)r->longest);
    if (rc == SHMS_OK) {
        memcpy(ref, b->ref, SHMS_REF_SIZE);
        b->keep = 1;
    }
    shms_batch_drop(w, b);
    return rc;
}

int shms_writer_put(shms_writer *w, const shms_object *object, const void *payload, uint8_t *ref) {
    shms_batch b = {0};
    int rc = ref ? begin(w, &b, object) : shms_fail(SHMS_EINVAL, SHMS_NO_REF);
    shms_piece all = {0, rc ? 0 : object->payload_size, (uintptr_t)payload};
    if (rc == SHMS_OK && (rc = shms_batch_copy(w, &b, &all, all.size != 0)) == SHMS_OK)
        rc = shms_batch_commit(w, &b);
    return end(w, &b, rc, ref);
}

int shms_writer_begin(shms_writer *w, const shms_object *object, char **payload, shms_uncommitted **out) {
    if (!payload || !out)
        return shms_fail(SHMS_EINVAL, SHMS_NO_OUT);
    shms_uncommitted *u = calloc(1, sizeof *u);
    *payload = NULL;
    *out = NULL;
    if (!u)
        return SHMS_ENOMEM;
    u->w = w;
    int rc = begin(w, &u->batch, object);
    if (rc) {
        end(w, &u->batch, rc, NULL);
        free(u);
        return rc;
    }
    *payload = u->batch.pending.payload;
    *out = u;
    return SHMS_OK;
}

int shms_uncommitted_commit(shms_uncommitted *u, uint8_t *ref) {
    if (!u)
        return shms_fail(SHMS_EINVAL, "the unfinished object is NULL: pass what shms_writer_begin has made");
    int rc = ref ? shms_batch_commit(u->w, &u->batch) : shms_fail(SHMS_EINVAL, SHMS_NO_REF);
    rc = end(u->w, &u->batch, rc, ref);
    free(u);
    return rc;
}

void shms_uncommitted_abort(shms_uncommitted *u) {
    if (u)
        shms_batch_drop(u->w, &u->batch);
    free(u);
}

int shms_writer_hit(shms_writer *w, const char *key, uint32_t key_len, uint8_t *ref) {
    shms_batch b = {0};
    return end(w, &b, ref ? shms_batch_hit(w, &b, key, key_len, 0, 0) : shms_fail(SHMS_EINVAL, SHMS_NO_REF), ref);
}

/* Claims by a writer or, if it is NULL, by a reader. */
static int claim(shms_writer *w, shms_reader *r, const char *key, uint32_t key_len, shms_claim **out) {
    if (!out)
        return shms_fail(SHMS_EINVAL, SHMS_NO_OUT);
    shms_claim *c = NULL;
    *out = NULL;
    int rc = shms_key_ok(key, key_len), stored;
    if (rc)
        return rc;
    if (!(c = calloc(1, sizeof *c)))
        return SHMS_ENOMEM;
    rc = w ? shms_writer_claim_for(w, THREADS, key, key_len, c) : shms_reader_claim_for(r, THREADS, key, key_len, c);
    /* it may have been stored since the caller has looked */
    if (rc == 1 && (stored = w ? shms_writer_has(w, key, key_len) : shms_reader_has(r, key, key_len)))
        rc = stored < 0 ? stored : SHMS_EEXISTS;
    if (rc == 1)
        *out = c;
    else
        shms_claim_end(c);
    return rc;
}

int shms_writer_claim(shms_writer *w, const char *key, uint32_t key_len, shms_claim **out) {
    return claim(w, NULL, key, key_len, out);
}

int shms_reader_claim(shms_reader *r, const char *key, uint32_t key_len, shms_claim **out) {
    return claim(NULL, r, key, key_len, out);
}

void shms_claim_end(shms_claim *c) {
    if (c)
        shms_claim_drop(c);
    free(c);
}
