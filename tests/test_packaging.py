"""What a release consists of. `make test-dist` tries the artefacts themselves."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from release.version import name_source, version_in

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parent.parent
BUILT = ("__pycache__", "*.egg-info", "*.so", "_shmstore.c", "include", "lib", "build", "dist", "site")
BUILD_SDIST = "import setuptools.build_meta as build; build.build_sdist('../dist')"


def run(*command: str | Path, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="not a clone, in which git knows which files are the project's"
)
def test_the_sdist_has_every_file_of_the_project(tmp_path: Path) -> None:
    files = set(run("git", "ls-files", folder=ROOT).splitlines())
    for link in [name for name in files if (ROOT / name).is_dir()]:  # an sdist has what it leads to
        files.remove(link)
        files |= {f"{link}/{path.name}" for path in (ROOT / link).iterdir()}
    for name in files:
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "clone" / name)
    run(sys.executable, "-c", BUILD_SDIST, folder=tmp_path / "clone")
    (sdist,) = (tmp_path / "dist").iterdir()
    with tarfile.open(sdist) as packed:
        inside = {name.partition("/")[2] for name in packed.getnames() if "egg-info" not in name}
    assert files == {name for name in inside if (tmp_path / "clone" / name).is_file()} - {"PKG-INFO", "setup.cfg"}


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
    assert len(before) > 15
    made = [at.replace("blob", "raw") + link if link.endswith(".svg") else at + link for link in before]  # a picture
    assert [*made, "https://example.org", "#figures"] == after


def test_a_private_name_of_redis_py_is_there_in_the_versions_that_we_admit() -> None:
    """Admit a major version once it has the name, or `tiers/resp.py` has a parser of its own."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert ["redis>=6,<9"] == extras["redis"]
    pytest.importorskip("redis")
    program = "from redis._parsers import _RESP2Parser"
    assert not subprocess.run([sys.executable, "-c", program], check=False).returncode, (
        "redis-py has moved its parser in Python: admit only versions before this one in pyproject.toml, then let "
        "`tiers/resp.py` parse answers itself, which are a status, an error, an integer or a bulk string"
    )


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
    """Its interface of C is stable from 3.15 on, and before that setuptools refuses to say so."""
    program = """
import runpy, setuptools, sys, sysconfig
sysconfig.get_config_vars()["Py_GIL_DISABLED"] = int(sys.argv[1])
sys.version_info = (3, int(sys.argv[2]))
setuptools.setup = lambda **given: print(given["options"]["bdist_wheel"]["py_limited_api"])
runpy.run_path("setup.py")
"""
    asked = {"0 11": "cp311", "0 15": "cp311", "1 14": "False", "1 15": "cp315"}
    assert asked == {given: run(sys.executable, "-c", program, *given.split(), folder=ROOT).strip() for given in asked}


def test_a_checkout_that_is_not_built_says_how_to_go_on(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "shmstore", tmp_path / "shmstore", ignore=shutil.ignore_patterns(*BUILT))
    command = (sys.executable, "-c", "import shmstore; shmstore.ObjectStoreWriter")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (1, "") == (done.returncode, done.stdout)
    assert f"not built in {tmp_path} (hint:" in done.stderr
    assert "pip install --editable ." in done.stderr
