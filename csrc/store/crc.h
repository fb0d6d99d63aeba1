/*
 * crc.h - CRC-32C (Castagnoli; RFC 3720, B.4) of the bytes of objects, for stores created with SHMS_CHECKSUMS.
 *
 * The checksum finds accidental damage: a stray store or bad memory. It does not protect against malice.
 */
#ifndef SHMS_CRC_H
#define SHMS_CRC_H

#include <stdint.h>

/* cdef: begin */
/* Extends `crc` by n bytes and returns the new checksum. The first call passes 0. */
uint32_t shms_crc32c(uint32_t crc, const void *bytes, uint64_t n);
/* The same without the processor's CRC instruction, for tests that compare the two. */
uint32_t shms_crc32c_portable(uint32_t crc, const void *bytes, uint64_t n);
/* cdef: end */
/* The checksum of the object at data + offset: key, metadata and payload, without the padding between them. */
uint32_t shms_object_crc(const uint8_t *data, uint64_t offset, uint32_t key_len, uint32_t meta_len, uint64_t length);

#endif
