//! What C has made, how it is freed, and the calls that writers and readers have in common.
#![allow(unsafe_code)]

use crate::error::check;
use crate::{Error, Reference, Result};
use shmstore_sys as sys;
use std::os::raw::{c_char, c_int};
use std::ptr::{null_mut, NonNull};

type Free<T> = unsafe extern "C" fn(*mut T);

/// What C has made, until it is dropped, which calls the function.
#[derive(Debug)]
pub(crate) struct Handle<T>(NonNull<T>, Free<T>);

// SAFETY: every function may be called from any thread, says shmstore.h under THREADS.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above; what frees it has it alone.
unsafe impl<T> Sync for Handle<T> {}

impl<T> Handle<T> {
    /// Takes what a call of C makes; `None` if it has made nothing.
    pub fn granted(free: Free<T>, make: impl FnOnce(*mut *mut T) -> c_int) -> Result<Option<Self>> {
        let mut raw = null_mut();
        check(make(&mut raw))?;
        Ok(NonNull::new(raw).map(|raw| Handle(raw, free)))
    }

    /// The same, where C makes something or returns an error.
    pub fn made(free: Free<T>, make: impl FnOnce(*mut *mut T) -> c_int) -> Result<Self> {
        Handle::granted(free, make).map(|made| made.expect("C has made it"))
    }

    pub fn raw(&self) -> *mut T {
        self.0.as_ptr()
    }

    /// Asks about a key.
    pub fn key(&self, call: unsafe extern "C" fn(*mut T, *const c_char, u32) -> c_int, key: &[u8]) -> Result<bool> {
        let (key, len) = parts(key);
        // SAFETY: such a function takes a handle and a key.
        check(unsafe { call(self.raw(), key, len) }).map(|answer| answer != 0)
    }

    /// Asks about a reference.
    pub fn reference(&self, call: unsafe extern "C" fn(*mut T, *const u8) -> c_int, of: &Reference) -> Result<bool> {
        // SAFETY: such a function takes a handle and the bytes of a reference.
        check(unsafe { call(self.raw(), of.as_bytes().as_ptr()) }).map(|answer| answer != 0)
    }

    /// Looks for the object of a key until it is stored, or claimed, or `pause` returns false.
    pub fn find_or_claim<F>(
        &self,
        call: unsafe extern "C" fn(*mut T, *const c_char, u32, *mut *mut sys::shms_claim) -> c_int,
        key: &[u8],
        find: impl Fn() -> Result<F>,
        mut pause: impl FnMut() -> bool,
    ) -> Result<Found<F>> {
        let (bytes, len) = parts(key);
        loop {
            match find() {
                Err(Error::NotFound) => {}
                found => return found.map(Found::Stored),
            }
            // SAFETY: such a function takes a handle and a key, and makes a claim.
            match Handle::granted(sys::shms_claim_end, |out| unsafe { call(self.raw(), bytes, len, out) }) {
                Ok(Some(claim)) => return Ok(Found::Claimed(Claim(claim))),
                Ok(None) if !pause() => return Ok(Found::Elsewhere),
                Ok(None) | Err(Error::Exists) => {} // it was stored since
                Err(error) => return Err(error),
            }
        }
    }
}

impl<T> Drop for Handle<T> {
    fn drop(&mut self) {
        // SAFETY: it is freed once, by its own function, and no call is under way, since each borrows it.
        unsafe { self.1(self.raw()) }
    }
}

/// Bytes as C takes them. It refuses more than a `u32` can say.
pub(crate) fn parts(bytes: &[u8]) -> (*const c_char, u32) {
    (bytes.as_ptr().cast(), bytes.len().try_into().unwrap_or(u32::MAX))
}

/// The right to make the object of a key, until it is dropped, in any thread, or its process ends.
///
/// It spares work and guards nothing: an object that two processes make is stored twice, and both are right.
#[derive(Debug)]
pub struct Claim(#[allow(dead_code)] Handle<sys::shms_claim>);

/// What a look for an object has come to, where several processes make them.
#[derive(Debug)]
pub enum Found<T> {
    /// It is stored.
    Stored(T),
    /// It is not stored, and this process makes it.
    Claimed(Claim),
    /// Another process or thread makes it.
    Elsewhere,
}
