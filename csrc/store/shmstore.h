/*
 * shmstore.h - a shared-memory object store: one writer, many readers, no locks between them.
 *
 * WHAT IT IS: docs/concepts/design.md.
 *
 *     shms_writer *w;                                     shms_reader *r;
 *     shms_options o = {.capacity = 1 << 30,              shms_reader_attach(&r, "frames", 0, NULL);
 *                       .n_readers = 2};                  shms_reader_acquire(r, ref, &v);
 *     shms_writer_create(&w, "frames", &o);               ... v->payload, v->payload_size ...
 *     shms_batch_put(w, &b, key, ...); // b.ref           shms_view_release(v);
 *
 * Puts, hits and protections are calls of a batch (batch.h), which can undo them.
 *
 * ERRORS. Functions return 0 or one of the negative codes below. Only after SHMS_ESYS is errno that of a failed system call. A handle that is NULL
 * counts as closed. A call that fails changes nothing.
 *
 * THREADS. Every function may be called from any thread. But shms_*_free must come after every other call on the handle
 * has returned.
 *
 * CAVEATS.
 *  - A handle does not survive fork: the child gets SHMS_EFORKED from every call, and holds no lock. The child inherits
 *    mappings, but no pins, so it must not read the parent's views.
 *  - shms_reader_close releases the rank only when the last view is gone. Leases no longer wait for it: its views hold
 *    their objects, and nothing else.
 *  - shms_writer_close releases the writer's lock only when the last ticket has ended (its commit fails).
 *  - After shms_writer_close the segment's pages stay until the last process that maps them is gone.
 *  - If a program closes file descriptors that it does not own, no lock ends, but the store can no longer probe locks.
 *    It then takes every process for alive: what a dead one held stays until the store is opened again.
 */
#ifndef SHMSTORE_H
#define SHMSTORE_H

#include <stdint.h>

/* cdef: begin */
#define SHMS_OK 0              /* done */
#define SHMS_EINVAL -1         /* an argument is out of range */
#define SHMS_ENOMEM -2         /* this process is out of private memory */
#define SHMS_ESYS -3           /* a system call failed; errno says how */
#define SHMS_ENOSPC -4         /* the file system cannot hold a segment of that size */
#define SHMS_EFULL -5          /* held objects leave no gap of that size */
#define SHMS_ETOOLARGE -6      /* the object is larger than the store allows for one */
#define SHMS_EEXISTS -7        /* the key is already in the store */
#define SHMS_ENOTFOUND -8      /* the key is not in the store */
#define SHMS_ESTALE -9         /* the reference does not name a live object of this store */
#define SHMS_ENOSTORE -10      /* no segment of that name */
#define SHMS_ESTOREEXISTS -11  /* a segment of that name exists */
#define SHMS_EWRITERACTIVE -12 /* the store's writer is alive */
#define SHMS_ERANKINUSE -13    /* a live process (or live views of this one) has this rank */
#define SHMS_ELAYOUT -14       /* not a segment of this version, size and architecture */
#define SHMS_ECORRUPT -15      /* a segment of ours whose contents contradict themselves */
#define SHMS_ECLOSED -16       /* the handle is closed */
#define SHMS_EFORKED -17       /* the handle belongs to the parent of this process */
#define SHMS_EOTHERSTORE -18   /* the name is now another store's */
#define SHMS_ENOSLOT -19       /* every slot is taken by an object that is held */
#define SHMS_ENOLEASE -20      /* every lease entry is taken by an open lease */
#define SHMS_ECREATING -21     /* the segment's creation is not over */
#define SHMS_EFOREIGN -22      /* the segment is another user's, or its mode admits others */
#define SHMS_ERANKS -23        /* the store has another number of ranks */
#define SHMS_ESPARSE -24       /* parts of the segment's file are holes */
#define SHMS_EOPTIONS -25      /* the store was created with other options */
#define SHMS_EBUSY -27 /* the object is promised, but the writer that evicts it was stopped before it saw that */
#define SHMS_EQUOTA -26 /* the objects of the kind fill its quota, and are held */
#define SHMS_ENOARENA -28 /* the handle owns the store, and has no arena (SHMS_OWNS) */

