/* errors.c: one line for each code of errors.h. */
#include "errors.h"

#include <stddef.h>

static const char *const meanings[] = {
    [-SHMS_KV_EFULL] = "fewer blocks are free than were asked for",
    [-SHMS_KV_ERANGE] = "a block id is outside the pool, or names the null block",
    [-SHMS_KV_EUNUSED] = "a block is given back that no request holds",
    [-SHMS_KV_EKEYED] = "a block that is to be cached has a key already",
    [-SHMS_KV_EWIDTH] = "block hashes have 1 to 32 bytes, all of one request the same number",
    [-SHMS_KV_ENOHASH] = "the request has fewer block hashes than blocks to be cached",
    [-SHMS_KV_ECOMPUTED] = "computed blocks need caching and a request that has no blocks yet",
    [-SHMS_KV_EBUSY] = "blocks are in use",
    [-SHMS_KV_EARGUMENT] = "a number is out of range",
    [-SHMS_KV_EMEMORY] = "the host is out of memory",
    [-SHMS_KV_ENOLIB] = "no usable libcrypto was found",
    [-SHMS_KV_ESHORT] = "the request's table has fewer blocks than are to be cached",
    [-SHMS_KV_ECORRUPT] = "a list of hashes is longer than its memory",
    [-SHMS_KV_BAD_QUEUE] = "the free queue is not one ring of valid block ids",
    [-SHMS_KV_BAD_COUNT] = "the free queue's length differs from its counter",
    [-SHMS_KV_BAD_STATE] = "a block is both free and referenced, or neither",
    [-SHMS_KV_BAD_KEY] = "a key names a block that does not have it, or misses one that does",
    [-SHMS_KV_BAD_KEYS] = "the number of keys differs from its counter",
    [-SHMS_KV_BAD_TABLE] = "a request's table names a free block, or a null block after a real one",
    [-SHMS_KV_BAD_HOLDERS] = "the number of requests holding blocks of a group differs from its counter",
};

const char *shms_kv_meaning(int code) {
    size_t i = -(size_t)code;
    return i < sizeof meanings / sizeof *meanings && meanings[i] ? meanings[i] : "an unknown code";
}
