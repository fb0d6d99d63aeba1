"""Simulate: python -m tests.simulate. What it notices of a changed core: tests.mutants."""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
INCLUDED = ("descriptors.c",)
"""What system.c includes for its private parts."""
MODES = ("plain", "buffers", "any-order")
"""The modes of weak.h."""
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-pthread", "-DSHMS_STEPS", "-w"]


def build(root: Path, *more: str) -> Path:
    """Compile what has changed of the simulator of a tree; CalledProcessError if it does not compile."""
    out, tests = root / "build" / "".join(["simulate", *more]), root / "tests"
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
        compiled(*FLAGS, *more, *options, *include, "-c", "-o", made, source)
    compiled("-pthread", "-Wl,--wrap=shms_forget_key", *more, "-o", out / "simulate", *objects)
    return out / "simulate"


def compiled(*arguments: object) -> None:
    subprocess.run(["cc", *map(str, arguments)], check=True, stderr=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulate", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000_000, help="of the actors, in all (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="the first one (%(default)s); each has 20,000 steps")
    parser.add_argument("--mode", choices=MODES, help="when others see stores; without it, the seed says so")
    chosen = parser.parse_args()
    if min(chosen.steps, chosen.seed) < 1:
        parser.error("--steps and --seed must be 1 or more")
    mode = [str(MODES.index(chosen.mode))] if chosen.mode else []
    return subprocess.run([build(ROOT), str(chosen.seed), str(chosen.steps), *mode]).returncode


if __name__ == "__main__":
    sys.exit(main())
