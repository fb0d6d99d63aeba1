/*
 * room.c - a put that waits for room: how it sleeps, and who wakes it.
 *
 * Who lets go of something has stored that in words of its own, and a look finds it there. So a wake-up carries nothing:
 * it is a FUTEX_WAKE on a word of the writer. A reader may not write there, and need not: the kernel only asks where the
 * word is.
 *
 * 1. The writer stores an odd number (F1), and then looks once more, at the words that others count their releases in.
 *    So that look finds what was counted before it, and who counts later finds the number.
 * 2. A reader has no fence between its count and its look at the number, because a get must not pay for a wait. And a
 *    wake-up between the writer's look and its sleep (F2) finds nobody, because the reader cannot change the number. So
 *    the writer looks again after 50 ms at the latest. That is also how it learns of a death, which wakes nobody.
 * 3. Other threads of the writer do change the number (F3), which the kernel compares. So they lose no wake-up.
 * 4. Nothing depends on any of this but time. A wait is a put that is tried again.
 */
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "step.h"
#include "writer.h"

#define LOOK_NS UINT64_C(50000000)
#define LEAST_NS UINT64_C(1000000) /* between two looks that found no room, but for the first ones */

__attribute__((cold)) void shms_room_wake(shms_word *wanted) {
    syscall(SYS_futex, wanted, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); /* the lower half of the word */
}

void shms_room_tell(struct shms_writer *w) {
    shms_word *word = &w->seg.writer->room_wanted;
    uint64_t freed = w->ring.changes - w->ring.by_uses;
    if (w->closed || freed == w->room_told)
        return;
    w->room_told = freed;
    SHMS_STEP("F3"); /* pairs with F2 */
    shms_set(word, shms_get(word) + 2);
    shms_room_wake(word);
}

void shms_room_close(struct shms_writer *w) {
    shms_word *word = &w->seg.writer->room_wanted;
    shms_set(word, 0);
    shms_room_wake(word);
}

int shms_room_await(struct shms_writer *w, uint64_t *until) {
    uint64_t now = shms_clock_ns(CLOCK_MONOTONIC), left = *until - now;
    bool often = now - w->room_looked < LEAST_NS; /* beside busy readers, each of whose releases is a change */
    w->room_looked = now;
    shms_word *word = &w->seg.writer->room_wanted;
    if (now >= *until) {
        *until = 0;
        return 0;
    }
    if (w->room_waits++ == 0) {
        w->room_told = w->ring.changes - w->ring.by_uses;
        SHMS_STEP("F1"); /* together with the fence, pairs with shms_room_made */
        shms_set(word, 1);
    }
    atomic_thread_fence(memory_order_seq_cst);
    /* Another writer's pin in passing counts as a change at each poll, and its end wakes. */
    if (!shms_poll(w) || w->passing || often) {
        shms_room_tell(w); /* of what this look has found, before the next line */
        uint32_t seen = (uint32_t)shms_get(word);
        shms_writer_leave_place(w, SHMS_OK);
        struct timespec most = {.tv_nsec = (long)(left < LOOK_NS ? left : LOOK_NS)};
        SHMS_STEP("F2"); /* pairs with F3 */
        if (often)
            nanosleep(&(struct timespec){.tv_nsec = LEAST_NS}, NULL);
        else
            syscall(SYS_futex, word, FUTEX_WAIT, seen, &most, NULL, 0);
        int rc = shms_writer_enter_to_place(w);
        if (rc) /* closed: the word may be a successor's */
            return rc;
    }
    if (--w->room_waits == 0)
        shms_set(word, 0);
    return 1;
}
