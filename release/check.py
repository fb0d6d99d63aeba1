"""Try what `make dist` built, each artefact in an empty environment and wheels without a compiler: `make test-dist`."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from release.build import DIST, GLIBC, ROOT, run
from release.version import version_in

VERSION = version_in("pyproject.toml")
PINS = ("-c", ROOT / "constraints.txt")
MACHINE = os.uname().machine
PART = ("tests/store/test_api.py", "tests/test_refs.py")
"""The part of the suite that runs without --whole: that the installed package has the calls; `make test` tries them."""
COMMANDS = f"""
import contextlib, io, re, shmstore
from shmstore.cli.main import main
def said(*command):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(command)
    return out.getvalue()
assert said("--version").split() == ["shmstore", "{VERSION}"]
with shmstore.ObjectStoreWriter.create(capacity=1 << 20, n_readers=1) as writer:
    assert re.search(f"^{{writer.name}} .* ok *$", said("ls"), re.M)  # its status is 1 if another store is damaged
"""
TENSORS = """
import shmstore, shmstore.multimodal, torch
with shmstore.ObjectStoreWriter.create(capacity=1 << 20, n_readers=1) as writer:
    with shmstore.ObjectStoreReader.attach(writer.handle) as reader:
        assert reader.get(writer.put("a", {"a": torch.ones(9, dtype=torch.bfloat16)}))["a"].sum() == 9
"""
FORK = """
import os, numpy, shmstore
with shmstore.ObjectStoreWriter.create(capacity=1 << 20, n_readers=1) as writer:
    handle, ref = writer.handle, writer.put("a", {"a": numpy.ones(9)})
    if (child := os.fork()) == 0:
        with shmstore.ObjectStoreReader.attach(handle) as reader:
            os._exit(int(reader.get(ref)["a"].sum()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
"""
ENGINE = """
import sys
from pathlib import Path
from tests.vllm import conftest  # the settings of an engine on CPUs
from tests.vllm.inputs import photograph
from tests.vllm.model import make_model
from tests.vllm.server import server
with server(make_model(Path("model")), Path("log"), *sys.argv[1:]) as one:
    assert one.ask(photograph(1))[0] == 200
    assert one.store().facts.puts == 1
"""
ARM = ("python3-minimal:arm64", "libpython3-stdlib:arm64", "libstdc++6:arm64")


@contextmanager
def said(what: str) -> Iterator[None]:
    """Print what was tried, and how long it took."""
    start = time.monotonic()
    yield
    print(f"{time.monotonic() - start:5.0f} s  {what}", flush=True)


def interpreters(kind: str) -> dict[str, str]:
    """Return the Pythons on PATH that can be run, each with its command; those without the GIL if `kind` is "t"."""
    names = [f"python3.{minor}{kind}" for minor in range(11, 16)]
    found = {name: path for name in names if (path := shutil.which(name))}
    return {n: p for n, p in found.items() if not subprocess.run([p, "-c", ""], capture_output=True).returncode}


def empty(folder: Path, interpreter: str | Path, *install: str | Path) -> Path:
    """Return the Python of a new environment into which pip, without a compiler, has installed something."""
    run(interpreter, "-m", "venv", folder)
    python = folder / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:", *PINS)
    run(*pip, *install, folder=folder, PATH=str(folder / "bin"), CC="/bin/false")
    return python


def readme_program(folder: Path) -> Path:
    """Return the README's first program: put and get between two processes."""
    found = re.search(r"^```python\n(.+?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert found
    program = folder / "two_processes.py"
    program.write_text(found[1], encoding="utf-8")
    return program


def try_base(wheel: Path, interpreter: str, folder: Path) -> None:
    """Try the wheel without an extra, and without any other command on PATH."""
    python = empty(folder, interpreter, wheel)
    for command in ((python, readme_program(folder)), (python, "-c", COMMANDS), ("shmstore", "--version")):
        run(*command, folder=folder, PATH=str(folder / "bin"))
    run(python, ROOT / "tests" / "without_torch.py", folder=folder)


def try_torch(wheel: Path, sdist: Path, folder: Path, whole: bool) -> None:
    """Try the extra `torch`, then the suite of the sdist in the same environment, without the package beside it."""
    with said("[torch]: a tensor"):
        python = empty(folder, sys.executable, f"{wheel}[torch]")
        run(python, "-c", TENSORS, folder=folder)
    with said("the suite" if whole else f"a part of the suite: {' '.join(PART)}"):
        run(python, "-m", "pip", "install", "--quiet", "--only-binary=:all:", *PINS, f"{wheel}[dev]")
        copy = tests_alone(sdist, folder)
        some = (*PART, "-m", "not alone") if not whole else ()
        print(run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *some, folder=copy).splitlines()[-1])


def tests_alone(sdist: Path, folder: Path) -> Path:
    """Return what an sdist holds without the package, so that tests import the installed one."""
    with tarfile.open(sdist) as files:
        files.extractall(folder / "unpacked", filter="data")
    (copy,) = (folder / "unpacked").iterdir()
    shutil.rmtree(copy / "shmstore")
    return copy


def try_sdist(sdist: Path, folder: Path) -> None:
    """Let pip build the sdist, with a compiler, in an environment that has only what it asks for.

    It has each module of the checkout, and what a program in C needs.
    """
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PINS, sdist, folder=folder)
    run(python, readme_program(folder), folder=folder)
    (installed,) = folder.glob("lib/python3.*/site-packages/shmstore")
    missing = modules(ROOT / "shmstore") - modules(installed)
    assert not missing, f"what pip has built lacks {missing}"
    flags = run(python, "-m", "shmstore.config", "--cflags", "--libs", folder=folder).split()
    run("cc", ROOT / "examples" / "c" / "producer.c", *flags, "-o", folder / "producer")
    name = f"shmstore-check-{os.getpid()}"
    try:
        run(folder / "producer", name)
    finally:
        Path("/dev/shm", name).unlink(missing_ok=True)


def modules(package: Path) -> set[Path]:
    """Return the modules of a package, and what else Python has there."""
    return {path.relative_to(package) for path in package.rglob("*.py*") if path.suffix != ".pyc"}


def try_vllm(wheel: Path, sdist: Path, vllm: Path, folder: Path) -> None:
    """Run the first command of the guide beside an installed vLLM, and ask it about an image."""
    guide = (ROOT / "docs" / "guides" / "vllm.md").read_text(encoding="utf-8")
    first = re.search(r"^vllm serve MODEL (.+)$", guide, re.M)
    assert first
    run(vllm / "bin" / "python", "-m", "venv", "--without-pip", folder)  # pip is theirs, and what it looks for, too
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python3.*/site-packages")
    (theirs,) = vllm.glob("lib/python3.*/site-packages")
    (packages / "vllm.pth").write_text(f"{theirs}\n")  # path files in there, as of an editable shmstore, are not read
    script = folder / "bin" / "vllm"
    script.write_text(f"#!{python}\nfrom vllm.entrypoints.cli.main import main\nif __name__ == '__main__': main()\n")
    script.chmod(0o755)
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index")
    run(*pip, "--no-deps", "--ignore-installed", wheel)
    run(*pip, f"{wheel}[vllm]")  # the extra asks for nothing that is not there
    copy = tests_alone(sdist, folder)
    assert str(packages) in run(python, "-c", "import shmstore; print(shmstore.__file__)", folder=copy)
    run(python, "-c", ENGINE, *first[1].split(), folder=copy)


def try_aarch64(wheel: Path, folder: Path) -> str:
    """Put and get in the emulator, with a Python from Debian; return what was tried."""
    if not shutil.which("qemu-aarch64") or not shutil.which("apt-get"):
        return "aarch64 was not tried: there is no qemu-aarch64, or no Debian"
    for name in ("lists/partial", "cache/archives/partial", "root"):
        (folder / name).mkdir(parents=True)
    options = ("APT::Architectures=amd64,arm64", f"Dir::State::lists={folder}/lists", f"Dir::Cache={folder}/cache")
    with_options = [word for option in options for word in ("-o", option)]
    subprocess.run(["apt-get", *with_options, "update"], capture_output=True, check=False)  # some sources have no arm64
    depends = run("apt-cache", *with_options, "depends", "--recurse", "--important", *ARM)
    packages = sorted(set(re.findall(r"^ *(?:\|?\w+: )?([a-z0-9.+-]+:arm64)$", depends, re.M)))
    run("apt-get", *with_options, "download", *packages, folder=folder)
    root = folder / "root"
    for package in folder.glob("*.deb"):
        run("dpkg", "-x", package, root)
    if not (root / "lib").exists():  # newer packages have everything in usr/
        (root / "lib").symlink_to("usr/lib")
    (python,) = root.glob("usr/bin/python3.[0-9]*[0-9]")
    glibcs = [word for minor in range(17, GLIBC[1] + 1) for word in ("--platform", f"manylinux_2_{minor}_aarch64")]
    versions = ("--python-version", python.name.removeprefix("python"), "--only-binary=:all:")
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        *PINS,
        *glibcs,
        *versions,
        "--target",
        folder / "packages",
        wheel,
    )
    emulator = ("qemu-aarch64", "-L", root, python, "-c")
    run(*emulator, FORK + COMMANDS, folder=folder, PYTHONPATH=str(folder / "packages"))
    return f"aarch64 in the emulator, {python.name}: put and get between two processes, --version, ls"


