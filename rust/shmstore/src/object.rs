//! Objects: what is put, what names it, and what is read.
#![allow(unsafe_code)]

use crate::error::check;
use crate::handle::{parts, Handle};
use crate::{Error, Result};
use shmstore_sys as sys;
use std::ffi::{CStr, CString};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::{Deref, DerefMut, Range};
use std::os::raw::{c_char, c_int};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

/// How long an object stays for its reference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lease {
    /// Until each rank has read or released it.
    #[default]
    Ranks,
    /// Until each rank of that group has, counted from 0.
    Group(u32),
    /// Not at all: readers find it by its key, and it can be evicted at any time.
    None,
}

/// 40 bytes that name an object, and its lease if it has one. Python's `ObjectRef.from_bytes` takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reference(pub(crate) [u8; sys::SHMS_REF_SIZE]);

impl Reference {
    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8; sys::SHMS_REF_SIZE] {
        &self.0
    }

    /// Takes what a call writes.
    pub(crate) fn made(write: impl FnOnce(*mut u8) -> c_int) -> Result<Reference> {
        let mut bytes = [0; sys::SHMS_REF_SIZE];
        check(write(bytes.as_mut_ptr())).map(|_| Reference(bytes))
    }
}

impl TryFrom<&[u8]> for Reference {
    type Error = Error;
    /// Takes any 40 bytes: the store knows whether they name an object.
    fn try_from(bytes: &[u8]) -> Result<Self> {
        let wrong = |_| Error::Invalid(format!("a reference has {} bytes, not {}", sys::SHMS_REF_SIZE, bytes.len()));
        bytes.try_into().map(Reference).map_err(wrong)
    }
}

/// An object that a reader holds. It derefs to the payload, in place.
///
/// The bytes stay as they are until it is dropped, in any thread, also after its reader was.
#[derive(Debug)]
pub struct View(pub(crate) Handle<sys::shms_view>);

impl View {
    /// Its key.
    pub fn key(&self) -> &[u8] {
        let view = self.view();
        self.bytes(view.key, view.key_len.into())
    }

    /// Its metadata.
    pub fn meta(&self) -> &[u8] {
        let view = self.view();
        self.bytes(view.meta, view.meta_len.into())
    }

    /// The object as one tensor, and its bytes. `None`: it is something else, such as a dict of tensors.
    pub fn tensor(&self) -> Result<Option<(TensorMeta, &[u8])>> {
        Ok(TensorMeta::parse(self.meta(), self.len())?.map(|(meta, bytes)| (meta, &self[bytes])))
    }

    fn view(&self) -> &sys::shms_view {
        // SAFETY: C has made it, and changes and frees it only at the drop.
        unsafe { &*self.0.raw() }
    }

    fn bytes(&self, start: *const c_char, len: u64) -> &[u8] {
        if len == 0 {
            return &[]; // `start` may be NULL
        }
        // SAFETY: the object is held, so its bytes do not change before the drop.
        unsafe { slice::from_raw_parts(start.cast(), len as usize) }
    }
}

impl Deref for View {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let view = self.view();
        self.bytes(view.payload, view.payload_size)
    }
}

/// Space for an object. It derefs to its payload, at a multiple of 64 bytes; if it is dropped, the space is given back.
///
/// The bytes are what was there before: write all of them.
#[derive(Debug)]
pub struct Pending {
    pub(crate) handle: Handle<sys::shms_uncommitted>, // dropped before the writer
    pub(crate) payload: NonNull<u8>,
    pub(crate) size: usize,
    pub(crate) _writer: Arc<Handle<sys::shms_writer>>,
}

// SAFETY: no other process or thread has its bytes, and its handle may be in any thread.
unsafe impl Send for Pending {}
// SAFETY: as above.
unsafe impl Sync for Pending {}

impl Pending {
    /// Hands the object out.
    pub fn commit(self) -> Result<Reference> {
        let raw = ManuallyDrop::new(self.handle).raw();
        // SAFETY: the call frees it, and its writer lives as long as `_writer`.
        Reference::made(|out| unsafe { sys::shms_uncommitted_commit(raw, out) })
    }
}

impl Deref for Pending {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are its own until it ends.
        unsafe { slice::from_raw_parts(self.payload.as_ptr(), self.size) }
    }
}

impl DerefMut for Pending {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { slice::from_raw_parts_mut(self.payload.as_ptr(), self.size) }
    }
}

/// What Python makes of a payload: one array or tensor, in C order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorMeta {
    /// A name of torch's, such as `bfloat16`, for a `torch.Tensor`; one of numpy's, such as `<f4` or `|u1`, for an array.
    pub dtype: String,
    /// The payload's size is the product of these and of the bytes of an element.
    pub shape: Vec<u64>,
}

impl TensorMeta {
    /// A dtype and a shape, which [`to_bytes`](Self::to_bytes) checks.
    pub fn new(dtype: impl Into<String>, shape: impl Into<Vec<u64>>) -> TensorMeta {
        TensorMeta { dtype: dtype.into(), shape: shape.into() }
    }

    /// The metadata of an object that is this tensor.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let dtype = CString::new(&*self.dtype).map_err(|_| Error::Invalid("a dtype has no byte 0".into()))?;
        let (shape, n_dims) = (self.shape.as_ptr(), self.shape.len().try_into().unwrap_or(u32::MAX));
        let mut bytes = vec![0; sys::SHMS_TENSOR_META];
        // SAFETY: there is room for any metadata, and C reads no shape of more than SHMS_MAX_DIMS numbers.
        let len = check(unsafe { sys::shms_tensor_meta(bytes.as_mut_ptr().cast(), dtype.as_ptr(), shape, n_dims) })?;
        bytes.truncate(len as usize);
        Ok(bytes)
    }

    /// The tensor of an object with that metadata and a payload of that size, and where in the payload its bytes are.
    ///
    /// `None`: it is something else. [`Error::Corrupt`]: no such payload has it.
    pub fn parse(meta: &[u8], payload_size: usize) -> Result<Option<(TensorMeta, Range<usize>)>> {
        let (meta, len) = parts(meta);
        let mut found = MaybeUninit::<sys::shms_tensor>::zeroed();
        // SAFETY: `meta` has `len` bytes.
        if check(unsafe { sys::shms_tensor_parse(found.as_mut_ptr(), meta, len, payload_size as u64) })? == 0 {
            return Ok(None);
        }
        // SAFETY: it is a struct of numbers, which zeros are, too; and the name has a 0 at its end.
        let (found, dtype) = unsafe { (found.assume_init(), CStr::from_ptr((*found.as_ptr()).dtype.as_ptr())) };
        let shape = &found.shape[..found.n_dims as usize];
        let bytes = found.offset as usize..(found.offset + found.size) as usize;
        Ok(Some((TensorMeta::new(dtype.to_string_lossy(), shape), bytes)))
    }
}
