/*
 * shmstore.h - a shared-memory object store: writers put objects, and readers see them in place, without locks.
 *
 *     shms_writer *w;                                     shms_reader *r;
 *     shms_options o = {.capacity = 1 << 30,              shms_view *v;
 *                       .n_readers = 2};                  shms_reader_attach(&r, "frames", 0, NULL);
 *     shms_writer_create(&w, "frames", &o);               shms_reader_acquire(r, ref, &v);
 *     shms_writer_put(w, &object, bytes, ref);            ... v->payload, v->payload_size ...
 *     // send the SHMS_REF_SIZE bytes of ref              shms_view_release(v);
 *
 * docs/guides/c.md has a program, and how to build it. Python and C share stores and references. Only the functions of
 * this header are exported.
 *
 * GROWTH. Set a struct to zeros before its fields: later versions take fields from `reserved`, where 0 is what this
 * version does. A struct that the library makes may grow at its end.
 *
 * NAMES. A store is a file in /dev/shm if its name has no slash. Elsewhere its name is the path of its file, from the
 * root on. /proc/PID/fd/N is that of a descriptor: what is opened by it is an opening of its own, and the handle needs
 * the descriptor no longer.
 *
 * ERRORS. Functions return 0 or one of the negative codes below; docs/guides/c.md says what to do after which.
 * shms_strerror has a text for each, and shms_last_error says more about some calls that were refused. Only after
 * SHMS_ESYS and SHMS_EMAP is errno that of a failed system call. A call that fails changes nothing in the store,
 * sets `*out` and `*payload` to NULL, and leaves the bytes of `ref`. A writer or reader that is NULL counts as closed.
 * Where another argument is NULL, the code is SHMS_EINVAL, but `expected` may be, and so may bytes of length 0.
 *
 * WAITING. No call waits for a reader, for room or for a store to come: make it again after a while. A call that needs a
 * lock which another process has tries for 100 ms, since a process that was killed has its locks for some milliseconds.
 *
 * THREADS. Every function may be called from any thread. But shms_*_free must come after every other call on the handle
 * has returned.
 *
 * CAVEATS.
 *  - A handle does not survive fork: the child gets SHMS_EFORKED from every call, and holds no lock. The child inherits
 *    mappings, but no pins, so it must not read the parent's views, private or not.
 *  - shms_reader_close releases the rank only when the last view is released. Leases no longer wait for it: its views hold
 *    their objects, and nothing else.
 *  - shms_writer_close releases the writer's lock only when the last unfinished object has ended (its commit fails).
 *  - After shms_writer_close the segment's pages stay until the last process that maps them ends.
 *  - If a program closes file descriptors that it does not own, no lock ends, but the store can no longer probe locks.
 *    It then takes every process for alive: what a dead one held stays until the store is opened again.
 */
#ifndef SHMSTORE_H
#define SHMSTORE_H

#include <stdint.h>

#define SHMSTORE_VERSION "0.1.0"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

/* cdef: begin */
#define SHMS_OK 0              /* done */
#define SHMS_EINVAL -1         /* an argument is out of range or NULL, or a key is not UTF-8 */
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
#define SHMS_EOTHERSTORE -18   /* it is now another store */
#define SHMS_ENOSLOT -19       /* every slot is taken by an object that is held */
#define SHMS_ENOLEASE -20      /* every lease entry is taken by an open lease */
#define SHMS_ECREATING -21     /* the segment's creation is not over */
#define SHMS_EFOREIGN -22      /* the segment is another user's, or its mode admits others */
#define SHMS_ERANKS -23        /* the store has another number of ranks */
#define SHMS_ESPARSE -24       /* parts of the segment's file are holes */
#define SHMS_EOPTIONS -25      /* the store was created with other options */
#define SHMS_EQUOTA -26        /* the objects of the kind fill its quota, and are held */
/* the object is promised, but the writer that evicts it was stopped before it saw that */
#define SHMS_EBUSY -27
#define SHMS_ENOARENA -28      /* the handle owns the store, and has no arena (SHMS_OWNS) */
#define SHMS_EMAP -29          /* the object cannot be mapped a second time; errno says why */

