"""What a release consists of: the sdist builds the wheel, and the wheel works without the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from release.version import name_source, version_in

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parent.parent
BUILT = ("__pycache__", "*.egg-info", "*.so", "_shmstore.c", "include", "lib", "build", "dist", "site")
BUILD_SDIST = "import setuptools.build_meta as build; build.build_sdist('../dist')"
PROGRAM = """
import shmstore, shmstore.bindings._shmstore as extension
with shmstore.ObjectStoreWriter.create(capacity=1 << 20, n_readers=1) as writer:
    with shmstore.ObjectStoreReader.attach(writer.handle) as reader:
        assert b"a value" == reader.get(writer.put("a key", b"a value"))
print(shmstore.__file__, extension.__file__, sep="\\n")
"""


def run(*command: str | Path, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


def sources(package: Path) -> set[Path]:
    return {path.relative_to(package) for path in package.rglob("*.py*") if path.suffix != ".pyc"}


def test_the_sdist_builds_a_wheel_that_works_where_there_is_no_checkout(tmp_path: Path, name: str) -> None:
    """This is what `pip install` of an sdist does; the extension, which takes most of the time, is compiled once."""
    clone, environment, elsewhere = (tmp_path / name for name in ("clone", "environment", "elsewhere"))
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".*", *BUILT))
    run(sys.executable, "-c", BUILD_SDIST, folder=clone)
    shutil.rmtree(clone)

    venv.create(environment)
    python = environment / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    # The dependencies and pip are those that run this test. Python ignores path files in a folder that a path file
    # names, so an editable installation of the checkout is not seen.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    elsewhere.mkdir()
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    offline = ("--no-deps", "--no-index")
    (sdist,) = (tmp_path / "dist").iterdir()
    run(*pip, "wheel", *offline, "--no-build-isolation", sdist, folder=elsewhere)
    (wheel,) = elsewhere.iterdir()
    assert re.fullmatch(r"shmstore-[\d.]+-cp311-abi3-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as files:
        folders = {name.split("/")[0] for name in files.namelist()}
    assert {"shmstore", wheel.name.split("-cp")[0] + ".dist-info"} == folders
    run(*pip, "install", *offline, "--ignore-installed", wheel, folder=elsewhere)

    installed = packages / "shmstore"
    package, extension = map(Path, run(python, "-I", "-c", PROGRAM, folder=elsewhere).splitlines())
    assert (installed, installed / "bindings") == (package.parent, extension.parent)
    assert sources(ROOT / "shmstore") == sources(installed)

    flags = run(python, "-I", "-m", "shmstore.config", "--cflags", "--libs", folder=elsewhere).split()
    assert f"-L{installed / 'lib'}" in flags
    run("cc", ROOT / "examples" / "c" / "producer.c", *flags, "-o", "producer", folder=elsewhere)
    run(elsewhere / "producer", name, folder=elsewhere)


@pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="not a clone, in which git knows which files are the project's"
)
def test_the_sdist_has_every_file_of_the_project(tmp_path: Path) -> None:
    files = run("git", "ls-files", folder=ROOT).splitlines()
    for name in files:
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "clone" / name)
    run(sys.executable, "-c", BUILD_SDIST, folder=tmp_path / "clone")
    (sdist,) = (tmp_path / "dist").iterdir()
    with tarfile.open(sdist) as packed:
        inside = {name.partition("/")[2] for name in packed.getnames() if "egg-info" not in name}
    assert set(files) == {name for name in inside if (tmp_path / "clone" / name).is_file()} - {"PKG-INFO", "setup.cfg"}


def test_an_index_is_told_where_the_source_is(tmp_path: Path) -> None:
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    with (tmp_path / "README.md").open("a") as readme:
        readme.write("[elsewhere](https://example.org), [here](#figures)\n")
    name_source(tmp_path, "https://example.org/shmstore")
    at = f"https://example.org/shmstore/blob/v{version_in('pyproject.toml')}/"
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert f"{at}CHANGELOG.md" == project["urls"]["Changelog"]
    before, after = (re.findall(r"\]\((.+?)\)", (folder / "README.md").read_text()) for folder in (ROOT, tmp_path))
    assert len(before) > 30
    assert [*(at + link for link in before), "https://example.org", "#figures"] == after


@pytest.mark.parametrize(
    ("version", "interface"), [("0.1.0", "0.1"), ("0.1.0.post1", "0.1"), ("0.2.dev3", "0.2"), ("1.12rc1", "1.12")]
)
def test_the_name_of_the_c_library_has_two_numbers(version: str, interface: str) -> None:
    program = """
import runpy, setuptools, sys
setuptools.setup = lambda **given: None
print(runpy.run_path("setup.py")["interface"](sys.argv[1]))
"""
    assert f"{interface}\n" == run(sys.executable, "-c", program, version, folder=ROOT)


def test_a_python_without_the_gil_gets_a_wheel_of_its_own() -> None:
    """Its interface of C is not stable, and setuptools refuses to say so."""
    program = """
import runpy, setuptools, sys, sysconfig
sysconfig.get_config_vars()["Py_GIL_DISABLED"] = int(sys.argv[1])
setuptools.setup = lambda **given: print("py_limited_api" in given["options"].get("bdist_wheel", {}))
runpy.run_path("setup.py")
"""
    assert ["True\n", "False\n"] == [run(sys.executable, "-c", program, given, folder=ROOT) for given in ("0", "1")]


def test_a_checkout_that_is_not_built_says_how_to_go_on(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "shmstore", tmp_path / "shmstore", ignore=shutil.ignore_patterns(*BUILT))
    command = (sys.executable, "-c", "import shmstore; shmstore.ObjectStoreWriter")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (1, "") == (done.returncode, done.stdout)
    assert f"not built in {tmp_path} (hint:" in done.stderr
    assert "pip install --editable ." in done.stderr