#define SHMS_REF_SIZE 40 /* bytes of a packed reference */
#define SHMS_ALIGN 64 /* of every object and of every payload in the data region */
#define SHMS_MAX_READERS 256 /* ranks */
#define SHMS_MAX_WRITERS 64 /* arenas */
#define SHMS_MAX_GROUPS 255 /* of ranks */
#define SHMS_MAX_OBJECTS 16777216 /* slots; the same limit holds for lease entries */
#define SHMS_MAX_CAPACITY 0x1000000000000 /* bytes of the data region: 2^48, what a reference's address holds */
#define SHMS_MAX_NAME 200 /* bytes of a store's name */
#define SHMS_MAX_KEY 65536 /* bytes of a key */
#define SHMS_KINDS 16 /* kinds of objects; number 0 is for those without one */
#define SHMS_MAX_META 0x40000000 /* bytes of an object's metadata */
#define SHMS_MAX_EXTRA 0xffffff /* extra bytes of an object, which only the writer reads */

#define SHMS_PREFAULT 1 /* map every page of the writer's data now, not at the first touch */
#define SHMS_HUGE_PAGES 2 /* ask for 2 MiB pages; best effort */
#define SHMS_FIFO 4 /* evict in insertion order: a use gives no second chance */
#define SHMS_CHECKSUMS 8 /* CRC-32C of each object's bytes at its commit, for shms_inspector_check */

#define SHMS_EPHEMERAL 16 /* nobody will ask for this name, so a dead writer's segment may be removed (shms_probe) */
#define SHMS_OUTLIVES 32 /* of _create: SHMS_AS_RECORDED keeps the name */
#define SHMS_OWNS 64 /* of _create: the handle has no arena; the store lives until it and all writers have ended */

#define SHMS_NODE_SHIFT 16 /* bits 16 and up of the flags: 1 + the NUMA node that the data is to be on; 0: any */
#define SHMS_NODES 1024 /* more than any kernel has */

#define SHMS_AS_RECORDED -1 /* the name goes with the last writer, unless SHMS_OUTLIVES or _stay keeps it */
#define SHMS_AS_IT_WAS -2 /* the name stays, and so does what is recorded of it */

#define SHMS_EVENT_PUT 1 /* committed */
#define SHMS_EVENT_EVICTED 2
#define SHMS_EVENT_DELETED 3
#define SHMS_MIN_LOG 131072 /* bytes of a log of events: room for a key of any length */

#define SHMS_ANY_STORE -1 /* any store of that name */
#define SHMS_ANY_ARENA -1 /* the first that has no living writer */
#define SHMS_OWN_UID -1 /* a store of the caller's own, whose mode admits no other user */

typedef struct shms_writer shms_writer;
typedef struct shms_reader shms_reader;

typedef struct shms_options {
    uint64_t capacity; /* bytes of the data region; rounded up to SHMS_ALIGN */
    uint64_t max_object_size; /* bytes of key, metadata and payload together; 0: the capacity */
    uint32_t n_readers; /* ranks that each hand-out expects, 1..SHMS_MAX_READERS */
    uint32_t max_objects; /* slots; 0: from the capacity */
    uint32_t n_writers; /* arenas, each with this capacity and number of objects, 1..SHMS_MAX_WRITERS; 0: 1 */
    uint32_t flags; /* SHMS_PREFAULT | SHMS_HUGE_PAGES | SHMS_FIFO | SHMS_CHECKSUMS, a node, and those of the call */
    uint32_t n_groups; /* of ranks; 0: one group of all */
    uint16_t group_sizes[SHMS_MAX_GROUPS]; /* each at least 1; together n_readers: the first ranks are group 0 */
} shms_options;

