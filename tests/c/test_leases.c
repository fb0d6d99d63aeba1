/* test_leases.c - the lease table and its bookkeeping in caller's memory, compared with a plain list of open leases. */
#include "support.h"

enum { ENTRIES = 6, SLOTS = 6, GROUPS = 3, ROUNDS = 200000 / EACH };

static shms_writer_table wt;
static shms_lease table[ENTRIES];
static shms_slot slots[SLOTS];
static struct {
    uint64_t number, id;
    uint32_t slot, group;
    bool held;
} model[ENTRIES];
static bool taken[ENTRIES];

static uint32_t leases_of(const shms_leases *l, uint32_t slot) {
    uint32_t n = 0;
    for (uint32_t e = l->first[slot]; e != SHMS_NONE; e = l->next[e])
        n++;
    return n;
}

static void compare(const shms_leases *l) {
    uint32_t open = 0, in_flight = 0, of_slot[SLOTS] = {0};
    for (uint32_t e = 0; e < ENTRIES; e++) {
        CHECK_EQ(model[e].number, table[e].number);
        in_flight += taken[e];
        if (!model[e].number)
            continue;
        open++;
        of_slot[model[e].slot]++;
        CHECK_EQ(shms_lease_what(model[e].slot, model[e].held, model[e].group, 0), table[e].what);
        CHECK_EQ(model[e].id, table[e].id);
    }
    CHECK_EQ(open, wt.open_leases);
    CHECK_EQ(ENTRIES - open - in_flight, l->n_free);
    for (uint32_t s = 0; s < SLOTS; s++)
        CHECK_EQ(of_slot[s], leases_of(l, s));
    CHECK_EQ(SHMS_OK, shms_leases_valid(l, slots, in_flight));
}

TEST(the_parts_of_the_word_do_not_overlap) {
    static const struct {
        uint32_t slot, group, next;
        bool held;
    } parts[] = {{0xffffff, 0, 0, false},
                 {0, 0xff, 0, false},
                 {0, 0, 0xffffff, false},
                 {0, 0, 0, true},
                 {0xabcdef, 0x12, 0x345678, true}};
    uint64_t all = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        uint64_t what = shms_lease_what(parts[i].slot, parts[i].held, parts[i].group, parts[i].next);
        CHECK_EQ(parts[i].slot, shms_lease_slot(what));
        CHECK_EQ(parts[i].held, shms_lease_held(what));
        CHECK_EQ(parts[i].group, shms_lease_group(what));
        CHECK_EQ(parts[i].next, shms_lease_next(what));
        CHECK(i == 4 || (all & what) == 0);
        all |= what;
    }
    CHECK_EQ(57, __builtin_popcountll(all));
}

TEST(the_table_matches_a_plain_list_of_open_leases) {
    uint64_t seed = 3, next = 1, next_id = 1, refused = 0, inits = 0;
    shms_layout layout = {.max_leases = ENTRIES, .max_objects = SLOTS, .n_groups = GROUPS};
    shms_leases l;
    void *memory = zeroed(shms_leases_memory(ENTRIES, SLOTS));
    wt.next_lease = wt.published = 1;
    for (int s = 0; s < SLOTS; s++)
        slots[s] = (shms_slot){.state = SHMS_LIVE, .id = next_id++};
    shms_leases_init(&l, memory, &layout, &wt, table, slots, NULL, true);
    for (int round = 0; round < ROUNDS; round++) {
        uint32_t entry = (uint32_t)below(&seed, ENTRIES), slot = (uint32_t)below(&seed, SLOTS);
        uint32_t group = (uint32_t)below(&seed, GROUPS + 1);
        switch (below(&seed, 10)) {
        case 0:
        case 1:
        case 2:
        case 3: { /* a hand-out; one in four is abandoned before it is opened */
            uint32_t e = shms_leases_take(&l);
            refused += e == SHMS_NONE;
            if (e == SHMS_NONE) {
                for (uint32_t i = 0; i < ENTRIES; i++)
                    CHECK(model[i].number || taken[i]);
                break;
            }
            CHECK(e < ENTRIES && !model[e].number && !taken[e]);
            taken[e] = true;
            compare(&l);
            taken[e] = false;
            if (below(&seed, 4) == 0) {
                shms_leases_untake(&l, e);
                break;
            }
            CHECK_EQ(next, shms_leases_open(&l, e, slot, slots[slot].id, group, 77));
            CHECK_EQ(77, table[e].opened_ns);
            model[e].number = next++, model[e].id = slots[slot].id, model[e].slot = slot;
            model[e].group = group, model[e].held = false;
            break;
        }
        case 4:
        case 5:
        case 6:
            if (model[entry].number) {
                shms_leases_close(&l, entry);
                model[entry].number = 0;
            }
            break;
        case 7: /* an object goes, after its leases */
            for (uint32_t e = 0; e < ENTRIES; e++)
                if (model[e].number && model[e].slot == slot) {
                    shms_leases_close(&l, e);
                    model[e].number = 0;
                }
            slots[slot].id = next_id++;
            break;
        case 9:
            if (model[entry].number && below(&seed, 2)) {
                shms_leases_hold(&l, entry);
                model[entry].held = true;
            } else if (model[entry].number && model[entry].group == 0) {
                shms_leases_assign_group(&l, entry, group);
                model[entry].group = group;
            }
            break;
        case 8: /* a successor reads the table: entries without a live object are closed, numbers continue */
            inits++;
            if (below(&seed, 2)) { /* its predecessor died during a deletion or a put */
                slots[slot].state = below(&seed, 2) ? SHMS_FREE : SHMS_LIVE;
                slots[slot].id = next_id++;
            }
            if (below(&seed, 4) == 0) {
                table[entry].what = shms_lease_what(SLOTS + (uint32_t)below(&seed, 9), false, 0, 0);
                model[entry].number = 0;
            }
            for (uint32_t e = 0; e < ENTRIES; e++)
                if (model[e].number &&
                    (slots[model[e].slot].state != SHMS_LIVE || slots[model[e].slot].id != model[e].id))
                    model[e].number = 0;
            shms_leases_init(&l, memory, &layout, &wt, table, slots, NULL, true);
            CHECK_EQ(next, wt.next_lease);
            compare(&l);
            slots[slot].state = SHMS_LIVE;
            break;
        }
        compare(&l);
    }
    CHECK(refused > 100 && inits > 1000);
    free(memory);
}
