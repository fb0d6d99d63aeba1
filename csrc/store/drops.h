/*
 * drops.h - objects that other writers have deleted: how this writer drops theirs, and deletes what they have dropped of
 * its own.
 *
 * `dropped` in a writer's row of holds is the id of an object that no writer may hand out any more. So a deletion does
 * not wait for an owner that is idle or dead.
 */
#ifndef SHMS_DROPS_H
#define SHMS_DROPS_H

#include "writer.h"

/* ---- for these, `hash` is the key's; the mutex is held ---- */

/* From now on this writer does not hand out others' objects of this key, or whose key begins so; and tells the owners,
 * which delete them. */
bool shms_drop_remote(struct shms_writer *w, uint64_t hash, const char *key, uint32_t key_len);
void shms_drop_all_remote(struct shms_writer *w, const char *prefix, uint32_t prefix_len);
/* Deletes what other writers have dropped. If that is more than their rings hold, it goes through a few slots at each call,
 * and until it has seen all, each look-up asks shms_is_dropped. */
void shms_delete_dropped(struct shms_writer *w);
/* The same for an object of this key, which that scan may not have seen: the index has a key once (D1). Before a put. */
void shms_delete_dropped_key(struct shms_writer *w, uint64_t hash, const char *key, uint32_t key_len);
/* The rest at once, for calls that list. It may yield the mutex: SHMS_ECLOSED */
int shms_delete_all_dropped(struct shms_writer *w);

/* ---- */

int shms_writer_enter_with_key(struct shms_writer *w, const char *key, uint32_t key_len);
/* For calls that list or count: first deletes all that other writers have dropped. */
int shms_writer_enter_to_list(struct shms_writer *w);

#endif
