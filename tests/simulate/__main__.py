"""Simulate, or mutate the C core: python -m tests.simulate [--steps N] [--seed N] [--mutants N] [--files GLOB].

With --mutants, so many lines of the core are changed, one at a time: a comparison or a condition is turned round, a
statement is left out. Each mutant is built and simulated, and what the simulator does not notice goes to the C tests.
What survives both is printed: a line that no test needs, or a change that changes nothing.
"""

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
INCLUDED = ("reader.c", "descriptors.c")
"""What simulate.c includes for its private parts."""
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-pthread", "-DSHMS_STEPS", "-w"]
CHANGES = [
    (r" == ", " != "),
    (r" != ", " == "),
    (r" < ", " <= "),
    (r" > ", " >= "),
    (r" && ", " || "),
    (r" \|\| ", " && "),
    (r"\bif \((?!0)", "if (0 && "),
    (r"\bif \((?!1)", "if (1 || "),
    (r"\breturn true;", "return false;"),
    (r"\breturn false;", "return true;"),
    (r" \+ 1\b", ""),
    (r"^(\s+)(shms_\w+\(|atomic_store)(.*);$", r"\1;"),
]


def build(root: Path) -> Path:
    """Compile the simulator of a tree; CalledProcessError if it does not compile."""
    out = root / "build" / "simulate"
    out.mkdir(parents=True, exist_ok=True)
    include = [f"-I{root / 'csrc'}", f"-I{root / 'tests/c'}"]
    core = [path for path in sorted((root / "csrc").glob("*/*.c")) if path.name not in INCLUDED]
    support = out / "support.o"
    tests = root / "tests"
    commands: tuple[list[object], ...] = (
        [*FLAGS, *include, "-Dmain=main_of_tests", "-c", "-o", support, tests / "c/support.c"],
        [*FLAGS, *include, "-o", out / "simulate", tests / "simulate/simulate.c", support, *core],
    )
    for command in commands:
        subprocess.run(["cc", *map(str, command)], check=True, stderr=subprocess.DEVNULL)
    return out / "simulate"


def changes(files: str) -> list[tuple[Path, int, str]]:
    """Return every change of one line: file, number of the line, and what stands there instead."""
    found = []
    for path in sorted((ROOT / "csrc" / "store").glob(files)):
        for number, line in enumerate(path.read_text().splitlines()):
            code = line.partition("/*")[0].rstrip()
            if not line[:1].isspace() or "SHMS_STEP" in code or line.lstrip().startswith("*"):
                continue
            for pattern, instead in CHANGES:
                if (changed := re.sub(pattern, instead, code, count=1)) != code:
                    found.append((path.relative_to(ROOT), number, changed))
    return found


def killed(root: Path, steps: int) -> str:
    """Return what notices the mutant in this tree."""
    try:
        simulator = build(root)
    except subprocess.CalledProcessError:
        return "compiler"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        if subprocess.run([simulator, "1", str(steps)], timeout=60, **quiet).returncode:  # type: ignore[call-overload]
            return "simulator"
        command = ["make", "-C", str(root / "tests/c"), "-j2", "check"]
        return "C tests" if subprocess.run(command, timeout=300, **quiet).returncode else "nothing"  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        return "hang"


def mutate(count: int, seed: int, steps: int, files: str) -> None:
    chosen = random.Random(seed).sample(found := changes(files), min(count, len(changes(files))))
    by: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for part in ("csrc", "tests/c", "tests/simulate"):
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("build"))
        for path, number, changed in chosen:
            original = (ROOT / path).read_text()
            lines = original.splitlines()
            was, lines[number] = lines[number], changed
            (root / path).write_text("\n".join([*lines, ""]))
            start = time.monotonic()
            how = killed(root, steps)
            (root / path).write_text(original)
            by[how] += 1
            if how == "nothing":
                print(f"{path}:{number + 1}: {was.strip()}\n    -> {changed.strip()}", flush=True)
            else:
                print(f"{path}:{number + 1}: {how}, {time.monotonic() - start:.1f} s", flush=True)
    print(f"{sum(by.values())} of {len(found)} mutants: {dict(by)}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mutants", type=int)
    parser.add_argument("--files", default="*.c", help="of csrc/store")
    chosen = parser.parse_args()
    if chosen.mutants:
        mutate(chosen.mutants, chosen.seed, chosen.steps, chosen.files)
        return 0
    return subprocess.run([build(ROOT), str(chosen.seed), str(chosen.steps)]).returncode


if __name__ == "__main__":
    sys.exit(main())
