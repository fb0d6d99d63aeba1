/*
 * fold.c - two passes over the bytes, both without recursion. The first finds out what each container holds, and the
 * second copies. Nobody vouches for the bytes, so each token is measured before it is used.
 */
#include "fold.h"

#include <stdbool.h>
#include <string.h>

/* Ext codes of the marks in front of a tuple's items, and of an object's name and tree. Those between begin leaves. */
#define TUPLE 1
#define OBJECT 5
/* Python is fast enough at so few containers, or items of one container; and it keeps small plans, which are faster. */
#define FEW_CONTAINERS 5
#define FEW_ITEMS 16
/* Bytes for each value in them. Long text and bytes are fast in Python, and a copy of them is not. */
#define LONG_VALUES 256
#define EXT_HEADER 6 /* bytes of the ext 32 around a part */
_Static_assert(FEW_CONTAINERS + 1 >= EXT_HEADER && FEW_ITEMS >= EXT_HEADER, "a part at most doubles");
_Static_assert(EXT_HEADER > sizeof(uint32_t), "the size of a part fits after the byte that says what it holds");

enum token_type { SCALAR, NUMBER, LIST, MAP, EXT };

typedef struct token {
    enum token_type type;
    uint64_t size;  /* of the header of a container, else of all of it */
    uint64_t items; /* of a container; a key and its value are two */
    uint8_t code;   /* of an ext value */
} token;

/* What a container holds, kept at the place of its header. */
enum { MANY = 1, TUPLES = 2, OTHER = 4, LEAF = 8 };

typedef struct frame {
    uint64_t at, left, items, numbers, containers;
    uint8_t holds;
    bool map;
} frame;

static uint64_t big_endian(const uint8_t *at, unsigned n) {
    uint64_t value = 0;
    while (n--)
        value = value << 8 | *at++;
    return value;
}

/* Reads the token that begins at `at`; false: it has no such form, or ends after `end`. */
static bool read_token(const uint8_t *at, const uint8_t *end, token *out) {
    static const uint8_t fixed[] = {[0xca - 0xc0] = 4, [0xcb - 0xc0] = 8, [0xcc - 0xc0] = 1, [0xcd - 0xc0] = 2,
                                    [0xce - 0xc0] = 4, [0xcf - 0xc0] = 8, [0xd0 - 0xc0] = 1, [0xd1 - 0xc0] = 2,
                                    [0xd2 - 0xc0] = 4, [0xd3 - 0xc0] = 8};
    uint64_t left = (uint64_t)(end - at);
    *out = (token){.type = SCALAR, .size = 1};
    if (left == 0)
        return false;
    uint8_t b = *at;
    if (b < 0x80 || b >= 0xe0) {
        out->type = NUMBER;
    } else if (b < 0xa0) {
        out->type = b < 0x90 ? MAP : LIST;
        out->items = (uint64_t)(b & 15) << (b < 0x90);
    } else if (b < 0xc0) {
        out->size = 1 + (b & 31);
    } else if (b < 0xc4) { /* or 0xc1, which msgpack refuses */
        out->type = NUMBER; /* as keys: True is one like 1, and None has a hash that is known */
    } else if (b >= 0xca && b < 0xd4) {
        out->type = NUMBER;
        out->size = 1 + fixed[b - 0xc0];
    } else if (b >= 0xd4 && b < 0xd9) {
        if (left < 2)
            return false;
        out->type = EXT;
        out->code = at[1];
        out->size = 2 + (1u << (b - 0xd4));
    } else { /* bin, ext, str, array, map: a length of 1, 2 or 4 bytes */
        bool container = b >= 0xdc, ext = b >= 0xc7 && b < 0xca;
        unsigned first = b < 0xc7 ? 0xc4 : b < 0xca ? 0xc7 : b < 0xdc ? 0xd9 : b < 0xde ? 0xdb : 0xdd;
        unsigned n = 1u << (b - first); /* of array and map: 2 or 4 */
        if (left < 1 + n + ext)
            return false;
        uint64_t length = big_endian(at + 1, n);
        out->size = 1 + n;
        if (container) {
            out->type = b >= 0xde ? MAP : LIST;
            out->items = length << (b >= 0xde);
        } else if (ext) {
            out->type = EXT;
            out->code = at[1 + n];
            out->size += 1 + length;
        } else {
            out->size += length;
        }
    }
    return out->size <= left;
}

