/*
 * room.h - a put that waits for room. The mutex is held.
 */
#ifndef SHMS_ROOM_H
#define SHMS_ROOM_H

#include "writer.h"

/* Waits for room after a refusal, until b->until (CLOCK_MONOTONIC), but for 50 ms at most. `placing` is held, too; it and
 * the mutex are released meanwhile. 1: something was released, so try again. 0: nothing was; once the time is over,
 * b->until = 0. SHMS_ECLOSED: neither is held. */
int shms_room_await(struct shms_writer *w, shms_batch *b);

#endif