/* The store that _attach, _recover and _join accept. NULL: any store of the caller's own. */
typedef struct shms_expected {
    int64_t store; /* its number, or SHMS_ANY_STORE */
    int64_t allow_uid; /* its owner, whatever the mode; or SHMS_OWN_UID */
    uint32_t n_readers; /* 0: any number */
    uint32_t end_leases; /* 1: the leases of the dead writer end; 0: they stay, if the object is still there */
    uint32_t finds; /* 1: the reader only finds, so no lease waits for it */
    const shms_options *options; /* those it was created with, but for flags of the call; NULL: any */
    uint64_t *needed; /* out, or NULL: the bytes to reserve, after SHMS_ENOSPC */
} shms_expected;

/* A reference, unpacked; ref.h has the 40 bytes. A reader trusts no field, and compares each with the slot table. */
typedef struct shms_ref {
    uint32_t store; /* which store: the superblock's random number */
    uint32_t slot;
    uint32_t entry; /* of the lease table */
    uint64_t address; /* the object's offset in the data region */
    uint64_t id; /* monotonic, never reused */
    uint64_t lease; /* number of the hand-out; never reused */
    uint64_t tag; /* keyed hash of the other fields; its key is the store's and the object's secret */
} shms_ref;

/* Space that is being written, between shms_batch_begin and shms_batch_commit or _undo. */
typedef struct shms_ticket {
    char *payload;
    uint64_t payload_size;
    uint64_t id;
    uint32_t slot;
    uint32_t entry;
} shms_ticket;

/* Bytes of the caller's, and where in the payload they go. If size is not 0, address is not 0. */
typedef struct shms_piece {
    uint64_t offset;
    uint64_t size;
    uint64_t address;
} shms_piece;

/* An object held by a reader. The bytes do not change until shms_view_release. */
typedef struct shms_view {
    const char *key;
    const char *meta;
    const char *payload;
    uint64_t payload_size;
    uint32_t key_len;
    uint32_t meta_len;
    uint64_t id;
    uint32_t slot; /* private from here */
    shms_reader *owner;
} shms_view;

/* What a writer has had of a tier beyond its host. Its process counts that, and the segment shows it. */
typedef struct shms_tier_figures {
    uint64_t there; /* 1: the writer has, or had, a tier; 0: it has not, and the others are 0, too */
    uint64_t hits, hit_bytes, misses, declined, damaged, errors, skipped;
    uint64_t published, published_bytes, refused, dropped, queued, saved_ns;
    uint64_t open; /* 1: the circuit is open: the tier has failed, and is not asked for now */
} shms_tier_figures;

/* What a writer has counted since its store was created. Each field is a word of its table, in this order, and a field
 * of WriterCounters in shmstore/store/stats.py. A new one needs nothing else; the table has room for 24. */
typedef struct shms_counters {
    uint64_t puts, put_bytes, hits, misses; /* put_bytes: payload; hits and misses: of shms_batch_hit */
    uint64_t evictions, evicted_bytes, deletes, refusals, cancels;
    /* puts that would have been hits with that much capacity; see ghosts.h */
    uint64_t more_hits_at_4x, more_hits_at_2x, more_hits_at_1_5x;
    uint64_t adopted; /* hits on objects of other writers */
} shms_counters;

/* What the processes of a rank have counted; ReaderCounters in shmstore/store/stats.py. The table has room for 7. */
typedef struct shms_reader_counters {
    uint64_t gets, stale, released; /* references read and refused; leases released without a get */
} shms_reader_counters;

typedef struct shms_stats {
    uint64_t capacity, max_object_size, max_objects, n_readers;
    uint64_t objects, used_bytes; /* live objects; ring bytes of these and of unfinished puts */
    uint64_t next_id, next_lease, open_leases, max_leases;
    uint64_t control_bytes, heap_bytes; /* bookkeeping in the segment and in the writer's own memory */
    shms_counters counters;
    shms_tier_figures tier;
} shms_stats;

/* The bytes of a stored object. */
typedef struct shms_stored {
    const char *meta, *payload, *extra;
    uint64_t payload_size;
    uint32_t meta_len, extra_len;
} shms_stored;

