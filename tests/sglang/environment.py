"""Set up the virtual environment of the tests in SGLang: `python3 tests/sglang/environment.py FOLDER`, some 3 GB.

SGLang's wheel asks for CUDA. On a CPU it needs these patches of the environment, none of SGLang:

* the packages that `requirements.txt` names, without what they ask for;
* `kernels.py` in the place of its kernels, and `operators.py` before all;
* shmstore, as the checkout has it, whose plug-in SGLang finds by its entry point.

With `--can-be-had` it sets nothing up: exit status 0 if pip finds the distribution, else 1.
"""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

VERSION = "0.5.23"
HERE = Path(__file__).resolve().parent
TORCH = "torch==2.13.0"


def pip(python: Path | str, *arguments: str, check: bool = True) -> int:
    command = [python, "-m", "pip", "-qq", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=check, capture_output=not check).returncode


def can_be_had() -> bool:
    wheel = f"sglang=={VERSION}"
    return 0 == pip(sys.executable, "install", "--dry-run", "--no-deps", "--ignore-installed", wheel, check=False)


def set_up(folder: Path) -> None:
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    tools = ("setuptools>=77", "wheel", "cffi>=1.17", "pytest>=8", "pytest-timeout>=2.3")
    pip(python, "install", TORCH, *tools)
    pip(python, "install", "--no-deps", "--requirement", str(HERE / "requirements.txt"))
    (packages,) = folder.glob("lib/python3.*/site-packages")
    shutil.copy(HERE / "kernels.py", packages / "sgl_kernel.py")
    shutil.copy(HERE / "operators.py", packages / "sgl_operators.py")
    (packages / "sgl_operators.pth").write_text("import sgl_operators\n")
    pip(python, "install", "--no-build-isolation", "--no-deps", "--editable", str(HERE.parent.parent))
    (folder / ".made").touch()


if __name__ == "__main__":
    if sys.argv[1:] == ["--can-be-had"]:
        sys.exit(0 if can_be_had() else 1)
    set_up(Path(sys.argv[1]).resolve())
