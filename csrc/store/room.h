/*
 * room.h - a put that waits for room. The mutex is held.
 */
#ifndef SHMS_ROOM_H
#define SHMS_ROOM_H

#include "writer.h"

/* Waits for room after a refusal, until something was released, but for 50 ms at most. `placing` is held, too.
 * True: try again; it and the mutex were released. False: put->timeout is over, and both are held. */
bool shms_room_await(struct shms_writer *w, shms_put *put);

#endif