/* The head of an event; the key's bytes follow it. */
typedef struct shms_event {
    uint64_t id; /* of the object */
    uint32_t kind; /* SHMS_EVENT_* */
    uint32_t key_len;
} shms_event;

/* A kind of objects, as in the writer table. */
typedef struct shms_kind_info {
    uint64_t name[3]; /* UTF-8, padded with zeros; all 0: no name */
    uint64_t bytes, objects, quota; /* of the data region and of slots, with unfinished puts; quota 0: no limit */
} shms_kind_info;

/* What a refusal (SHMS_EFULL, SHMS_ENOSLOT, SHMS_ENOLEASE, SHMS_EQUOTA) has found, in bytes of the data region. For
 * SHMS_EQUOTA, `kept` and what is held are about objects of the kind only. */
typedef struct shms_refusal {
    uint64_t capacity, used_bytes, max_objects, max_leases; /* as in shms_stats */
    uint64_t reclaimable; /* of objects that nobody holds */
    uint64_t longest; /* longest run of these and of gaps: an object of that size would have had room. After
                         SHMS_EQUOTA: the longest object for which its kind would have had it */
    uint64_t kept; /* of objects that only this writer holds: protected, or unfinished */
    uint64_t kind, quota, kind_bytes; /* SHMS_EQUOTA: the kind, its quota, and what it has of that; else 0 */
    uint64_t held[SHMS_MAX_READERS]; /* by rank: pinned, or promised and not yet read */
    uint64_t held_by_writer[SHMS_MAX_WRITERS]; /* by other writers: leased, or being leased */
    uint8_t awaited[SHMS_MAX_READERS]; /* by rank: 1 if it has never attached */
} shms_refusal;

typedef struct shms_reader_stats {
    uint64_t live_views;
    shms_reader_counters counters;
} shms_reader_stats;

/* ---- values ---- */

void shms_ref_unpack(shms_ref *out, const uint8_t *packed);
void shms_ref_pack(uint8_t *out, const shms_ref *ref);
void shms_copy(void *dst, const void *src, uint64_t n); /* memcpy; bypasses the caches if that is faster */
uint64_t shms_space_needed(const shms_options *options); /* bytes that _create reserves; 0: options out of range */
int shms_options_round(shms_options *options); /* to what a store created with them has; SHMS_EINVAL */
/* May this process have memory on that node, below SHMS_NODES? SHMS_ESYS, with EINVAL: there is no such node. */
int shms_node_check(uint32_t node);
/* Watches /dev/shm, so that a process can wait for a store without polling. *out is the descriptor, or -1. SHMS_ESYS:
 * _watch_close must follow all the same. */
int shms_watch(int *out);
void shms_watch_close(int *watch); /* idempotent; *watch may be -1 */
/* 1: since the last call a file of that name came, or the creation of a store ended; 0; or SHMS_ESYS. Never waits. */
int shms_watch_read(int watch, const char *name);

/* ---- the writer ---- */

/* With SHMS_OWNS, all calls of the handle but _close, _free and _options return SHMS_ENOARENA. */
int shms_writer_create(shms_writer **out, const char *name, const shms_options *options);
/* Accepts only the expected store. SHMS_EFOREIGN, SHMS_EOTHERSTORE, SHMS_ERANKS or SHMS_EOPTIONS: it is another, left
 * as it was. */
int shms_writer_recover(shms_writer **out, const char *name, const shms_expected *expected);
/* Takes over an arena of a store of several writers: the one of that number, or SHMS_ANY_ARENA. What is in it comes
 * along. SHMS_EWRITERACTIVE: it has a writer, or all have. SHMS_ECORRUPT: it is damaged, or each that has no writer is;
 * SHMS_ANY_ARENA passes by those. */
