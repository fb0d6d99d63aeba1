"""The C library of the package: its flags, its header, what it exports, and that Python reads what C has put."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmstore import CorruptStoreError, MsgpackSerde, ObjectRef, ObjectStoreReader, ObjectStoreWriter
from shmstore.config import flags
from tests.support import SHM

ROOT = Path(__file__).parents[1]
PRODUCER = ROOT / "examples" / "c" / "producer.c"
GUIDE = ROOT / "docs" / "guides" / "c.md"
WIRE = ROOT / "tests" / "data" / "wire.txt"
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
(INCLUDE,) = flags(cflags=True)
HEADER = Path(INCLUDE.removeprefix("-I"), "shmstore.h")
(SHARED,) = HEADER.parents[1].glob("lib/libshmstore.so.*")
EXPORTED = set(re.findall(r"(shms_\w+)\(", re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)))
compiles = pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")


def run(*command: str | Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LD_")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def told(*options: str) -> list[str]:
    return run(sys.executable, "-m", "shmstore.config", *options).split()


@contextmanager
def produced(program: Path, store: str) -> Iterator[ObjectRef]:
    """Run the producer until the end of the block; its reference."""
    with subprocess.Popen([program, store], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout
            yield ObjectRef.from_bytes(bytes.fromhex(running.stdout.readline()))
        finally:
            running.communicate("\n", timeout=60)
    assert 0 == running.returncode


@compiles
@pytest.mark.parametrize("how", [["--libs"], ["--libs", "--static"]], ids=" ".join)
def test_a_producer_in_c_puts_what_a_reader_in_python_gets(how: list[str], tmp_path: Path, name: str) -> None:
    assert len(PRODUCER.read_text().splitlines()) <= 80
    program = tmp_path / "producer"
    run("cc", "-std=c11", *STRICT, PRODUCER, *told("--cflags", *how), "-o", program)
    assert ("libshmstore.so" in run("ldd", program)) == ("--static" not in how)
    expected = np.arange(6, dtype=np.float32).reshape(2, 3)
    with produced(program, name) as ref, ObjectStoreReader.attach(name, rank=0) as reader:
        np.testing.assert_array_equal(expected, reader.get(ref), strict=True)
    assert not (SHM / name).exists()

    # as one of several writers, which hand out what the others have put
    with ObjectStoreWriter.create(name, capacity=1 << 20, n_readers=1, n_writers=2) as writer:
        with produced(program, name) as ref, ObjectStoreReader.attach(name, rank=0) as reader:
            again = writer.get_cached("cat.jpg")
            np.testing.assert_array_equal(expected, reader.get(again), strict=True)
            assert ref != again
            np.testing.assert_array_equal(expected, reader.get(ref), strict=True)


def built(folder: Path, fragment: str, main: str) -> Path:
    """Return a program made of a fragment of the guide and its main."""
    text = GUIDE.read_text(encoding="utf-8")
    block = re.search(rf"^```c title=\"Fragment: {fragment}.+?\n(.+?)^```", text, re.M | re.S)
    assert block
    source, program = folder / "program.c", folder / "program"
    source.write_text(block[1] + main)
    run("cc", "-std=gnu11", *STRICT, source, *told("--cflags", "--libs"), "-o", program)
    return program


@compiles
def test_of_two_programs_of_the_guide_one_makes_the_object(tmp_path: Path, name: str) -> None:
    main = """
#include <stdio.h>
#include <stdlib.h>
int main(int n, char **given) {
    shms_expected finds = SHMS_EXPECTED_DEFAULTS;
    shms_object o = {.key = "k", .key_len = 1, .payload_size = 5, .unleased = 1};
    shms_writer *w;
    shms_reader *r = NULL;
    shms_view *v = NULL;
    finds.finds = 1;
    int rc = n == 3 ? shms_writer_join(&w, given[1], SHMS_ANY_ARENA, &finds) : 99;
    if (rc == SHMS_OK && (rc = shms_reader_attach(&r, given[1], (uint32_t)atoi(given[2]), &finds)) == SHMS_OK)
        rc = find_or_make(w, r, &o, "bytes", &v);
    if (rc == SHMS_OK)
        printf("%.5s %llu\\n", v->payload, (unsigned long long)v->id);
    return -rc;
}
"""
    program = built(tmp_path, "one makes", main)
    with ObjectStoreWriter.create(name, capacity=1 << 20, n_readers=2, n_writers=3):
        both = [subprocess.Popen([program, name, str(rank)], stdout=subprocess.PIPE) for rank in range(2)]
        (first, second) = [process.communicate(timeout=60)[0] for process in both]
    assert first == second
    assert first.startswith(b"bytes ")
    assert [0, 0] == [process.returncode for process in both]


@compiles
def test_the_reader_of_the_guide_reads_what_was_put(tmp_path: Path, name: str) -> None:
    main = """
