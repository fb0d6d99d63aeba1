"""Test what `pip install shmstore` brings today, without the pins, on the newest Python here: `make test-newest`.

torch comes with it only as a build for CPUs. A Python for which pip finds none but those for CUDA, of some 3 GB, runs
the tests that import no torch, and conftest.py skips the others.

With `--here` it takes the Python that runs this. With `--can-be-had` it sets nothing up: exit status 0 if there is a
newer one.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYENV = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
BASE = ("setuptools>=77", "wheel", "cffi", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "packaging")
TESTS = ("serde", "store", "multimodal", "tiers", "test_refs.py", "test_c_library.py")


def newest() -> str | None:
    """Return the newest Python of a released version that runs; pyenv's names run only for versions it was told."""
    for minor in range(15, sys.version_info.minor, -1):
        name = f"python3.{minor}"
        for found in (shutil.which(name), *PYENV.glob(f"versions/3.{minor}.*/bin/{name}")):
            if found and not subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode:
                return str(found)
    return None


def torch_for_cpus(python: Path) -> str | None:
    """Return the newest torch if pip finds it for CPUs, else the one of constraints.txt if that is for CPUs."""
    (pinned,) = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    options = ["-m", "pip", "-qq", "install", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-"]
    for asked in ("torch", pinned):
        done = subprocess.run([python, *options, asked], capture_output=True, check=False)
        for found in json.loads(done.stdout)["install"] if not done.returncode else ():
            if not any("cuda" in needed or "nvidia" in needed for needed in found["metadata"]["requires_dist"]):
                return f"torch=={found['metadata']['version']}"
    return None


def run(python: str, *options: str) -> int:
    start = time.monotonic()
    folder = ROOT / ".venv-newest"
    subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
    python_there = folder / "bin" / "python"
    torch = torch_for_cpus(python_there)
    pip = (python_there, "-m", "pip", "-qq", "--disable-pip-version-check", "install")
    subprocess.run([*pip, *BASE, *([torch] if torch else [])], check=True)
    subprocess.run([*pip, "--no-build-isolation", "--editable", f"{ROOT}[metrics,redis]"], check=True)
    listed = subprocess.run([python_there, "-m", "pip", "list", "--format", "freeze"], capture_output=True, text=True)
    print(python, *sorted(listed.stdout.split()), "" if torch else "without torch", flush=True)
    tests = [ROOT / "tests" / name for name in TESTS]
    if not torch:
        subprocess.run([python_there, ROOT / "tests" / "without_torch.py"], check=True)
    command = (python_there, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider")
    chosen = ("-o", "addopts=", "-m", "not slow and not alone and not checkout", *options)
    status = subprocess.run([*command, *chosen, *tests], cwd=ROOT, check=False).returncode
    print(f"{time.monotonic() - start:.0f} s")
    return status


if __name__ == "__main__":
    given = sys.argv[1:]
    if given == ["--can-be-had"]:
        sys.exit(newest() is None)
    here = "--here" in given
    sys.exit(run((None if here else newest()) or sys.executable, *given[here:]))
