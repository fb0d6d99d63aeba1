/*
 * room.c - a put that waits for room. A wait is a put that is tried again, so nothing depends on it but time.
 *
 * What this process releases wakes all threads that wait (shms_room_made). Other processes wake nobody, and neither does
 * a death: one of the threads polls for all of them, every millisecond, and once it has waited for 50 ms, every 5 ms.
 */
#include "room.h"

#include "holders.h"
#include "monitor.h"

#define CALL_NS UINT64_C(50000000) /* the longest call, because only the caller handles signals */
#define OFTEN_NS UINT64_C(1000000)
#define SELDOM_NS UINT64_C(5000000)

/* Sleeps until a release of this process, or until that time. False: the time has come. */
static bool sleep_until(struct shms_writer *w, uint64_t at) {
    struct timespec then = {.tv_sec = (time_t)(at / 1000000000), .tv_nsec = (long)(at % 1000000000)};
    return pthread_cond_timedwait(&w->room, &w->mutex, &then) == 0;
}

/* The same for the thread that polls. What the polls of puts have found meanwhile counts: they looked for themselves. */
static void look_until(struct shms_writer *w, uint64_t since, uint64_t end) {
    bool woken = false;
    w->room_looks = true;
    for (uint64_t now; !woken && (now = shms_clock_ns(CLOCK_MONOTONIC)) < end;) {
        uint64_t next = now + (now - since < CALL_NS ? OFTEN_NS : SELDOM_NS);
        woken = sleep_until(w, next < end ? next : end);
        if (!woken)
            shms_poll(w);
        woken |= w->released;
    }
    w->room_looks = false;
    if (w->released)
        pthread_cond_broadcast(&w->room);
    else /* another one looks, as long as this one is away */
        pthread_cond_signal(&w->room);
    w->released = false;
}

bool shms_room_await(struct shms_writer *w, shms_put *put) {
    uint64_t now = shms_clock_ns(CLOCK_MONOTONIC);
    put->waits_since = put->waits_since ? put->waits_since : now;
    uint64_t until = put->waits_since + put->timeout, end = until < now + CALL_NS ? until : now + CALL_NS;
    if (now >= until)
        return false;
    w->room_waits++;
    pthread_mutex_unlock(&w->placing);
    if (w->room_looks)
        sleep_until(w, end);
    else
        look_until(w, put->waits_since, end);
    w->room_waits--;
    pthread_mutex_unlock(&w->mutex);
    return true;
}