int shms_writer_join(shms_writer **out, const char *name, int arena, const shms_expected *expected);
/* Releases the lock as soon as the last ticket has ended; its commit returns SHMS_ECLOSED. The mapping stays until
 * _free. With `unlink` 1 the name goes with the last writer; with 0 it stays, and is no longer ephemeral; or
 * SHMS_AS_RECORDED or SHMS_AS_IT_WAS. */
int shms_writer_close(shms_writer *w, int unlink);
/* Records that the name is no longer ephemeral, and if `beyond_close`, that SHMS_AS_RECORDED keeps it. For a caller that
 * has taken the store over by its name, when nothing else can fail. */
int shms_writer_stay(shms_writer *w, int beyond_close);
void shms_writer_free(
    shms_writer *w); /* if not closed, ends it like a process that dies, without unlinking; NULL is allowed */
/* The same for the variable that has the handle, so that an owner can exist before the handle does. */
void shms_writer_drop(shms_writer **w);
/* Its part of the data region: the address, or 0 for NULL; place[0] is its size, and place[1] its offset in the file. */
uint64_t shms_writer_data(const shms_writer *w, uint64_t *place);
/* The options, as rounded; the number of its arena (SHMS_MAX_WRITERS: none), and the arenas that _join has passed by, one bit each. Returns the
 * store's number, or 0 for NULL. */
uint64_t shms_writer_options(shms_writer *w, shms_options *out, uint64_t *place);

/* 1; 2 if the object has extra bytes; 0; or an error. Changes nothing. */
int shms_writer_has(shms_writer *w, const char *key, uint32_t key_len);
/* Copies the extra bytes of the object of `ref`. *size is the room, and is set to the bytes needed. SHMS_ESTALE: it has
 * been evicted. */
int shms_writer_extra(shms_writer *w, const uint8_t *ref, uint8_t *out, uint64_t *size);
int shms_writer_touch(shms_writer *w, const char *key, uint32_t key_len); /* 1, 0 or an error; a use */
/* The bytes of this writer's own object of a key that is protected: they stay until _unprotect. */
int shms_writer_look(shms_writer *w, const char *key, uint32_t key_len, shms_stored *out);
/* 1: the object of `ref` is here, and has this key if `key` is not NULL; 0; or an error. */
int shms_writer_validate(shms_writer *w, const uint8_t *ref, const char *key, uint32_t key_len);
/* From now on that lease waits for one group only: 1 + its number. 1: it does; 0: the lease has ended. SHMS_EINVAL: it
 * waits for another group, or there is no such group. Without this, and if several groups may read it, a lease waits
 * for all ranks; that is group 0. */
int shms_writer_assign_group(shms_writer *w, const uint8_t *ref, uint32_t group);
int shms_writer_cancel(shms_writer *w, const uint8_t *ref); /* 1: that lease was open, and has ended; 0; or an error */
/* Ends every open lease and returns their number: for a successor, if the requests of the dead writer died with it. */
int64_t shms_writer_cancel_all(shms_writer *w);
/* No lease of this writer waits for the rank any more, until it attaches. Other writers retire it for their own. */
int shms_writer_retire(shms_writer *w, uint32_t rank);
int shms_writer_delete(shms_writer *w, const char *key, uint32_t key_len); /* 1, 0 or an error */
/* Deletes the objects whose keys begin with `prefix`; of length 0: all. */
int shms_writer_clear(shms_writer *w, const char *prefix, uint32_t prefix_len);
int64_t shms_writer_count(shms_writer *w); /* objects that have a key */
/* The number of the kind of that name (1 to 23 bytes without a 0), from 1 on; 0: all numbers have other names. */
int shms_writer_kind(shms_writer *w, const char *name, uint32_t len);
/* Sets how many bytes objects of a kind may take; 0: no limit. */
int shms_writer_quota(shms_writer *w, uint32_t kind, uint64_t quota);
int shms_writer_kinds(shms_writer *w, shms_kind_info *out); /* SHMS_KINDS records, by number */
/* Replaces the figures that this writer shows of its tier. A successor starts without any. */
int shms_writer_tier(shms_writer *w, const shms_tier_figures *figures);
/* Tells all writers of the store not to use what a tier got up to this moment; it holds for successors, too. */
int shms_writer_clear_tier(shms_writer *w, uint64_t moment);
/* Sets *out to the last moment that a writer of the store has told; 0: none. */
int shms_writer_tier_cleared(shms_writer *w, uint64_t *out);
int shms_writer_stats(shms_writer *w, shms_stats *out);
/* Records events from now on, in a log of `bytes` bytes (at least SHMS_MIN_LOG), which drops the oldest ones. Keeps a
 * log that is there. With 0, stops and forgets it. Returns the position behind the last event, or an error. */
