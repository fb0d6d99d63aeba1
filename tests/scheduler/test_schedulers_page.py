"""The programs of docs/schedulers.md run as they stand there."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "schedulers.md"


def run_program(number: int, folder: Path) -> dict[str, Any]:
    programs = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.S | re.M)
    assert 2 == len(programs)
    program = folder / "program.py"
    program.write_text(programs[number], encoding="utf-8")
    return runpy.run_path(str(program))


def test_the_step_loop_finishes_every_request_with_hits_and_preemptions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run_program(0, tmp_path)
    log = names["log"]
    assert {"r0", "r1", "r2"} == set(names["finished"])
    assert 0.0 == names["manager"].usage
    assert "admit r0, 0 tokens found" == log[0]
    assert "admit r1, 8 tokens found" in log
    assert any(line.startswith("preempt") for line in log)
    assert "usage at the end: 0%" == capsys.readouterr().out.splitlines()[-1]
    names["manager"].check_valid()


def test_the_encoder_program_prints_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_program(1, tmp_path)
    assert "['A'] ['A']\n" == capsys.readouterr().out
    names["cache"].check_valid()
