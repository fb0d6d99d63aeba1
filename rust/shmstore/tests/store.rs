//! What the crate adds to C: ownership, errors, threads and forks. The tests of the store itself are in tests/c.

use shmstore::{poll, Error, Expected, Found, Lease, Options, Pending, Reader, Reference, TensorMeta, View, Writer};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use std::{fs, process, thread};

const CAPACITY: usize = 1 << 20;

fn new_name() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    format!("shmstore-rust-{}-{}", process::id(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// A store of one writer and two ranks, and a reader as rank 0.
fn store() -> (String, Writer, Reader) {
    let name = new_name();
    let writer = Writer::create(&name, &options()).unwrap();
    let reader = Reader::attach(&name, 0, &Expected::default()).unwrap();
    (name, writer, reader)
}

fn options() -> Options {
    Options { capacity: CAPACITY as u64, n_readers: 2, n_writers: 1, ..Options::default() }
}

fn exists(name: &str) -> bool {
    fs::metadata(format!("/dev/shm/{name}")).is_ok()
}

/// Sleeps, for ten seconds in all.
fn pause() -> impl FnMut() -> bool {
    let end = Instant::now() + Duration::from_secs(10);
    move || {
        thread::sleep(Duration::from_millis(1));
        Instant::now() < end
    }
}

#[test]
fn what_is_put_is_seen_in_place_by_reference_and_by_key() {
    let (_, writer, reader) = store();
    let reference = writer.put("key", b"meta", b"payload", Lease::Ranks).unwrap();
    let received = Reference::try_from(&reference.as_bytes()[..]).unwrap();
    for view in [reader.acquire(&received).unwrap(), reader.find("key").unwrap().unwrap()] {
        assert_eq!((&b"key"[..], &b"meta"[..], &b"payload"[..]), (view.key(), view.meta(), &*view));
    }
    assert!(reader.find("other").unwrap().is_none());
    assert_eq!((true, false), (reader.has("key").unwrap(), writer.has("other").unwrap()));
}

#[test]
fn a_pending_object_is_seen_after_its_commit_alone() {
    let (_, writer, reader) = store();
    let mut pending = writer.begin("key", b"", 1000, Lease::None).unwrap();
    assert_eq!(0, pending.as_ptr() as usize % 64);
    pending.fill(7);
    assert!(!reader.has("key").unwrap());
    pending.commit().unwrap();
    assert_eq!(&[7; 1000], &*reader.find("key").unwrap().unwrap());
}

#[test]
fn a_pending_object_that_is_dropped_gives_its_space_back() {
    let (_, writer, reader) = store();
    let size = CAPACITY - 64;
    for _ in 0..3 {
        let pending = writer.begin("key", b"", size, Lease::Ranks).unwrap();
        assert!(matches!(writer.begin("other", b"", size, Lease::Ranks), Err(Error::Full(_))));
        drop(pending);
        assert!(!reader.has("key").unwrap());
    }
}

#[test]
fn a_pending_object_outlives_its_writer_and_then_cannot_be_committed() {
    let (name, writer, _) = store();
    let mut pending = writer.begin("key", b"", 100, Lease::Ranks).unwrap();
    drop(writer);
    pending.fill(7);
    assert!(matches!(pending.commit(), Err(Error::Closed)));
    assert!(!exists(&name));
}

#[test]
fn an_object_without_bytes_is_an_empty_slice() {
    let (_, writer, reader) = store();
    let pending = writer.begin("key", b"", 0, Lease::Ranks).unwrap();
    assert!(pending.is_empty());
    let view = reader.acquire(&pending.commit().unwrap()).unwrap();
    assert_eq!((&b""[..], &b""[..]), (view.meta(), &*view));
}

#[test]
fn a_view_outlives_its_reader_and_keeps_its_bytes() {
    let (name, writer, reader) = store();
    let view = reader.acquire(&writer.put("key", b"", &[7; 1000], Lease::Ranks).unwrap()).unwrap();
    drop(reader);
    assert!(matches!(
        Reader::attach(&name, 0, &Expected { at_once: true, ..Expected::default() }),
        Err(Error::RankInUse)
    ));
    assert!(writer.delete("key").unwrap());
    let full = || writer.put("other", b"", &[8; CAPACITY - 64], Lease::None);
    assert!(matches!(full(), Err(Error::Full(_))));
    assert_eq!(&[7; 1000], &*view);
    writer.retire(1).unwrap();
    assert!(matches!(full(), Err(Error::Full(_))));
    drop(view);
    full().unwrap();
}

#[test]
fn an_object_stays_until_those_have_read_or_released_it_that_its_lease_names() {
    let name = new_name();
    let writer = Writer::create(&name, &Options { group_sizes: vec![1, 1], ..options() }).unwrap();
    let [first, second] = [0, 1].map(|rank| Reader::attach(&name, rank, &Expected::default()).unwrap());
    let put = |key, lease| writer.put(key, b"", &[7; CAPACITY - 64], lease);
    let full = || matches!(put("other", Lease::None), Err(Error::Full(_)));

    let reference = put("ranks", Lease::Ranks).unwrap();
    drop(first.acquire(&reference).unwrap());
    assert!(full());
    assert!(second.release(&reference).unwrap());
    assert!(!second.release(&reference).unwrap());

    let reference = put("second group", Lease::Group(1)).unwrap();
    assert!(full());
    drop(second.acquire(&reference).unwrap());
    put("none", Lease::None).unwrap();

    let reference = put("cancelled", Lease::Ranks).unwrap();
    assert!(writer.cancel(&reference).unwrap());
    put("last", Lease::Ranks).unwrap();
    assert_eq!(1, writer.cancel_all().unwrap());
    writer.clear("la").unwrap();
    assert!(!writer.has("last").unwrap());
}

#[test]
fn no_lease_waits_for_a_reader_that_only_finds() {
    let (name, writer, reader) = store();
    let finder = Reader::attach(&name, 1, &Expected { finds: true, ..Expected::default() }).unwrap();
    drop(reader.acquire(&writer.put("key", b"", &[7; CAPACITY - 64], Lease::Ranks).unwrap()).unwrap());
    writer.put("other", b"", &[8; CAPACITY - 64], Lease::Ranks).unwrap();
    assert_eq!(CAPACITY - 64, finder.find("other").unwrap().unwrap().len());
}

#[test]
fn a_tensor_is_read_as_it_was_written() {
    let (_, writer, reader) = store();
    for (dtype, shape, size) in [("bfloat16", &[2, 300][..], 1200), ("<f4", &[][..], 4), ("|u1", &[0, 7][..], 0)] {
        let meta = TensorMeta::new(dtype, shape);
        let reference = writer.put(dtype, &meta.to_bytes().unwrap(), &vec![7; size], Lease::Ranks).unwrap();
        let view = reader.acquire(&reference).unwrap();
        assert_eq!(Some((meta, &vec![7; size][..])), view.tensor().unwrap());
    }
    let view = reader.acquire(&writer.put("a", b"\x80", b"", Lease::Ranks).unwrap()).unwrap(); // msgpack: {}
    assert_eq!(None, view.tensor().unwrap());
    let wrong = TensorMeta::new("float32", [1000]).to_bytes().unwrap();
    assert!(matches!(TensorMeta::parse(&wrong, 8), Err(Error::Corrupt)));
    assert!(matches!(TensorMeta::new("float\0", []).to_bytes(), Err(Error::Invalid(_))));
    assert!(matches!(TensorMeta::new("float32", [1; 13]).to_bytes(), Err(Error::Invalid(_))));
}

#[test]
fn an_error_says_what_was_wrong() {
    let (name, writer, reader) = store();
    let said = |error: Error| error.to_string();
    let key = said(writer.put("", b"", b"", Lease::Ranks).unwrap_err());
    assert!(key.starts_with("a key must have 1 to 65536 bytes, not 0"), "{key}");
    let utf8 = said(writer.put(b"\xc0", b"", b"", Lease::Ranks).unwrap_err());
    assert!(utf8.contains("UTF-8"), "{utf8}");
    let ranks = Expected { n_readers: 5, ..Expected::default() };
    let ranks = Reader::attach(&name, 1, &ranks).unwrap_err();
    assert!(matches!(&ranks, Error::Ranks(said) if said.contains('5')), "{ranks}");
    let short = Reference::try_from(&[0; 39][..]).unwrap_err();
    assert_eq!("a reference has 40 bytes, not 39", said(short));
    assert!(matches!(reader.acquire(&Reference::try_from(&[7; 40][..]).unwrap()), Err(Error::Stale)));
    let folder = Writer::create("/nowhere/at/all", &options()).unwrap_err();
    assert!(matches!(&folder, Error::System(error) if error.kind() == std::io::ErrorKind::NotFound), "{folder:?}");
    assert!(said(folder).contains("No such file"));
    assert!(matches!(Writer::create("a\0b", &options()), Err(Error::Invalid(_))));
    assert!(matches!(Writer::create(&name, &options()), Err(Error::StoreExists)));
    assert_eq!(-10, Reader::attach(new_name(), 0, &Expected::default()).unwrap_err().code());
    let groups = Options { group_sizes: vec![1; 256], ..options() };
    assert!(matches!(Writer::create(new_name(), &groups), Err(Error::Invalid(_))));
}

#[test]
fn a_poll_ends_with_success_with_another_error_or_with_the_callers_patience() {
    let (_, writer, reader) = store();
    let reference = writer.put("key", b"", &[7; CAPACITY - 64], Lease::Ranks).unwrap();
    let put = || writer.put("other", b"", &[8; CAPACITY - 64], Lease::None);
    let mut left = 3;
    let patience = || {
        left -= 1;
        left > 0
    };
    assert!(matches!(poll(put, patience), Err(Error::Full(_))));
    assert_eq!(0, left);
    assert!([Error::Creating, Error::Busy, Error::NoStore].iter().all(Error::is_temporary));
    assert!(matches!(poll(|| reader.acquire(&Reference::try_from(&[7; 40][..])?), || panic!()), Err(Error::Stale)));
    thread::scope(|scope| {
        let waiting = scope.spawn(|| poll(put, pause()));
        writer.cancel(&reference).unwrap();
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn of_two_threads_that_want_an_object_one_makes_it() {
    let (_, writer, reader) = store();
    let made = AtomicU32::new(0);
    let want = || match reader.find_or_claim("key", pause()).unwrap() {
        Found::Stored(view) => view,
        Found::Claimed(_claim) => {
            assert!(matches!(writer.hit_or_claim("key", || false), Ok(Found::Elsewhere)));
            made.fetch_add(1, Ordering::Relaxed);
            writer.put("key", b"", b"made", Lease::None).unwrap();
            reader.find("key").unwrap().unwrap()
        }
        Found::Elsewhere => panic!("it took more than ten seconds"),
    };
    thread::scope(|scope| {
        let both = [scope.spawn(want), scope.spawn(want)];
        for view in both.map(|one| one.join().unwrap()) {
            assert_eq!(b"made", &*view);
        }
    });
    assert_eq!(1, made.load(Ordering::Relaxed));
    assert!(matches!(writer.hit_or_claim("key", || panic!()), Ok(Found::Stored(_))));
}

#[test]
fn a_claim_that_is_dropped_is_the_next_ones() {
    let (_, writer, reader) = store();
    let claim = reader.find_or_claim("key", || panic!()).unwrap();
    assert!(matches!(claim, Found::Claimed(_)));
    thread::spawn(move || drop(claim)).join().unwrap();
    assert!(matches!(writer.hit_or_claim("key", || panic!()), Ok(Found::Claimed(_))));
}

#[test]
fn two_threads_put_and_read_by_one_writer_and_one_reader() {
    let (_, writer, reader) = store();
    let exchange = |byte: u8| {
        for n in 0..500 {
            let key = format!("{byte}-{}", n % 10);
            let mut pending = match writer.begin(&key, &[byte], 5000, Lease::Ranks) {
                Err(Error::Exists) => {
                    writer.delete(&key).unwrap();
                    continue;
                }
                pending => pending.unwrap(),
            };
            pending.fill(byte);
            let reference = pending.commit().unwrap();
            let view: View = reader.acquire(&reference).unwrap();
            assert_eq!((&[byte][..], &[byte; 5000][..]), (view.meta(), &*view));
            writer.cancel(&reference).unwrap();
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| exchange(1));
        scope.spawn(|| exchange(2));
    });
}

#[test]
fn a_writer_takes_over_what_a_closed_one_has_kept() {
    let (name, writer, reader) = store();
    let put = writer.put("key", b"", b"kept", Lease::Ranks).unwrap();
    assert!(matches!(Writer::recover(&name, &Expected::default()), Err(Error::WriterActive)));
    writer.close(Some(false)).unwrap();
    assert!(matches!(writer.has("key"), Err(Error::Closed)));
    drop(writer);
    let other = Expected { options: Some(Options { capacity: 1 << 16, ..options() }), ..Expected::default() };
    assert!(matches!(Writer::recover(&name, &other), Err(Error::Options(_))));
    let successor = Writer::recover(&name, &Expected { options: Some(options()), ..Expected::default() }).unwrap();
    assert_eq!(b"kept", &*reader.acquire(&put).unwrap());
    assert!(successor.has("key").unwrap());
    successor.close(Some(true)).unwrap();
    assert!(!exists(&name));
}

#[test]
fn a_writer_joins_a_store_of_several() {
    let name = new_name();
    let first = Writer::create(&name, &Options { n_writers: 2, ..options() }).unwrap();
    let second = Writer::join(&name, None, &Expected::default()).unwrap();
    assert!(matches!(Writer::join(&name, Some(1), &Expected::default()), Err(Error::WriterActive)));
    second.put("key", b"", b"second's", Lease::None).unwrap();
    let reader = Reader::attach(&name, 0, &Expected::default()).unwrap();
    assert_eq!(b"second's", &*reader.acquire(&first.hit("key").unwrap()).unwrap());
    drop(first);
    assert!(exists(&name));
    drop(second);
    assert!(!exists(&name));
}

extern "C" {
    fn fork() -> i32;
    fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    fn _exit(status: i32) -> !;
}

#[test]
fn what_has_a_handle_may_be_used_in_any_thread() {
    fn in_any_thread<T: Send + Sync + 'static>() {}
    in_any_thread::<(Writer, Reader, View, Pending, Found<Reference>, Error)>();
}

#[test]
fn a_forked_child_is_refused_and_harms_nothing() {
    let (name, writer, reader) = store();
    let reference = writer.put("key", b"", b"payload", Lease::Ranks).unwrap();
    let (view, pending) = (reader.acquire(&reference).unwrap(), writer.begin("other", b"", 100, Lease::Ranks).unwrap());
    let claim = reader.find_or_claim("third", || false).unwrap();
    let child = unsafe { fork() };
    if child == 0 {
        let refused = [
            matches!(writer.put("fourth", b"", b"", Lease::Ranks), Err(Error::Forked)),
            matches!(writer.has("key"), Err(Error::Forked)),
            matches!(reader.acquire(&reference), Err(Error::Forked)),
            matches!(reader.find("key"), Err(Error::Forked)),
            matches!(pending.commit(), Err(Error::Forked)),
        ];
        drop((view, claim, reader, writer));
        unsafe { _exit(refused.iter().filter(|yes| !**yes).count() as i32) }
    }
    let mut status = -1;
    assert_eq!(child, unsafe { waitpid(child, &mut status, 0) });
    assert_eq!(0, status);
    assert!(exists(&name));
    assert_eq!(b"payload", &*view);
    assert!(matches!(writer.hit_or_claim("third", || false), Ok(Found::Elsewhere)));
    let other = pending.commit().unwrap();
    drop(reader.acquire(&other).unwrap());
}
