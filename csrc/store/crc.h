/*
 * crc.h - CRC-32C (Castagnoli; RFC 3720, B.4) of the bytes of objects, for stores made with SHMS_CHECKSUMS.
 *
 * It finds what a stray store, a bad cable or bad memory did to a tensor; it is no proof against malice.
 */
#ifndef SHMS_CRC_H
#define SHMS_CRC_H

#include <stdint.h>

/* cdef: begin */
/* The checksum of n more bytes, after those that `crc` is of; 0 to begin with. */
uint32_t shms_crc32c(uint32_t crc, const void *bytes, uint64_t n);
/* The same without the processor's instruction; tests compare the two. */
uint32_t shms_crc32c_portable(uint32_t crc, const void *bytes, uint64_t n);
/* cdef: end */
/* Of an object of these lengths at data + offset: key, metadata and payload; the padding between them is nobody's. */
uint32_t shms_object_crc(const uint8_t *data, uint64_t offset, uint32_t key_len, uint32_t meta_len, uint64_t length);

#endif
