/* blockhash.h: the hash chain over the full blocks of a request, SHA-256 over canonical CBOR.
 *
 * hash(block i) = SHA-256 of the CBOR array of three elements
 *
 *     83                      array of three
 *     58 20 <32 bytes>        the parent: hash of block i-1, or the seed hash
 *     90 <16 token ids>       the tokens (an array header and one integer each)
 *     f6 | 8n <n extra keys>  null, or what distinguishes this block from others with the same tokens
 *
 * Extra keys of block [s, e), in this order: the LoRA adapter; for each item that overlaps the block its identifier and
 * its offset minus s; the cache salt (block 0 only); a digest of the block's prompt embeddings. In the tagged form each
 * is an array that begins with its kind, so that no value of one kind equals a value of another:
 *
 *     83 64 "lora" <name> <path or null>
 *     83 62 "mm" <identifier> <offset>
 *     82 64 "salt" <salt>
 *     82 66 "embeds" 58 20 <digest>
 *
 * In the flat form the values follow each other without kinds: name, identifier, offset, salt, digest.
 *
 * SHA-256 comes from the system's libcrypto, which the first call looks for. Without it, shms_blockhash_bodies returns
 * the part after the parent of each message, and the caller hashes.
 *
 * Caveats: the LoRA adapter and the salt are passed as CBOR of either form, and identifiers as CBOR of their text. This
 * file encodes only numbers, and writes the kinds of items and digests. Items are in order of offset. Offset and length
 * are not negative, and their sum fits (else ARGUMENT). No state is kept between calls. */
#ifndef SHMS_BLOCKHASH_H
#define SHMS_BLOCKHASH_H
#include <stddef.h>
#include <stdint.h>

#include "hashlist.h"

/* cdef: begin */
typedef struct shms_blockhash_extras {
    const uint8_t *lora;
    int64_t lora_len;     /* CBOR of the LoRA adapter; length 0: none */
    const uint8_t *salt;
    int64_t salt_len;     /* CBOR of the cache salt; length 0: no salt */
    const int64_t *items;
    int64_t n_items;     /* three numbers each: offset, length, end of its identifier in idents */
    const uint8_t *idents;                     /* the identifiers' CBOR, one after the other */
    const uint8_t *embeds;
    int64_t n_embeds;   /* 32-byte digests of the first n_embeds blocks of the call */
    int32_t tagged;                            /* 1: the tagged form, 0: the flat form */
} shms_blockhash_extras;

int shms_blockhash_ready(void);                /* 0: libcrypto was found and works; NOLIB */
int shms_blockhash_extend(shms_hashlist *out, const uint8_t *parent, int64_t first, int64_t n_blocks,
                          int32_t block_size, const void *tokens, const shms_blockhash_extras *extras);
/* Appends to `out` the hashes of blocks first .. first+n_blocks-1. Their tokens (int64) begin at
 * `tokens`; parent is 32 bytes. After NOLIB, MEMORY, WIDTH or ARGUMENT, nothing is appended. */
int64_t shms_blockhash_bodies(uint8_t *out, int64_t room, int64_t *ends, int64_t first, int64_t n_blocks,
                              int32_t block_size, const void *tokens, const shms_blockhash_extras *extras);
/* Writes the messages without array header and parent, one after the other, and the end of each into `ends`. Returns
 * the bytes used. FULL: more than `room`; see shms_blockhash_bound. */
int64_t shms_blockhash_bound(int64_t n_blocks, int32_t block_size, const shms_blockhash_extras *extras);
/* Bytes that always suffice for n_blocks bodies. ARGUMENT: the number does not fit an int64. */
/* cdef: end */
#endif
