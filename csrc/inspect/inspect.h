/*
 * inspect.h - inspects a store from outside: alive, stopped, dead or damaged.
 *
 * WHAT IT IS. An inspector maps a segment read-only. It takes no lock, has no rank, writes no word and waits for no
 * process. So neither the writer nor a reader can notice it. All that it returns are copies.
 *
 *     shms_inspector *i;
 *     shms_inspector_open(&i, "frames", SHMS_OWN_UID);
 *     shms_inspector_facts(i, &facts);
 *     for (uint64_t at = 0; (n = shms_inspector_slots(i, &at, records, room)) > 0;) ...
 *
 * CONSISTENCY. Each record is true of one moment, even while a writer works. The inspector reads a record, then reads
 * again what identifies it. If that has changed, it reads the record again, up to SHMS_INSPECT_TRIES times. A record
 * that keeps changing has `moving` set, and so has a slot in WRITING. Its other fields are then a hint. Two records may
 * be of different moments: objects that seem to overlap may not have existed together.
 *
 * TRUST. The contents are not trusted: offsets, lengths, slots and ranks are checked before they are used.
 *
 * ALIVE means that the process's lock is held. A stopped process is alive. Process ids are as the processes recorded
 * them, each in its own PID namespace.
 *
 * CAVEATS. The inspector does not see which objects are inside a `protect` block: that is in the writer's memory. If a
 * file is truncated during an inspection, the inspector gets SIGBUS, as with every mapping. So it maps a file of another
 * user only if its caller names that user. shmstore itself never truncates a file.
 */
#ifndef SHMS_INSPECT_H
#define SHMS_INSPECT_H

#include "store/core.h"

/* cdef: begin */
#define SHMS_INSPECT_TRIES 200
#define SHMS_VERIFY_PASSES 8
#define SHMS_STATE_WRITING 1  /* of a slot record: space is taken, the bytes are being written */
#define SHMS_STATE_LIVE 2
#define SHMS_STATE_EVICTING 3 /* the writer is deciding, or died before it decided */

typedef struct shms_inspector shms_inspector;

/* What a file looks like. It need not be a segment. */
typedef struct shms_probe {
    uint64_t size, allocated, device, inode, modified_ns, uid;
    uint64_t ours;         /* 1: it starts with the magic number */
    /* 1: its first page is all zeros, or the file is empty; perhaps its creation did not finish */
    uint64_t blank;
    uint64_t published;    /* 1: its creation has finished, by this or another version */
    uint64_t same_version; /* 1: by this version */
    /* same_version: -code of what is wrong: SHMS_ECORRUPT (superblock), ELAYOUT (size), ESPARSE (holes); or 0 */
    uint64_t fault;
    uint64_t n_readers, n_writers, writers_alive; /* 0 if there is a fault */
    uint64_t writer_alive; /* 1: a process holds the lock of a writer or an owner, or may be about to take it */
    uint64_t ranks_alive;  /* how many of the SHMS_MAX_READERS ranks have a held lock */
    /* 1: of this version, created with SHMS_EPHEMERAL, and no caller has asked for its name */
    uint64_t ephemeral;
} shms_probe;

/* The superblock, and the table of one writer. The capacity and the numbers of objects and leases are those of an
 * arena. */
typedef struct shms_facts {
    uint64_t store, created_ns, file_size, capacity, max_object_size, max_objects, max_leases, n_readers, flags;
    uint64_t n_writers, control_bytes, device, inode;
    uint64_t owner_pid; /* of an owner without an arena, if it is alive; else 0 */
    uint64_t writer_alive, writer_pid, writer_epoch; /* epoch: 1 + number of recoveries; 0: no writer yet */
    uint64_t next_id, next_lease, hand, used_bytes, objects;
    uint64_t finds, find_misses; /* of all ranks, in all arenas */
    uint64_t moving;
    shms_counters counters;
    shms_tier_figures tier;
    uint8_t group_of[SHMS_MAX_READERS]; /* by rank */
} shms_facts;

/* A rank: its table, and what it holds. Only pins and leases that the writer would respect count; see `pinned`
 * below. retired: by every writer that there has been. */
