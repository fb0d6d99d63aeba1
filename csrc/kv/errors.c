/* errors.c: one sentence for each code of errors.h. */
#include "errors.h"

const char *shms_kv_meaning(int code) {
    switch (code) {
    case SHMS_KV_EFULL:
        return "fewer blocks are free than were asked for";
    case SHMS_KV_ERANGE:
        return "a block id is outside the pool, or names the null block";
    case SHMS_KV_EUNUSED:
        return "a block is given back that no request holds";
    case SHMS_KV_EKEYED:
        return "a block that is to be cached has a key already";
    case SHMS_KV_EWIDTH:
        return "block hashes have 1 to 32 bytes, all of one request the same number";
    case SHMS_KV_ENOHASH:
        return "the request has fewer block hashes than blocks to be cached";
    case SHMS_KV_ECOMPUTED:
        return "computed blocks need caching and a request that has no blocks yet";
    case SHMS_KV_EBUSY:
        return "blocks are in use";
    case SHMS_KV_EARGUMENT:
        return "a number is out of range";
    case SHMS_KV_EMEMORY:
        return "the host is out of memory";
    case SHMS_KV_ENOLIB:
        return "no usable libcrypto was found";
    case SHMS_KV_ESHORT:
        return "the request's table has fewer blocks than are to be cached";
    case SHMS_KV_ECORRUPT:
        return "a list of hashes is longer than its memory";
    case SHMS_KV_BAD_QUEUE:
        return "the free queue is not one ring of valid block ids";
    case SHMS_KV_BAD_COUNT:
        return "the free queue's length differs from its counter";
    case SHMS_KV_BAD_STATE:
        return "a block is both free and referenced, or neither";
    case SHMS_KV_BAD_KEY:
        return "a key names a block that does not have it, or misses one that does";
    case SHMS_KV_BAD_KEYS:
        return "the number of keys differs from its counter";
    case SHMS_KV_BAD_TABLE:
        return "a request's table names a free block, or a null block after a real one";
    case SHMS_KV_BAD_HOLDERS:
        return "the number of requests holding blocks of a group differs from its counter";
    default:
        return "an unknown code";
    }
}
