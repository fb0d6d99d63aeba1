/* blockhash.c: CBOR and SHA-256 in one pass.
 *
 * Canonical CBOR (RFC 8949, 4.2) allows one encoding: definite lengths, and the shortest head (1, 2, 3, 5 or 9 bytes)
 * for each number. So equal (parent, tokens, extras) give equal bytes on every host. Different ones give different
 * bytes, because CBOR can be decoded.
 *
 * One block of 16 tokens below 65536 is 85 bytes, which is two compressions. They take 75 ns with the processor's SHA
 * instructions, so the call around them matters. libcrypto's one-shot SHA256() looks up its algorithm each time (300
 * ns); SHA256_Init/Update/Final do not. dlopen finds them, so the package needs neither libcrypto at link time nor its
 * headers. The context is opaque memory, larger than every SHA256_CTX so far (112 bytes). A known answer is checked
 * before the pointers are used.
 *
 * The message of a block goes into one buffer of `bound` bytes. `bound` counts the longest head for every number, so
 * writing needs no checks. `refuses` runs before the first byte: token positions and the ends of items fit an int64,
 * and items are in order, as the loop over them needs. Hashes go into room that was reserved before, and the list's
 * length is raised at the end. So a refusal appends nothing. */
#include "blockhash.h"

#include <dlfcn.h>
#include <endian.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef union {
    uint64_t align;
    uint8_t bytes[512];
} sha_context;

static int (*sha_init)(void *);
static int (*sha_update)(void *, const void *, size_t);
static int (*sha_final)(uint8_t *, void *);
static int sha_found = SHMS_KV_ENOLIB;
static pthread_once_t sha_once = PTHREAD_ONCE_INIT;

static void sha_digest(uint8_t *out, const uint8_t *bytes, size_t n) {
    sha_context context;
    sha_init(&context);
    sha_update(&context, bytes, n);
    sha_final(out, &context);
}

static void sha_look(void) {
    static const char *const names[] = {"libcrypto.so.3", "libcrypto.so.1.1"};
    static const uint8_t abc[] = {0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea}; /* FIPS 180-2, "abc", first bytes */
    uint8_t digest[32];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *lib = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (!lib)
            continue;
        *(void **)&sha_init = dlsym(lib, "SHA256_Init");
        *(void **)&sha_update = dlsym(lib, "SHA256_Update");
        *(void **)&sha_final = dlsym(lib, "SHA256_Final");
        if (sha_init && sha_update && sha_final) {
            sha_digest(digest, (const uint8_t *)"abc", 3);
            if (!memcmp(digest, abc, sizeof abc)) {
                sha_found = 0;
                return; /* the library stays open until the process ends */
            }
        }
        dlclose(lib);
    }
}

int shms_blockhash_ready(void) {
    pthread_once(&sha_once, sha_look);
    return sha_found;
}

/* Always writes 9 bytes, for which `bound` has room; the bytes that follow overwrite those beyond the head. */
static inline uint8_t *put_head(uint8_t *p, uint8_t major, uint64_t v) {
    if (v < 24) {
        *p = (uint8_t)(major | v);
        return p + 1;
    }
    int log = v <= 0xff ? 0 : v <= 0xffff ? 1 : v <= 0xffffffff ? 2 : 3;
    *p = (uint8_t)(major | (24 + log));
    v = htobe64(v << (64 - (8 << log)));
    memcpy(p + 1, &v, sizeof v);
    return p + 1 + (1 << log);
}

static inline uint8_t *put_int(uint8_t *p, int64_t v) {
    return v >= 0 ? put_head(p, 0x00, (uint64_t)v) : put_head(p, 0x20, (uint64_t)(-1 - v));
}

static uint8_t *put_bytes(uint8_t *p, const uint8_t *bytes, int64_t n) {
    memcpy(p, bytes, (size_t)n);
    return p + n;
}

static const uint8_t item_tag[] = {0x83, 0x62, 'm', 'm'}; /* an array of three that begins with "mm" */
static const uint8_t embed_tag[] = {0x82, 0x66, 'e', 'm', 'b', 'e', 'd', 's'};

/* Writes tokens and extras of the block that begins at token s. Items before *skip end at or before s. */
static uint8_t *put_body(uint8_t *p, int64_t s, int32_t block_size, const int64_t *tokens,
                         const shms_blockhash_extras *x, int64_t *skip, const uint8_t *embed) {
    p = put_head(p, 0x80, (uint64_t)block_size);
    for (int32_t i = 0; i < block_size; i++)
        p = put_int(p, tokens[i]);
    int64_t e = s + block_size, n = 0, last = *skip;
    while (*skip < x->n_items && x->items[3 * *skip] + x->items[3 * *skip + 1] <= s)
        ++*skip;
    for (last = *skip; last < x->n_items && x->items[3 * last] < e; last++)
        n += (x->tagged ? 1 : 2) * (x->items[3 * last + 1] > 0 && x->items[3 * last] + x->items[3 * last + 1] > s);
    n += (x->lora_len > 0) + (x->salt_len > 0 && s == 0) + (embed != NULL);
    if (n == 0) {
        *p++ = 0xf6;
        return p;
    }
    p = put_head(p, 0x80, (uint64_t)n);
    if (x->lora_len > 0)
        p = put_bytes(p, x->lora, x->lora_len);
    for (int64_t i = *skip; i < last; i++) {
        const int64_t *item = x->items + 3 * i;
        int64_t from = i ? item[-1] : 0;
        if (item[1] <= 0 || item[0] + item[1] <= s)
            continue;
        if (x->tagged)
            p = put_bytes(p, item_tag, sizeof item_tag);
        p = put_bytes(p, x->idents + from, item[2] - from);
        p = put_int(p, item[0] - s);
    }
    if (x->salt_len > 0 && s == 0)
        p = put_bytes(p, x->salt, x->salt_len);
    if (embed) {
        if (x->tagged)
            p = put_bytes(p, embed_tag, sizeof embed_tag);
        p = put_bytes(put_head(p, 0x40, 32), embed, 32);
    }
    return p;
}