typedef struct shms_rank_record {
    uint64_t rank, group, alive, pid, epoch, attached_ns, retired; /* epoch 0: never attached */
    uint64_t closed; /* 1: its last process has closed; with alive: it still has views */
    shms_reader_counters counters;
    uint64_t pins, pinned_objects, pinned_bytes;            /* pins: counts every pin of an object */
    uint64_t owed_leases, owed_bytes, oldest_owed_ns;       /* leases that still expect it; 0: none */
    uint64_t held_bytes;                                    /* pinned or owed, each object once */
    uint64_t moving;
} shms_rank_record;

/* An occupied slot of the arena of `writer`, and its offset there. pinned: one bit for each live rank that has it
 * pinned. */
typedef struct shms_slot_record {
    uint64_t slot, writer, state, id, offset, length, span, key_len, meta_len, extra_len, put_ns;
    /* bounded: its offset and lengths are within the data region */
    uint64_t deleted, checked, kind, crc, bounded, moving;
    uint64_t pinned[4];
} shms_slot_record;

/* An open lease of `writer` on an object in the arena of `owner`. group: 1 + the number of the group it is for; 0: all
 * ranks. owed: one bit for each rank that it expects. */
typedef struct shms_lease_record {
    uint64_t entry, writer, number, slot, owner, id, opened_ns, moving, held, group;
    uint64_t is_void; /* 1: the object is another writer's, and the writer of the lease is dead */
    uint64_t owed[4];
} shms_lease_record;

/* A broken invariant. `arena` is the writer whose words are wrong, or from whose words a rank's differ. `where` is a
 * slot, entry or rank. Each kind explains the other values. */
typedef struct shms_finding {
    uint64_t kind, arena, where, value, expected;
} shms_finding;

/* of a writer; value: what it says; expected: the limit, or what was counted */
#define SHMS_F_HAND 1         /* where: 1 for that of small objects; the hand is not aligned, or too large */
#define SHMS_F_USED 2         /* used_bytes is not the sum of the spans */
#define SHMS_F_OBJECTS 3      /* objects is not the number of live slots */
#define SHMS_F_OPEN_LEASES 4  /* open_leases is not the number of entries in use */
#define SHMS_F_RETIRED 5      /* where: rank; retired at an epoch that it has not reached */
#define SHMS_F_COUNTERS 6     /* value: next_id, expected: next_lease; shms_counters_valid says no */
#define SHMS_F_PINNING 7     /* value: slot, expected: number of slots; not a slot of another writer */
#define SHMS_F_HOLDS 8        /* where: slot, value: entry; the list of its leases there leads to another entry */
/* of a slot */
#define SHMS_F_STATE 10       /* value: not a valid state */
#define SHMS_F_BOUNDS 11      /* value: offset, expected: length; not within the data region */
#define SHMS_F_ID 12          /* value: id, expected: next_id; the id is 0, or not assigned yet */
#define SHMS_F_FLAGS 13       /* value: flags that this build never writes */
#define SHMS_F_OVERLAP 14     /* value: the other slot; they share bytes */
#define SHMS_F_SAME_ID 15     /* value: the other slot, expected: the id of both */
#define SHMS_F_SAME_KEY 16    /* value: the other slot; both can be handed out */
#define SHMS_F_KEY 17         /* value: length of the key; 0, or too long */
#define SHMS_F_CRC 18         /* value: as computed, expected: as stored */
#define SHMS_F_KIND 19        /* value: kind, which has no name */
#define SHMS_F_INDEX 25       /* value: id; its key is not in the index */
/* of a kind; where: kind */
#define SHMS_F_KIND_BYTES 40   /* bytes is not the sum of its spans */
#define SHMS_F_KIND_OBJECTS 41 /* objects is not the number of its slots */
/* of a lease entry */
#define SHMS_F_LEASE_NUMBER 20 /* value: number, expected: next_lease */
#define SHMS_F_LEASE_SLOT 21   /* value: slot, expected: number of slots */
#define SHMS_F_LEASE_OBJECT 22 /* value: slot, expected: id; that object is not in the slot */
#define SHMS_F_LEASE_GROUP 24  /* value: group, as in shms_lease_record; expected: number of groups */
#define SHMS_F_SAME_LEASE 23   /* value: the other entry, expected: the number of both */
#define SHMS_F_UNLISTED 26    /* value: number, expected: slot; the owner of the object does not find the lease */
/* of a rank */
#define SHMS_F_BASE 30         /* value: base, of a rank that is not closed; expected: next_lease */
#define SHMS_F_ACK 31          /* value: the highest acknowledged number, expected: next_lease */
#define SHMS_F_PIN_FREE 32     /* value: slot, expected: pins; a live rank pins a free slot */
#define SHMS_F_PIN_COUNT 33    /* value: slot, expected: pins; more pins than a process can have */
#define SHMS_F_UNATTACHED 34   /* never attached, but its table is not empty */

