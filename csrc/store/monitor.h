/*
 * monitor.h - how calls take the writer's two locks, and release them.
 */
#ifndef SHMS_MONITOR_H
#define SHMS_MONITOR_H

#include "writer.h"

void shms_monitor_init(struct shms_writer *w);
/* Takes the mutex, or returns why the handle cannot be used. */
int shms_writer_enter(struct shms_writer *w);
/* Releases the mutex, and returns `rc`. */
int shms_writer_leave(struct shms_writer *w, int rc);
/* Has the store had no room for the call? */
static inline bool shms_is_refusal(int rc) {
    return rc == SHMS_EFULL || rc == SHMS_ENOSLOT || rc == SHMS_ENOLEASE || rc == SHMS_EQUOTA;
}
/* If `rc` is a refusal, counts it, and copies it to the batch. */
void shms_writer_refused(struct shms_writer *w, int rc, shms_batch *b);
/* The same two with `placing`, which is taken first. */
int shms_writer_enter_to_place(struct shms_writer *w);
int shms_writer_leave_place(struct shms_writer *w, int rc);
/* Takes both, also in a writer without an arena, which only its close can enter. */
int shms_writer_enter_to_close(struct shms_writer *w);
/* For calls that end a pending put: also enters a closed writer whose last pending put has not ended. */
int shms_writer_enter_to_end(struct shms_writer *w);
/* Releases the lock of a closed writer without a pending put; so others tell that from a death. */
void shms_writer_say_goodbye(struct shms_writer *w, int unlinks);
/* Call it when a pending put's slot has left WRITING. The last pending put of a closed writer releases its lock. */
void shms_writer_pending_ended(struct shms_writer *w, uint32_t entry);
/* Yields the mutex to a waiting thread, and takes it again. False: no thread waits. */
bool shms_writer_yield(struct shms_writer *w);
/* Wakes the threads that wait. Call it after this process has released something that kept them out. */
static inline void shms_room_made(struct shms_writer *w) {
    if (w->room_waits)
        pthread_cond_broadcast(&w->room);
}

#endif
