/* A rank with a reference, while the writer evicts the object and reuses its bytes. */
#include "world.h"

RUN(begin, nothing, owner_evicts, rank_uses)