/* Reads about a regular file, whoever it belongs to, and maps nothing of it. SHMS_ENOSTORE: there is no such file.
 * SHMS_ELAYOUT: it is not a regular file. */
int shms_probe_file(shms_probe *out, const char *name);

/* Opens an inspector of a store of that user, or of SHMS_OWN_UID. SHMS_ENOSTORE. SHMS_EFOREIGN. SHMS_ELAYOUT: not a
 * store, another version, or not yet published. SHMS_ECORRUPT. SHMS_ESPARSE: reading a sparse file would allocate memory
 * that the file never had. */
int shms_inspector_open(shms_inspector **out, const char *name, int64_t allow_uid);
void shms_inspector_free(shms_inspector *i); /* NULL is allowed */
void shms_inspector_drop(shms_inspector **i); /* like shms_writer_drop */

/* Of one arena; SHMS_EINVAL: there is no such arena. Slots and lease entries have their numbers of all arenas. */
int shms_inspector_facts(shms_inspector *i, uint64_t arena, shms_facts *out);
/* How many leases of an arena wait for a rank, or are held: as in shms_stats. Or an error. It reads those in use. */
int64_t shms_inspector_open_leases(shms_inspector *i, uint64_t arena);
/* All ranks. `out` has room for n_readers records. */
int shms_inspector_ranks(shms_inspector *i, shms_rank_record *out);
/* Stores up to `room` occupied slots from *at on, and sets *at to where to continue. Returns how many; 0 at the end. */
int64_t shms_inspector_slots(shms_inspector *i, uint64_t *at, shms_slot_record *out, uint64_t room);
/* The same for open leases. */
int64_t shms_inspector_leases(shms_inspector *i, uint64_t *at, shms_lease_record *out, uint64_t room);
/* The kinds of an arena, by number; another arena may number them otherwise. `out` has room for SHMS_KINDS records. */
int shms_inspector_kinds(shms_inspector *i, uint64_t arena, shms_kind_info *out);

/* Copies `size` bytes of the object `id` in `slot`, starting `from` bytes after its start. Nothing is pinned.
 * SHMS_ESTALE: the object is not there, or not any more; ignore the copy. SHMS_EINVAL: the object does not have that
 * many bytes. */
int shms_inspector_copy(shms_inspector *i, uint64_t slot, uint64_t id, uint64_t from, uint64_t size, uint8_t *out);

/* Checks every invariant that can be seen from outside. Returns how many are broken, up to `room`. It makes up to
 * SHMS_VERIFY_PASSES passes, and reports only what is broken in each of them. Anything else was merely changing. */
int64_t shms_inspector_verify(shms_inspector *i, shms_finding *out, uint64_t room);
/* Checks the checksum of the object `id` in `slot`. 1: right. 0: wrong, see *out. SHMS_ENOTFOUND: the object has no
 * checksum. SHMS_ESTALE: the object is not there, or not any more. */
int shms_inspector_check(shms_inspector *i, uint64_t slot, uint64_t id, shms_finding *out);

/* Removes the name of a segment, or of the remains of one, whose writer is dead. The file must be the one that was
 * probed (device, inode and size); else SHMS_ENOSTORE. SHMS_EWRITERACTIVE: its writer is alive, or may be, because the
 * file is empty and young. SHMS_ERANKINUSE: a rank is alive, and `force` is 0. Nobody gets the name meanwhile, so no
 * process recovers the segment. Processes that have mapped it keep it. SHMS_ESYS, errno EACCES: this user may not remove
 * it. */
int shms_segment_remove(const char *name, uint64_t device, uint64_t inode, uint64_t size, int force);
/* cdef: end */

#endif
