//! What `src/lib.rs` declares is what `shmstore.h` declares: C programs that assert it compile.

use shmstore_sys::*;
use std::collections::BTreeSet;
use std::mem::{size_of, MaybeUninit};
use std::path::Path;
use std::process::Command;
use std::{env, fs, slice};

const RUST: &str = include_str!("../src/lib.rs");

/// The header without comments.
fn header() -> String {
    let text = include_str!("../csrc/shmstore.h").split("/*");
    text.map(|part| part.split_once("*/").map_or(part, |(_, code)| code)).collect()
}

/// Compiles a program after the header; panics with the compiler's messages.
fn compile(name: &str, text: &[String]) {
    let source = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::write(&source, format!("#include <stddef.h>\n#include \"shmstore.h\"\n{}", text.concat())).unwrap();
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".into());
    let mut words = compiler.split_whitespace();
    let mut command = Command::new(words.next().unwrap());
    command.args(words).args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]);
    command.arg("-I").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("csrc"));
    let done = command.arg(source).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// What stands between two marks, each time.
fn between<'t>(text: &'t str, start: &str, end: &str) -> Vec<&'t str> {
    text.split(start).skip(1).map(|rest| rest.split(end).next().unwrap()).collect()
}

fn set<'t>(names: impl IntoIterator<Item = &'t str>) -> BTreeSet<&'t str> {
    names.into_iter().map(str::trim).collect()
}

#[test]
fn each_constant_has_its_value() {
    let header = header();
    let mut names = set(between(&header, "#define ", " "));
    let mut text = Vec::new();
    let ours = between(RUST, "constants! {", "\n}")[0].split([',', ';', ':']);
    for (name, value) in ours.filter_map(|one| one.split_once(" = ")) {
        assert!(names.remove(name.trim()), "the header does not have {name}");
        text.push(format!("_Static_assert({name} == {value}, \"\");\n"));
    }
    names.retain(|name| !name.starts_with("SHMSTORE_"));
    assert_eq!(set(["SHMS_EXPECTED_DEFAULTS"]), names);
    compile("constants.c", &text);
}

#[test]
fn each_function_has_its_parameters_and_its_result() {
    let header = header();
    let (_, declared) = header.split_once("uint64_t shms_space_needed").unwrap();
    let theirs = declared.match_indices('(').map(|(at, _)| declared[..at].rsplit([' ', '*', '\n']).next().unwrap());
    let ours = between(RUST, "pub fn ", ";");
    let names = set(ours.iter().map(|one| one.split('(').next().unwrap()));
    assert!(names.len() > 40);
    assert_eq!(set(theirs.filter(|name| name.starts_with("shms_")).chain(["shms_space_needed"])), names);
    let mut text = Vec::new();
    for one in ours {
        let (name, rest) = one.split_once('(').unwrap();
        let (parameters, result) = rest.rsplit_once(')').unwrap();
        let types = parameters.split(',').filter_map(|one| one.split_once(": ")).map(|(_, given)| in_c(given));
        let types = types.collect::<Vec<_>>().join(", ");
        let result = result.split_once("-> ").map_or("void".into(), |(_, given)| in_c(given));
        text.push(format!("{result} {name}({});\n", if types.is_empty() { "void" } else { &types }));
    }
    compile("functions.c", &text);
}

/// `*const *mut T` as `T *const *` is more than the header has: a pointer here has at most one `const`, the first.
fn in_c(rust: &str) -> String {
    let base = rust.trim().rsplit(' ').next().unwrap();
    let c = match base {
        "c_int" | "c_char" | "c_void" => base[2..].into(),
        "u8" | "u16" | "u32" | "u64" => format!("uint{}_t", &base[1..]),
        "i64" => "int64_t".into(),
        _ => base.to_string(),
    };
    let constant = if rust.contains("*const") { "const " } else { "" };
    format!("{constant}{c} {}", "*".repeat(rust.matches('*').count()))
}

/// Asserts the size of a struct, and place and size of each field; does not compile if a field is left out.
macro_rules! layout {
    ($text:ident, $of:ident { $($field:ident),* }) => {
        let zeros = unsafe { MaybeUninit::<$of>::zeroed().assume_init() };
        let start = &zeros as *const _ as usize;
        let $of { $($field),* } = &zeros;
        let name = stringify!($of);
        $text.push(format!("_Static_assert(sizeof({name}) == {}, \"{name}\");\n", size_of::<$of>()));
        $({
            let (field, at) = (stringify!($field), $field as *const _ as usize - start);
            let size = std::mem::size_of_val($field);
            $text.push(format!("_Static_assert(offsetof({name}, {field}) == {at}, \"{name}.{field}\");\n"));
            $text.push(format!("_Static_assert(sizeof((({name} *)0)->{field}) == {size}, \"{name}.{field}\");\n"));
        })*
    };
}

#[test]
fn each_struct_has_its_size_and_its_fields() {
    let mut text = Vec::new();
    layout!(
        text,
        shms_options {
            capacity,
            max_object_size,
            n_readers,
            max_objects,
            n_writers,
            flags,
            mode,
            group,
            n_groups,
            group_sizes,
            reserved
        }
    );
    layout!(text, shms_expected { store, allow_uid, n_readers, end_leases, finds, at_once, options, needed, reserved });
    layout!(text, shms_view { key, meta, payload, payload_size, key_len, meta_len, id });
    layout!(
        text,
        shms_tier_figures {
            there,
            hits,
            hit_bytes,
            misses,
            declined,
            damaged,
            errors,
            skipped,
            published,
            published_bytes,
            refused,
            dropped,
            queued,
            saved_ns,
            open
        }
    );
    layout!(
        text,
        shms_counters {
            puts,
            put_bytes,
            hits,
            misses,
            evictions,
            evicted_bytes,
            deletes,
            refusals,
            cancels,
            more_hits_at_4x,
            more_hits_at_2x,
            more_hits_at_1_5x,
            remote_hits
        }
    );
    layout!(
        text,
        shms_stats {
            capacity,
            max_object_size,
            max_objects,
            n_readers,
            objects,
            used_bytes,
            next_id,
            next_lease,
            open_leases,
            max_leases,
            control_bytes,
            heap_bytes,
            tier,
            counters
        }
    );
    layout!(text, shms_reader_counters { gets, stale, released, finds, find_misses });
    layout!(text, shms_rank_stats { live_views, counters });
    layout!(text, shms_object { key, meta, payload_size, key_len, meta_len, unleased, group, reserved });
    layout!(text, shms_tensor { dtype, offset, size, itemsize, n_dims, shape });
    let all = text.concat();
    let asserted = set(between(&all, "sizeof(shms_", ")"));
    let header = header();
    assert_eq!(
        set(between(&header, "typedef struct shms_", "{").into_iter().filter(|one| !one.contains(';'))),
        asserted
    );
    compile("structs.c", &text);
}

#[test]
fn the_defaults_of_what_is_expected_are_the_same() {
    let ours = &SHMS_EXPECTED_DEFAULTS as *const _ as *const u8;
    let bytes = unsafe { slice::from_raw_parts(ours, size_of::<shms_expected>()) };
    let header = header();
    let theirs = between(&header, "#define SHMS_EXPECTED_DEFAULTS {", "\n")[0];
    assert!(theirs.starts_with("SHMS_ANY_STORE, SHMS_OWN_UID, 0, 0, "));
    assert!(bytes[..16].iter().all(|byte| *byte == 0xff) && bytes[16..].iter().all(|byte| *byte == 0));
}
