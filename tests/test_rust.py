"""The Rust crates with Python: what one puts the other reads, and what a killed process in Rust leaves.

`make test-rust` runs the tests of the crates themselves.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter, StoreFullError
from shmstore.config import flags
from tests.support import SHM


def runs(command: str) -> bool:
    """Say whether there is such a command and it runs: rustup's cargo is one, but has nothing for another user."""
    return bool(shutil.which(command)) and not subprocess.run([command, "--version"], capture_output=True).returncode


if not runs("cargo"):
    pytest.skip("there is no cargo that runs", allow_module_level=True)
pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parents[1]
PROGRAMS = ("--offline", "--quiet", "--manifest-path", ROOT / "tests" / "rust" / "Cargo.toml")
TARGET = ROOT / "rust" / "target"
GUIDE = (ROOT / "docs" / "guides" / "rust.md").read_text(encoding="utf-8")


def cargo(*command: str | Path, **environment: str) -> None:
    done = subprocess.run(
        ["cargo", *command],
        env={**os.environ, "CARGO_TARGET_DIR": str(TARGET), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stdout


@pytest.fixture(scope="module")
def programs() -> Path:
    """Build the example and the other process of these tests; the folder of both."""
    cargo("build", *PROGRAMS)
    return TARGET / "debug"


@contextmanager
def running(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Run a program until the end of the block, and of its input."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.communicate(timeout=60)


def told(process: subprocess.Popen[str], line: str = "") -> str:
    """Return the next line that a program prints, after another one was written to it."""
    assert process.stdin
    assert process.stdout
    if line:
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
    return process.stdout.readline().rstrip("\n")


def test_a_reader_in_python_gets_the_frames_of_a_producer_in_rust(programs: Path, name: str) -> None:
    with running(programs / "producer", name) as producer:
        refs = [told(producer, key) for key in ("first", "second", "first")]
        with ObjectStoreReader.attach(name, rank=0) as reader:
            for ref, byte in zip(refs, (5, 6, 5), strict=True):
                frame = reader.get(ObjectRef.from_bytes(bytes.fromhex(ref)))
                np.testing.assert_array_equal(np.full((480, 640, 3), byte, np.uint8), frame, strict=True)
    assert 0 == producer.returncode
    assert not (SHM / name).exists()


def test_the_worker_of_the_guide_gets_frames(programs: Path, name: str, tmp_path: Path) -> None:
    block = re.search(r"^```python title=\"Fragment: .+?\n(.+?)^```", GUIDE, re.M | re.S)
    assert block
    worker = tmp_path / "worker.py"
    worker.write_text(block[1].replace("target/release", str(programs)).replace('"frames"', repr(name)))
    done = subprocess.run([sys.executable, worker], capture_output=True, text=True, check=False)
    assert (0, "(480, 640, 3)\n" * 2, "") == (done.returncode, done.stdout, done.stderr)
    assert not (SHM / name).exists()


@pytest.mark.skipif(not shutil.which("pkg-config"), reason="there is no pkg-config")
def test_a_program_links_the_library_that_pkg_config_finds(name: str, tmp_path: Path) -> None:
    (found,) = flags(cflags=True)
    lib = Path(found.removeprefix("-I")).parent / "lib"
    asked = {"SHMSTORE_SYS_USE_PKG_CONFIG": "1", "PKG_CONFIG_PATH": str(lib / "pkgconfig"), "CC": "/bin/false"}
    cargo("build", *PROGRAMS, **asked, CARGO_TARGET_DIR=str(tmp_path), RUSTFLAGS=f"-C link-arg=-Wl,-rpath,{lib}")
    with running(tmp_path / "debug" / "producer", name) as producer:
        assert told(producer, "key")
        assert str(lib / "libshmstore.so") in Path(f"/proc/{producer.pid}/maps").read_text()
    assert 0 == producer.returncode


@pytest.mark.usefixtures("programs")
def test_the_fragments_of_the_guide_compile_in_a_crate_of_their_own(tmp_path: Path) -> None:
    blocks = re.findall(r"^```rust title=\"Fragment: .+?\n(.+?)^```", GUIDE, re.M | re.S)
    assert len(blocks) == 2
    cargo("init", "--quiet", "--vcs", "none", "--lib", "--name", "guide", tmp_path)
    with (tmp_path / "Cargo.toml").open("a") as manifest:
        manifest.write(f'shmstore = {{ path = "{ROOT / "rust" / "shmstore"}" }}\n')
    modules = (f"mod fragment{n} {{ #![allow(dead_code)]\n{block}}}\n" for n, block in enumerate(blocks))
    (tmp_path / "src" / "lib.rs").write_text("#![deny(warnings)]\n" + "".join(modules))
    cargo("check", "--quiet", "--offline", "--manifest-path", tmp_path / "Cargo.toml")


@pytest.mark.parametrize("dtype", ["<f4", "bfloat16"])
def test_a_reader_in_rust_sees_what_a_writer_in_python_has_put(dtype: str, programs: Path, name: str) -> None:
    expected = torch.arange(6).reshape(2, 3)
    value = expected.numpy().astype(dtype) if dtype == "<f4" else expected.to(torch.bfloat16)
    with ObjectStoreWriter.create(name, capacity=1 << 20, n_readers=1) as writer:
        with running(programs / "peer", "view", name) as reader:
            line = told(reader, writer.put("cat.jpg", value).to_bytes().hex())
    of_bytes = list(value.tobytes() if isinstance(value, np.ndarray) else value.view(torch.uint8).numpy().tobytes())
    assert f"cat.jpg {dtype} [2, 3] {of_bytes}" == line


def test_nothing_is_left_of_a_put_in_which_a_writer_in_rust_is_killed(programs: Path, name: str) -> None:
    with running(programs / "peer", "put", name) as peer:
        assert "inside" == told(peer)
        peer.kill()
        peer.wait()
        with ObjectStoreWriter.recover(name) as writer:
            assert (True, False) == (writer.is_cached("before"), writer.is_cached("inside"))
            writer.delete("before")
            writer.cancel_all()
            writer.put("whole", np.zeros((1 << 20) - 128, np.uint8))


def test_a_view_of_a_reader_in_rust_ends_with_its_process(programs: Path, name: str) -> None:
    with ObjectStoreWriter.create(name, capacity=1 << 20, n_readers=1) as writer:
        with running(programs / "peer", "view", name) as peer:
            assert told(peer, writer.put("seen", np.zeros(8, np.uint8)).to_bytes().hex())
            whole = np.zeros((1 << 20) - 128, np.uint8)
            with pytest.raises(StoreFullError):
                writer.put("whole", whole)
            peer.kill()
            peer.wait()
            writer.put("whole", whole, timeout=60)


def test_a_claim_in_rust_excludes_python_until_its_process_is_killed(programs: Path, name: str) -> None:
    with ObjectStoreWriter.create(name, capacity=1 << 20, n_readers=2) as writer:
        with running(programs / "peer", "claim", name) as peer:
            assert "Claimed" == told(peer)
            with ObjectStoreReader.attach(name, rank=1) as reader:
                assert reader.find_or_claim("key") is None
                assert writer.claimed("key")
                peer.kill()
                peer.wait()
                claim = reader.find_or_claim("key", wait=60)
                assert claim
                claim.end()
