/*
 * fold.h - finds the parts of an object's metadata that hold no tensor, so that msgpack's own decoder can make them.
 *
 * shmstore/serde/wire.py has the format. What it makes of a dict in Python takes 15 times as long as in C.
 */
#ifndef SHMS_FOLD_H
#define SHMS_FOLD_H

#include <stdint.h>

/* cdef: begin */
#define SHMS_MAX_DEPTH 100  /* containers inside one another */
#define SHMS_MAX_NUMBERS 64 /* keys of a dict that are numbers or None: as many may have the same hash */

/* Codes of ext values that no metadata has, only what _fold makes of it. */
#define SHMS_PART_PLAIN 32  /* dicts, lists and scalars */
#define SHMS_PART_TUPLES 33 /* and tuples */

/* Copies metadata to `out`, with each part of that kind, if Python would be slow at it, as the data of one such ext
 * value. A part keeps the limits above, and its keys are scalars. `out` has room for 3 * size + 16 bytes. Returns the
 * length; 0: there is no such part, or the bytes are not metadata, or they have one of the codes. */
uint64_t shms_meta_fold(const uint8_t *meta, uint64_t size, uint8_t *out);
/* cdef: end */

#endif