def main() -> None:
    """Try each artefact, and print what was tried."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--whole", action="store_true", help="the whole suite, and aarch64 in the emulator")
    parser.add_argument("--vllm", type=Path, metavar="FOLDER", help="the environment of `make test-vllm`")
    given = parser.parse_args()
    kind = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    try:
        (sdist,) = DIST.glob(f"shmstore-{VERSION}.tar.gz")
        wheels = {
            path.stem.partition("manylinux_2_28_")[2]: path for path in DIST.glob(f"*-{VERSION}-*{kind or 'abi3'}-*")
        }
        wheel = wheels[MACHINE]
    except (ValueError, KeyError):
        sys.exit(f"dist/ lacks the sdist or the wheel of {VERSION} for this machine: run `make dist` first")
    with TemporaryDirectory() as made:
        for name, interpreter in interpreters(kind).items():
            with said(f"{name}: put and get between two processes, --version, ls, what works without torch"):
                try_base(wheel, interpreter, Path(made, name))
        try_torch(wheel, sdist, Path(made, "torch"), given.whole)
        with said("the sdist, built by pip"):
            try_sdist(sdist, Path(made, "sdist"))
        if given.vllm:
            with said("[vllm]: the first command of the guide, and an image"):
                try_vllm(wheel, sdist, given.vllm.resolve(), Path(made, "vllm"))
        if given.whole and "aarch64" in wheels and MACHINE != "aarch64":
            start = time.monotonic()
            what = try_aarch64(wheels["aarch64"], Path(made, "aarch64"))
            print(f"{time.monotonic() - start:5.0f} s  {what}")


if __name__ == "__main__":
    main()