int64_t shms_blockhash_bound(int64_t n_blocks, int32_t block_size, const shms_blockhash_extras *x) {
    int64_t idents = x->n_items ? x->items[3 * x->n_items - 1] : 0, bytes;
    int64_t each = 9 + 9 * (int64_t)block_size + 9 + x->lora_len + idents +
                   (9 + (int64_t)sizeof item_tag) * x->n_items + 34 + (int64_t)sizeof embed_tag;
    if (n_blocks < 0 || block_size < 1 || __builtin_mul_overflow(n_blocks, each, &bytes) ||
        __builtin_add_overflow(bytes, x->salt_len, &bytes))
        return SHMS_KV_EARGUMENT;
    return bytes;
}

static const uint8_t *embed_of(const shms_blockhash_extras *x, int64_t i) {
    return i < x->n_embeds ? x->embeds + 32 * i : NULL;
}

static int refuses(int64_t first, int64_t n_blocks, int32_t block_size, const shms_blockhash_extras *x) {
    if (first < 0 || n_blocks < 0 || block_size < 1)
        return 1;
    if (n_blocks > INT64_MAX / block_size - first)
        return 1;
    for (int64_t i = 0, before = 0; i < x->n_items; before = x->items[3 * i++]) {
        int64_t offset = x->items[3 * i], length = x->items[3 * i + 1];
        if (offset < before || length < 0 || length > INT64_MAX - offset)
            return 1;
    }
    return 0;
}

int shms_blockhash_extend(shms_hashlist *out, const uint8_t *parent, int64_t first, int64_t n_blocks,
                          int32_t block_size, const void *tokens, const shms_blockhash_extras *x) {
    uint8_t small[1024], *message = small, seed[32];
    if (refuses(first, n_blocks, block_size, x))
        return SHMS_KV_EARGUMENT;
    if (shms_blockhash_ready())
        return SHMS_KV_ENOLIB;
    if (n_blocks == 0)
        return 0;
    if (out->width && out->width != 32)
        return SHMS_KV_EWIDTH;
    int64_t bound = shms_blockhash_bound(1, block_size, x), skip = 0;
    if (bound < 0 || bound > INT64_MAX - 35)
        return SHMS_KV_EARGUMENT;
    parent = memcpy(seed, parent, sizeof seed); /* it may be in `out`, which is about to move */
    int rc = shms_hashlist_reserve(out, n_blocks);
    if (rc)
        return rc;
    if (35 + bound > (int64_t)sizeof small && !(message = malloc((size_t)(35 + bound))))
        return SHMS_KV_EMEMORY;
    message[0] = 0x83;
    message[1] = 0x58;
    message[2] = 0x20;
    uint8_t *hash = out->data + out->n * SHMS_HASH_BYTES;
    for (int64_t i = 0; i < n_blocks; i++, hash += SHMS_HASH_BYTES) {
        const int64_t *block = (const int64_t *)tokens + i * block_size;
        memcpy(message + 3, parent, 32);
        uint8_t *end = put_body(message + 35, (first + i) * block_size, block_size, block, x, &skip, embed_of(x, i));
        sha_digest(hash, message, (size_t)(end - message));
        parent = hash;
    }
    if (message != small)
        free(message);
    out->n += n_blocks;
    out->width = 32;
    return 0;
}

int64_t shms_blockhash_bodies(uint8_t *out, int64_t room, int64_t *ends, int64_t first, int64_t n_blocks,
                              int32_t block_size, const void *tokens, const shms_blockhash_extras *x) {
    if (refuses(first, n_blocks, block_size, x))
        return SHMS_KV_EARGUMENT;
    int64_t bound = shms_blockhash_bound(n_blocks, block_size, x);
    if (bound < 0 || bound > room)
        return bound < 0 ? SHMS_KV_EARGUMENT : SHMS_KV_EFULL;
    uint8_t *p = out;
    int64_t skip = 0;
    for (int64_t i = 0; i < n_blocks; i++) {
        const int64_t *block = (const int64_t *)tokens + i * block_size;
        p = put_body(p, (first + i) * block_size, block_size, block, x, &skip, embed_of(x, i));
        ends[i] = p - out;
    }
    return p - out;
}