#define SHMS_REF_SIZE 40                  /* bytes of a packed reference */
#define SHMS_ALIGN 64                     /* of every object and of every payload in the data region */
#define SHMS_MAX_READERS 256              /* ranks */
#define SHMS_MAX_WRITERS 64               /* arenas */
#define SHMS_MAX_GROUPS 255               /* of ranks */
#define SHMS_MAX_OBJECTS 16777216         /* slots; the same limit holds for lease entries */
#define SHMS_MAX_CAPACITY 0x1000000000000 /* bytes of the data region: 2^48, what a reference's address holds */
#define SHMS_MAX_NAME 200                 /* bytes of a store's name, without the folder */
#define SHMS_MAX_KEY 65536                /* bytes of a key */
#define SHMS_MAX_META 0x40000000          /* bytes of an object's metadata */

#define SHMS_PREFAULT 1   /* map every page of the writer's data now, not at the first touch */
#define SHMS_HUGE_PAGES 2 /* ask for 2 MiB pages; best effort */
#define SHMS_CHECKSUMS 8  /* CRC-32C of each object's bytes at its commit, for `shmstore verify` */

#define SHMS_EPHEMERAL 16 /* nobody will ask for this name, so a dead writer's segment may be removed */
#define SHMS_OUTLIVES 32  /* of _create: SHMS_AS_RECORDED keeps the name */
/* of _create: the handle has no arena; the store lives until it and all writers have ended */
#define SHMS_OWNS 64
/* of _create: memory without a name, sealed against another size; the path is a descriptor's */
#define SHMS_MEMFD 128

#define SHMS_AS_RECORDED -1 /* the last writer removes the name, unless SHMS_OUTLIVES keeps it */
#define SHMS_AS_IT_WAS -2   /* the name stays, and so does what is recorded of it */

#define SHMS_ANY_STORE -1 /* any store of that name */
#define SHMS_ANY_ARENA -1 /* the first that has no living writer */
#define SHMS_OWN_UID -1   /* a store of the caller's own, whose mode admits no other user */

typedef struct shms_writer shms_writer;
typedef struct shms_reader shms_reader;

typedef struct shms_options {
    uint64_t capacity;                     /* bytes of the data region; rounded up to SHMS_ALIGN */
    uint64_t max_object_size;              /* bytes of key, metadata and payload together; 0: the capacity */
    uint32_t n_readers;                    /* ranks that each hand-out expects, 1..SHMS_MAX_READERS */
    uint32_t max_objects;                  /* slots; 0: from the capacity */
    /* arenas, each with this capacity and number of objects, 1..SHMS_MAX_WRITERS; 0: 1 */
    uint32_t n_writers;
    /* SHMS_PREFAULT | SHMS_HUGE_PAGES | SHMS_CHECKSUMS, and those of the call */
    uint32_t flags;
    /* of _create: the file's permissions, whatever the umask: 0600, 0660, 0606 or 0666; 0: 0600. Whoever shares a
     * store must read and write it. */
    uint32_t mode;
    /* of _create: 1 + the user group that the file belongs to; 0: as the folder says */
    uint32_t group;
    uint32_t n_groups;                     /* of ranks; 0: one group of all */
    uint16_t group_sizes[SHMS_MAX_GROUPS]; /* each at least 1; together n_readers: the first ranks are group 0 */
    uint64_t reserved[4];                  /* 0 */
} shms_options;

/* The store that _attach, _recover and _join accept. NULL: any store of the caller's own. Begin with
 * SHMS_EXPECTED_DEFAULTS, since zeros are store 0 of user 0. */
typedef struct shms_expected {
    int64_t store;               /* its number, or SHMS_ANY_STORE */
    int64_t allow_uid;           /* its owner, whatever the mode; or SHMS_OWN_UID */
    uint32_t n_readers;          /* 0: any number */
    /* 1: the leases of the dead writer end; 0: they stay, if the object is still there */
    uint32_t end_leases;
    uint32_t finds;              /* 1: the reader only finds, so no lease waits for it */
    /* 1: the rank of a process that has just ended may still be in use; 0: try for 100 ms */
    uint32_t at_once;
    const shms_options *options; /* those it was created with, but for flags of the call; NULL: any */
    uint64_t *needed;            /* out, or NULL: the bytes to reserve, after SHMS_ENOSPC */
    uint64_t reserved[4];        /* 0 */
} shms_expected;

/* An object held by a reader. The bytes do not change until shms_view_release. */
typedef struct shms_view {
    const char *key;
    const char *meta;
    const char *payload;
    uint64_t payload_size;
    uint32_t key_len;
    uint32_t meta_len;
    uint64_t id; /* of the object; never reused in this store */
} shms_view;

