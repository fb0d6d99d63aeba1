/* A rank dies at any step of a read; its successor reads, while the writer evicts the object and reuses its bytes. */
#define STEPS 12
#include "world.h"

WORLD private a = PRIVATE(a, 0);
WORLD struct shms_reader first = READER(0), second = READER(0);

static void before(void) {
    begin_private(&a);
    store_first(0, 0, 1, 0);
    refer(0, 0, 1, 0);
    everybody();
}

static void *writer(void *unused) {
    live(SHMS_ROLE_WRITER);
    victims_of(&a.w)[0] = 0;
    if (shms_evictable(&a.w, 0) && vacate(&a.w, 1) == SHMS_OK)
        *payload(0, 0) = 2;
    return unused;
}

static void use(struct shms_reader *r) {
    shms_ref ref;
    shms_slot seen;
    int rc = pin_of_rank(r, &(uint8_t){0}, &ref, &seen);
    if (rc == SHMS_OK) {
        assert(*payload(0, 0) == 1);
        shms_reader_table_unpin(r->table, &r->seg.layout, 0, 0);
    }
}

static void *rank(void *unused) {
    be_mortal(0);
    use(&first);
    live_through();
    leave_lock();
    return unused;
}

static void *successor(void *unused) {
    succeed(0);
    shms_reader_table_attach(second.table, &a.w.seg.layout, &world.arenas[0].writer, 0, false, 1, 1);
    use(&second);
    return unused;
}

static void afterwards(void) {}

RUN(before, afterwards, fates, writer, rank, successor)
