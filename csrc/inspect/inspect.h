/*
 * inspect.h - a store seen from outside: alive, stopped, dead or damaged.
 *
 * WHAT IT IS.  An inspector maps a segment read-only, takes no lock, has no rank, writes no word, and waits for
 * nobody: whatever it does, neither the writer nor a reader can tell that it is there.  All that it gives are copies.
 *
 *     shms_inspector *i;
 *     shms_inspector_open(&i, "frames");
 *     shms_inspector_facts(i, &facts);
 *     for (uint64_t at = 0; (n = shms_inspector_slots(i, &at, records, room)) > 0;) ...
 *
 * CONSISTENCY.  Each record is true of one moment, though a writer is at work: it is read, and what identifies it is
 * read again; where that has changed it is read anew.  A record that would not hold still in SHMS_INSPECT_TRIES
 * tries, or is half-made by its nature (WRITING), has `moving` set; its other fields are then a hint.  Two records may
 * be of different moments: objects that seem to overlap may never have been there at once.
 *
 * TRUST.  Nothing read is believed: offsets, lengths, slots and ranks are checked before they are followed.
 *
 * ALIVE means: the process's lock is held.  A stopped process is alive.  Process ids are what the processes wrote down,
 * each in its own PID namespace.
 *
 * CAVEATS.  Which objects are inside a `protect` block is in the writer's memory, and not seen here.  A file that is
 * cut short while it is looked at (nothing of ours does that) is SIGBUS, as with every mapping.
 */
#ifndef SHMS_INSPECT_H
#define SHMS_INSPECT_H

#include "store/shmstore.h"

/* cdef: begin */
#define SHMS_INSPECT_TRIES 200
#define SHMS_VERIFY_PASSES 8
#define SHMS_STATE_WRITING 1  /* of a slot record: space taken, bytes on their way */
#define SHMS_STATE_LIVE 2
#define SHMS_STATE_EVICTING 3 /* the writer is about to decide, or died deciding */

typedef struct shms_inspector shms_inspector;

/* What a file of /dev/shm looks like, without believing that it is a segment. */
typedef struct shms_probe {
    uint64_t size, device, inode, modified_ns, uid;
    uint64_t ours;         /* 1: it begins with the magic number */
    uint64_t blank;        /* 1: its first page is all zeros (or the file is empty): perhaps a creation cut short */
    uint64_t published;    /* 1: its creation was completed, by this or another version */
    uint64_t same_version; /* 1: by this one */
    uint64_t writer_alive; /* 1: somebody holds the writer's lock */
    uint64_t ranks_alive;  /* locks held of the SHMS_MAX_READERS ranks */
    uint64_t disposable;   /* 1: by this version, created with SHMS_DISPOSABLE, and nobody has asked for it to stay */
} shms_probe;

/* The superblock. */
typedef struct shms_facts {
    uint64_t store, created_ns, file_size, capacity, max_object_size, max_objects, max_leases, n_readers, flags;
    uint64_t control_bytes, device, inode;
    uint64_t writer_alive, writer_pid, writer_epoch; /* epoch: 1 + how often it was recovered */
    uint64_t next_id, next_lease, hand, used_bytes, objects, open_leases;
    uint64_t puts, put_bytes, hits, misses, evictions, evicted_bytes, deletes, refusals, cancels;
    uint64_t moving;
} shms_facts;

/* A rank: its table, and what it holds.  Only what the writer would respect counts as held: see `pinned` below. */
typedef struct shms_rank_record {
    uint64_t rank, alive, pid, epoch, attached_ns, retired; /* epoch 0: has never attached */
    uint64_t closed;                                        /* 1: its last process has closed; alive: it has views */
    uint64_t base, gets, stale, released, releases;
    uint64_t pins, pinned_objects, pinned_bytes;            /* pins: with multiplicity */
    uint64_t owed_leases, owed_bytes, oldest_owed_ns;       /* hand-outs that it has still to read; 0: none */
    uint64_t held_bytes;                                    /* pinned or owed, each object once */
    uint64_t moving;
} shms_rank_record;

/* An occupied slot.  pinned: one bit a rank, of those alive that pin it. */
typedef struct shms_slot_record {
    uint64_t slot, state, id, offset, length, span, key_len, meta_len, put_ns;
    uint64_t deleted, checked, crc, bounded, moving; /* bounded: its lengths stay inside the data region */
    uint64_t pinned[4];
} shms_slot_record;

/* An open lease.  owed: one bit a rank, of those that it waits for. */
typedef struct shms_lease_record {
    uint64_t entry, number, slot, id, opened_ns, moving;
    uint64_t owed[4];
} shms_lease_record;

/* Something that is wrong.  `where` is a slot, entry or rank; the values are explained at each kind. */
typedef struct shms_finding {
    uint64_t kind, where, value, expected;
} shms_finding;

