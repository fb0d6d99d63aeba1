"""The examples run, print what they should, and leave nothing behind."""

import subprocess
import sys
from pathlib import Path

from tests.support import SHM

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_small_engine_serves_its_requests_and_ends_all_leases() -> None:
    engine = EXAMPLES / "engine.py"
    assert len(engine.read_text().splitlines()) < 150
    command = [sys.executable, str(engine)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        out, err = running.communicate(timeout=120)
    assert (0, "") == (running.returncode, err)
    both = 8 * 3 * 64 * 64 * (len("beach") + len("mountain"))
    lines = out.splitlines()
    assert lines[0].startswith("rejected, request 0")
    assert [f"answers: [({request}, 0, {both}), ({request}, 1, {both})]" for request in (1, 2, 2, 2)] == lines[1:-1]
    assert "clips decoded: 2, CacheInfo(hits=3, total=5), open leases: 0" == lines[-1]
    assert not [*SHM.glob(f"shmstore-{running.pid}-*")]