int main(int n, char **given) {
    uint8_t ref[SHMS_REF_SIZE];
    return n == 2 && fread(ref, sizeof ref, 1, stdin) == 1 ? -show(given[1], ref) : 99;
}
"""
    program = built(tmp_path, "a reader", main)
    with ObjectStoreWriter.create(name, capacity=1 << 20, n_readers=1) as writer:
        ref = writer.put("cat.jpg", np.zeros(16, np.float32)).to_bytes()
        first = subprocess.run([program, name], input=ref, capture_output=True, check=False)
        assert (0, b"cat.jpg: 64 bytes, <f4 of 16\n") == (first.returncode, first.stdout)
        writer.delete("cat.jpg")
        assert 9 == subprocess.run([program, name], input=ref, capture_output=True, check=False).returncode, "ESTALE"


def test_the_guide_says_what_to_do_after_each_error() -> None:
    table = GUIDE.read_text(encoding="utf-8").partition("| code |")[2].partition("\n\n")[0]
    codes = re.findall(r"^#define (SHMS_E[A-Z]+) -", HEADER.read_text(), flags=re.M)
    assert sorted(codes) == sorted(re.findall(r"SHMS_E[A-Z]+", table))


@compiles
@pytest.mark.parametrize(("compiler", "standard", "language"), [("cc", "c11", "c"), ("c++", "c++17", "c++")])
def test_the_header_compiles_and_links(compiler: str, standard: str, language: str, tmp_path: Path) -> None:
    if not shutil.which(compiler):
        pytest.skip(f"there is no {compiler}")
    source, program = tmp_path / "source", tmp_path / "program"
    body = "shms_expected e = SHMS_EXPECTED_DEFAULTS; puts(e.store < 0 ? shms_version() : shms_last_error());"
    source.write_text(f"#include <shmstore.h>\n#include <stdio.h>\nint main(void) {{ {body} }}\n")
    linked = ("-x", "none", *told("--cflags", "--libs"), "-o", str(program))
    run(compiler, f"-std={standard}", *STRICT, "-x", language, source, *linked)
    assert run(program) == defined("SHMSTORE_VERSION").strip('"') + "\n"


@pytest.mark.skipif(not shutil.which("pkg-config"), reason="there is no pkg-config")
def test_pkg_config_says_the_same() -> None:
    (folder,) = told("--pkgconfigdir")

    def asked(*options: str) -> list[str]:
        words = run("env", f"PKG_CONFIG_PATH={folder}", "pkg-config", "shmstore", *options).split()
        return [word.replace("/lib/pkgconfig/../..", "") for word in words]

    assert told("--cflags", "--libs") == asked("--cflags", "--libs")
    assert told("--static", "--libs")[1:] == asked("--static", "--libs")[-2:]
    assert [defined("SHMSTORE_VERSION").strip('"')] == asked("--modversion")


def test_config_without_a_question_is_an_error() -> None:
    done = subprocess.run([sys.executable, "-m", "shmstore.config"], capture_output=True, text=True, check=False)
    assert 2 == done.returncode


def defined(constant: str) -> str:
    found = re.search(rf"^#define {constant} (\S+)", HEADER.read_text(), flags=re.M)
    assert found
    return found[1]


@pytest.mark.skipif(not shutil.which("nm"), reason="there is no nm")
def test_the_library_exports_what_the_header_declares_and_nothing_else() -> None:
    assert EXPORTED == {line.split()[-1] for line in run("nm", "-D", "--defined-only", SHARED).splitlines()}
    assert f".{defined('SHMSTORE_VERSION')[1:-1]}".startswith(SHARED.suffixes[-2] + SHARED.suffixes[-1])


@compiles
def test_python_uses_its_own_core_in_a_program_that_has_another_version(tmp_path: Path) -> None:
    other = tmp_path / "other.so"
    source = "".join(f"int {name}(void) {{ __builtin_trap(); }}\n" for name in EXPORTED)
    subprocess.run(["cc", "-shared", "-fPIC", "-xc", "-", "-o", other], input=source, text=True, check=True)
    program = """
