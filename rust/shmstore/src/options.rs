//! What a store is created with, and which store is accepted.

use crate::{Error, Result};
use shmstore_sys as sys;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Bits of [`Options::flags`].
pub mod flags {
    pub use shmstore_sys::{SHMS_CHECKSUMS as CHECKSUMS, SHMS_EPHEMERAL as EPHEMERAL, SHMS_HUGE_PAGES as HUGE_PAGES};
    pub use shmstore_sys::{SHMS_OUTLIVES as OUTLIVES, SHMS_OWNS as OWNS, SHMS_PREFAULT as PREFAULT};
}

/// What [`Writer::create`](crate::Writer::create) creates; all but `capacity` and `n_readers` may be 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Bytes of the data region.
    pub capacity: u64,
    /// Bytes of key, metadata and payload together; 0: the capacity.
    pub max_object_size: u64,
    /// Ranks, each of which reads or releases every reference that is handed out: 1 to 256.
    pub n_readers: u32,
    /// Objects at most; 0: from the capacity.
    pub max_objects: u32,
    /// Arenas, each with this capacity and number of objects: 1 to 64; 0: 1.
    pub n_writers: u32,
    /// Of [`flags`].
    pub flags: u32,
    /// The file's permissions, whatever the umask; 0: 0600.
    pub mode: u32,
    /// The user group that the file belongs to; `None`: as the folder says.
    pub group: Option<u32>,
    /// Ranks of each group, the first ranks first; empty: one group of all.
    pub group_sizes: Vec<u16>,
}

/// The store that a writer or reader accepts; by default, any that belongs to this user alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// Its number, as a handle of Python's has it; `None`: any.
    pub store: Option<i64>,
    /// Its owner, whatever the mode.
    pub allow_uid: Option<u32>,
    /// Its ranks; 0: any number.
    pub n_readers: u32,
    /// Whether a successor ends the leases of the dead writer.
    pub end_leases: bool,
    /// Whether the reader only finds objects by their keys, so that no lease waits for it.
    pub finds: bool,
    /// Whether a rank or arena that is in use is an error at once. Else it is tried for 100 ms, since a process that was
    /// killed has its locks for some milliseconds.
    pub at_once: bool,
    /// What it was created with; `None`: anything.
    pub options: Option<Options>,
}

impl Options {
    pub(crate) fn as_c(&self) -> sys::shms_options {
        let mut group_sizes = [0; sys::SHMS_MAX_GROUPS]; // C refuses more
        group_sizes.iter_mut().zip(&self.group_sizes).for_each(|(to, size)| *to = *size);
        sys::shms_options {
            capacity: self.capacity,
            max_object_size: self.max_object_size,
            n_readers: self.n_readers,
            max_objects: self.max_objects,
            n_writers: self.n_writers,
            flags: self.flags,
            mode: self.mode,
            group: self.group.map_or(0, |group| group.saturating_add(1)),
            n_groups: self.group_sizes.len().try_into().unwrap_or(u32::MAX),
            group_sizes,
            reserved: [0; 4],
        }
    }
}

impl Expected {
    /// Calls C with it.
    pub(crate) fn pass<T>(&self, call: impl FnOnce(&sys::shms_expected) -> T) -> T {
        let options = self.options.as_ref().map(Options::as_c);
        call(&sys::shms_expected {
            store: self.store.unwrap_or(sys::SHMS_ANY_STORE),
            allow_uid: self.allow_uid.map_or(sys::SHMS_OWN_UID, i64::from),
            n_readers: self.n_readers,
            end_leases: self.end_leases.into(),
            finds: self.finds.into(),
            at_once: self.at_once.into(),
            options: options.as_ref().map_or(std::ptr::null(), |options| options),
            ..sys::SHMS_EXPECTED_DEFAULTS
        })
    }
}

/// A store's name as C takes it.
pub(crate) fn name(name: &Path) -> Result<CString> {
    CString::new(name.as_os_str().as_bytes()).map_err(|_| Error::Invalid("a store's name has no byte 0".into()))
}
