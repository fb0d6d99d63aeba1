"""Change lines of the C core, one at a time, and see what notices: python -m tests.mutants [--simulate] [--orders].

A comparison or a condition is turned round, a number is changed, a statement is left out. The tests of C that run the
line see each mutant, the fastest first. What they do not notice is printed: a line that no test needs, or a change that
changes nothing. Lines that no test runs are not changed: `make -C tests/c coverage`, which this needs, lists them.

With --simulate, the simulator gets mutants of the lines of the store that it runs, and says after how many steps it has
noticed. With --orders, it gets each memory order of the store made weaker, and lets stores leave in any order. What it
does not notice is for load order, for what it does not do, or stronger than it must be.
"""

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.c.coverage import ran, read
from tests.simulate.__main__ import FLAGS, MODES, build, compiled

ROOT = Path(__file__).resolve().parent.parent
CHANGES = [
    (r" == ", " != "),
    (r" != ", " == "),
    (r" < ", " <= "),
    (r" < ", " >= "),
    (r" > ", " >= "),
    (r" > ", " <= "),
    (r" >= ", " > "),
    (r" <= ", " < "),
    (r" && ", " || "),
    (r" \|\| ", " && "),
    (r" \+ ", " - "),
    (r" - ", " + "),
    (r" \+ 1\b", ""),
    (r" - 1\b", ""),
    (r"\+\+", "--"),
    (r" \+= ", " -= "),
    (r"\btrue\b", "false"),
    (r"\bfalse\b", "true"),
    (r"= 0;", "= 1;"),
    (r"\breturn 0;", "return 1;"),
    (r"\breturn SHMS_E\w+;", "return SHMS_OK;"),
    (r"\b(if|while) \((.*)\)( \{)?$", r"\1 (!(\2))\3"),
    (r"\bif \((?!0)", "if (0 && "),
    (r"\bif \((?!1)", "if (1 || "),
    (r"^(\s+)\w+\(.*\);$", r"\1;"),  # a call
    (r"^(\s+)[\w>.\[\]*-]+ [-+|&]?= .*;$", r"\1;"),  # an assignment
]
ORDERS = [
    (r"^(?!.*load)(.*)memory_order_seq_cst", r"\1memory_order_release"),
    (r"memory_order_(seq_cst|release)", "memory_order_relaxed"),
]
WEAK = MODES.index("any-order")
NO_CODE = re.compile(r"SHMS_STEP|SHMS_LOOK|^\s*\*|^\S|\bfor \(|_Static_assert")
"""Lines that are left as they are. What a `for` counts is changed in its body."""
WRAPS = dict(re.findall(r"^LINK_(test_\w+) := (\S+)$", (ROOT / "tests/c/Makefile").read_text(), flags=re.M))
"""Tests that replace a function of the core. That works for objects only, so they are linked anew for each mutant."""

Change = tuple[Path, int, str]


def changes(files: list[Path], patterns: list[tuple[str, str]]) -> list[Change]:
    """Return every change of one line: file, number of the line, and what stands there instead."""
    found = set()
    for path in files:
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            code = line.partition("/*")[0].rstrip()
            if NO_CODE.search(code):
                continue
            for pattern, instead in patterns:
                for match in re.finditer(pattern, code):
                    changed = code[: match.start()] + match.expand(instead) + code[match.end() :]
                    found.add((path, number, changed))
    return sorted(found)


