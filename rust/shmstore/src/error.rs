//! One error for each code of C.
#![allow(unsafe_code)]

use shmstore_sys as sys;
use std::ffi::CStr;
use std::os::raw::c_int;
use std::{fmt, io};

/// What a call returns.
pub type Result<T> = std::result::Result<T, Error>;

macro_rules! errors {
    ($($code:ident $name:ident $(($field:ty, $value:expr))? $doc:literal;)*) => {
        /// Why a call has failed. It has changed nothing in the store.
        ///
        /// A `String` says what was wrong, what is expected, and what to do.
        #[derive(Debug)]
        #[non_exhaustive]
        pub enum Error {
            $(#[doc = $doc] $name $(($field))?,)*
            /// A code that this version does not know.
            Unknown(i32),
        }

        impl Error {
            /// The code in `shmstore.h`.
            pub fn code(&self) -> i32 {
                match self {
                    $(Error::$name { .. } => sys::$code,)*
                    Error::Unknown(code) => *code,
                }
            }

            /// The error of a call of this thread that has just returned.
            pub(crate) fn of(code: c_int) -> Error {
                match code {
                    $(sys::$code => Error::$name $(($value))?,)*
                    other => Error::Unknown(other),
                }
            }
        }
    };
}

errors! {
    SHMS_EINVAL Invalid(String, said()) "An argument is out of range, or a key is not UTF-8.";
    SHMS_ENOMEM NoMemory "This process is out of private memory.";
    SHMS_ESYS System(io::Error, io::Error::last_os_error()) "A system call failed.";
    SHMS_ENOSPC NoSpace "The file system cannot hold a segment of that size.";
    SHMS_EFULL Full(String, said()) "Held objects leave no gap of that size.";
    SHMS_ETOOLARGE TooLarge(String, said()) "The object is larger than the store allows for one.";
    SHMS_EEXISTS Exists "The key is already in the store: [`hit`](crate::Writer::hit) hands it out.";
    SHMS_ENOTFOUND NotFound "The key is not in the store.";
    SHMS_ESTALE Stale "The reference does not name a live object of this store.";
    SHMS_ENOSTORE NoStore "There is no store of that name.";
    SHMS_ESTOREEXISTS StoreExists "A store of that name exists.";
    SHMS_EWRITERACTIVE WriterActive "The store's writer is alive.";
    SHMS_ERANKINUSE RankInUse "A live process, or live views of this one, have this rank.";
    SHMS_ELAYOUT Layout "The file is not a store of this version, size and architecture.";
    SHMS_ECORRUPT Corrupt "The contents of the store, or of an object, contradict themselves.";
    SHMS_ECLOSED Closed "The writer or reader is closed.";
    SHMS_EFORKED Forked "The writer or reader belongs to the parent of this process.";
    SHMS_EOTHERSTORE OtherStore(String, said()) "The name is now another store's.";
    SHMS_ENOSLOT NoSlot(String, said()) "Every slot is taken by an object that is held.";
    SHMS_ENOLEASE NoLease(String, said()) "Every lease entry is taken by an open lease.";
    SHMS_ECREATING Creating "The store is still being created.";
    SHMS_EFOREIGN Foreign(String, said()) "The store is another user's, or its mode admits others.";
    SHMS_ERANKS Ranks(String, said()) "The store has another number of ranks.";
    SHMS_ESPARSE Sparse "Parts of the store's file are holes.";
    SHMS_EOPTIONS Options(String, said()) "The store was created with other options.";
    SHMS_EQUOTA Quota(String, said()) "The objects of the kind fill its quota, and are held.";
    SHMS_EBUSY Busy "The object is promised, but the writer that evicts it was stopped before it saw that.";
    SHMS_ENOARENA NoArena "The writer owns the store, and has no arena.";
    SHMS_EMAP Map(io::Error, io::Error::last_os_error()) "The object cannot be mapped a second time.";
}

impl Error {
    /// Whether the same call may succeed later, if a reader releases something or another process goes on.
    pub fn is_temporary(&self) -> bool {
        use Error::*;
        matches!(self, Full(_) | NoSlot(_) | NoLease(_) | Quota(_) | Creating | Busy | NoStore)
    }
}

/// Returns what is not an error: 0, or an answer.
pub(crate) fn check(code: c_int) -> Result<c_int> {
    if code < 0 {
        return Err(Error::of(code));
    }
    Ok(code)
}

fn said() -> String {
    // SAFETY: it returns a text with a 0 at its end, which stays until the next call of this thread.
    unsafe { CStr::from_ptr(sys::shms_last_error()) }.to_string_lossy().into_owned()
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use Error::*;
        // SAFETY: it takes any code, and returns a constant text with a 0 at its end.
        let meaning = unsafe { CStr::from_ptr(sys::shms_strerror(self.code())) }.to_string_lossy();
        match self {
            Invalid(said) | Full(said) | TooLarge(said) | OtherStore(said) | NoSlot(said) => f.write_str(said),
            Foreign(said) | NoLease(said) | Ranks(said) | Options(said) | Quota(said) => f.write_str(said),
            System(error) | Map(error) => write!(f, "{meaning}: {error}"),
            _ => f.write_str(&meaning),
        }
    }
}

impl std::error::Error for Error {}
