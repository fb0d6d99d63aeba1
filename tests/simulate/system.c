/* system.c - in the place of the system: the segments that an actor has open, its calls that fail, and its clock. */
#include "simulate.h"

#include "store/descriptors.c" /* the list of open segments */
#include "store/step.h"

enum { OPEN = 4 * ACTORS };

bool at_each_access;
uint64_t one_fails_of;
static struct {
    shms_segment *seg;
    int of;
} opened[OPEN];

bool in_segment(const volatile void *at) {
    const uint8_t *byte = (const uint8_t *)at;
    for (shms_segment *s = open_segments; s; s = s->next)
        if ((byte >= s->control && byte < s->control + s->control_size) ||
            (byte >= s->all_data && byte < s->all_data + s->data_size))
            return true;
    return false;
}
void before_access(void) {
    if (at_each_access)
        SHMS_STEP("");
}

bool refused(int error) {
    if (!acting || ending || !one_fails_of || one_of(one_fails_of))
        return false;
    counted.failed++;
    self()->refused = true;
    errno = error;
    return true;
}

/* In the place of libc's, so that a seed replays: a step takes a microsecond, and the time of day jumps. */
int clock_gettime(clockid_t clock, struct timespec *out) {
    uint64_t ns = clock == CLOCK_MONOTONIC ? now * 1000 : one_of(UINT64_C(1) << 60);
    *out = (struct timespec){.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
    return 0;
}
int nanosleep(const struct timespec *time, struct timespec *left) {
    (void)time, (void)left;
    return 0;
}
ssize_t getrandom(void *out, size_t size, unsigned flags) {
    (void)flags;
    for (size_t i = 0; i < size; i++)
        ((uint8_t *)out)[i] = (uint8_t)one_of(256);
    return (ssize_t)size;
}

/* Segments that the actor has opened or closed since it went on. */
void note_opened(int by) {
    for (int i = 0; i < OPEN; i++) {
        bool there = false;
        for (shms_segment *s = open_segments; s; s = s->next)
            there |= s == opened[i].seg;
        if (!there)
            opened[i].seg = NULL;
    }
    for (shms_segment *s = open_segments; s; s = s->next) {
        int free_at = -1;
        bool known = false;
        for (int i = 0; i < OPEN; i++) {
            known |= opened[i].seg == s;
            if (!opened[i].seg)
                free_at = i;
        }
        if (!known) {
            MUST("room for a segment", 1, free_at >= 0);
            opened[free_at].seg = s, opened[free_at].of = by;
        }
    }
}

void none_is_open(void) { MUST("no open segment", true, !open_segments); }

void close_all_of(int number) {
    for (int i = 0; i < OPEN; i++)
        if (opened[i].seg && opened[i].of == number) {
            shms_segment_close(opened[i].seg);
            opened[i].seg = NULL;
        }
}
