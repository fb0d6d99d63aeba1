/*
 * monitor.c - the writer's two locks: how a call enters and leaves, and how it lets other threads go first. It knows no
 * object.
 */
#include "monitor.h"

#include <sched.h>

void shms_monitor_init(struct shms_writer *w) {
    pthread_mutex_init(&w->placing, NULL);
    pthread_mutex_init(&w->mutex, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&w->room, &attr);
    pthread_condattr_destroy(&attr);
}

/* Turns of a wait. The first ones spin, for tens of microseconds on most processors; the others give up the
 * processor. */
#define SPINS 2000
#define YIELDS 200
#define GRACE 1000

static void wait_a_turn(int turn) {
    if (turn >= SPINS)
        sched_yield();
    else
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        __asm__ volatile("yield");
#endif
}

/* Spins first, because to sleep and wake takes longer than most waits. */
static void wait_for_mutex(struct shms_writer *w, bool returning) {
    for (int turn = 0; turn < SPINS + YIELDS; turn++) {
        if ((returning || !atomic_load(&w->returning)) && pthread_mutex_trylock(&w->mutex) == 0)
            return;
        wait_a_turn(turn);
    }
    pthread_mutex_lock(&w->mutex);
}

static void take_mutex(struct shms_writer *w) {
    if (!atomic_load(&w->returning) && pthread_mutex_trylock(&w->mutex) == 0)
        return;
    atomic_fetch_add(&w->waiting, 1);
    wait_for_mutex(w, false);
    atomic_fetch_sub(&w->waiting, 1);
    atomic_fetch_add(&w->handovers, 1);
}

/* A mutex is not fair: a thread that unlocks it and locks it again is faster than those that wait. So a put, which
 * needs it for long, lets one waiting thread go first, and then stays away for a while. After that the others let the
 * put go first, because threads that hit without a pause would keep it out.
 *
 * A ticket lock would be fair by itself. But with more threads than cores each call then waits until a sleeping thread has
 * woken up: 8 threads that hit on 2 cores did 0.07 million hits a second, where they do 2 million. */
static void take_mutex_last(struct shms_writer *w) {
    if (atomic_load(&w->waiting)) {
        uint32_t before = atomic_load(&w->handovers);
        for (int turn = 0; turn < SPINS + YIELDS && atomic_load(&w->waiting) && atomic_load(&w->handovers) == before;
             turn++)
            wait_a_turn(turn);
        for (int turn = 0; turn < GRACE; turn++)
            wait_a_turn(0);
    }
    atomic_fetch_add(&w->returning, 1);
    wait_for_mutex(w, true);
    atomic_fetch_sub(&w->returning, 1);
}

bool shms_writer_yield(struct shms_writer *w) {
    if (atomic_load(&w->waiting) == 0)
        return false;
    pthread_mutex_unlock(&w->mutex);
    take_mutex_last(w);
    return true;
}

static int enter(struct shms_writer *w, bool to_place) {
    if (!w)
        return SHMS_ECLOSED;
    if (atomic_load_explicit(&w->seg.forked, memory_order_relaxed)) /* first: a child may have a locked mutex */
        return SHMS_EFORKED;
    if (to_place)
        pthread_mutex_lock(&w->placing);
    (to_place ? take_mutex_last : take_mutex)(w);
    if (!w->closed)
        return SHMS_OK;
    pthread_mutex_unlock(&w->mutex);
    if (to_place)
        pthread_mutex_unlock(&w->placing);
    return SHMS_ECLOSED;
}

int shms_writer_enter(struct shms_writer *w) { return shms_has_no_arena(w) ? SHMS_ENOARENA : enter(w, false); }
int shms_writer_enter_to_place(struct shms_writer *w) { return shms_has_no_arena(w) ? SHMS_ENOARENA : enter(w, true); }
int shms_writer_enter_to_close(struct shms_writer *w) { return enter(w, true); }

int shms_writer_leave(struct shms_writer *w, int rc) {
    pthread_mutex_unlock(&w->mutex);
    return rc;
}

int shms_writer_leave_place(struct shms_writer *w, int rc) {
    shms_writer_leave(w, rc);
    pthread_mutex_unlock(&w->placing);
    return rc;
}

int shms_writer_enter_to_end(struct shms_writer *w) {
    int rc = shms_writer_enter(w);
    if (rc != SHMS_ECLOSED || !w)
        return rc;
    pthread_mutex_lock(&w->mutex);
    if (w->unfinished)
        return SHMS_OK;
    pthread_mutex_unlock(&w->mutex);
    return SHMS_ECLOSED;
}

void shms_writer_say_goodbye(struct shms_writer *w, int unlinks) {
    if (!shms_has_no_arena(w))
        shms_set(&w->seg.writer->pid, 0);
    shms_segment_unlock(&w->seg, unlinks);
}

void shms_writer_pending_ended(struct shms_writer *w, uint32_t entry) {
    w->leased -= entry != SHMS_NONE;
    if (--w->unfinished == 0 && w->closed)
        shms_writer_say_goodbye(w, w->unlinks);
}

void shms_writer_refused(struct shms_writer *w, int rc, shms_batch *b) {
    if (!shms_is_refusal(rc))
        return;
    b->refusal = w->refusal;
    shms_count(w, SHMS_C(refusals), 1);
}
