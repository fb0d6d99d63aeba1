"""The C tests of the books, each compiled by itself: plain, and under the sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
PARTS = ("books", "hashlist", "blockhash", "blockpool", "kvcache")
FLAGS = {
    "plain": ["-O2"],
    "sanitized": ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}


@pytest.mark.skipif(COMPILER is None, reason="no C compiler here: the C tests are compiled when they run")
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("name", ["test_hashlist", "test_blockhash", "test_blockpool", "test_kvcache"])
def test_c(name: str, flags: str, tmp_path: Path) -> None:
    program = tmp_path / name
    sources = [f"{ROOT}/tests/c/{name}.c", *(f"{ROOT}/csrc/{part}.c" for part in PARTS)]
    options = ["-std=c11", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-D_GNU_SOURCE", *FLAGS[flags], f"-I{ROOT}/csrc"]
    command = [str(COMPILER), *options, *sources, "-o", str(program), "-pthread", "-ldl"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (0, "") == (built.returncode, built.stderr)
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=120)
    assert (0, "") == (ran.returncode, ran.stderr)
