"""Check the core's C code with GenMC, and that each memory order is needed: python -m tests.genmc GENMC [NAME ...].

Each program explores all executions of a few calls, under RC11 and IMM. Then each order of orders.py that names a
program is made weaker, one at a time, and that program must fail. With --table, the result goes into
docs/concepts/reliability.md.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.genmc.orders import ORDERS, Order

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PAGE = ROOT / "docs" / "concepts" / "reliability.md"
PROGRAMS = sorted(path.stem for path in HERE.glob("*.c"))
MODELS = ("rc11", "imm")
# 0.10.3 reports accesses to freed memory if it caches instructions, and its inliner crashes on functions of this size.
OPTIONS = ("-disable-instruction-caching", "-disable-function-inliner", "-disable-estimation")

ADAPTED = [
    # fewer turns until a reader that waits asks whether the writer lives
    ("wait.c", "#define TURNS 1000 ", "#define TURNS 1 "),
    # GenMC copies no record through a pointer; world.h does it word by word
    (
        "reader.c",
        "*seen = shms_slot_copy(s, ref->id);",
        "copy_slot(seen, &(shms_slot[]){shms_slot_copy(s, ref->id)}[0]);",
    ),
    ("find.c", "*seen = shms_slot_copy(s, id);", "copy_slot(seen, &(shms_slot[]){shms_slot_copy(s, id)}[0]);"),
    ("leases.c", "*l = (shms_leases){", "shms_leases same __attribute__((unused)) = {"),
    ("holders.c", "*p = now;", "copy_peer(p, &now);"),
]
"""File, its line, and what stands there for GenMC."""


class Result(NamedTuple):
    holds: bool
    fails: bool
    """Neither: it did not run, or not to its end."""
    executions: int
    seconds: float
    """Of a processor."""
    output: str

    def reason(self) -> str:
        return "\n".join(
            line for line in self.output.splitlines() if re.match(r"\S+:\d+:\d+: error|[\w ]*(rror|violation):", line)
        )


@contextmanager
def tree(*changes: tuple[str, str, str]) -> Iterator[Path]:
    """Yield a copy of the core's sources, adapted and changed."""
    with tempfile.TemporaryDirectory(prefix="shmstore-genmc-") as folder:
        shutil.copytree(ROOT / "csrc" / "store", Path(folder) / "store")
        for name, before, after in (*ADAPTED, *changes):
            path = Path(folder) / "store" / name
            text = path.read_text()
            if text.count(before) != 1:
                raise ValueError(f"{name} has {before!r} {text.count(before)} times, expected once")
            path.write_text(text.replace(before, after))
        yield Path(folder)


def run(genmc: str, sources: Path, program: str, model: str) -> Result:
    command = [
        genmc,
        f"-{model}",
        *OPTIONS,
        "--",
        "-g0",
        "-DSHMS_GENMC",
        "-D_GNU_SOURCE",
        f"-I{sources}",
        HERE / f"{program}.c",
    ]
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen([str(part) for part in command], stdout=out, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        output = out.read().decode(errors="replace")
    explored = re.search(r"complete executions explored: (\d+)", output)
    executions = int(explored[1]) if explored else 0
    holds = process.returncode == 0 and "No errors were detected." in output and executions > 0
    fails = re.search(r"^Error: (Safety violation|Non-atomic race|Race|Attempt to)", output, re.M) is not None
    return Result(holds and not fails, fails, executions, used.ru_utime + used.ru_stime, output)


def weakened(genmc: str, order: Order) -> tuple[Order, Result]:
    """Run the program that must notice, on sources with the order made weaker."""
    result = Result(False, False, 0, 0.0, "")
    with tree(order.change()) as sources:
        for model in MODELS:
            result = run(genmc, sources, order.program, model)
            if result.fails:
                break
    return order, result


def table(results: dict[str, dict[str, Result]]) -> str:
    """Return the table of reliability.md."""
    lines = [
        "| program | what happens | executions | seconds | orders that it needs |",
        "|---|---|---:|---:|---|",
    ]
    for program, by_model in results.items():
        what = re.match(r"/\* (.*?) \*/", (HERE / f"{program}.c").read_text(), re.S)
        assert what is not None
        needed = ", ".join(sorted({order.label for order in ORDERS if order.program == program}))
        counts = " / ".join(dict.fromkeys(f"{by_model[model].executions:,}" for model in MODELS))
        seconds = sum(result.seconds for result in by_model.values())
        lines.append(f"| `{program}` | {' '.join(what[1].split())} | {counts} | {seconds:.0f} | {needed or '-'} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.genmc", description=__doc__.partition("\n")[0])
    parser.add_argument("genmc", help="the program")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these programs, and their orders")
    parser.add_argument("--table", action="store_true", help="write the result into docs/concepts/reliability.md")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time (%(default)s)")
    chosen = parser.parse_args()
    names = chosen.names or PROGRAMS
    wrong = 0
    results: dict[str, dict[str, Result]] = {name: {} for name in names}
    with tree() as sources, ThreadPoolExecutor(chosen.jobs) as pool:
        runs = [(name, model) for name in names for model in MODELS]
        for (name, model), result in zip(
            runs, pool.map(lambda one: run(chosen.genmc, sources, *one), runs), strict=True
        ):
            results[name][model] = result
            print(f"{name} {model}: {result.executions} executions, {result.seconds:.1f} s", flush=True)
            if not result.holds:
                print(f"{name} {model} does not hold\n{result.reason()}", flush=True)
                wrong += 1
        orders = [order for order in ORDERS if order.program in names]
        for order, result in pool.map(lambda order: weakened(chosen.genmc, order), orders):
            said = "fails, as it must" if result.fails else "still holds" if result.holds else "did not run"
            print(f"{order.label} in {order.file} as {order.weaker}: {order.program} {said}", flush=True)
            if not result.fails:
                print(order.text if result.holds else result.reason(), flush=True)
                wrong += 1
    if chosen.table and not wrong and names == PROGRAMS:
        before, begin, rest = PAGE.read_text().partition("<!-- genmc: begin -->\n")
        PAGE.write_text(before + begin + table(results) + "\n" + rest[rest.index("<!-- genmc: end -->") :])
    print(f"{wrong} of {len(names) * len(MODELS) + len(orders)} results are not as expected")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
