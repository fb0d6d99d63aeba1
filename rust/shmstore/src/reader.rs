//! A reader of a store.
#![allow(unsafe_code)]

use crate::handle::{parts, Handle};
use crate::options::name;
use crate::{Error, Expected, Found, Reference, Result, View};
use shmstore_sys as sys;
use std::path::Path;

/// A reader, which sees the objects of all writers of a store. Any threads may use it at once.
///
/// When it is dropped, no lease waits for its rank any more. Its views stay, and keep the rank.
#[derive(Debug)]
pub struct Reader(Handle<sys::shms_reader>);

impl Reader {
    /// Attaches to a store as one of its ranks.
    pub fn attach(store: impl AsRef<Path>, rank: u32, expected: &Expected) -> Result<Reader> {
        let (store, free) = (name(store.as_ref())?, sys::shms_reader_free);
        // SAFETY: all arguments outlive the call.
        let attach = |out, given: &_| unsafe { sys::shms_reader_attach(out, store.as_ptr(), rank, given) };
        expected.pass(|given| Handle::made(free, |out| attach(out, given))).map(Reader)
    }

    /// The object of a reference; its lease no longer waits for this rank.
    pub fn acquire(&self, reference: &Reference) -> Result<View> {
        let (bytes, free) = (reference.0.as_ptr(), sys::shms_view_release);
        // SAFETY: it takes the bytes of a reference.
        Handle::made(free, |out| unsafe { sys::shms_reader_acquire(self.0.raw(), bytes, out) }).map(View)
    }

    /// The object of a key, if it is stored. It needs no reference, and ends no lease.
    pub fn find(&self, key: impl AsRef<[u8]>) -> Result<Option<View>> {
        match self.find_or_error(key.as_ref()) {
            Err(Error::NotFound) => Ok(None),
            found => found.map(Some),
        }
    }

    /// The object of a key, or the right to make it, or neither if another process or thread makes it.
    ///
    /// In this last case it looks again for as long as `pause`, which sleeps for some milliseconds, returns true. A thread
    /// that holds a claim must not wait: two could wait for each other.
    pub fn find_or_claim(&self, key: impl AsRef<[u8]>, pause: impl FnMut() -> bool) -> Result<Found<View>> {
        let key = key.as_ref();
        self.0.find_or_claim(sys::shms_reader_claim, key, || self.find_or_error(key), pause)
    }

    /// Whether the key is stored; this is not a use of it.
    pub fn has(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        self.0.key(sys::shms_reader_has, key.as_ref())
    }

    /// Ends the lease for this rank without a view; whether it was open.
    pub fn release(&self, reference: &Reference) -> Result<bool> {
        self.0.reference(sys::shms_reader_release, reference)
    }

    fn find_or_error(&self, key: &[u8]) -> Result<View> {
        let ((key, len), free) = (parts(key), sys::shms_view_release);
        let mut unleased = [0; sys::SHMS_REF_SIZE];
        let out_ref = unleased.as_mut_ptr();
        // SAFETY: it takes a key, and writes the bytes of a reference, which nobody needs.
        Handle::made(free, |out| unsafe { sys::shms_reader_find(self.0.raw(), key, len, out_ref, out) }).map(View)
    }
}
