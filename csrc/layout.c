#include "shmstore.h"
uint32_t shms_layout_version(void) { return 1; }
