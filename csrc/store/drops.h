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
/* Deletes what other writers have dropped. A call that looks for a key, or that lists or counts objects, does this first,
 * under the mutex: by itself, or by one of the two below. If more was dropped than the rings hold, it goes through a
 * few slots at each call, and until it has seen all, each look-up asks shms_is_dropped. */
void shms_delete_dropped(struct shms_writer *w);
static inline void shms_settle(struct shms_writer *w) {
    if (shms_has_others(w))
        shms_delete_dropped(w);
}
/* The same for an object of this key, which that scan may not have seen: the index has a key once (D1). Before a put. */
void shms_delete_dropped_key(struct shms_writer *w, uint64_t hash, const char *key, uint32_t key_len);

/* ---- enter, and settle ---- */

/* SHMS_EINVAL: it is no key. */
int shms_writer_enter_with_key(struct shms_writer *w, const char *key, uint32_t key_len);
/* For calls that list or count: nothing that was dropped is left. */
int shms_writer_enter_to_list(struct shms_writer *w);

#endif
