"""The examples run, print what they should, and leave nothing behind."""

import subprocess
import sys
from pathlib import Path

from tests.support import SHM

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(example: str) -> list[str]:
    """Run an example and all of its processes, which share its pipes, to their ends; return its lines."""
    command = [sys.executable, str(EXAMPLES / example)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        out, err = running.communicate(timeout=120)
    assert (0, "") == (running.returncode, err)
    assert not [*SHM.glob(f"*-{running.pid}*")]
    return out.splitlines()


def test_the_small_engine_survives_its_api_server_and_decodes_nothing_again() -> None:
    assert len((EXAMPLES / "engine.py").read_text().splitlines()) < 200
    rejected, *answers, stats = run("engine.py")
    assert rejected.startswith("rejected, request 0")
    total = 8 * 3 * 64 * 64 * (len("beach") + len("mountain"))
    expected = []
    for request, samples, decoded in ((1, 1, 2), (2, 3, 2), (3, 1, 0)):  # the last one after the kill
        found = [[(request, rank, total) for rank in range(2)]] * samples
        expected.append(f"answers: {found}, clips decoded: {decoded}")
    assert expected == answers
    assert "CacheInfo(hits=2, total=2), open leases: 0" == stats
