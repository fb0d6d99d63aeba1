/* shmstore.c - what shmstore.h offers to programs in C alone. */
#include "shmstore.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "batch.h"

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
        [-SHMS_EFULL] = "the store is full of what readers or leases hold: try again later, or raise capacity",
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
    if (!o || !shms_is_unused(o->reserved) || shms_key_ok(o->key, o->key_len) || (!o->meta && o->meta_len) ||
        !is_key((const uint8_t *)o->key, o->key_len))
        return SHMS_EINVAL;
    shms_put put = {.key = o->key,
                    .key_len = o->key_len,
                    .meta = o->meta,
                    .meta_len = o->meta_len,
                    .payload_size = o->payload_size};
    return shms_batch_begin(w, b, &put);
}

/* Undoes what has failed, and frees the memory of the batch. */
static int end(shms_writer *w, shms_batch *b, int rc, uint8_t *ref) {
    if (rc == SHMS_OK) {
        memcpy(ref, b->ref, SHMS_REF_SIZE);
        b->keep = 1;
    }
    shms_batch_drop(w, b);
    return rc;
}

int shms_writer_put(shms_writer *w, const shms_object *object, const void *payload, uint8_t *ref) {
    shms_batch b = {0};
    int rc = ref ? begin(w, &b, object) : SHMS_EINVAL;
    shms_piece all = {0, rc ? 0 : object->payload_size, (uintptr_t)payload};
    if (rc == SHMS_OK && (rc = shms_batch_copy(w, &b, &all, all.size != 0)) == SHMS_OK)
        rc = shms_batch_commit(w, &b);
    return end(w, &b, rc, ref);
}

int shms_writer_begin(shms_writer *w, const shms_object *object, char **payload, shms_uncommitted **out) {
    if (!payload || !out)
        return SHMS_EINVAL;
    shms_uncommitted *u = calloc(1, sizeof *u);
    *payload = NULL;
    *out = NULL;
    if (!u)
        return SHMS_ENOMEM;
    u->w = w;
    int rc = begin(w, &u->batch, object);
    if (rc) {
        shms_uncommitted_abort(u);
        return rc;
    }
    *payload = u->batch.pending.payload;
    *out = u;
    return SHMS_OK;
}

int shms_uncommitted_commit(shms_uncommitted *u, uint8_t *ref) {
    if (!u)
        return SHMS_EINVAL;
    int rc = end(u->w, &u->batch, ref ? shms_batch_commit(u->w, &u->batch) : SHMS_EINVAL, ref);
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
    return end(w, &b, ref ? shms_batch_hit(w, &b, key, key_len, 0, 0) : SHMS_EINVAL, ref);
}

/* A msgpack integer, as short as it can be. */
static char *pack(char *at, uint64_t n) {
    if (n < 128) {
        *at++ = (char)n;
        return at;
    }
    int log = n > UINT32_MAX ? 3 : n > UINT16_MAX ? 2 : n > UINT8_MAX;
    *at++ = (char)(0xcc + log);
    for (int shift = 8 << log; shift; shift -= 8)
        *at++ = (char)(n >> (shift - 8));
    return at;
}

/* Is it a dtype of torch's, or one of numpy's with its order of bytes? */
static bool is_dtype(const char *name) {
    static const char *const torch[] = {
        "bool",           "int8",
        "int16",          "int32",
        "int64",          "uint8",
        "uint16",         "uint32",
        "uint64",         "float16",
        "float32",        "float64",
        "bfloat16",       "complex32",
        "complex64",      "complex128",
        "float8_e4m3fn",  "float8_e4m3fnuz",
        "float8_e5m2",    "float8_e5m2fnuz",
        "float8_e8m0fnu", "float4_e2m1fn_x2",
    };
    static const char *const numpy[] = {"b1", "i1", "i2", "i4", "i8", "u1", "u2",
                                        "u4", "u8", "f2", "f4", "f8", "c8", "c16"};
    bool ordered = *name && strchr("<>|", *name);
    const char *const *names = ordered ? numpy : torch;
    size_t n = ordered ? sizeof numpy / sizeof *numpy : sizeof torch / sizeof *torch;
    for (size_t i = 0; i < n; i++)
        if (!strcmp(name + ordered, names[i]))
            return true;
    return false;
}

/* The format is that of shmstore/serde/wire.py: an array of a mark, the dtype, the offset and the dimensions. */
int shms_tensor_meta(char *out, const char *dtype, const uint64_t *shape, uint32_t n_dims) {
    if (!out || !dtype || !is_dtype(dtype) || n_dims > SHMS_MAX_DIMS || (!shape && n_dims))
        return SHMS_EINVAL;
    size_t len = strlen(dtype);
    char mark = strchr("<>|", dtype[0]) ? 4 : 3; /* an array, or a tensor */
    char head[] = {(char)(0x90 + 3 + n_dims), (char)0xc7, 0, mark, (char)(0xa0 + len)};
    char *at = (char *)memcpy(out, head, sizeof head) + sizeof head;
    at = (char *)memcpy(at, dtype, len) + len;
    at = pack(at, 0);
    for (uint32_t i = 0; i < n_dims; i++)
        at = pack(at, shape[i]);
    return (int)(at - out);
}
