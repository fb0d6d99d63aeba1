"""The recorded traces are answered line by line."""

from __future__ import annotations

import itertools
from pathlib import Path

from tests.scheduler.replay import differences, lines

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "kv.jsonl.gz"


def test_every_recorded_line_is_answered_exactly() -> None:
    trace = list(lines(GOLDEN))
    assert 48 == sum("cfg" in line for line in trace)
    assert [] == list(itertools.islice(differences(iter(trace)), 3))
