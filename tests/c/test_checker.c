/* test_checker.c - shms_writer_valid finds each bit of the books that is not as it was. */
#include "fixture.h"

static bool flips_are_found(void *at, size_t size, const char *what) {
    uint8_t *bytes = at;
    for (size_t i = 0; i < size * 8; i++) {
        bytes[i / 8] ^= (uint8_t)(1 << i % 8);
        int rc = shms_writer_valid(w);
        bytes[i / 8] ^= (uint8_t)(1 << i % 8);
        if (rc != SHMS_ECORRUPT) {
            fprintf(stderr, "bit %zu of %s\n", i, what);
            return false;
        }
    }
    return true;
}
#define FOUND(field) CHECK(flips_are_found((void *)&(field), sizeof(field), #field))

/* Objects of two kinds, with and without leases, and a free slot between them. */
TEST(each_bit_of_the_books_counts) {
    enum { OBJECTS = 6, GONE = 2 };
    open_store("checker", (shms_options){.capacity = 1 << 20, .n_readers = 1, .max_objects = 8}, 1);
    int kind = shms_writer_kind(w, "kind", 4);
    CHECK_EQ(SHMS_OK, shms_writer_quota(w, (uint32_t)kind, 1 << 19));
    for (uint64_t k = 0; k < OBJECTS; k++) {
        shms_pending t;
        const char *key = key_of("", k);
        CHECK_EQ(SHMS_OK, verb_begin_of(w, key, 1, NULL, 0, 1000 + 30000 * (k / 2), k % 2 ? (uint32_t)kind : 0, k < 4,
                                        &t, NULL));
        CHECK_EQ(SHMS_OK, verb_commit(w, &t, k < 4 ? ref : NULL));
    }
    CHECK_EQ(SHMS_OK, verb_hit(w, "1", 1, ref)); /* two leases on one object */
    for (uint64_t k = 0; k < OBJECTS; k += 4)
        CHECK_EQ(1, shms_writer_delete(w, key_of("", k), 1));
    CHECK_EQ(SHMS_OK, shms_writer_valid(w));
    shms_ring *r = &w->ring;
    shms_leases *l = &w->leases;
    shms_writer_table *t = w->seg.writer;
    FOUND(r->first);
    FOUND(r->last);
    FOUND(r->count);
    uint64_t hands[] = {r->areas[SHMS_LARGE].hand, r->areas[SHMS_SMALL].hand};
    for (int wrong = 0; wrong < 3; wrong++) {
        r->areas[SHMS_LARGE].hand = wrong == 0   ? r->capacity + SHMS_ALIGN
                                    : wrong == 1 ? shms_ring_start(r, r->last) + SHMS_ALIGN /* inside of an object */
                                                 : hands[SHMS_LARGE];
        r->areas[SHMS_SMALL].hand = wrong == 2 ? r->capacity - SHMS_ALIGN : hands[SHMS_SMALL];
        CHECK_EQ(SHMS_ECORRUPT, shms_writer_valid(w));
    }
    r->areas[SHMS_SMALL].hand = hands[SHMS_SMALL];
    FOUND(r->areas[SHMS_LARGE].hand_next);
    for (uint32_t z = 0; z < r->n_zones; z++)
        FOUND(r->zones[z].first);
    for (uint32_t s = r->first; s != SHMS_NONE; s = r->next[s]) {
        FOUND(r->next[s]);
        FOUND(r->prev[s]);
        FOUND(w->seg.slots[s].state);
        FOUND(w->seg.slots[s].id);
    }
    for (uint32_t k = 0; k <= (uint32_t)kind; k++) {
        FOUND(w->kinds.lists[k]);
        FOUND(w->kinds.table[k].bytes);
        FOUND(w->kinds.table[k].objects);
    }
    shms_kind_list listed = w->kinds.lists[kind];
    w->kinds.lists[kind] = (shms_kind_list){SHMS_NONE, SHMS_NONE, 0};
    CHECK_EQ(SHMS_ECORRUPT, shms_writer_valid(w));
    w->kinds.lists[kind] = listed;
    uint64_t first = shms_get(&w->kinds.table[kind].name[0]);
    shms_set(&w->kinds.table[kind].name[0], 0);
    CHECK_EQ(SHMS_ECORRUPT, shms_writer_valid(w));
    shms_set(&w->kinds.table[kind].name[0], first);
    uint32_t cut = w->kinds.next[listed.first];
    w->kinds.next[listed.first] = SHMS_NONE; /* a list that ends early */
    w->kinds.lists[kind].last = listed.first;
    CHECK_EQ(SHMS_ECORRUPT, shms_writer_valid(w));
    w->kinds.next[listed.first] = cut;
    w->kinds.lists[kind] = listed;
    uint32_t gone = w->free_slots[0]; /* a list that has a free slot in the place of an object */
    shms_set(&w->seg.slots[gone].flags, shms_get(&w->seg.slots[listed.first].flags));
    w->kinds.next[gone] = cut;
    w->kinds.prev[gone] = SHMS_NONE;
    w->kinds.prev[cut] = w->kinds.lists[kind].first = gone;
    CHECK_EQ(SHMS_ECORRUPT, shms_writer_valid(w));
    w->kinds.prev[cut] = w->kinds.lists[kind].first = listed.first;
    const uint64_t kind_bits = (uint64_t)kind << SHMS_SLOT_KIND_SHIFT;
    for (int wrong = 1; wrong >= 0; wrong--) { /* two objects of one size have each other's kind */
        for (uint32_t s = 2; s < 4; s++)
            shms_set(&w->seg.slots[s].flags, shms_get(&w->seg.slots[s].flags) ^ kind_bits);
        CHECK_EQ(wrong ? SHMS_ECORRUPT : SHMS_OK, shms_writer_valid(w));
    }
    for (uint32_t s = listed.first; s != SHMS_NONE; s = w->kinds.next[s]) {
        FOUND(w->kinds.next[s]);
        FOUND(w->kinds.prev[s]);
    }
    for (uint32_t e = 0; e < l->n_entries; e++)
        if (l->table[e].number) {
            FOUND(l->table[e].id);
            FOUND(l->slot[e]);
            FOUND(l->next[e]);
        }
    uint32_t front = l->first[1], second = l->next[front], next = l->prev[front];
    uint64_t what = shms_get(&l->table[front].what);
    FOUND(l->prev[second]);
    l->prev[front] = l->free[0]; /* what is looked at next is not in the list */
    CHECK_EQ(SHMS_ECORRUPT, shms_writer_valid(w));
    l->prev[front] = next;
    l->next[second] = front; /* the list goes round */
    l->prev[front] = second;
    CHECK_EQ(SHMS_ECORRUPT, shms_writer_valid(w));
    l->next[second] = SHMS_NONE;
    l->prev[front] = next;
    l->next[front] = SHMS_NONE; /* an open lease is in no list */
    CHECK_EQ(SHMS_ECORRUPT, shms_writer_valid(w));
    l->next[front] = second;
    shms_set(&l->table[front].what, shms_lease_with_next(what, 1)); /* a list that others walk */
    CHECK_EQ(SHMS_ECORRUPT, shms_writer_valid(w));
    shms_set(&l->table[front].what, what);
    l->free[0] += l->n_entries;
    CHECK_EQ(SHMS_ECORRUPT, shms_writer_valid(w));
    l->free[0] -= l->n_entries;
    FOUND(l->n_free);
    FOUND(w->n_free_slots);
    FOUND(w->unfinished);
    FOUND(w->leased);
    FOUND(w->index.count);
    FOUND(t->objects);
    FOUND(t->used_bytes);
    FOUND(t->open_leases);
    FOUND(t->published);
    FOUND(t->next_lease);
    end();
}
