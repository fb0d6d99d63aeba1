//! A shared-memory object store for the tensors of inference engines: a process puts an object once, and others see it in
//! place, in Rust, in C and in Python.
//!
//! ```
//! use shmstore::{Expected, Lease, Options, Reader, TensorMeta, Writer};
//!
//! # let name = format!("shmstore-doc-{}", std::process::id());
//! let writer = Writer::create(&name, &Options { capacity: 1 << 20, n_readers: 1, ..Options::default() })?;
//! let meta = TensorMeta::new("float32", [2, 3]).to_bytes()?;
//! let mut pending = writer.begin("cat.jpg", &meta, 24, Lease::Ranks)?; // 24 bytes in the store
//! pending.fill(0);
//! let reference = pending.commit()?; // 40 bytes, for any pipe or socket
//!
//! let reader = Reader::attach(&name, 0, &Expected::default())?; // in another process, as rank 0
//! let view = reader.acquire(&reference)?;
//! assert_eq!(Some((TensorMeta::new("float32", [2, 3]), &[0; 24][..])), view.tensor()?);
//! # Ok::<(), shmstore::Error>(())
//! ```
//!
//! A store is a file in `/dev/shm`, or elsewhere if its name is a path. A key is text, in UTF-8.
//!
//! **No call waits** for a reader, for room or for a store to come: [`poll`] calls again. **Forks**: in a child of `fork`,
//! each call on what the parent has opened returns [`Error::Forked`], and the parent's views must not be read.
#![deny(missing_docs, unsafe_op_in_unsafe_fn, unsafe_code)] // what calls C allows `unsafe`, each with its reason
#![deny(clippy::undocumented_unsafe_blocks)]

mod error;
mod handle;
mod object;
mod options;
mod reader;
mod writer;

pub use error::{Error, Result};
pub use handle::{Claim, Found};
pub use object::{Lease, Pending, Reference, TensorMeta, View};
pub use options::{flags, Expected, Options};
pub use reader::Reader;
pub use writer::Writer;

/// Calls again while the error is [temporary](Error::is_temporary) and `pause`, which sleeps, returns true.
pub fn poll<T>(mut call: impl FnMut() -> Result<T>, mut pause: impl FnMut() -> bool) -> Result<T> {
    loop {
        match call() {
            Err(error) if error.is_temporary() && pause() => {}
            done => return done,
        }
    }
}