/* What a writer has had of a tier beyond its host; only Python has tiers. */
typedef struct shms_tier_figures {
    uint64_t there; /* 1: the writer has, or had, a tier; 0: it has not, and the others are 0, too */
    uint64_t hits, hit_bytes, misses, declined, damaged, errors, skipped;
    uint64_t published, published_bytes, refused, dropped, queued, saved_ns;
    uint64_t open; /* 1: the circuit is open: the tier has failed, and is not asked for now */
} shms_tier_figures;

/* What a writer has counted since its store was created. Each field is a word of its table, in this order, and a field
 * of WriterCounters in shmstore/store/stats.py and of rust/shmstore-sys. The table has room for 24. */
typedef struct shms_counters {
    uint64_t puts, put_bytes, hits, misses; /* put_bytes: payload; hits and misses: of _hit */
    uint64_t evictions, evicted_bytes, deletes, refusals, cancels;
    /* puts that would have been hits with that much capacity */
    uint64_t more_hits_at_4x, more_hits_at_2x, more_hits_at_1_5x;
    uint64_t remote_hits; /* hits on objects of other writers */
} shms_counters;

typedef struct shms_stats {
    uint64_t capacity, max_object_size, max_objects, n_readers;
    uint64_t objects, used_bytes; /* live objects; ring bytes of these and of unfinished puts */
    uint64_t next_id, next_lease;
    uint64_t open_leases, max_leases; /* open_leases: without those that are complete and still have an entry */
    uint64_t control_bytes, heap_bytes; /* bookkeeping in the segment and in the writer's own memory */
    shms_tier_figures tier;
    shms_counters counters; /* the last field: a later version of the interface may count more */
} shms_stats;

/* What the processes of a rank have counted; ReaderCounters in shmstore/store/stats.py. The table has room for 7. */
typedef struct shms_reader_counters {
    uint64_t gets, stale, released; /* references read and refused; leases released without a get */
    uint64_t finds, find_misses;    /* keys found, and not found */
} shms_reader_counters;

typedef struct shms_rank_stats {
    uint64_t live_views;
    shms_reader_counters counters;
} shms_rank_stats;

/* Bytes that _create reserves in that folder; 0: options out of range. */
uint64_t shms_space_needed(const shms_options *options, const char *folder);

/* ---- the writer ---- */

/* With SHMS_OWNS, all calls of the handle but _close and _free return SHMS_ENOARENA. */
int shms_writer_create(shms_writer **out, const char *name, const shms_options *options);
/* Accepts only the expected store. SHMS_EFOREIGN, SHMS_EOTHERSTORE, SHMS_ERANKS or SHMS_EOPTIONS: it is another, left
 * as it was. */
int shms_writer_recover(shms_writer **out, const char *name, const shms_expected *expected);
/* Takes over an arena of a store of several writers: the one of that number, or SHMS_ANY_ARENA. What is in it comes
 * along. SHMS_EWRITERACTIVE: it has a writer, or all have. SHMS_ECORRUPT: it is damaged, or each that has no writer is;
 * SHMS_ANY_ARENA passes by those. */
int shms_writer_join(shms_writer **out, const char *name, int arena, const shms_expected *expected);
/* Releases the lock as soon as the last unfinished object has ended; its commit returns SHMS_ECLOSED. The mapping stays
 * until _free. With `unlink` 1 the last writer removes the name; with 0 it stays, and is no longer ephemeral; or
 * SHMS_AS_RECORDED or SHMS_AS_IT_WAS. */
int shms_writer_close(shms_writer *w, int unlink);
/* If not closed, ends it like a process that dies, without unlinking. NULL is allowed. */
void shms_writer_free(shms_writer *w);
/* 1; 2 if the object has extra bytes; 0; or an error. Changes nothing. */
int shms_writer_has(shms_writer *w, const char *key, uint32_t key_len);
int shms_writer_touch(shms_writer *w, const char *key, uint32_t key_len); /* 1, 0 or an error; a use */
/* From now on that lease waits for one group only: 1 + its number. 1: it does; 0: the lease has ended. SHMS_EINVAL: it
 * waits for another group, or there is no such group. Without this, and if several groups may read it, a lease waits
 * for all ranks; that is group 0. */
