/* test_tier.c - the figures of a tier: each writer has its own, and only the process that wrote them leaves them. */
#include "inspect/inspect.h"
#include "support.h"

enum { WRITERS = 2, FIGURES = sizeof(shms_tier_figures) / sizeof(uint64_t) };

static const char *name;
static shms_writer *writers[WRITERS];
static shms_inspector *inspector;

static void begin(void) {
    shms_options o = {.capacity = 4096, .n_readers = 1, .max_objects = 4, .n_writers = WRITERS};
    name = store_name("tier");
    CHECK_EQ(SHMS_OK, shms_writer_create(&writers[0], name, &o));
    CHECK_EQ(SHMS_OK, shms_writer_join(&writers[1], name, 1, NULL));
    CHECK_EQ(SHMS_OK, shms_inspector_open(&inspector, name));
}

static void end(void) {
    shms_inspector_free(inspector);
    for (int i = 0; i < WRITERS; i++)
        end_writer(writers[i]);
}

/* Figures that all differ, also from those of another seed. */
static shms_tier_figures made(uint64_t seed) {
    shms_tier_figures f;
    for (uint64_t i = 0; i < FIGURES; i++)
        ((uint64_t *)&f)[i] = seed * 100 + i;
    return f;
}

/* Do the writer itself and an inspector see these figures? */
static void shows(int arena, shms_tier_figures expected) {
    shms_stats stats;
    shms_facts facts;
    CHECK_EQ(SHMS_OK, shms_writer_stats(writers[arena], &stats));
    CHECK_EQ(SHMS_OK, shms_inspector_facts(inspector, (uint64_t)arena, &facts));
    CHECK(!memcmp(&expected, &stats.tier, sizeof expected));
    CHECK(!memcmp(&expected, &facts.tier, sizeof expected));
}

TEST(each_writer_shows_the_figures_of_its_own_tier) {
    shms_tier_figures one = made(1), two = made(2), none = {0};
    begin();
    shows(0, none);
    CHECK_EQ(SHMS_OK, shms_writer_tier(writers[1], &two));
    shows(0, none);
    shows(1, two);
    CHECK_EQ(SHMS_OK, shms_writer_tier(writers[0], &one));
    shows(0, one);
    shows(1, two);
    CHECK_EQ(SHMS_OK, shms_writer_tier(writers[1], &one));
    shows(1, one);
    end();
}

TEST(a_successor_starts_without_figures) {
    shms_tier_figures one = made(1), two = made(2);
    shms_facts facts;
    begin();
    CHECK_EQ(SHMS_OK, shms_writer_tier(writers[0], &one));
    CHECK_EQ(SHMS_OK, shms_writer_tier(writers[1], &two));
    shms_writer_free(writers[1]); /* like a process that dies */
    CHECK_EQ(SHMS_OK, shms_inspector_facts(inspector, 1, &facts));
    CHECK(!memcmp(&two, &facts.tier, sizeof two)); /* they can be looked at until then */
    CHECK_EQ(SHMS_OK, shms_writer_join(&writers[1], name, 1, NULL));
    shows(0, one);
    shows(1, (shms_tier_figures){0});
    end();
}

TEST(a_writer_that_is_closed_leaves_its_successor_s_figures) {
    shms_tier_figures one = made(1);
    shms_writer *closed;
    begin();
    closed = writers[1];
    shms_writer_close(closed, 0);
    CHECK_EQ(SHMS_OK, shms_writer_join(&writers[1], name, 1, NULL));
    CHECK_EQ(SHMS_ECLOSED, shms_writer_tier(closed, &one));
    CHECK_EQ(SHMS_ECLOSED, shms_writer_tier(NULL, &one));
    shows(1, (shms_tier_figures){0});
    shms_writer_free(closed);
    end();
}

TEST(what_one_writer_clears_all_see_and_successors_too) {
    uint64_t seen = 1;
    begin();
    CHECK_EQ(SHMS_OK, shms_writer_tier_cleared(writers[0], &seen));
    CHECK_EQ(0, seen);
    CHECK_EQ(SHMS_OK, shms_writer_clear_tier(writers[1], 7));
    CHECK_EQ(SHMS_OK, shms_writer_clear_tier(writers[0], 5));
    for (int i = 0; i < WRITERS; i++) {
        CHECK_EQ(SHMS_OK, shms_writer_tier_cleared(writers[i], &seen));
        CHECK_EQ(7, seen);
    }
    shms_writer_free(writers[1]); /* like a process that dies */
    CHECK_EQ(SHMS_OK, shms_writer_join(&writers[1], name, 1, NULL));
    CHECK_EQ(SHMS_OK, shms_writer_tier_cleared(writers[0], &seen));
    CHECK_EQ(7, seen);
    shows(1, (shms_tier_figures){0});
    CHECK_EQ(SHMS_ECLOSED, shms_writer_clear_tier(NULL, 9));
    CHECK_EQ(SHMS_ECLOSED, shms_writer_tier_cleared(NULL, &seen));
    end();
}