static bool is_part(uint8_t held) { return (held & (MANY | OTHER)) == MANY; }

/* The container in `f` ends at `end`: notes what it holds, and of a part its size; the one around it holds that, too. */
static void close_frame(frame *f, frame *around, uint64_t end, uint8_t *holds) {
    if (f->numbers > SHMS_MAX_NUMBERS)
        f->holds |= OTHER;
    holds[f->at] = f->holds | (f->containers > FEW_CONTAINERS || f->items >= FEW_ITEMS ? MANY : 0);
    if (is_part(holds[f->at])) { /* what the containers in it hold is of no use any more */
        uint32_t size = (uint32_t)(end - f->at);
        memcpy(holds + f->at + 1, &size, sizeof size);
    }
    if (around) {
        around->holds |= f->holds & (TUPLES | OTHER);
        around->containers += f->containers;
    }
}

/* The first pass. False: the bytes are not one value, or nothing of it may be folded, or that is not worth a copy. */
static bool scan(const uint8_t *meta, uint64_t size, uint8_t *holds) {
    frame frames[SHMS_MAX_DEPTH];
    unsigned depth = 0;
    uint64_t at = 0, tokens = 0;
    do {
        token t;
        tokens++;
        if (!read_token(meta + at, meta + size, &t))
            return false;
        frame *f = depth ? &frames[depth - 1] : NULL;
        bool first = f && f->left == f->items, key = f && f->map && f->left % 2 == 0;
        if (f) {
            f->left--;
            f->numbers += key && t.type == NUMBER;
        }
        if (t.type == EXT) {
            if (t.code == SHMS_PART_PLAIN || t.code == SHMS_PART_TUPLES)
                return false;
            if (f && first && !f->map && t.code >= TUPLE && t.code <= OBJECT)
                f->holds |= t.code == TUPLE ? TUPLES : t.code == OBJECT ? OTHER : OTHER | LEAF;
            else if (f)
                f->holds |= OTHER;
        } else if (t.type == LIST || t.type == MAP) {
            if (key || depth == SHMS_MAX_DEPTH)
                return false;
            frames[depth++] =
                (frame){.at = at, .left = t.items, .items = t.items, .containers = 1, .map = t.type == MAP};
        }
        at += t.size;
        while (depth && frames[depth - 1].left == 0) {
            depth--;
            close_frame(&frames[depth], depth ? &frames[depth - 1] : NULL, at, holds);
        }
    } while (depth);
    return at == size && size / LONG_VALUES <= tokens;
}

/* The end of the value that begins at `at`, in bytes that _scan has accepted. */
static uint64_t end_of(const uint8_t *meta, uint64_t size, uint64_t at) {
    token t;
    for (uint64_t left = 1; left && read_token(meta + at, meta + size, &t); at += t.size)
        left += t.items - 1;
    return at;
}

uint64_t shms_meta_fold(const uint8_t *meta, uint64_t size, uint8_t *out) {
    uint8_t *holds = out + 2 * size + 16; /* [offset]: of the container that begins there */
    uint64_t length = 0, folded = 0;
    if (!scan(meta, size, holds))
        return 0;
    for (uint64_t at = 0, end; at < size; at = end) {
        token t;
        read_token(meta + at, meta + size, &t);
        uint8_t held = t.type == LIST || t.type == MAP ? holds[at] : 0;
        end = held & LEAF ? end_of(meta, size, at) : at + t.size;
        if (is_part(held)) {
            uint32_t n;
            memcpy(&n, holds + at + 1, sizeof n);
            end = at + n;
            uint8_t code = held & TUPLES ? SHMS_PART_TUPLES : SHMS_PART_PLAIN;
            const uint8_t header[EXT_HEADER] = {0xc9, n >> 24, n >> 16, n >> 8, n, code};
            memcpy(out + length, header, EXT_HEADER);
            length += EXT_HEADER;
            folded++;
        }
        memcpy(out + length, meta + at, end - at);
        length += end - at;
    }
    return folded ? length : 0;
}
