"""A reader that meets EVICTING while the writer dies; in C, because the moment lies between two loads."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_a_reader_believes_evicting_only_if_it_still_stands_after_the_writers_death(tmp_path: Path) -> None:
    program = tmp_path / "test_outlast"
    sources = [*(ROOT / "csrc").glob("*.c"), ROOT / "tests" / "c" / "test_outlast.c"]
    command = [
        "cc",
        "-std=gnu11",
        "-O1",
        "-g",
        "-pthread",
        "-D_GNU_SOURCE",
        "-DSHMS_STEPS",
        f"-I{ROOT / 'csrc'}",
        "-o",
        str(program),
    ]
    subprocess.run([*command, *map(str, sources)], check=True)
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
