#ifndef SHMSTORE_H
#define SHMSTORE_H
#include <stdint.h>
/* cdef: begin */
uint32_t shms_layout_version(void); /* version of the shared layout that this build reads and writes */
/* cdef: end */
#endif
