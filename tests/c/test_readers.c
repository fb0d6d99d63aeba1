/* test_readers.c - one rank's table in caller's memory: pins, acknowledgements, and what a successor resets. */
#include "support.h"

enum { SLOTS = 5, ENTRIES = 4, RANK = 3, ROUNDS = 100000 };

static const shms_layout layout = {
    .n_writers = 1, .max_objects = SLOTS, .max_leases = ENTRIES, .n_groups = 3, .group_of = {0, 1, 1, 1, 2}};
static shms_reader_table *t;
static shms_slot slots[SLOTS];
static shms_lease leases[ENTRIES];
static shms_writer_table wt;

static shms_word *ack(uint32_t entry) { return &shms_reader_acks(t, &layout)[entry]; }

TEST(a_pin_stays_only_if_the_object_is_there) {
    t = zeroed(4096);
    for (uint64_t state = SHMS_FREE; state <= SHMS_EVICTING; state++)
        for (uint64_t id = 7; id <= 8; id++)
            for (uint32_t mark = 1; mark < SHMS_MARKS; mark += SHMS_MARKS - 2) {
                slots[2] = (shms_slot){.state = state, .id = 7, .head = shms_slot_head(1, mark, 0)};
                bool there = id == 7 && (state == SHMS_LIVE || state == SHMS_EVICTING);
                uint64_t releases = t->releases;
                CHECK_EQ(there ? state : SHMS_FREE, shms_reader_table_pin(t, &layout, &slots[2], 2, id));
                CHECK_EQ(there, shms_reader_pins(t)[2]);
                shms_reader_table_use(t, &slots[2], 2);
                CHECK_EQ(there, shms_pin_count(&shms_reader_pins(t)[2], memory_order_relaxed));
                if (there)
                    shms_reader_table_unpin(t, &layout, 2, 0);
                CHECK_EQ(mark << SHMS_PIN_MARK_SHIFT, shms_reader_pins(t)[2]);
                CHECK_EQ(releases + 1, t->releases); /* a pin that came and went may have stopped an eviction */
                shms_reader_pins(t)[2] = 0;
            }
}

static void acknowledge_a_newer_one(const char *label) {
    if (strcmp(label, "R3b"))
        return;
    shms_step_hook = NULL;
    leases[1].number = 9;
    CHECK_EQ(1, shms_reader_table_ack(t, &layout, &leases[1], 1, 9, 0, 0));
}

TEST(an_acknowledgement_never_decreases) {
    leases[1].number = 5;
    shms_step_hook = acknowledge_a_newer_one;
    CHECK_EQ(0, shms_reader_table_ack(t, &layout, &leases[1], 1, 5, 0, 0)); /* overtaken between R3a and R3b */
    CHECK(!shms_step_hook);
    CHECK_EQ(9, *ack(1));
    CHECK_EQ(0, shms_reader_table_ack(t, &layout, &leases[1], 1, 5, 0, 0)); /* the entry is another lease's */
    CHECK_EQ(9, *ack(1));
    leases[1].number = 0;
}

TEST(every_step_matches_a_simple_model) {
    uint64_t seed = 9, pins[SLOTS] = {0}, acked[ENTRIES] = {0}, epoch = 0, base = 0, next = 1, news = 0,
             counts[3] = {0};
    memset(t, 0, 4096);
    for (uint32_t i = 0; i < SLOTS; i++)
        slots[i] = (shms_slot){.state = SHMS_LIVE, .id = 1 + i};
    for (int round = 0; round < ROUNDS; round++) {
        uint32_t slot = (uint32_t)below(&seed, SLOTS), entry = (uint32_t)below(&seed, ENTRIES);
        uint64_t number = leases[entry].number, released = t->releases;
        switch (below(&seed, 8)) {
        case 0:
        case 1:
            CHECK_EQ(SHMS_LIVE, shms_reader_table_pin(t, &layout, &slots[slot], slot, slots[slot].id));
            pins[slot]++;
            break;
        case 2:
        case 3:
            if (pins[slot]) {
                shms_reader_table_unpin(t, &layout, slot, 0);
                pins[slot]--;
                news++;
            }
            break;
        case 4: /* the writer opens or closes one */
            leases[entry].number = number ? 0 : next++;
            wt.next_lease = wt.published = next;
            break;
        case 5: { /* an acknowledgement, sometimes of a lease that has ended */
            uint64_t of = below(&seed, 4) ? number : number - 1;
            bool first = of && of == number && acked[entry] < of;
            if (of) {
                CHECK_EQ(first, shms_reader_table_ack(t, &layout, &leases[entry], entry, of, 0, 0));
                news += first;
                counts[0] += first;
            }
            if (first)
                acked[entry] = of;
            break;
        }
        case 6:
            if (below(&seed, 50) == 0) { /* another process takes the rank */
                if (below(&seed, 2)) { /* a forged table */
                    shms_reader_pins(t)[slot] = (uint32_t)chance(&seed);
                    *ack(entry) = next + below(&seed, 3);
                    t->base[0] = chance(&seed);
                    acked[entry] = 0;
                    counts[2]++;
                }
                bool retired = below(&seed, 2);
                wt.retired[RANK] = retired ? epoch + 1 : 0;
                shms_reader_table_attach(t, &layout, &wt, RANK, false, 42, 43);
                base = epoch || retired ? next : 0;
                memset(pins, 0, sizeof pins);
                counts[1]++;
                epoch++;
                CHECK(t->pid == 42 && t->attached_ns == 43);
            }
            break;
        case 7:
            if (below(&seed, 50) == 0) {
                shms_reader_table_close(t, &layout);
                base = SHMS_CLOSED;
            }
        }
        bool expected = base <= number && acked[entry] != number && wt.retired[RANK] != epoch + 1;
        for (uint32_t group = 0; group < 4; group++)
            CHECK_EQ(expected && (group == 0 || group == 2),
                     shms_reader_expected(t, &layout, RANK, 0, wt.retired[RANK], entry, number,
                                          shms_lease_what(1, true, group, 2)));
        CHECK(t->releases == released || t->releases == released + 1);
        CHECK_EQ(news, t->releases);
        CHECK_EQ(epoch, t->epoch);
        CHECK_EQ(base, t->base[0]);
        for (uint32_t i = 0; i < SLOTS; i++)
            CHECK_EQ(pins[i], shms_pin_count(&shms_reader_pins(t)[i], memory_order_relaxed));
        for (uint32_t i = 0; i < ENTRIES; i++)
            CHECK_EQ(acked[i], *ack(i));
    }
    CHECK(counts[0] > 100 && counts[1] > 100 && counts[2] > 50);
    free(t);
}
