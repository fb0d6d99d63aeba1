"""Set up the virtual environment of the tests in SGLang: `python3 tests/sglang/environment.py FOLDER`, some 3 GB.

SGLang's wheel asks for CUDA. On a CPU it needs these patches of the environment, none of SGLang:

* the packages that `requirements.txt` names, without what they ask for;
* `kernels.py` in the place of its kernels, and `operators.py` before all;
* shmstore, as the checkout has it, whose plug-in SGLang finds by its entry point.
"""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
TORCH = "torch==2.13.0"


def pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "-qq", "--disable-pip-version-check", *arguments], check=True)


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
    set_up(Path(sys.argv[1]).resolve())
