"""The recorded traces are answered line by line."""

from __future__ import annotations

import itertools

import pytest

from tests.scheduler.helpers import golden_file
from tests.scheduler.replay import differences, lines

GOLDEN = golden_file()
pytestmark = pytest.mark.skipif(
    GOLDEN is None, reason="the recorded traces (shared/golden/kv.jsonl.gz) are not beside the repository"
)


def test_every_recorded_line_is_answered_exactly() -> None:
    trace = list(lines(GOLDEN))
    assert 48 == sum("cfg" in line for line in trace)
    assert [] == list(itertools.islice(differences(iter(trace)), 3))


@pytest.mark.parametrize(
    "op",
    ["req", "lookup", "alloc_rest", "step", "common", "stats", "events", "state", "enc_step", "e_freed", "e_state"],
)
def test_the_replay_notices_one_changed_answer_of_each_kind(op: str) -> None:
    trace = list(itertools.islice(lines(GOLDEN), 30_000))
    number = next(i for i, line in enumerate(trace) if line.get("op") == op and line["want"] not in (None, [], [0]))
    want = trace[number]["want"]
    trace[number]["want"] = (
        {**want, "free": -1} if isinstance(want, dict) else [*want, -1] if isinstance(want, list) else "other"
    )
    start = max(i for i in range(number) if "cfg" in trace[i])
    assert [number - start + 1] == [at for at, _, _ in differences(iter(trace[start : number + 50]))]