int shms_writer_assign_group(shms_writer *w, const uint8_t *ref, uint32_t group);
/* 1: that lease was open, and has ended; 0; or an error */
int shms_writer_cancel(shms_writer *w, const uint8_t *ref);
/* Ends every open lease and returns their number: for a successor, if the requests of the dead writer died with it. */
int64_t shms_writer_cancel_all(shms_writer *w);
/* No lease of this writer waits for the rank any more, until it attaches. Other writers retire it for their own. */
int shms_writer_retire(shms_writer *w, uint32_t rank);
int shms_writer_delete(shms_writer *w, const char *key, uint32_t key_len); /* 1, 0 or an error */
/* Deletes the objects whose keys begin with `prefix`; of length 0: all. */
int shms_writer_clear(shms_writer *w, const char *prefix, uint32_t prefix_len);
/* 1: a living process, or a thread of this one, has a claim on that key; 0; or an error. */
int shms_writer_claimed(shms_writer *w, const char *key, uint32_t key_len);
int64_t shms_writer_count(shms_writer *w); /* objects that have a key */
/* Copies each key of this arena that begins with `prefix`: 8 bytes with its object's id, 4 with the key's length, then the
 * key. *size is the room, and is set to the bytes needed: if they are more, nothing counts, and the call is made again.
 * Other threads may put during the call. Their keys may be missing, and a key that they put again may come twice. */
int shms_writer_keys(shms_writer *w, const char *prefix, uint32_t prefix_len, uint8_t *out, uint64_t *size);
int shms_writer_stats(shms_writer *w, shms_stats *out);

/* ---- a reader ---- */

/* `expected` is as for _recover. */
int shms_reader_attach(shms_reader **out, const char *name, uint32_t rank, const shms_expected *expected);
/* Pins the object of a key in any arena, which counts as a use. `ref`: SHMS_REF_SIZE bytes, a reference without a
 * lease: the object stays as long as the view, and no longer. SHMS_ENOTFOUND, also for one that is being evicted. */
int shms_reader_find(shms_reader *r, const char *key, uint32_t key_len, uint8_t *ref, shms_view **out);
int shms_reader_has(shms_reader *r, const char *key, uint32_t key_len); /* 1, 0 or an error; no use */
int shms_reader_acquire(shms_reader *r, const uint8_t *ref, shms_view **out); /* pins and acknowledges */
/* The same, but the payload is copy-on-write: it may be written, and no other process and no other view sees that. The
 * mapping is the view's own, and ends with it. After an error (SHMS_EMAP: there is no memory for the mapping) nothing
 * is acknowledged. */
int shms_reader_acquire_private(shms_reader *r, const uint8_t *ref, shms_view **out);
void shms_view_release(shms_view *v); /* unpins, and frees `v`; NULL is allowed */
/* Acknowledges without reading: 1, or 0 if the lease is over. */
int shms_reader_release(shms_reader *r, const uint8_t *ref);
int shms_reader_validate(shms_reader *r, const uint8_t *ref); /* 1, 0 or an error; changes nothing */
int shms_reader_claimed(shms_reader *r, const char *key, uint32_t key_len); /* like shms_writer_claimed */
int shms_reader_stats(shms_reader *r, shms_rank_stats *out);
/* Ends calls, and no lease waits for it. The rank stays taken while views live. */
int shms_reader_close(shms_reader *r);
/* Closes if not closed. The mapping stays until the last view is released. NULL is allowed. */
void shms_reader_free(shms_reader *r);
/* cdef: end */

/* ---- for C: Python has its own ---- */

const char *shms_version(void); /* SHMSTORE_VERSION of the library */
const char *shms_strerror(int code); /* what a code means, in a few words */
/* What was wrong in the last call of this thread that returned SHMS_EINVAL, SHMS_ETOOLARGE, SHMS_EFULL, SHMS_ENOSLOT,
 * SHMS_ENOLEASE, SHMS_EQUOTA, SHMS_EFOREIGN, SHMS_EOTHERSTORE, SHMS_ERANKS or SHMS_EOPTIONS, what is expected, and what
 * to do. It stays until the next of them; "" before the first. No other code has such a text. */
const char *shms_last_error(void);

/* The defaults of shms_expected: any store of the caller's own. shms_expected e = SHMS_EXPECTED_DEFAULTS; e.finds = 1; */
#define SHMS_EXPECTED_DEFAULTS {SHMS_ANY_STORE, SHMS_OWN_UID, 0, 0, 0, 0, 0, 0, {0}}

/* An object to be stored. A key is 1 to SHMS_MAX_KEY bytes of UTF-8. That of a namespace begins with the byte 0xFF, the
 * bytes of the namespace in one byte, and the namespace, also in UTF-8. Python takes `meta` for what its serializer has
 * made: see shms_tensor_meta. */
typedef struct shms_object {
    const char *key;
    const char *meta;
    uint64_t payload_size;
    uint32_t key_len;
    uint32_t meta_len;
    uint32_t unleased; /* 1: no lease: readers find it by key, no rank is awaited, and it can be evicted at any time */
    uint32_t group; /* the ranks that the lease waits for: 1 + their group's number; 0: as in _assign_group */
    uint64_t reserved[4]; /* 0 */
} shms_object;