class Tree:
    """A copy of what the tests are made from, one line of which is changed at a time."""

    def __init__(self, root: Path) -> None:
        """Copy, and build the tests with the core as a library beside them: a mutant replaces that."""
        self.root = root
        for part in ("csrc", "tests/c", "tests/simulate"):
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("build"))
        self.sources = sorted((root / "csrc").glob("*/*.c"))
        self.times: dict[str, float] = {}
        self.noticed_after: list[int] = []

    def build_tests(self, longest: float) -> None:
        self.compile(self.sources)
        self.link()
        for source in sorted((self.root / "tests/c").glob("test_*.c")):
            if source.stem not in WRAPS:
                self.link_test(source.stem, "-L", self.root, "-lcore", f"-Wl,-rpath,{self.root}")
            start = time.monotonic()
            if how := self.fails(source.stem, longest):
                print(f"{source.stem} is left out: it {how}", flush=True)
            else:
                self.times[source.stem] = time.monotonic() - start

    def compile(self, sources: list[Path]) -> None:
        for source in sources:
            compiled(*FLAGS, "-g0", "-fPIC", f"-I{self.root / 'csrc'}", "-c", "-o", source.with_suffix(".o"), source)

    def link(self) -> None:
        objects = [source.with_suffix(".o") for source in self.sources]
        compiled("-shared", "-pthread", "-o", self.root / "libcore.so", *objects)
        for test, wraps in WRAPS.items():
            self.link_test(test, wraps, *objects)

    def link_test(self, test: str, *core: object) -> None:
        made, folder, include = self.root / test, self.root / "tests/c", f"-I{self.root / 'csrc'}"
        compiled(*FLAGS, include, "-o", made, folder / f"{test}.c", folder / "support.c", *core, "-lrt", "-ldl")

    @contextlib.contextmanager
    def changed(self, path: Path, number: int, line: str) -> Iterator[None]:
        original = (self.root / path).read_text()
        lines = original.splitlines()
        lines[number - 1] = line
        (self.root / path).write_text("\n".join([*lines, ""]))
        stale = [self.root / path] if path.suffix == ".c" else self.sources
        built = {source: source.with_suffix(".o").read_bytes() for source in stale if self.times}
        try:
            if built:
                self.compile(stale)
                self.link()
            yield
        finally:
            (self.root / path).write_text(original)
            for source, code in built.items():
                source.with_suffix(".o").write_bytes(code)

    def simulated(self, *arguments: object) -> str:
        """Return how the simulator of this tree fails, or nothing. It takes no time-out: it watches itself."""
        command = [str(build(self.root)), *map(str, arguments)]
        result = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
        steps = [int(n) for n in re.findall(r"after (\d+) steps", result.stderr)]
        self.noticed_after += steps
        return f"simulator after {steps[-1]:,} steps" if steps else "simulator" if result.returncode else ""

    def fails(self, test: str, timeout: float) -> str:
        """Return how a program of this tree fails, or nothing."""
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command = [str(self.root / test)]
        process = subprocess.Popen(command, start_new_session=True, **quiet)  # type: ignore[call-overload]
        try:
            return f"ends with status {status}" if (status := process.wait(timeout)) else ""
        except subprocess.TimeoutExpired:
            return "takes too long"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for left in Path("/dev/shm").glob("shms-test-*"):  # of processes that were killed
                if not Path("/proc", left.name.split("-")[-2]).exists():
                    left.unlink(missing_ok=True)


def simulator_ran(steps: int) -> set[tuple[str, int]]:
    """Return the lines of the store that the simulator runs."""
    program = build(ROOT, "--coverage")
    for counts in program.parent.glob("*.gcda"):
        counts.unlink()
    subprocess.run([program, "1", str(steps)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines, _ = read(program.parent, "*.gcda")
    return {line for line, count in lines.items() if count and line[0].startswith("csrc/store/")}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", default="*/*.[ch]", help="of csrc")
    parser.add_argument("--longest", type=float, default=1000, help="seconds that a test may take to be run at all")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--orders", action="store_true", help="all of them, in half an hour")
    parser.add_argument("--steps", type=int, help="of the simulator, for each: 1,000,000, or 10,000,000 of an order")
    chosen = parser.parse_args()
    chosen.steps = chosen.steps or (10_000_000 if chosen.orders else 1_000_000)
    simulate = chosen.simulate or chosen.orders
    files = [path.relative_to(ROOT) for path in (ROOT / "csrc").glob(chosen.files)]
    found = changes(files, ORDERS if chosen.orders else CHANGES)
    tests: dict[tuple[str, int], list[str]] = defaultdict(list)
    if chosen.orders:
        found = [change for change in found if change[0].parts[1] == "store"]
    else:
        say("looks which lines are run")
        for test, lines in {"": simulator_ran(chosen.steps)}.items() if simulate else ran().items():
            for at in lines:
                tests[at].append(test)
        found = [change for change in found if (str(change[0]), change[1]) in tests]
        random.Random(chosen.seed).shuffle(found)
        found = found[: chosen.count]
    noticed: Counter[tuple[Path, str]] = Counter()
    by: dict[str, Counter[str]] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder))
        say("builds the simulator" if simulate else "builds the tests, and runs each once")
        if simulate:
            build(tree.root)
        else:
            tree.build_tests(chosen.longest)
        say(f"changes {len(found)} lines")
        for path, number, line in found:
            try:
                with tree.changed(path, number, line):
                    if simulate:
                        notices = tree.simulated(chosen.seed, chosen.steps, *[WEAK] * chosen.orders)
                    else:
                        able = [test for test in tests[str(path), number] if test in tree.times]
                        able.sort(key=lambda test: (-noticed[path, test], tree.times[test]))
                        notices = next((test for test in able if tree.fails(test, 10 + 5 * tree.times[test])), "")
                        noticed[path, notices] += 1
            except subprocess.CalledProcessError:
                notices = "compiler"
            by[str(path.parent)][
                "tests" if notices.startswith("test_") else notices.partition(" ")[0] or "nothing"
            ] += 1
            was = (tree.root / path).read_text().splitlines()[number - 1].strip()
            print(f"{notices or 'NOTHING'}: {path}:{number}: {was}  ->  {line.strip()}", flush=True)
    for part, count in sorted(by.items()):
        print(f"{part}: {dict(count)}")
    total = sum(by.values(), Counter())
    able_to = total.total() - total["compiler"]
    print(f"noticed: {able_to - total['nothing']} of {able_to}", end="")
    print(f", half within {statistics.median(after):,.0f} steps" if (after := tree.noticed_after) else "")


def say(phase: str) -> None:
    print(f"mutants: {phase}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
