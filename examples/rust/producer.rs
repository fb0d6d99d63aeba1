//! A producer in Rust, whose frames a reader in Python gets.
//!
//! Each line of its input names a frame. It makes those that are not stored yet, and prints a reference for each line.

use shmstore::{poll, Error, Expected, Lease, Options, Reference, TensorMeta, Writer};
use std::io::{stdin, stdout, BufRead, Write};
use std::time::{Duration, Instant};

/// Creates the store, or joins one that exists.
fn open(name: &str) -> shmstore::Result<Writer> {
    let options = Options { capacity: 64 << 20, n_readers: 1, ..Options::default() };
    match Writer::create(name, &options) {
        Err(Error::StoreExists) => Writer::join(name, None, &Expected::default()),
        created => created,
    }
}

/// Hands out a stored frame, or makes it in place: an array of height, width and colours.
fn frame(writer: &Writer, key: &str) -> shmstore::Result<Reference> {
    match writer.hit(key) {
        Err(Error::NotFound) => {}
        stored => return stored,
    }
    let shape = [480, 640, 3];
    let meta = TensorMeta::new("|u1", shape).to_bytes()?; // "uint8" for a torch.Tensor
    let size = shape.iter().product::<u64>() as usize;
    let end = Instant::now() + Duration::from_secs(5);
    let pause = || {
        std::thread::sleep(Duration::from_millis(1)); // the store is full: a reader may release something
        Instant::now() < end
    };
    let mut pending = poll(|| writer.begin(key, &meta, size, Lease::Ranks), pause)?;
    pending.fill(key.len() as u8); // here a decoder would write its pixels
    pending.commit()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let store = std::env::args().nth(1).ok_or("usage: producer STORE")?;
    let writer = open(&store)?;
    for line in stdin().lock().lines() {
        let reference = frame(&writer, &line?)?;
        let digits: String = reference.as_bytes().iter().map(|byte| format!("{:02x}", byte)).collect();
        println!("{}", digits);
        stdout().flush()?;
    }
    Ok(()) // the writer is dropped, and the last one removes the store
}
