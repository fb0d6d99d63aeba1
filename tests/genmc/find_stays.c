/* A rank looks for a key, whose next object is put and stays, because another rank has it as the writer evicts it. */
#define RANKS 2
#include "world.h"

static void writer(void) {
    put(&a, 1, UNIT, UNLEASED);
    send();
    evict_first(&a);
}

static void with_reference(void) {
    receive();
    use(&last, UNLEASED);
}

static void finder(void) { find_and_use(&first, 1); }

RUN(begin_empty, nothing, writer, with_reference, finder)
