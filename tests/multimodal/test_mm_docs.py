"""The example for engine authors runs as it is printed, and is as short as it is said to be."""

import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "engine-authors.md"


def test_the_example_runs_and_prints_what_it_should(tmp_path):
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) < 60
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(PAGE.parents[1]), "PATH": "", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    saw = f"the model saw [{3 * 224 * 224 * 0.2:.1f}"[:19]
    assert [True, True, True] == [
        done.stdout.splitlines()[0].startswith(saw),
        done.stdout.splitlines()[1] == done.stdout.splitlines()[0],
        done.stdout.splitlines()[2] == "CacheInfo(hits=1, total=2)",
    ], done.stdout
    assert done.stderr == ""
