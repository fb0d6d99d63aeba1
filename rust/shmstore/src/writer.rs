//! A writer of a store.
#![allow(unsafe_code)]

use crate::handle::{parts, Handle};
use crate::options::name;
use crate::{error::check, Error, Expected, Found, Lease, Options, Pending, Reference, Result};
use shmstore_sys as sys;
use std::path::Path;
use std::ptr::{null_mut, NonNull};
use std::sync::Arc;

/// A writer, which puts objects into its arena of a store. Any threads may use it at once.
///
/// When it is dropped, it closes as `close(None)` does.
#[derive(Debug)]
pub struct Writer(Arc<Handle<sys::shms_writer>>);

impl Writer {
    /// Creates a store.
    pub fn create(store: impl AsRef<Path>, options: &Options) -> Result<Writer> {
        let (store, options) = (name(store.as_ref())?, options.as_c());
        // SAFETY: all arguments outlive the call.
        Writer::made(|out| unsafe { sys::shms_writer_create(out, store.as_ptr(), &options) })
    }

    /// Takes over a store of one writer, which is dead, with what is in it.
    pub fn recover(store: impl AsRef<Path>, expected: &Expected) -> Result<Writer> {
        let store = name(store.as_ref())?;
        // SAFETY: all arguments outlive the call.
        expected.pass(|given| Writer::made(|out| unsafe { sys::shms_writer_recover(out, store.as_ptr(), given) }))
    }

    /// Takes over an arena of a store of several writers, with what is in it; `None`: the first that has no writer.
    pub fn join(store: impl AsRef<Path>, arena: Option<u32>, expected: &Expected) -> Result<Writer> {
        let store = name(store.as_ref())?;
        let arena = arena.map_or(sys::SHMS_ANY_ARENA, |number| number.try_into().unwrap_or(i32::MAX));
        // SAFETY: all arguments outlive the call.
        expected.pass(|given| Writer::made(|out| unsafe { sys::shms_writer_join(out, store.as_ptr(), arena, given) }))
    }

    fn made(make: impl FnOnce(*mut *mut sys::shms_writer) -> i32) -> Result<Writer> {
        Ok(Writer(Arc::new(Handle::made(sys::shms_writer_free, make)?)))
    }

    /// Copies an object into the store, and hands it out.
    pub fn put(&self, key: impl AsRef<[u8]>, meta: &[u8], payload: &[u8], lease: Lease) -> Result<Reference> {
        let object = object(key.as_ref(), meta, payload.len(), lease);
        // SAFETY: all arguments outlive the call, and the payload has the bytes that `object` says.
        Reference::made(|out| unsafe { sys::shms_writer_put(self.raw(), &object, payload.as_ptr().cast(), out) })
    }

    /// Takes space for an object, whose payload is written in place. Nobody sees it before [`Pending::commit`].
    pub fn begin(&self, key: impl AsRef<[u8]>, meta: &[u8], size: usize, lease: Lease) -> Result<Pending> {
        let (object, mut payload) = (object(key.as_ref(), meta, size, lease), null_mut());
        // SAFETY: all arguments outlive the call.
        let begin = |out: *mut _| unsafe { sys::shms_writer_begin(self.raw(), &object, &mut payload, out) };
        let handle = Handle::made(sys::shms_uncommitted_abort, begin)?;
        let payload = NonNull::new(payload.cast()).unwrap_or_else(NonNull::dangling); // NULL if it has no bytes
        Ok(Pending { handle, payload, size, _writer: Arc::clone(&self.0) })
    }

    /// Hands a stored object out once more, also that of another writer.
    pub fn hit(&self, key: impl AsRef<[u8]>) -> Result<Reference> {
        let (key, len) = parts(key.as_ref());
        // SAFETY: it takes a key, and writes the bytes of a reference.
        Reference::made(|out| unsafe { sys::shms_writer_hit(self.raw(), key, len, out) })
    }

    /// A [`hit`](Self::hit), or the right to make the object; see [`Reader::find_or_claim`](crate::Reader::find_or_claim).
    pub fn hit_or_claim(&self, key: impl AsRef<[u8]>, pause: impl FnMut() -> bool) -> Result<Found<Reference>> {
        let key = key.as_ref();
        self.0.find_or_claim(sys::shms_writer_claim, key, || self.hit(key), pause)
    }

    /// Whether the key is stored; this is not a use of it.
    pub fn has(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        self.0.key(sys::shms_writer_has, key.as_ref())
    }

    /// Deletes the object; whether it was stored. Those who hold it keep it.
    pub fn delete(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        self.0.key(sys::shms_writer_delete, key.as_ref())
    }

    /// Deletes the objects whose keys begin with a prefix; all, if it is empty.
    pub fn clear(&self, prefix: impl AsRef<[u8]>) -> Result<()> {
        self.0.key(sys::shms_writer_clear, prefix.as_ref()).map(drop)
    }

    /// Ends a lease; whether it was open.
    pub fn cancel(&self, reference: &Reference) -> Result<bool> {
        self.0.reference(sys::shms_writer_cancel, reference)
    }

    /// Ends every open lease; how many there were. For a successor, if the requests of the dead writer died with it.
    pub fn cancel_all(&self) -> Result<u64> {
        // SAFETY: the handle is freed only after the drop.
        let ended = unsafe { sys::shms_writer_cancel_all(self.raw()) };
        ended.try_into().map_err(|_| Error::of(ended as i32))
    }

    /// No lease of this writer waits for the rank any more, until it attaches.
    pub fn retire(&self, rank: u32) -> Result<()> {
        // SAFETY: as above.
        check(unsafe { sys::shms_writer_retire(self.raw(), rank) }).map(drop)
    }

    /// Ends its calls, and lets go of the arena once each [`Pending`] has ended; their commits fail.
    ///
    /// `unlink`: whether the last writer removes the store. `None`: unless it was created with [`OUTLIVES`](crate::flags).
    pub fn close(&self, unlink: Option<bool>) -> Result<()> {
        let how = unlink.map_or(sys::SHMS_AS_RECORDED, i32::from);
        // SAFETY: as above.
        check(unsafe { sys::shms_writer_close(self.raw(), how) }).map(drop)
    }

    fn raw(&self) -> *mut sys::shms_writer {
        self.0.raw()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.close(None); // it may be closed already, or belong to a parent
    }
}

fn object(key: &[u8], meta: &[u8], payload_size: usize, lease: Lease) -> sys::shms_object {
    let ((key, key_len), (meta, meta_len)) = (parts(key), parts(meta));
    let (unleased, group) = match lease {
        Lease::Ranks => (0, 0),
        Lease::Group(number) => (0, number.saturating_add(1)),
        Lease::None => (1, 0),
    };
    let payload_size = payload_size as u64;
    sys::shms_object { key, meta, payload_size, key_len, meta_len, unleased, group, reserved: [0; 4] }
}
