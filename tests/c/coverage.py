"""Run the tests of C in the build for coverage, and print what of the core they do not run: make coverage.

Each test leaves its counts in a folder of its own, so that `ran` can also say which tests run a line.
"""

import json
import os
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILT = HERE / "build" / "coverage"

Line = tuple[str, int]


def run(test: Path) -> Path:
    """Run a test that was built for coverage, and return the folder of its counts."""
    counts = BUILT / "counts" / test.name
    shutil.rmtree(counts, ignore_errors=True)
    # The folder that the objects are in is left out of the paths of what the test writes.
    strip = {"GCOV_PREFIX": str(counts), "GCOV_PREFIX_STRIP": str(len(BUILT.parts) - 1)}
    subprocess.run([test], check=True, cwd=HERE, env=os.environ | strip)
    for path in counts.glob("core/*/*.gcda"):
        shutil.copy(BUILT / path.relative_to(counts).with_suffix(".gcno"), path.parent)
    return counts


def read(counts: Path, where: str = "core/*/*.gcda") -> tuple[dict[Line, int], dict[tuple[Line, int], int]]:
    """Return how often each line of the core ran, and each branch: the nth of its line."""
    lines: dict[Line, int] = defaultdict(int)
    branches: dict[tuple[Line, int], int] = defaultdict(int)
    data = sorted(counts.glob(where))
    out = subprocess.run(["gcov", "-j", "-t", "-b", *data], check=True, capture_output=True, cwd=HERE).stdout
    for one in out.splitlines():
        for file in json.loads(one)["files"]:
            path = (HERE / file["file"]).resolve()
            if ROOT / "csrc" not in path.parents:
                continue
            source = path.read_text().splitlines()
            for line in file["lines"]:
                at = (str(path.relative_to(ROOT)), line["line_number"])
                lines[at] += line["count"]
                if "SHMS_STEP" not in source[at[1] - 1]:
                    for n, branch in enumerate(line["branches"]):
                        branches[at, n] += branch["count"]
    return lines, branches


def built() -> list[Path]:
    return sorted(path for path in BUILT.glob("test_*") if not path.suffix)


def ran() -> dict[str, set[Line]]:
    """Return the lines that each test ran the last time."""
    return {
        test.name: {line for line, count in read(BUILT / "counts" / test.name)[0].items() if count} for test in built()
    }


def main() -> None:
    lines: dict[Line, int] = defaultdict(int)
    branches: dict[tuple[Line, int], int] = defaultdict(int)
    for test in built():
        more_lines, more_branches = read(run(test))
        for line, count in more_lines.items():
            lines[line] += count
        for branch, count in more_branches.items():
            branches[branch] += count
    for at in sorted(lines):
        own = [count for (line, _), count in branches.items() if line == at]
        if not lines[at] or not all(own):
            what = "never runs" if not lines[at] else f"{own.count(0)} of {len(own)} branches"
            text = (ROOT / at[0]).read_text().splitlines()[at[1] - 1].strip()
            print(f"{at[0]}:{at[1]}: {what}: {text}")
    for folder in sorted({path.rpartition("/")[0] for path, _ in lines}):
        of_lines = share([count for (path, _), count in lines.items() if path.startswith(folder)])
        of_branches = share([count for ((path, _), _), count in branches.items() if path.startswith(folder)])
        print(f"{folder}: {of_lines} lines, {of_branches} branches")


def share(counts: list[int]) -> str:
    return f"{100 * sum(map(bool, counts)) / len(counts):.1f} % of {len(counts)}"


if __name__ == "__main__":
    main()
