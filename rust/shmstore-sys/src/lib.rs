//! The C interface of shmstore, `shmstore.h`, by hand: the same names, and nothing more.
//!
//! The header is the manual. This package has it in `csrc`, with the C sources, which its build compiles with the compiler
//! that `CC` names. If `SHMSTORE_SYS_USE_PKG_CONFIG` is set, it links the library that pkg-config finds. The crate
//! `shmstore` is the safe interface.
#![deny(unsafe_op_in_unsafe_fn)]
#![allow(non_camel_case_types)] // the names are those of C

use std::os::raw::{c_char, c_int, c_void};

macro_rules! constants {
    ($($type:ty: $($name:ident = $value:expr),+;)*) => { $($(pub const $name: $type = $value;)+)* };
}

macro_rules! structs {
    ($($name:ident { $($($field:ident),+: $type:ty;)* })*) => {
        $(#[repr(C)] #[derive(Clone, Copy, Debug)] pub struct $name { $($(pub $field: $type,)+)* })*
    };
}

constants! {
    c_int: SHMS_OK = 0, SHMS_EINVAL = -1, SHMS_ENOMEM = -2, SHMS_ESYS = -3, SHMS_ENOSPC = -4, SHMS_EFULL = -5,
        SHMS_ETOOLARGE = -6, SHMS_EEXISTS = -7, SHMS_ENOTFOUND = -8, SHMS_ESTALE = -9, SHMS_ENOSTORE = -10,
        SHMS_ESTOREEXISTS = -11, SHMS_EWRITERACTIVE = -12, SHMS_ERANKINUSE = -13, SHMS_ELAYOUT = -14,
        SHMS_ECORRUPT = -15, SHMS_ECLOSED = -16, SHMS_EFORKED = -17, SHMS_EOTHERSTORE = -18, SHMS_ENOSLOT = -19,
        SHMS_ENOLEASE = -20, SHMS_ECREATING = -21, SHMS_EFOREIGN = -22, SHMS_ERANKS = -23, SHMS_ESPARSE = -24,
        SHMS_EOPTIONS = -25, SHMS_EQUOTA = -26, SHMS_EBUSY = -27, SHMS_ENOARENA = -28, SHMS_EMAP = -29;

    usize: SHMS_REF_SIZE = 40, SHMS_ALIGN = 64, SHMS_MAX_GROUPS = 255, SHMS_MAX_NAME = 200, SHMS_MAX_KEY = 65536,
        SHMS_MAX_META = 0x40000000, SHMS_MAX_DIMS = 12, SHMS_TENSOR_META = 160, SHMS_DTYPE_SIZE = 24;
    u32: SHMS_MAX_READERS = 256, SHMS_MAX_WRITERS = 64, SHMS_MAX_OBJECTS = 16777216;
    u64: SHMS_MAX_CAPACITY = 0x1000000000000;

    u32: SHMS_PREFAULT = 1, SHMS_HUGE_PAGES = 2, SHMS_CHECKSUMS = 8, SHMS_EPHEMERAL = 16, SHMS_OUTLIVES = 32,
        SHMS_OWNS = 64, SHMS_MEMFD = 128;
    c_int: SHMS_AS_RECORDED = -1, SHMS_AS_IT_WAS = -2, SHMS_ANY_ARENA = -1;
    i64: SHMS_ANY_STORE = -1, SHMS_OWN_UID = -1;
}

structs! {
    shms_writer { _opaque: [u8; 0]; } shms_reader { _opaque: [u8; 0]; }
    shms_uncommitted { _opaque: [u8; 0]; } shms_claim { _opaque: [u8; 0]; }
    shms_options {
        capacity, max_object_size: u64;
        n_readers, max_objects, n_writers, flags, mode, group, n_groups: u32;
        group_sizes: [u16; SHMS_MAX_GROUPS];
        reserved: [u64; 4];
    }
    shms_expected {
        store, allow_uid: i64;
        n_readers, end_leases, finds, at_once: u32;
        options: *const shms_options;
        needed: *mut u64;
        reserved: [u64; 4];
    }
    shms_view {
        key, meta, payload: *const c_char;
        payload_size: u64;
        key_len, meta_len: u32;
        id: u64;
    }
    shms_tier_figures {
        there, hits, hit_bytes, misses, declined, damaged, errors, skipped: u64;
        published, published_bytes, refused, dropped, queued, saved_ns, open: u64;
    }
    shms_counters {
        puts, put_bytes, hits, misses, evictions, evicted_bytes, deletes, refusals, cancels: u64;
        more_hits_at_4x, more_hits_at_2x, more_hits_at_1_5x, remote_hits: u64;
    }
    shms_stats {
        capacity, max_object_size, max_objects, n_readers, objects, used_bytes, next_id, next_lease: u64;
        open_leases, max_leases, control_bytes, heap_bytes: u64;
        tier: shms_tier_figures;
        counters: shms_counters;
    }
    shms_reader_counters { gets, stale, released, finds, find_misses: u64; }
    shms_rank_stats { live_views: u64; counters: shms_reader_counters; }
    shms_object {
        key, meta: *const c_char;
        payload_size: u64;
        key_len, meta_len, unleased, group: u32;
        reserved: [u64; 4];
    }
    shms_tensor {
        dtype: [c_char; SHMS_DTYPE_SIZE];
        offset, size: u64;
        itemsize, n_dims: u32;
        shape: [u64; SHMS_MAX_DIMS];
    }
}

#[rustfmt::skip]
pub const SHMS_EXPECTED_DEFAULTS: shms_expected = shms_expected {
    store: SHMS_ANY_STORE, allow_uid: SHMS_OWN_UID, n_readers: 0, end_leases: 0, finds: 0, at_once: 0,
    options: std::ptr::null(), needed: std::ptr::null_mut(), reserved: [0; 4],
};

#[rustfmt::skip] // a line for each, where there is room
extern "C" {
    pub fn shms_space_needed(options: *const shms_options, folder: *const c_char) -> u64;
    pub fn shms_writer_create(out: *mut *mut shms_writer, name: *const c_char, options: *const shms_options) -> c_int;
    pub fn shms_writer_recover(out: *mut *mut shms_writer, name: *const c_char,
        expected: *const shms_expected) -> c_int;
    pub fn shms_writer_join(out: *mut *mut shms_writer, name: *const c_char, arena: c_int,
        expected: *const shms_expected) -> c_int;
    pub fn shms_writer_close(w: *mut shms_writer, unlink: c_int) -> c_int;
    pub fn shms_writer_free(w: *mut shms_writer);
    pub fn shms_writer_has(w: *mut shms_writer, key: *const c_char, key_len: u32) -> c_int;
    pub fn shms_writer_touch(w: *mut shms_writer, key: *const c_char, key_len: u32) -> c_int;
    pub fn shms_writer_assign_group(w: *mut shms_writer, reference: *const u8, group: u32) -> c_int;
    pub fn shms_writer_cancel(w: *mut shms_writer, reference: *const u8) -> c_int;
    pub fn shms_writer_cancel_all(w: *mut shms_writer) -> i64;
    pub fn shms_writer_retire(w: *mut shms_writer, rank: u32) -> c_int;
    pub fn shms_writer_delete(w: *mut shms_writer, key: *const c_char, key_len: u32) -> c_int;
    pub fn shms_writer_clear(w: *mut shms_writer, prefix: *const c_char, prefix_len: u32) -> c_int;
    pub fn shms_writer_claimed(w: *mut shms_writer, key: *const c_char, key_len: u32) -> c_int;
    pub fn shms_writer_count(w: *mut shms_writer) -> i64;
    pub fn shms_writer_keys(w: *mut shms_writer, prefix: *const c_char, prefix_len: u32, out: *mut u8,
        size: *mut u64) -> c_int;
    pub fn shms_writer_stats(w: *mut shms_writer, out: *mut shms_stats) -> c_int;
    pub fn shms_reader_attach(out: *mut *mut shms_reader, name: *const c_char, rank: u32,
        expected: *const shms_expected) -> c_int;
    pub fn shms_reader_find(r: *mut shms_reader, key: *const c_char, key_len: u32, reference: *mut u8,
        out: *mut *mut shms_view) -> c_int;
    pub fn shms_reader_has(r: *mut shms_reader, key: *const c_char, key_len: u32) -> c_int;
    pub fn shms_reader_acquire(r: *mut shms_reader, reference: *const u8, out: *mut *mut shms_view) -> c_int;
    pub fn shms_reader_acquire_private(r: *mut shms_reader, reference: *const u8, out: *mut *mut shms_view) -> c_int;
    pub fn shms_view_release(v: *mut shms_view);
    pub fn shms_reader_release(r: *mut shms_reader, reference: *const u8) -> c_int;
    pub fn shms_reader_validate(r: *mut shms_reader, reference: *const u8) -> c_int;
    pub fn shms_reader_claimed(r: *mut shms_reader, key: *const c_char, key_len: u32) -> c_int;
    pub fn shms_reader_stats(r: *mut shms_reader, out: *mut shms_rank_stats) -> c_int;
    pub fn shms_reader_close(r: *mut shms_reader) -> c_int;
    pub fn shms_reader_free(r: *mut shms_reader);
    pub fn shms_version() -> *const c_char;
    pub fn shms_strerror(code: c_int) -> *const c_char;
    pub fn shms_last_error() -> *const c_char;
    pub fn shms_writer_put(w: *mut shms_writer, object: *const shms_object, payload: *const c_void,
        reference: *mut u8) -> c_int;
    pub fn shms_writer_begin(w: *mut shms_writer, object: *const shms_object, payload: *mut *mut c_char,
        out: *mut *mut shms_uncommitted) -> c_int;
    pub fn shms_uncommitted_commit(u: *mut shms_uncommitted, reference: *mut u8) -> c_int;
    pub fn shms_uncommitted_abort(u: *mut shms_uncommitted);
    pub fn shms_writer_hit(w: *mut shms_writer, key: *const c_char, key_len: u32, reference: *mut u8) -> c_int;
    pub fn shms_writer_claim(w: *mut shms_writer, key: *const c_char, key_len: u32, out: *mut *mut shms_claim) -> c_int;
    pub fn shms_reader_claim(r: *mut shms_reader, key: *const c_char, key_len: u32, out: *mut *mut shms_claim) -> c_int;
    pub fn shms_claim_end(claim: *mut shms_claim);
    pub fn shms_tensor_meta(out: *mut c_char, dtype: *const c_char, shape: *const u64, n_dims: u32) -> c_int;
    pub fn shms_tensor_parse(out: *mut shms_tensor, meta: *const c_char, meta_len: u32, payload_size: u64) -> c_int;
}
