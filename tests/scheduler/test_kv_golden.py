"""The recorded traces are answered line by line."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.replay import differences, lines

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "kv.jsonl.gz"


@pytest.fixture(scope="module")
def trace() -> list[dict[str, Any]]:
    return list(lines(GOLDEN))


def test_every_recorded_line_is_answered_exactly(trace: list[dict[str, Any]]) -> None:
    assert 48 == sum("cfg" in line for line in trace)
    assert [] == list(itertools.islice(differences(iter(trace)), 3))


@pytest.mark.parametrize(
    "op",
    ["req", "lookup", "alloc_rest", "step", "common", "stats", "events", "state", "enc_step", "e_freed", "e_state"],
)
def test_the_replay_notices_one_changed_answer_of_each_kind(op: str, trace: list[dict[str, Any]]) -> None:
    number = next(i for i, line in enumerate(trace) if line.get("op") == op and line["want"] not in (None, [], [0]))
    want = trace[number]["want"]
    wrong = {**want, "free": -1} if isinstance(want, dict) else [*want, -1] if isinstance(want, list) else "other"
    start = max(i for i in range(number) if "cfg" in trace[i])
    changed = [*trace[start:number], {**trace[number], "want": wrong}, *trace[number + 1 : number + 50]]
    assert [number - start + 1] == [at for at, _, _ in differences(iter(changed))]