int64_t shms_writer_track_events(shms_writer *w, uint64_t bytes);
/* Copies events from position `from` on; size[0] is the room, and is set to the bytes used, or to those that one event
 * needs. Sets size[1] to the position behind them, and size[2] to the first position that the log has: if it is above
 * `from`, the events between are lost and nothing is copied. SHMS_EINVAL: no event has had that position. */
int shms_writer_events(shms_writer *w, uint64_t from, uint8_t *out, uint64_t *size);
/* Copies each stored object whose key begins with `prefix` as a put, in order of age. size[0] is the room, and is set to
 * the bytes needed. Sets size[1] to the position of the events at which they hold. */
int shms_writer_stored(shms_writer *w, const char *prefix, uint32_t prefix_len, uint8_t *out, uint64_t *size);
int shms_writer_valid(shms_writer *w); /* checks every invariant; SHMS_ECORRUPT at the first broken one */

/* ---- a reader ---- */

int shms_reader_attach(shms_reader **out, const char *name, uint32_t rank,
                       const shms_expected *expected); /* as for _recover */
/* Pins the object of a key in any arena, which counts as a use. `ref`: SHMS_REF_SIZE bytes, a reference without a lease:
 * the object stays as long as the view, and no longer. SHMS_ENOTFOUND, also for an object that is being evicted. */
int shms_reader_find(shms_reader *r, const char *key, uint32_t key_len, uint8_t *ref, shms_view **out);
int shms_reader_has(shms_reader *r, const char *key, uint32_t key_len); /* 1, 0 or an error; no use */
int shms_reader_acquire(shms_reader *r, const uint8_t *ref,
                        shms_view **out); /* pins and acknowledges; NULL after an error */
void shms_view_release(shms_view *v); /* unpins, and frees `v`; NULL is allowed */
int shms_reader_release(shms_reader *r,
                        const uint8_t *ref); /* acknowledges without reading: 1, or 0 if the lease is over */
int shms_reader_validate(shms_reader *r, const uint8_t *ref); /* 1, 0 or an error; changes nothing */
int shms_reader_stats_get(shms_reader *r, shms_reader_stats *out);
uint64_t shms_reader_store(const shms_reader *r); /* the store's number, or 0 for NULL */
uint64_t shms_reader_writer_epoch(const shms_reader *r); /* 1 + number of takeovers; 0 for NULL */
/* The writer's epoch, if it has grown since the last call or the attachment; else 0. Each epoch comes once. */
uint64_t shms_reader_took_over(shms_reader *r);
int shms_reader_named(const shms_reader *r); /* 1: the name still names this store; 0: it was removed */
/* An arena's data: its address, and its size; 0 if it has never been taken. Address 0: no such arena, or a closed reader. */
uint64_t shms_reader_data(const shms_reader *r, uint32_t arena, uint64_t *size);
uint64_t shms_reader_pid(const char *name,
                         uint32_t rank); /* process that last attached as `rank`; 0: none, or no store */
int shms_reader_close(
    shms_reader *r); /* ends calls, and no lease waits for it; the rank stays taken while views live */
void shms_reader_free(
    shms_reader *r); /* closes if not closed; the mapping stays until the last view is gone; NULL is allowed */
void shms_reader_drop(shms_reader **r); /* like shms_writer_drop */
void shms_view_drop(shms_view **v); /* likewise */
/* cdef: end */

#endif
