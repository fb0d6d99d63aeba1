"""Compile and run `edges.c`; ``python -m bench.edges`` writes docs/contributing/full-store.md.

``EDGES_BASE=../other-checkout`` also runs the program with the ``csrc`` of another version, in turn.
"""

import os
import platform
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
RUNS = 3

Values = dict[str, list[float]]
"""The values of each figure: medians of some runs."""


def built(checkout: Path, to: Path) -> Path:
    """Compile the program of a checkout with its store."""
    core = checkout / "csrc" / "store"
    if not core.exists():  # 0.1 had one folder for all
        core = core.parent
    command = ["cc", "-std=c11", "-D_GNU_SOURCE", "-O2", "-pthread", f"-I{core}", "-o", str(to)]
    subprocess.run([*command, str(checkout / "bench" / "edges.c"), *map(str, core.glob("*.c"))], check=True)
    return to


def programs(folder: Path) -> dict[str, Path]:
    """Compile "new", and also "old" if EDGES_BASE is set."""
    found = {"new": built(ROOT, folder / "new")}
    if base := os.environ.get("EDGES_BASE"):
        found["old"] = built(Path(base), folder / "old")
    return found


def measure(compiled: dict[str, Path], group: str) -> dict[str, Values]:
    """Run a group of figures with each program in turn; return the values by version."""
    runs: dict[str, dict[str, list[list[float]]]] = {version: defaultdict(list) for version in compiled}
    for _ in range(1 if group == "capacity" else RUNS):
        for version, program in compiled.items():
            output = subprocess.run([program, group], check=True, capture_output=True, text=True).stdout
            for line in output.splitlines():
                name, *values = line.split()
                runs[version][name].append([float(value) for value in values])
    return {
        version: {name: [median(column) for column in zip(*rows, strict=True)] for name, rows in figures.items()}
        for version, figures in runs.items()
    }


PAGE = """# A full store

This page says what a put costs if it finds no room or has to search far, and what a concurrent hit or get takes.
`python -m bench.edges` writes this page; `make bench` has the same figures and their limits.
The program is `bench/edges.c`: with threads in C, the interpreter's lock is not measured.
Times are in microseconds, medians of {runs} runs on {machine}.

| during puts of another thread | median | 99th percentile | longest |
|---|---:|---:|---:|
{during}

The longest times include times in which the machine did not run a thread.
One put with 32,768 victims takes {many:.0f} µs.

| | µs |
|---|---:|
{puts}

In Python the error also says who holds how much, which asks each rank about each object.
With 10^5 objects and one rank the first such error after a release takes some 2 ms, and the next ones 20 µs.

**Effective capacity** is the share of the bytes that objects fill, on average, in a store that is always full.
With objects of 1 to 32 MiB and a tenth of the bytes held at any time, it is {one:.3f} in 1 GiB and {four:.3f} in 4 GiB.
The lost bytes are at the hand, if the last victim was larger than needed, and in front of held objects.

**Held objects split the space.** Small ones, up to 1/4096 of the capacity, lie together and cost large ones nothing.
A dozen larger ones, held for long and spread over the store, can leave no gap of a quarter of its size.
"""
DURING = {
    "during-refused-hit": "a hit during puts that are refused (10^5 objects held, one released each time)",
    "during-refused-get": "a get during the same puts",
    "during-victims-hit": "a hit during puts that evict 32,768 objects each",
    "during-victims-get": "a get during the same puts",
}
PUTS = {
    "refused-1-rank": "a refused put after one get of another object; 10^5 objects held, 1 rank",
    "refused-8-ranks": "the same, 8 ranks",
    "split-100k": "a refused put, although every second of 10^5 objects may go",
    "no-lease-entry": "a hit that finds no lease entry among 262,144, after one get of another object",
}


def main() -> None:
    """Measure the figures and write the page."""
    values: Values = {}
    with tempfile.TemporaryDirectory() as folder:
        compiled = {"new": built(ROOT, Path(folder) / "new")}
        for group in ("refused", "split", "lease", "during", "capacity"):
            values |= measure(compiled, group)["new"]
    during = [
        f"| {what} | " + " | ".join(f"{value:.2f}" for value in values[name]) + " |" for name, what in DURING.items()
    ]
    puts = [f"| {what} | {values[name][0]:.1f} |" for name, what in PUTS.items()]
    text = PAGE.format(
        runs=RUNS,
        machine=f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        during="\n".join(during),
        puts="\n".join(puts),
        many=values["during-victims-put"][0],
        one=values["capacity-1-gib"][0],
        four=values["capacity-4-gib"][0],
    )
    (ROOT / "docs" / "contributing" / "full-store.md").write_text(text)


if __name__ == "__main__":
    main()
