/*
 * remote.h - remote hits: how a writer finds, pins and leases objects of other writers.
 *
 * The writer never waits for the owner of an object, and the owner never for it. Both write words of their own:
 *
 * `pinning` names the one slot that it has pinned, and `first` in its row of holds the list of its leases on a slot.
 * `used` and `dropped` in the row tell the owner what this writer would do with an object of its own. Other writers read
 * `dropped`, too, so a deletion does not wait for an owner that is idle or dead. The section on several writers in
 * docs/concepts/protocol.md has the steps and the argument.
 *
 * Slots have their numbers of all arenas here.
 */
#ifndef SHMS_REMOTE_H
#define SHMS_REMOTE_H

#include "writer.h"

/* J1, J2: a new process ends what its predecessor had pinned and leased of others, and counts that. Whatever it does
 * before, the owners are refused for what the dead held, because a writer with that lock lives again. With `keep` it then
 * opens those leases again whose objects are still there (B1 to B5), and ends the others (V3). */
void shms_holds_begin(const shms_segment *seg, bool keep);
/* B1, B2: pins the object of another writer, if it is still there and LIVE. In EVICTING it is a miss, without a wait. */
bool shms_holds_pin(const shms_segment *seg, uint32_t slot, uint64_t id);
/* The same for an object that this writer has leased, which the owner may be asking about: waits until it has decided, as
 * long as segment.h says. 1: pinned. 0: it was evicted. SHMS_EBUSY: the owner was stopped meanwhile. */
int shms_holds_pin_again(const shms_segment *seg, uint32_t slot, uint64_t id, bool patient);
/* B5; also for a pin that missed. */
void shms_holds_unpin(const shms_segment *seg, uint32_t slot);

/* ---- for these, `hash` is the key's; the mutex is held ---- */

/* The slot of an object of another writer that may be handed out, and its words in `seen`; or SHMS_NONE. */
uint32_t shms_look_remote(struct shms_writer *w, uint64_t hash, const char *key, uint32_t key_len, shms_slot *seen);
/* B1 to B5: leases what was found, with a taken entry. False if it was evicted; then the entry is free again. */
bool shms_hit_remote(struct shms_writer *w, uint32_t slot, uint64_t id, uint32_t entry, uint32_t group, bool hold,
                     uint8_t *out);
/* Opens a held lease on another writer's object of this key, which is no hit: 1. 0 if there is none, or if the key is here.
 * The mutex is held, and may be yielded. SHMS_ENOLEASE, ECORRUPT, ECLOSED */
int shms_keep_remote(struct shms_writer *w, const char *key, uint32_t key_len, uint8_t *out);
/* A use, which the CLOCK of the owner sees. */
void shms_use_remote(struct shms_writer *w, uint32_t slot);
/* For ring.h: has a rank or another writer used what is in an own slot since this was asked last? The context is the
 * writer. */
shms_used_fn shms_used_remotely;

#endif
