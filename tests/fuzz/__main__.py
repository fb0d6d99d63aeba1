"""Fuzz with coverage, a target on each core: python -m tests.fuzz [TARGET...] [--seconds N | --runs N] [--keep].

`superblock` is what is read of any file, and `image` what a segment's bytes can do to C: both need clang with
libFuzzer. The others are what Python parses, and need atheris. Each starts from its corpus,
`tests/fuzz/corpus/TARGET.txt`: an input a line, in hexadecimal digits.
With --keep the corpus becomes what has reached other code since. What fails stays in build/fuzz/.
"""

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "fuzz"
PARSERS = ("reference", "handle", "metadata", "updates", "span", "resp")
IN_C = ("image", "superblock")
MOST = 400
"""Inputs of a corpus that are kept; the smallest."""
CLANG = next((found for name in ("clang", "clang-19") if (found := shutil.which(os.environ.get("CLANG", name)))), None)


def build(name: str) -> list[str]:
    """Compile a target with the whole core, steps, sanitizers and coverage."""
    assert CLANG, f"{name} needs clang: CLANG names another than clang and clang-19"
    target = BUILD / name
    sources = [HERE / f"{name}.c", ROOT / "tests/c/support.c", *sorted((ROOT / "csrc").rglob("*.c"))]
    flags = "-std=c11 -D_GNU_SOURCE -O1 -g -pthread -DSHMS_STEPS -Dmain=main_of_tests -fno-sanitize-recover=all"
    options = [*flags.split(), "-fsanitize=fuzzer,address,undefined", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests/c'}"]
    if name == "image":
        options += ["-Wl,--wrap=nanosleep"]  # image.c has another, which does not sleep
    subprocess.run([CLANG, *options, "-o", target, *sources], check=True)
    return [str(target), "-max_len=256"]


def unpack(name: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    for number, line in enumerate((HERE / "corpus" / f"{name}.txt").read_text().split()):
        (folder / f"{number}").write_bytes(bytes.fromhex(line))


def pack(name: str, folder: Path) -> None:
    inputs = sorted({path.read_bytes() for path in folder.iterdir()}, key=lambda one: (len(one), one))
    (HERE / "corpus" / f"{name}.txt").write_text("".join(f"{one.hex()}\n" for one in inputs[:MOST] if len(one) <= 512))


def run(name: str, bound: str, keep: bool) -> int:
    """Fuzz one target in a process of its own, and return its exit status."""
    corpus, smaller = BUILD / f"corpus-{name}", BUILD / f"smaller-{name}"
    for folder in (corpus, smaller):
        shutil.rmtree(folder, ignore_errors=True)
    unpack(name, corpus)
    smaller.mkdir()
    command = build(name) if name in IN_C else [sys.executable, "-m", "tests.fuzz.parsers", name]
    command += ["-timeout=20", "-rss_limit_mb=3000", f"-artifact_prefix={BUILD}/{name}-"]
    with (BUILD / f"{name}.log").open("w") as log:
        status = subprocess.run([*command, bound, str(corpus)], cwd=ROOT, stderr=log, stdout=log).returncode
        if keep and not status:
            if name in IN_C:  # atheris cannot merge
                subprocess.run([*command, "-merge=1", str(smaller), str(corpus)], cwd=ROOT, stderr=log, check=True)
            pack(name, smaller if name in IN_C else corpus)
    lines = (BUILD / f"{name}.log").read_text(errors="replace").splitlines()
    done = [line for line in lines if line.startswith("Done ")] or lines[-20:]
    print(f"{name}: {'ok' if not status else 'FAILED'}:", *done, sep="\n  " if status else " ", flush=True)
    return status


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", default=(*IN_C, *PARSERS), metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=30, help="of each target")
    parser.add_argument("--runs", type=int, help="of each target, instead")
    parser.add_argument("--keep", action="store_true", help="write the corpora")
    chosen = parser.parse_args()
    if unknown := {*chosen.targets} - {*IN_C, *PARSERS}:
        parser.error(f"no target {', '.join(unknown)}; there are {', '.join([*IN_C, *PARSERS])}")
    BUILD.mkdir(parents=True, exist_ok=True)
    bound = f"-runs={chosen.runs}" if chosen.runs else f"-max_total_time={chosen.seconds}"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return int(any([*pool.map(lambda name: run(name, bound, chosen.keep), chosen.targets)]))


if __name__ == "__main__":
    sys.exit(main())
