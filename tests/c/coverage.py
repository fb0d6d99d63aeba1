"""Run the tests of C in the build for coverage, and print what of the core they do not run: make -C tests/c coverage.

Each test leaves its counts in a folder of its own, so that `ran` can also say which tests run a line. A folder that is
named has what Python's tests leave, the extension's counts and the package's python.json: `make coverage`. Then what
does not run must be in not_run.txt.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
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


def read(
    counts: Path, where: str = "core/*/*.gcda", built_in: Path = HERE
) -> tuple[dict[Line, int], dict[tuple[Line, int], int]]:
    """Return how often each line of the core ran, and each branch: the nth of its line."""
    lines: dict[Line, int] = defaultdict(int)
    branches: dict[tuple[Line, int], int] = defaultdict(int)
    data = sorted(counts.glob(where))
    out = subprocess.run(["gcov", "-j", "-t", "-b", *data], check=True, capture_output=True, cwd=built_in).stdout
    for one in out.splitlines():
        for file in json.loads(one)["files"]:
            path = (built_in / file["file"]).resolve()
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
    return sorted(path for path in BUILT.glob("test_*") if (HERE / f"{path.name}.c").exists())


def ran() -> dict[str, set[Line]]:
    """Return the lines that each test ran the last time."""
    return {
        test.name: {line for line, count in read(BUILT / "counts" / test.name)[0].items() if count} for test in built()
    }


def not_run() -> dict[tuple[str, str], list[str]]:
    """Return the lines that not_run.txt lists, and why each does not run, as often as it is listed."""
    why, found = "", defaultdict(list)
    for text in (HERE / "not_run.txt").read_text().splitlines():
        if text.startswith("= "):
            why = text[2:]
        elif text.startswith(("csrc/", "shmstore/")):
            path, _, rest = text.partition(": ")
            found[path, rest.partition(" -- ")[0]].append(why)
    return found


def of_python(report: Path) -> dict[Line, str]:
    """Return which lines of Python do not run, or not in each way, by the report of `coverage json`."""
    missing = {}
    for path, file in json.loads(report.read_text())["files"].items():
        missing.update({(path, abs(line)): "a branch" for line, _ in file["missing_branches"]})
        missing.update({(path, line): "never runs" for line in file["missing_lines"]})
    return missing


def main() -> int:
    every = [read(run(test)) for test in built()]
    every += [read(Path(folder), "csrc/*/*.gcda", ROOT) for folder in sys.argv[1:]]
    lines: dict[Line, int] = defaultdict(int)
    branches: dict[tuple[Line, int], int] = defaultdict(int)
    for more_lines, more_branches in every:
        for line, count in more_lines.items():
            lines[line] += count
        for branch, count in more_branches.items():
            branches[branch] += count
    missing = {}
    for at in sorted(lines):
        own = [count for (line, _), count in branches.items() if line == at]
        if not lines[at] or not all(own):
            missing[at] = "never runs" if not lines[at] else f"{own.count(0)} of {len(own)} branches"
    for folder in sys.argv[1:]:
        missing |= of_python(Path(folder) / "python.json")
    known, unknown, why = not_run() if sys.argv[1:] else {}, 0, Counter[str]()
    for (path, n), what in missing.items():
        text = (ROOT / path).read_text().splitlines()[n - 1].strip()
        if known.get((path, text)):
            why[known[path, text].pop()] += 1
        else:
            print(f"{path}:{n}: {what}: {text}")
            unknown += 1
    for (path, text), left in known.items():
        if left:
            print(f"{path}: runs, though not_run.txt lists it: {text}")
    for folder in sorted({path.rpartition("/")[0] for path, _ in lines}):
        of_lines = share([count for (path, _), count in lines.items() if path.startswith(folder)])
        of_branches = share([count for ((path, _), _), count in branches.items() if path.startswith(folder)])
        print(f"{folder}: {of_lines} lines, {of_branches} branches")
    for reason, times in why.items():
        print(f"{times} lines in not_run.txt: {reason}")
    return 1 if sys.argv[1:] and unknown else 0


def share(counts: list[int]) -> str:
    return f"{100 * sum(map(bool, counts)) / len(counts):.1f} % of {len(counts)}"


if __name__ == "__main__":
    sys.exit(main())
