//! Compiles the C sources in `csrc` with the compiler that `CC` names, or links the library that pkg-config finds if
//! `SHMSTORE_SYS_USE_PKG_CONFIG` is set.

use std::process::Command;
use std::{env, fs};

/// Those of csrc/build_ffi.py, without warnings.
const FLAGS: &str = "-std=c11 -O3 -g0 -fPIC -fvisibility=hidden -D_GNU_SOURCE -pthread";

fn main() {
    if set("SHMSTORE_SYS_USE_PKG_CONFIG", "").is_empty() {
        compile();
    } else {
        link_installed();
    }
}

/// Makes a static library of all sources.
fn compile() {
    println!("cargo:rerun-if-changed=csrc");
    let (out, here) = (env::var("OUT_DIR").unwrap(), env::current_dir().unwrap());
    let _ = fs::remove_dir_all(&out); // it may have objects of sources that were removed since
    fs::create_dir(&out).unwrap();
    let sources = fs::read_dir(here.join("csrc")).expect("csrc has the C sources, or is a link to a checkout's");
    let sources =
        sources.map(|file| file.unwrap().path()).filter(|path| path.extension().map_or(false, |is| is == "c"));
    run(command(&set("CC", "cc"))
        .args(FLAGS.split(' '))
        .args(set("CFLAGS", "").split_whitespace())
        .arg("-c")
        .args(sources)
        .current_dir(&out));
    let objects = fs::read_dir(&out).unwrap().map(|file| file.unwrap().path());
    run(command(&set("AR", "ar")).arg("crs").arg("libshmstore.a").args(objects).current_dir(&out));
    println!("cargo:rustc-link-search=native={out}");
    for library in ["static=shmstore", "pthread", "rt"] {
        println!("cargo:rustc-link-lib={library}");
    }
}

/// Links a library with the same interface: its first two numbers are those of this crate.
fn link_installed() {
    println!("cargo:rerun-if-env-changed=PKG_CONFIG_PATH");
    let major = env!("CARGO_PKG_VERSION_MAJOR");
    let minor: u32 = env!("CARGO_PKG_VERSION_MINOR").parse().unwrap();
    let versions = [format!("shmstore >= {major}.{minor}"), format!("shmstore < {major}.{}", minor + 1)];
    for word in run(command(&set("PKG_CONFIG", "pkg-config")).arg("--libs").args(versions)).split_whitespace() {
        match word.split_at(2) {
            ("-L", folder) => println!("cargo:rustc-link-search=native={folder}"),
            ("-l", library) => println!("cargo:rustc-link-lib={library}"),
            _ => {} // where to look at run time, which cargo passes on to no program
        }
    }
}

/// The value of an environment variable. The build runs again if it changes.
fn set(name: &str, default: &str) -> String {
    println!("cargo:rerun-if-env-changed={name}");
    env::var(name).unwrap_or_else(|_| default.into())
}

/// A command of one or several words, such as `ccache cc`.
fn command(words: &str) -> Command {
    let mut words = words.split_whitespace();
    let mut command = Command::new(words.next().expect("CC, AR and PKG_CONFIG name commands"));
    command.args(words);
    command
}

/// What a command prints. It panics if it fails, with what it has said.
fn run(command: &mut Command) -> String {
    let done = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(done.status.success(), "{command:?} has failed: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}
