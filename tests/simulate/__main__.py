"""Simulate, or change the C core and see what notices: python -m tests.simulate [--steps N] [--mutants N | --orders].

With --orders, each memory order of the core is made weaker. What the simulator does not notice is printed: it is for
load order, for what the simulator does not do, or stronger than it must be.

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
WEAK = "2"
"""The mode of weak.h that orders are for."""
ORDERS = [
    (r"memory_order_seq_cst", "memory_order_release"),
    (r"memory_order_(seq_cst|release)", "memory_order_relaxed"),
]


def build(root: Path) -> Path:
    """Compile what has changed of the simulator of a tree; CalledProcessError if it does not compile."""
    out, tests = root / "build" / "simulate", root / "tests"
    out.mkdir(parents=True, exist_ok=True)
    own = sorted((tests / "simulate").glob("*.c"))
    core = [path for path in (root / "csrc").glob("*/*.c") if path.name not in INCLUDED]
    headers = [*root.glob("csrc/*/*.h"), *tests.glob("*/*.h"), *(root / "csrc/store" / name for name in INCLUDED)]
    newest = max(path.stat().st_mtime_ns for path in headers)
    objects = []
    for source in (*own, tests / "c/support.c", *core):
        objects.append(made := out / f"{source.stem}.o")
        if made.exists() and made.stat().st_mtime_ns > max(newest, source.stat().st_mtime_ns):
            continue
        options = ["-Dmain=main_of_tests"] if source.stem == "support" else []
        if source.stem != "weak":
            options += ["-include", str(tests / "simulate/weak.h")]
        include = [f"-I{root / 'csrc'}", f"-I{tests / 'c'}"]
        compiled(*FLAGS, *options, *include, "-c", "-o", made, source)
    compiled("-pthread", "-o", out / "simulate", *objects)
    return out / "simulate"


def compiled(*arguments: object) -> None:
    subprocess.run(["cc", *map(str, arguments)], check=True, stderr=subprocess.DEVNULL)


def changes(files: str, patterns: list[tuple[str, str]]) -> list[tuple[Path, int, str]]:
    """Return every change of one line: file, number of the line, and what stands there instead."""
    found = []
    for path in sorted((ROOT / "csrc" / "store").glob(files)):
        for number, line in enumerate(path.read_text().splitlines()):
            code = line.partition("/*")[0].rstrip()
            if not line[:1].isspace() or "SHMS_STEP" in code or line.lstrip().startswith("*"):
                continue
            for pattern, instead in patterns:
                if (changed := re.sub(pattern, instead, code, count=1)) != code:
                    found.append((path.relative_to(ROOT), number, changed))
    return found


def killed(root: Path, steps: int, also_tests: bool) -> str:
    """Return what notices the mutant in this tree."""
    try:
        simulator = build(root)
    except subprocess.CalledProcessError:
        return "compiler"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        if subprocess.run(
            [simulator, "1", str(steps), *([] if also_tests else [WEAK])], timeout=300, **quiet
        ).returncode:  # type: ignore[call-overload]
            return "simulator"
        if not also_tests:
            return "nothing"
        command = ["make", "-C", str(root / "tests/c"), "-j2", "check"]
        return "C tests" if subprocess.run(command, timeout=300, **quiet).returncode else "nothing"  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        return "hang"


def mutate(found: list[tuple[Path, int, str]], count: int, seed: int, steps: int, also_tests: bool) -> None:
    chosen = random.Random(seed).sample(found, min(count, len(found)))
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
            how = killed(root, steps, also_tests)
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
    parser.add_argument("--orders", action="store_true")
    parser.add_argument("--files", default="*.c", help="of csrc/store")
    chosen = parser.parse_args()
    if chosen.mutants or chosen.orders:
        found = changes(chosen.files, ORDERS if chosen.orders else CHANGES)
        mutate(found, chosen.mutants or len(found), chosen.seed, chosen.steps, not chosen.orders)
        return 0
    return subprocess.run([build(ROOT), str(chosen.seed), str(chosen.steps)]).returncode


if __name__ == "__main__":
    sys.exit(main())
