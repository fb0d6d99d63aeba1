/*
 * directory.h - which key is in which slot, and which keys are protected. The mutex is held.
 */
#ifndef SHMS_DIRECTORY_H
#define SHMS_DIRECTORY_H

#include "writer.h"

/* Has another writer dropped the object in an own slot, which is not deleted yet? */
bool shms_is_dropped(const struct shms_writer *w, uint32_t slot);
/* The own slot of this key and its hash, if its object may be handed out; or SHMS_NONE. */
uint32_t shms_find_live(const struct shms_writer *w, uint64_t hash, const char *key, uint32_t key_len);
/* Removes the slot's key from the index, and counts it: evicted, or deleted. */
void shms_forget_key(struct shms_writer *w, uint32_t slot, bool evicted);
/* The hash of a key, as in index.h, and of the slot's key. */
uint64_t shms_key_hash(const struct shms_writer *w, const char *key, uint32_t key_len);
uint64_t shms_slot_hash(struct shms_writer *w, uint32_t slot);
/* Is the key of this hash protected? */
bool shms_key_kept(const struct shms_writer *w, uint64_t hash);
/* Protects the object that is, or will be, stored under the key. False: there is no memory. */
bool shms_protect_key(struct shms_writer *w, const char *key, uint32_t key_len);
/* Ends one protection of the key, and returns true. shms_reclaim_unprotected must follow, once for several calls. */
bool shms_unprotect_key(struct shms_writer *w, const char *key, uint32_t key_len);
/* Marks protected slots, so that a search need not look up keys. A slot is protected if its key is, or if it was
 * deleted while its key was: the caller may have handed the object out. */
void shms_protect_slot(struct shms_writer *w, uint32_t slot, bool on);

#endif
