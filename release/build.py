"""Build what a release consists of, from the last commit: the sdist, and a wheel for each processor.

`make dist` runs it with the tools it needs. Each artefact is built twice, in folders of different names, and must have
the same bytes. zig is the compiler: it links with the symbols of an old glibc, and for the other processor too. It
needs the interpreter's Python.h and git, and writes into dist/. Of the environment it takes SHMSTORE_URL, the address
of the repository: without it an index shows no links of the project, and those of the README lead nowhere.
"""

import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from elftools.elf.elffile import ELFFile  # auditwheel needs it, too

from release.version import ROOT, name_source

DIST = ROOT / "dist"
PROCESSORS = ("x86_64", "aarch64")
GLIBC = (2, 28)
FLAGS = "-DNDEBUG -fwrapv -g0"
"""In place of those with which the interpreter was built; csrc/build_ffi.py adds its own."""
BUILD_SDIST = "import setuptools.build_meta as build, sys; build.build_sdist(sys.argv[1])"
BUILD_WHEEL = """
import setuptools.build_meta as build, sys
build.build_wheel(sys.argv[1], {"--build-option": ["--plat-name=" + sys.argv[2]]})
"""


def run(*command: str | Path, folder: Path = ROOT, **environment: str) -> str:
    """Return what a command prints; SystemExit with all of it if the command fails."""
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    text = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed with status {done.returncode}:\n{text}")
    return text


def unpack_commit(folder: Path) -> None:
    """Put the files of the last commit into a folder; they name the repository that `SHMSTORE_URL` says, if it does."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    if url := os.environ.get("SHMSTORE_URL"):
        name_source(folder, url)


def without_times(path: Path, epoch: int) -> None:
    """Write an sdist anew, so that its bytes depend on its files' names, modes and contents alone."""
    packed = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda one: one.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    path.write_bytes(gzip.compress(packed.getvalue(), mtime=epoch))


def build_sdist(folder: Path, epoch: int) -> Path:
    """Build the sdist from the last commit, and put it into a folder."""
    unpack_commit(folder / "commit")
    run(sys.executable, "-c", BUILD_SDIST, folder, folder=folder / "commit")
    (path,) = folder.glob("*.tar.gz")
    without_times(path, epoch)
    return path


def build_wheel(sdist: Path, processor: str, epoch: int) -> Path:
    """Build the wheel for a processor from an sdist, and put it beside it."""
    folder = sdist.parent / processor
    with tarfile.open(sdist) as files:
        files.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    zig = f"{sys.executable} -m ziglang"
    compiler = f"{zig} cc -target {processor}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    run(
        *(sys.executable, "-c", BUILD_WHEEL, sdist.parent, f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{processor}"),
        folder=source,
        CC=compiler,
        LDSHARED=f"{compiler} -shared -s -rtlib=none",  # zig's library has a slow memcpy, which comes before glibc's
        AR=f"{zig} ar",
        RANLIB=f"{zig} ranlib",
        CFLAGS=FLAGS,
        SOURCE_DATE_EPOCH=str(epoch),
        # Each build compiles everything itself.
        ZIG_GLOBAL_CACHE_DIR=str(folder / "cache"),
        ZIG_LOCAL_CACHE_DIR=str(folder / "cache"),
    )
    (path,) = sdist.parent.glob(f"*_{processor}.whl")
    return path


def check_wheel(path: Path) -> None:
    """SystemExit if a wheel needs a newer glibc than its name says, other libraries, or more than the stable API."""
    shown = " ".join(run(sys.executable, "-m", "auditwheel", "show", path).split())
    tag = re.search(r'platform tag: "manylinux_(\d+)_(\d+)_(\w+)"', shown)
    if not tag or (int(tag[1]), int(tag[2])) > GLIBC or not path.stem.endswith(tag[3]):
        sys.exit(f"{path.name} is not what its name says: {shown}")
    with zipfile.ZipFile(path) as files:
        for name in files.namelist():
            if (content := files.read(name)).startswith(b"\x7fELF"):
                symbols = ELFFile(io.BytesIO(content)).get_section_by_name(".dynsym")
                if symbols.get_symbol_by_name("memcpy") is None:
                    sys.exit(f"{path.name}: {name} does not take memcpy from glibc")
            if name.endswith(".abi3.so"):  # by itself: in a wheel, abi3audit takes a linker's script for a library
                extension = files.extract(name, path.parent / f"{path.stem} unpacked")
                run(sys.executable, "-m", "abi3audit", "--strict", "--assume-minimum-abi3", "3.11", extension)


def build(folder: Path, epoch: int, pool: ThreadPoolExecutor) -> list[Path]:
    """Build everything in a new folder, the sdist first."""
    folder.mkdir()
    sdist = build_sdist(folder, epoch)
    return [sdist, *pool.map(lambda processor: build_wheel(sdist, processor, epoch), PROCESSORS)]


def main() -> None:
    """Build everything twice, compare, check and copy."""
    os.umask(0o022)  # a file's mode is part of an archive
    epoch = int(run("git", "log", "-1", "--format=%ct"))
    with TemporaryDirectory() as made, ThreadPoolExecutor(2) as pool:
        first, second = (build(Path(made, name), epoch, pool) for name in ("first", "another"))
        for one, other in zip(first, second, strict=True):
            if (one.name, one.read_bytes()) != (other.name, other.read_bytes()):
                sys.exit(f"two builds of {one.name} differ")
        for wheel in first[1:]:
            check_wheel(wheel)
        shutil.rmtree(DIST, ignore_errors=True)
        DIST.mkdir()
        for path in first:
            shutil.copyfile(path, DIST / path.name)
            print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.stat().st_size:>9,}  {path.name}")


if __name__ == "__main__":
    main()