/* An object whose payload the caller writes in place. */
typedef struct shms_uncommitted shms_uncommitted;

/* Copies key, metadata and payload into the store, and hands the object out: writes SHMS_REF_SIZE bytes to `ref`. Each
 * rank then reads or releases it, or shms_writer_cancel ends the lease. The reference to an `unleased` object has no lease,
 * like that of shms_reader_find. The four refusals are SHMS_EFULL, SHMS_ENOSLOT, SHMS_ENOLEASE and SHMS_EQUOTA: the call
 * succeeds once a reader has released something. */
int shms_writer_put(shms_writer *w, const shms_object *object, const void *payload, uint8_t *ref);
/* Copies key and metadata, and takes space for a payload: *payload is where to write it, at a multiple of SHMS_ALIGN.
 * No process can see the object yet. One of the next two calls must follow, before shms_writer_free. */
int shms_writer_begin(shms_writer *w, const shms_object *object, char **payload, shms_uncommitted **out);
/* Hands it out, as _put does; after an error it no longer exists. */
int shms_uncommitted_commit(shms_uncommitted *u, uint8_t *ref);
void shms_uncommitted_abort(shms_uncommitted *u); /* gives the space back; NULL is allowed */
/* Hands a stored object out once more, also that of another writer. SHMS_ENOTFOUND */
int shms_writer_hit(shms_writer *w, const char *key, uint32_t key_len, uint8_t *ref);

/* The right to make the object of a key, so that of all processes one makes it. It ends with its process. A claim spares
 * work and guards nothing: two who make the same object store it twice, and both are right.
 *
 *     while ((rc = shms_reader_find(r, key, len, ref, &v)) == SHMS_ENOTFOUND) {
 *         if ((rc = shms_reader_claim(r, key, len, &claim)) == 1) {
 *             ... make it, and put it ...
 *             shms_claim_end(claim);
 *         } else if (rc == 0) {
 *             usleep(3000); // a living process makes it
 *         } else if (rc != SHMS_EEXISTS) {
 *             break;
 *         }
 *     }
 *
 * A thread that holds a claim must not wait for another, since two could wait for each other. Beyond 64 claims of a
 * process, and in a store whose file was removed, all are granted. */
typedef struct shms_claim shms_claim;

/* 1: granted. 0: a living process, or another thread, has it: look for the object again after some milliseconds.
 * SHMS_EEXISTS: it is stored by now. *out is NULL except after 1. */
int shms_writer_claim(shms_writer *w, const char *key, uint32_t key_len, shms_claim **out);
int shms_reader_claim(shms_reader *r, const char *key, uint32_t key_len, shms_claim **out);
void shms_claim_end(shms_claim *claim); /* lets others make it, and frees `claim`, in any thread; NULL is allowed */

/* Of tensors: the most dimensions, bytes that are enough for the metadata of one, and for the name of its dtype. */
#define SHMS_MAX_DIMS 12
#define SHMS_TENSOR_META 160
#define SHMS_DTYPE_SIZE 24

/* Writes the metadata of an object whose payload is one tensor in C order, and returns its length, or SHMS_EINVAL.
 * `dtype` is a name of torch's, such as "bfloat16", for a torch.Tensor. Or it is one of numpy's for an array of numbers
 * ("<f4", "|u1") or bools ("|b1"). The product of the dimensions and of the bytes of an element must be the payload's
 * size. */
int shms_tensor_meta(char *out, const char *dtype, const uint64_t *shape, uint32_t n_dims);

/* One tensor or array, in C order. */
typedef struct shms_tensor {
    char dtype[SHMS_DTYPE_SIZE]; /* a name as shms_tensor_meta takes it, with a 0 at its end */
    uint64_t offset, size; /* of its bytes in the payload */
    uint32_t itemsize; /* bytes of an element */
    uint32_t n_dims;
    uint64_t shape[SHMS_MAX_DIMS];
} shms_tensor;

/* Reads the metadata of an object with a payload of that size. 1: it is one tensor or array, as in *out, and its bytes are
 * within the payload. 0: it is something else, such as a tree of values, or has a dtype that shms_tensor_meta refuses.
 * SHMS_ECORRUPT: no such tensor is in such a payload. docs/reference/wire-format.md says what else there may be. */
int shms_tensor_parse(shms_tensor *out, const char *meta, uint32_t meta_len, uint64_t payload_size);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif

#endif
