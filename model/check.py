#!/usr/bin/env python3
"""Check the protocol models with spin: each run must hold, and each mutation must fail for the reason given.

`python model/check.py` does all runs, and the mutations marked for CI. `--all` does all mutations. Names select some.
Exit status: 0 if all results are as expected, 1 if one is not, 3 if spin or a C compiler is missing.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
MEMORY_MB = 4000
AT_A_TIME = 2  # each may take so much memory
DEPTH = 100_000
TIMEOUT_S = 600
NOT_FINISHED = ("max search depth too small", "out of memory", "memory exceeded", "Search not completed", "aborting")

VIEW = "g_view[k]!="
OWED = "g_owed["
BYTES = "data["
STUCK = "violated go "
OPEN = "lseq[0]==0"
LOST = "ok==g_com[k]"
PART = "go|| !"
TWICE = "del[0]"
HELD = "g_held[1]"
REFUSED = "held[object]"
PASSING = "!(met)"
GRANTED = "g_whole==x"
FREED = "g_whole==g_id[h]"
CALLED_STALE = "taken|| !(g_owed["
LEFT_OPEN = "!(open)"
FOUND = "!(g_view[0])"
WHOLE = "!(g_whole)"


@dataclass(frozen=True)
class Run:
    """The sizes with which a model must hold."""

    name: str
    model: str
    sizes: str
    why: str


@dataclass(frozen=True)
class Mutation:
    """A switch that removes one point of the protocol, the run that must fail, and the assertion that must fail."""

    name: str
    run: str
    by: str
    ci: bool = False


RUNS = [
    Run("one-rank", "protocol.pml", "RCRASH=1 WCRASH=1 WOPS=6 BREATHS=1", "both sides may die at any step"),
    Run("closing", "protocol.pml", "RCRASH=1 WCRASH=1 WOPS=5 CLOSES=1", "the rank is also closed and attached again"),
    Run("two-slots", "protocol.pml", "NS=2 RCRASH=0 WCRASH=1 WOPS=6 BREATHS=1", "several victims; death anywhere"),
    Run("one-key", "protocol.pml", "NS=2 ONEKEY=1 RCRASH=0 WCRASH=1 WOPS=6 ROPS=1", "a key is deleted and put again"),
    Run("two-ranks", "protocol.pml", "NR=2 RCRASH=1 WCRASH=0 WOPS=4 ROPS=1", "a lease expects both ranks"),
    Run("two-threads", "protocol.pml", "THREADS=2 RCRASH=0 WCRASH=0 WOPS=6", "two threads share a rank's table"),
    Run("two-entries", "protocol.pml", "NL=2 MAXH=3 RCRASH=1 WCRASH=0 WOPS=6", "several leases of one object"),
    Run("retiring", "protocol.pml", "RETIRE=1 RCRASH=1 WCRASH=0 WOPS=6", "a rank is retired while it attaches"),
    Run("holding", "protocol.pml", "HOLD=1 RCRASH=1 WCRASH=1 WOPS=6", "the writer holds a lease that ranks have read"),
    Run("search", "search.pml", "DEATHS=3", "one rank dies, closes and attaches again often"),
    Run("search-retired", "search.pml", "DEATHS=2 ROPS=1 RETIRE=1", "a rank is retired at any moment"),
    Run("search-reuse", "search.pml", "DEATHS=1 ROPS=1 PUTS=1", "another object comes into the slot; missed pins"),
    Run("search-two", "search.pml", "NR=2 DEATHS=0 ROPS=1", "two ranks"),
    Run("search-remote", "search.pml", "REMOTES=1 DEATHS=0 ROPS=0 PUTS=1 BOPS=1", "a put next to another writer"),
    Run("pinning", "remote.pml", "AOPS=2 BOPS=2", "another writer hands out; each of the three may die at any step"),
    Run("owner", "remote.pml", "MAXA=1 MAXB=1 AOPS=2 BOPS=1", "the slot's owner hands out, too"),
    Run("keeping", "remote.pml", "KEEP=1 MAXB=1 AOPS=1 BOPS=1 BDEATHS=2", "a successor keeps leases"),
    Run("groups", "remote.pml", "NR=2 GROUPS=1 MAXB=1 AOPS=1 BOPS=1 ADEATHS=0", "a lease for one group, or all"),
    Run("chain", "remote.pml", "NB=2 OWN=1 MAXB=3 MAXID=1 AOPS=1 BOPS=4 ADEATHS=0 RDEATHS=0", "a chain that changes"),
    Run("finding", "finding.pml", "FINDS=2", "a rank finds by key, and another one gets what it has pinned"),
]

MUTATIONS = [
    Mutation("R1_RELAXED", "one-rank", VIEW, ci=True),
    Mutation("NO_R2", "one-rank", VIEW),
    Mutation("ID_FIRST", "one-rank", BYTES),
    Mutation("EVICTING_IS_LIVE", "one-rank", VIEW),
    Mutation("ORPHAN_UNASKED", "one-rank", BYTES, ci=True),
    Mutation("R3_FIRST", "one-rank", OWED),
    Mutation("ACK_UNASKED", "two-threads", STUCK),
    Mutation("ACK_NO_MAXIMUM", "two-threads", STUCK),
    Mutation("CLOSE_EARLY", "closing", VIEW),
    Mutation("CLOSE_EXPECTED", "closing", OPEN, ci=True),
    Mutation("NO_A2", "one-rank", STUCK),
    Mutation("NO_A4", "one-rank", STUCK),
    Mutation("A4_EARLY", "retiring", STUCK),
    Mutation("RETIRED_UNSEEN", "retiring", STUCK, ci=True),
    Mutation("NO_T2", "retiring", STUCK),
    Mutation("NEVER_IS_DEAD", "one-rank", OWED),
    Mutation("PROBE_THEN_EPOCH", "one-rank", OWED, ci=True),
    Mutation("VERDICT_KEPT", "one-rank", OWED),
    Mutation("VERDICT_YIELDED", "one-rank", OWED),
    Mutation("NO_SECOND_LOOK", "one-rank", OWED, ci=True),
    Mutation("RETIRED_FOR_EVER", "retiring", OWED),
    Mutation("W2_UNFENCED", "one-rank", VIEW, ci=True),
    Mutation("NO_W3", "one-rank", VIEW),
    Mutation("VERDICT_FOR_W3P", "one-rank", BYTES, ci=True),
    Mutation("ONE_BY_ONE", "two-slots", PART, ci=True),
    Mutation("FREE_LATE", "one-rank", BYTES),
    Mutation("L2_FIRST", "one-rank", OWED),
    Mutation("L3_EARLY", "two-ranks", OWED, ci=True),
    Mutation("NO_L3", "two-ranks", STUCK),
    Mutation("NO_V3", "one-rank", STUCK),
    Mutation("LIVE_EARLY", "one-rank", BYTES),
    Mutation("WRITING_IS_LIVE", "one-rank", BYTES),
    Mutation("EVICTING_LEFT", "one-rank", LOST),
    Mutation("NO_D1", "one-key", TWICE, ci=True),
    Mutation("HOLD_READ", "holding", HELD, ci=True),
    Mutation("HOLD_LEFT", "holding", STUCK),
    Mutation("RELEASE_FIRST", "search", REFUSED),
    Mutation("UNCOUNTED", "search", REFUSED),
    Mutation("TOTAL_FIRST", "search", REFUSED, ci=True),
    Mutation("NO_EPOCH", "search", REFUSED),
    Mutation("NO_BASE", "search", REFUSED),
    Mutation("NO_GONE", "search", REFUSED),
    Mutation("VERDICT_UNPOLLED", "search", REFUSED, ci=True),
    Mutation("BLAMED_ONCE", "search", REFUSED, ci=True),
    Mutation("NO_RETIRED", "search-retired", REFUSED),
    Mutation("CANCEL_UNMARKED", "search", REFUSED),
    Mutation("COMMIT_UNMARKED", "search-reuse", REFUSED),
    Mutation("FAILED_EARLY", "search-reuse", REFUSED, ci=True),
    Mutation("LOOK_PINS", "search-remote", PASSING, ci=True),
    Mutation("NO_SECOND_SEARCH", "search-remote", PASSING, ci=True),
    Mutation("PIN_REMEMBERED", "search-remote", REFUSED),
    Mutation("J2_UNCOUNTED", "search-remote", REFUSED, ci=True),
    Mutation("B1_RELAXED", "pinning", GRANTED),
    Mutation("NO_B2", "pinning", GRANTED),
    Mutation("B2_ID_FIRST", "pinning", GRANTED),
    Mutation("B5_EARLY", "pinning", GRANTED, ci=True),
    Mutation("NO_W3H", "pinning", GRANTED),
    Mutation("LEASES_BEFORE_W2", "pinning", OWED, ci=True),
    Mutation("LEASES_BEFORE_PINS", "pinning", OWED, ci=True),
    Mutation("RANKS_BEFORE_HOLDS", "pinning", OWED, ci=True),
    Mutation("RANK_VERDICT_KEPT", "owner", OWED),
    Mutation("PIN_VERDICT_KEPT", "pinning", GRANTED),
    Mutation("LEASE_VERDICT_KEPT", "pinning", OWED, ci=True),
    Mutation("DEAD_HOLDS", "pinning", STUCK),
    Mutation("MOVED_IS_EMPTY", "chain", OWED, ci=True),
    Mutation("MOVED_UNASKED", "chain", STUCK),
    Mutation("NUMBER_ONCE", "chain", OWED),
    Mutation("REUSE_UNFENCED", "chain", OWED),
    Mutation("PINS_LEFT", "pinning", STUCK),
    Mutation("FIRST_LEFT", "pinning", STUCK, ci=True),
    Mutation("J1_LATE", "pinning", STUCK, ci=True),
    Mutation("NUMBERS_LEFT", "pinning", LEFT_OPEN),
    Mutation("KEEP_UNPINNED", "keeping", FREED, ci=True),
    Mutation("KEEP_UNASKED", "keeping", FREED, ci=True),
    Mutation("GROUP_UNASKED", "groups", STUCK, ci=True),
    Mutation("ALL_IS_NOBODY", "groups", OWED),
    Mutation("EVICTING_IS_STALE", "pinning", CALLED_STALE, ci=True),
    Mutation("ORPHAN_OF_B", "pinning", FREED),
    Mutation("ONE_BASE", "owner", LEFT_OPEN),
    Mutation("FIND_EVICTING", "finding", FOUND),
    Mutation("FIND_UNASKED", "finding", FOUND, ci=True),
    Mutation("FINDER_UNSEEN", "finding", FOUND),
    Mutation("BUSY_IS_STALE", "finding", WHOLE, ci=True),
]


def holds(status: int, output: str) -> bool:
    """Return whether pan finished a full search without an error; unclear output counts as an error."""
    if status != 0 or any(text in output for text in NOT_FINISHED):
        return False
    summary = re.search(r"^State-vector \d+ byte, depth reached \d+, errors: (\d+)$", output, re.M)
    return summary is not None and summary[1] == "0" and "Full statespace search" in output


def fails(output: str, by: str) -> bool:
    """Return whether pan found a violated assertion that contains `by`."""
    found = re.search(r"^pan:1: assertion violated (.*)$", output, re.M)
    return found is not None and by in f"violated {found[1]} "


def verify(model: str, sizes: str, mutation: str | None) -> tuple[int, str]:
    """Run spin, the compiler and pan in a temporary directory; return pan's exit status and output."""
    defines = [f"-D{size}" for size in sizes.split()] + ([f"-DMUT_{mutation}"] if mutation else [])
    options = ["-w", "-DSAFETY", "-DCOLLAPSE", "-DNOREDUCE", f"-DMEMLIM={MEMORY_MB}"]
    with tempfile.TemporaryDirectory() as directory:
        spin = ["spin", "-a", *defines, str(HERE / model)]
        for command in (spin, ["cc", "-O0" if mutation else "-O1", *options, "-o", "pan", "pan.c"]):
            done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
            if done.returncode:
                return done.returncode, done.stdout + done.stderr
        try:
            pan = subprocess.run(
                ["./pan", f"-m{DEPTH}", "-w25", "-n"], cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return 1, f"aborting: not finished in {TIMEOUT_S} s"
        return pan.returncode, pan.stdout + pan.stderr


def figures(output: str) -> str:
    """Extract the number of states and the memory from pan's output."""
    states = re.search(r"(\d+) states, stored", output)
    memory = re.search(r"([\d.]+)\s+total actual memory usage", output)
    return f"{int(states[1]) if states else 0:>10,} states {float(memory[1]) if memory else 0:6.0f} MB"


def check(one: Run | Mutation) -> tuple[bool, str, str]:
    """Return whether one run or mutation comes out as expected, a line about it, and the output."""
    start = time.monotonic()
    if isinstance(one, Run):
        status, output = verify(one.model, one.sizes, None)
        good = holds(status, output)
        said = f"{'holds' if good else 'BROKEN':7} {one.name:18} {figures(output)}"
    else:
        run = next(run for run in RUNS if run.name == one.run)
        _, output = verify(run.model, run.sizes, one.name)
        good = fails(output, one.by)
        said = f"{'fails' if good else 'HOLDS?':7} {one.name:18} in {one.run:12}"
    return good, f"{said} {time.monotonic() - start:5.1f} s", output


def main() -> int:
    """Run the checks that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="runs and mutations; default: all runs, and the mutations for CI")
    parser.add_argument("--all", action="store_true", help="do all mutations")
    arguments = parser.parse_args()
    known = {run.name for run in RUNS} | {mutation.name for mutation in MUTATIONS}
    if unknown := sorted(set(arguments.names) - known):
        parser.error(f"unknown names: {', '.join(unknown)}; choose from {', '.join(sorted(known))}")
    for tool in ("spin", "cc"):
        if shutil.which(tool) is None:
            print(f"{tool} is missing: the models were NOT checked (Debian: apt-get install spin gcc)")
            return 3
    wanted: list[Run | Mutation] = [run for run in RUNS if not arguments.names or run.name in arguments.names]
    for mutation in MUTATIONS:
        if mutation.name in arguments.names or (not arguments.names and (arguments.all or mutation.ci)):
            wanted.append(mutation)
    wrong, began = 0, time.monotonic()
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for good, line, output in pool.map(check, wanted):
            print(line, flush=True)
            if not good:
                wrong += 1
                print(output)
    print(f"{time.monotonic() - began:.0f} s, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
