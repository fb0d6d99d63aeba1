/*
 * tensor.c - the metadata of one tensor or array, as shmstore/serde/wire.py has it: an array of a mark, the dtype, the
 * offset and the dimensions.
 */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

#define TENSOR 3 /* codes of the marks: ext values without data */
#define ARRAY 4
#define MOST_BYTES (UINT64_C(1) << 62) /* of a payload, in Python, too */

static bool is_ordered(const char *name) { return *name && strchr("<>|", *name); }

/* The bytes of an element; 0: it is neither a dtype of torch's nor one of numpy's with its order of bytes. */
static uint32_t itemsize(const char *name) {
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
        "bcomplex32",
    };
    static const char *const numpy[] = {"b1", "i1", "i2", "i4", "i8", "u1", "u2",
                                        "u4", "u8", "f2", "f4", "f8", "c8", "c16"};
    bool ordered = is_ordered(name);
    const char *const *names = ordered ? numpy : torch;
    size_t n = ordered ? sizeof numpy / sizeof *numpy : sizeof torch / sizeof *torch;
    for (size_t i = 0; i < n; i++)
        if (!strcmp(name + ordered, names[i])) { /* the first number is its bits, or numpy's its bytes */
            unsigned long number = strtoul(name + strcspn(name, "0123456789"), NULL, 10);
            return number == 0 ? 1 : (uint32_t)(ordered ? number : (number + 7) / 8);
        }
    return 0;
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

int shms_tensor_meta(char *out, const char *dtype, const uint64_t *shape, uint32_t n_dims) {
    if (!out || !dtype || (!shape && n_dims))
        return shms_fail(SHMS_EINVAL,
                         "out, dtype or shape is NULL: pass SHMS_TENSOR_META bytes, a name, and n_dims dimensions");
    if (n_dims > SHMS_MAX_DIMS)
        return shms_fail(SHMS_EINVAL, "n_dims must be at most %d, not %u", SHMS_MAX_DIMS, n_dims);
    if (!itemsize(dtype))
        return shms_fail(SHMS_EINVAL, "dtype must be a name such as float32, or <f4 for an array, not %.40s", dtype);
    size_t len = strlen(dtype);
    char head[] = {(char)(0x90 + 3 + n_dims), (char)0xc7, 0, is_ordered(dtype) ? ARRAY : TENSOR, (char)(0xa0 + len)};
    char *at = (char *)memcpy(out, head, sizeof head) + sizeof head;
    at = (char *)memcpy(at, dtype, len) + len;
    at = pack(at, 0);
    for (uint32_t i = 0; i < n_dims; i++)
        at = pack(at, shape[i]);
    return (int)(at - out);
}

/* Reads a msgpack integer from 0 on. NULL: there is none before `end`. */
static const uint8_t *unpack(const uint8_t *at, const uint8_t *end, uint64_t *out) {
    if (at == end || (*at >= 128 && (*at < 0xcc || *at > 0xcf)))
        return NULL;
    *out = *at < 128 ? *at : 0;
    int n = *at < 128 ? 0 : 1 << (*at - 0xcc);
    if (end - ++at < n)
        return NULL;
    while (n--)
        *out = *out << 8 | *at++;
    return at;
}

int shms_tensor_parse(shms_tensor *out, const char *meta, uint32_t meta_len, uint64_t payload_size) {
    if (!out || (!meta && meta_len))
        return shms_fail(SHMS_EINVAL, out ? "the metadata is NULL: pass its bytes, such as view->meta" : SHMS_NO_OUT);
    *out = (shms_tensor){0};
    const uint8_t *at = (const uint8_t *)meta, *end = at + meta_len;
    uint32_t items = meta_len > 5 ? at[0] - 0x90u : 0;
    if (items < 3 || items > 15 || at[1] != 0xc7 || at[2] != 0 || (at[3] != TENSOR && at[3] != ARRAY))
        return 0;
    uint32_t len = at[4] - 0xa0u;
    at += 5;
    if (len >= SHMS_DTYPE_SIZE || len >= (uint64_t)(end - at))
        return 0;
    memcpy(out->dtype, at, len);
    out->itemsize = itemsize(out->dtype);
    if (!out->itemsize || is_ordered(out->dtype) != (meta[3] == ARRAY))
        return 0;
    at = unpack(at + len, end, &out->offset);
    out->n_dims = items - 3;
    bool fits = true, empty = false;
    out->size = out->itemsize;
    for (uint32_t i = 0; at && i < out->n_dims; i++)
        if ((at = unpack(at, end, &out->shape[i]))) {
            if (out->shape[i] > MOST_BYTES)
                return SHMS_ECORRUPT;
            empty |= out->shape[i] == 0;
            fits &= !__builtin_mul_overflow(out->size, out->shape[i], &out->size);
        }
    out->size = empty ? 0 : out->size;
    return at == end && out->offset % SHMS_ALIGN == 0 &&
                   (empty || (fits && out->offset <= payload_size && out->size <= payload_size - out->offset))
               ? 1
               : SHMS_ECORRUPT;
}