/* of the superblock; value is what it says, expected the limit or what was counted */
#define SHMS_F_HAND 1         /* a hand (0, or 1 for small objects) is beyond the data region, or not aligned */
#define SHMS_F_USED 2         /* used_bytes is not the sum of the spans */
#define SHMS_F_OBJECTS 3      /* objects is not the number of live slots */
#define SHMS_F_OPEN_LEASES 4  /* open_leases is not the number of entries in use */
#define SHMS_F_RETIRED 5      /* rank: retired at an epoch that it has not reached */
#define SHMS_F_PUBLISHED 6    /* published is above next_lease */
/* of a slot */
#define SHMS_F_STATE 10       /* value: no state at all */
#define SHMS_F_BOUNDS 11      /* value: offset, expected: length; outside the data region, or its parts outside it */
#define SHMS_F_ID 12          /* value: id, expected: next_id; 0 or from the future */
#define SHMS_F_FLAGS 13       /* value: flags that nobody writes */
#define SHMS_F_OVERLAP 14     /* value: the other slot; they share bytes */
#define SHMS_F_SAME_ID 15     /* value: the other slot, expected: the id of both */
#define SHMS_F_SAME_KEY 16    /* value: the other slot; both can be handed out */
#define SHMS_F_KEY 17         /* value: length of the key; none, or too long */
#define SHMS_F_CRC 18         /* value: as computed, expected: as stored */
/* of a lease entry */
#define SHMS_F_LEASE_NUMBER 20 /* value: number, expected: next_lease */
#define SHMS_F_LEASE_SLOT 21   /* value: slot, expected: how many there are */
#define SHMS_F_LEASE_OBJECT 22 /* value: slot, expected: id; that object is not there */
#define SHMS_F_SAME_LEASE 23   /* value: the other entry, expected: the number of both */
/* of a rank */
#define SHMS_F_BASE 30         /* value: base, of a rank that is not closed; expected: next_lease */
#define SHMS_F_ACK 31          /* value: acknowledged, expected: next_lease; of the first entry where it is wrong */
#define SHMS_F_PIN_FREE 32     /* value: slot, expected: pins; a living rank pins what is not there */
#define SHMS_F_PIN_COUNT 33    /* value: slot, expected: pins; more than there can be views */
#define SHMS_F_UNATTACHED 34   /* has never attached, and yet its table is not empty */

/* Looks at a regular file of /dev/shm; SHMS_ENOSTORE where there is none, SHMS_ELAYOUT for what is no regular file. */
int shms_probe_file(shms_probe *out, const char *name);

/* Opens; SHMS_ENOSTORE, SHMS_ELAYOUT (not ours, another version, or not yet published), SHMS_ECORRUPT; SHMS_ESPARSE: to
 * read it would allocate what a planted file never had. */
int shms_inspector_open(shms_inspector **out, const char *name);
void shms_inspector_free(shms_inspector *i); /* NULL is allowed */
void shms_inspector_drop(shms_inspector **i); /* as shms_writer_drop */

int shms_inspector_facts(shms_inspector *i, shms_facts *out);
/* All ranks: `out` has room for n_readers. */
int shms_inspector_ranks(shms_inspector *i, shms_rank_record *out);
/* Up to `room` occupied slots from *at on; *at becomes where to go on.  Returns how many, 0 at the end. */
int64_t shms_inspector_slots(shms_inspector *i, uint64_t *at, shms_slot_record *out, uint64_t room);
/* The same for open leases. */
int64_t shms_inspector_leases(shms_inspector *i, uint64_t *at, shms_lease_record *out, uint64_t room);

/* Copies `size` bytes of the object `id` in `slot`, from `from` bytes behind its start on.  Nothing is pinned.
 * SHMS_ESTALE: it is not, or no longer, there; what was copied means nothing.  SHMS_EINVAL: not that many bytes. */
int shms_inspector_copy(shms_inspector *i, uint64_t slot, uint64_t id, uint64_t from, uint64_t size, uint8_t *out);

/* Every invariant of the tables that can be seen from outside.  Returns how many of them, up to `room`, are broken.
 * What seems broken is looked at SHMS_VERIFY_PASSES times, and reported if it is so each time: the rest was on the
 * move. */
int64_t shms_inspector_verify(shms_inspector *i, shms_finding *out, uint64_t room);
/* The checksum of the object `id` in `slot`: 1 right, 0 wrong (*out says how), SHMS_ENOTFOUND: it has none,
 * SHMS_ESTALE: it is not, or no longer, there. */
int shms_inspector_check(shms_inspector *i, uint64_t slot, uint64_t id, shms_finding *out);

/* Removes the name of a segment, or of what is left of one, whose writer is dead.  It must still be the file that was
 * probed (device, inode; else SHMS_ENOSTORE).  SHMS_EWRITERACTIVE; SHMS_ERANKINUSE where a rank is alive, unless
 * `force`.  The writer's lock is held meanwhile, so that nobody recovers what is being removed.  Who maps it
 * keeps it. */
int shms_segment_remove(const char *name, uint64_t device, uint64_t inode, int force);
/* cdef: end */

#endif
