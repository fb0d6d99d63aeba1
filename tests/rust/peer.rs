//! The other process of tests/test_rust.py. It says on a line how far it is, and then waits to be killed or for the end of its
//! input.

use shmstore::{Expected, Lease, Options, Reader, Reference, Writer};
use std::io::{stdin, stdout, BufRead, Read, Write};

fn say(line: String) {
    println!("{line}");
    stdout().flush().unwrap();
}

/// The reference that the next line of the input has, in hexadecimal digits.
fn given() -> Reference {
    let mut line = String::new();
    stdin().lock().read_line(&mut line).unwrap();
    let digits = |n: usize| u8::from_str_radix(&line[2 * n..2 * n + 2], 16).unwrap();
    Reference::try_from(&(0..40).map(digits).collect::<Vec<_>>()[..]).unwrap()
}

fn wait() {
    stdin().lock().read_to_end(&mut Vec::new()).unwrap();
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (what, store) = (&*arguments[0], &*arguments[1]);
    let attach = || Reader::attach(store, 0, &Expected::default()).unwrap();
    match what {
        "view" => {
            let view = attach().acquire(&given()).unwrap();
            let (meta, bytes) = view.tensor().unwrap().unwrap();
            say(format!("{} {} {:?} {:?}", String::from_utf8_lossy(view.key()), meta.dtype, meta.shape, bytes));
            wait();
        }
        "put" => {
            let options = Options { capacity: 1 << 20, n_readers: 1, ..Options::default() };
            let writer = Writer::create(store, &options).unwrap();
            writer.put("before", b"", b"", Lease::Ranks).unwrap();
            let mut pending = writer.begin("inside", b"", 1 << 19, Lease::Ranks).unwrap();
            pending[..1000].fill(7);
            say("inside".into());
            wait();
        }
        "claim" => {
            let claim = attach().find_or_claim("key", || false).unwrap();
            say(format!("{claim:?}").split('(').next().unwrap().into());
            wait();
        }
        _ => panic!("view, put or claim, not {what}"),
    }
}