import shmstore
with shmstore.ObjectStoreWriter.create(capacity=1 << 20, n_readers=1) as writer:
    with shmstore.ObjectStoreReader.attach(writer.handle) as reader:
        assert 1 == reader.get(writer.put("k", 1))
"""
    run("env", f"LD_PRELOAD={other}", sys.executable, "-c", program)


@pytest.mark.parametrize("shape", [(), (0,), (127, 128, 255, 256), (2**16 - 1,), (2**16, 0), (0, 2**32), (1,) * 12])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "<f4", "|u1", ">c16"])
def test_the_metadata_of_a_tensor_is_that_of_the_serializer(dtype: str, shape: Sequence[int]) -> None:
    library = ctypes.CDLL(str(SHARED))
    out, dims = ctypes.create_string_buffer(int(defined("SHMS_TENSOR_META"))), (ctypes.c_uint64 * len(shape))(*shape)
    length = library.shms_tensor_meta(out, dtype.encode(), dims, len(shape))
    serde = MsgpackSerde()
    if dtype[0] in "<|>":
        template: object = np.broadcast_to(np.zeros((), dtype), shape)
    else:
        template = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    assert serde.layout(template).meta == out.raw[:length]


@pytest.mark.parametrize("line", [line for line in WIRE.read_text().splitlines() if line[0] != "#"])
def test_python_reads_and_writes_the_metadata_that_c_reads(line: str) -> None:
    packed, size, kind, *what = line.split(" ", 3)
    meta, payload, serde = bytes.fromhex(packed), bytearray(min(int(size), 1 << 20)), MsgpackSerde()
    if kind == "corrupt":
        with pytest.raises(CorruptStoreError):
            serde.decode(meta, payload)
        return
    value: Any = serde.decode(meta, payload)
    assert meta == serde.encode(value).meta
    if kind == "value":
        assert what == [repr(value)]
    elif kind != "other":
        dtype, _, nbytes, *shape = what[0].split()
        assert kind == {torch.Tensor: "tensor", np.ndarray: "array"}[type(value)]
        name = str(getattr(value.dtype, "str", value.dtype)).removeprefix("torch.")
        assert (dtype, int(nbytes)) == (name, value.nbytes)
        assert [*value.shape] == [*map(int, shape)]


def test_the_dtypes_of_numbers_are_taken_and_no_others() -> None:
    library, out = ctypes.CDLL(str(SHARED)), ctypes.create_string_buffer(int(defined("SHMS_TENSOR_META")))
    of_torch = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
    of_torch.add("bcomplex32")  # torch 2.15's
    of_numpy = {np.dtype(code).str for code in "?bhiqBHIQefdFD"}
    others = {name for name in of_torch if re.match(r"u?int[1-7]$|bits|q", name)}  # parts of bytes, quantised
    names = of_torch | of_numpy | {"float", "half", "<M8[ns]", "|S3", "=f4", "|O"}
    taken = {name for name in names if library.shms_tensor_meta(out, name.encode(), None, 0) > 0}
    assert of_torch - others | of_numpy == taken


def test_each_code_has_a_text_of_its_own() -> None:
    library = ctypes.CDLL(str(SHARED))
    library.shms_strerror.restype = ctypes.c_char_p
    codes = [int(code) for code in re.findall(r"^#define SHMS_(?:OK|E[A-Z]+) (0|-\d+)", HEADER.read_text(), flags=re.M)]
    assert len(codes) == len(set(codes)) > 28
    texts = [library.shms_strerror(code) for code in [*codes, 1]]
    assert len(texts) == len(set(texts))
    assert {library.shms_strerror(1)} == {library.shms_strerror(code) for code in (min(codes) - 1, -(2**31), 2**31 - 1)}
