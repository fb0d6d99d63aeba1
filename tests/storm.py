"""A store in the storm: python -m tests.storm [--minutes N] [--seed N].

API servers, engines and workers are processes of one store. Every tenth of a second one of them gets SIGKILL, SIGSEGV,
SIGSTOP and SIGCONT, or a control group that has no memory left; now and then all are killed, and start again with
another capacity and quota. Each value says what its bytes must be, so every reader checks them.

At the end no byte was wrong, nothing was encoded twice without cause, every lease and pin comes back, and nothing has
leaked: no file, descriptor, mapping or process. A `find` takes no longer than at the beginning, and the
process that watches needs no more memory.
"""

import argparse
import mmap
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shmstore import (
    Claim,
    ObjectExistsError,
    ObjectNotFoundError,
    ObjectRef,
    ObjectStoreReader,
    ObjectStoreWriter,
    StaleRefError,
    StoreFullError,
)
from shmstore.inspect.verify import verify
from shmstore.tiers import StoreTier, open_tier
from tests.support import SHM, Child, bits, memory_group, random_tensor, segments, store_name

SERVERS, ENGINES, WORKERS = 2, 2, 4
WRITERS = SERVERS + ENGINES
RANKS = WORKERS + ENGINES + 1
"""Two groups of workers, which leases are for; and those that only find, of which the last one watches."""
GROUPS = [2, 2, ENGINES + 1]
KEYS = 60
ENCODED = "encoder outputs"
CELL, CELLS = 40, 64
PROCESSES = WRITERS + WORKERS
ROUNDS = SERVERS * CELLS * CELL
MADE = ROUNDS + 8 * PROCESSES
ENCODERS = MADE + 8 * PROCESSES


def is_alive(pid: int) -> bool:
    """Say whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@cache
def content(key: int) -> Any:
    return random_tensor(key, 300 + key * 7919 % 4000)


def value_of(key: int) -> Any:
    return {"key": key, "x": content(key)}


def check(value: Any) -> None:
    assert bits(content(value["key"])) == bits(value["x"]), value["key"]


class Board:
    """Memory that all processes share.

    It has rows of references, the counts of each process, and for each key the process that encodes it.
    """

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, ENCODERS + 8 * KEYS)

    def post(self, row: int, cell: int, ref: ObjectRef) -> None:
        at = (row * CELLS + cell) * CELL
        self._map[at : at + CELL] = ref.to_bytes()

    def take(self, cell: int) -> ObjectRef:
        return ObjectRef.from_bytes(self._map[cell * CELL : (cell + 1) * CELL])

    def count(self, process: int, of: int = ROUNDS) -> int:
        at = of + 8 * process
        return int.from_bytes(self._map[at : at + 8], "little")

    def counted(self, process: int, of: int = ROUNDS) -> None:
        at = of + 8 * process
        self._map[at : at + 8] = (self.count(process, of) + 1).to_bytes(8, "little")

    @contextmanager
    def encoding(self, key: int) -> Iterator[None]:
        """Be the only living process that encodes this key."""
        at = ENCODERS + 8 * key
        other = int.from_bytes(self._map[at : at + 8], "little")
        end = time.monotonic() + 1
        while other and is_alive(other):  # one that dies loses its claim a little before it has ended
            assert time.monotonic() < end, f"process {other} encodes {key}, too"
            time.sleep(0.001)
        self._map[at : at + 8] = os.getpid().to_bytes(8, "little")
        yield
        self._map[at : at + 8] = bytes(8)


class Life:
    """What the processes of one storm share."""

    def __init__(self, folder: str) -> None:
        self.name, self.folder, self.board = store_name(), folder, Board()
        self.capacity, self.quota = 96 << 10, 0.5

    def open(self) -> ObjectStoreWriter:
        return ObjectStoreWriter.open(
            self.name,
            capacity=self.capacity,
            n_readers=RANKS,
            groups=GROUPS,
            n_writers=WRITERS,
            max_objects=64,
            quotas={"audio": self.quota},
        )

    def tier(self, writer: ObjectStoreWriter) -> StoreTier:
        return StoreTier(writer, open_tier(f"file://{self.folder}/tier"), namespace="storm")


def serve(life: Life, process: int, chance: random.Random) -> None:
    """Be an API server: hand images out to groups of workers, abort some, and publish to the tier."""
    writer = life.open()
    writer.check_valid()
    tier = life.tier(writer)
    refs: list[ObjectRef] = []
    while True:
        key, group = chance.randrange(KEYS), chance.choice([0, 1])
        try:
            if writer.is_cached(str(key)):
                ref = writer.get_cached(str(key), group=group, hold=chance.random() < 0.1)
            elif chance.random() < 0.1 and tier.fetch(str(key)):
                ref = writer.get_cached(str(key), group=group)
            else:
                kind = chance.choice(["image", "audio"])
                ref = writer.put(str(key), value_of(key), group=group, kind=kind, timeout=chance.choice([0.0, 0.002]))
                tier.publish(str(key))
            refs.append(ref)
            life.board.post(process, chance.randrange(CELLS), ref)
        except StoreFullError:
            refs.clear()
            writer.cancel_all()
        except (ObjectNotFoundError, ObjectExistsError):
            pass  # another writer has evicted or stored it meanwhile
        if len(refs) > 8:
            with suppress(StaleRefError):
                writer.cancel(refs.pop(chance.randrange(len(refs))))
        if chance.random() < 0.02:
            writer.delete(str(chance.randrange(KEYS)))
        life.board.counted(process)


def encode(life: Life, process: int, chance: random.Random) -> None:
    """Be an engine: find encoder outputs, or claim and encode them, as one engine does for all."""
    writer = life.open()
    reader = ObjectStoreReader.attach(life.name, WORKERS + process - SERVERS, wait=30, finds_only=True)
    while True:
        key = chance.randrange(KEYS)
        found = reader.find_or_claim(str(key), namespace=ENCODED, wait=0.01)
        if isinstance(found, Claim):
            with found, life.board.encoding(key):
                life.board.counted(process, MADE)
                with suppress(StoreFullError, ObjectExistsError):  # a find misses what is being evicted, and may stay
                    writer.cancel(writer.put(str(key), value_of(key), namespace=ENCODED, unless_stored=True))
        elif found is not None:
            check(reader.get(found.ref))
            found.end()
        life.board.counted(process)


def read(life: Life, process: int, chance: random.Random) -> None:
    """Be a worker: read or release what servers have sent."""
    reader = ObjectStoreReader.attach(life.name, process - WRITERS, wait=30)
    views: list[Any] = []
    while True:
        with suppress(StaleRefError):
            ref = life.board.take(chance.randrange(SERVERS * CELLS))
            if chance.random() < 0.3:
                reader.release(ref)
            else:
                views.append(reader.get(ref, private=chance.random() < 0.1))
                check(views[-1])
        if len(views) > 4:
            check(views.pop(chance.randrange(len(views))))
        life.board.counted(process)


ROLES: list[Callable[[Life, int, random.Random], None]] = [*[serve] * SERVERS, *[encode] * ENGINES, *[read] * WORKERS]


def live(life: Life, process: int, seed: float) -> None:
    """Be one of the processes until killed."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ROLES[process](life, process, random.Random(seed))


class Storm:
    """The processes, and what happens to them."""

    def __init__(self, life: Life, seed: int, stack: ExitStack) -> None:
        self.life, self.chance = life, random.Random(seed)
        self.happened: Counter[str] = Counter()
        self.finds: list[float] = []
        self.memory: list[float] = []
        (Path(life.folder) / "tier").mkdir()
        for key in range(KEYS):
            content(key)  # before the forks
        self.running: list[Child] = []
        self.full = stack.enter_context(memory_group())
        if self.full is not None:
            version_1 = self.full / "memory.limit_in_bytes"
            (version_1 if version_1.exists() else self.full / "memory.max").write_text("0")
        stack.callback(self.kill_all)
        self.start_all()

    def start_all(self) -> None:
        """Make the store, or take over what the last ones left; and wait until all are well."""
        self.life.open().close()
        for process in range(PROCESSES):
            self.running.append(Child(live, self.life, process, self.chance.random()))
        self.await_all()

    def kill_all(self) -> None:
        for child in self.running:
            child.kill()
        self.running.clear()

    def must_run(self, process: int) -> None:
        """Raise what went wrong if a process has ended by itself."""
        child = self.running[process]
        if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            child.join()
            raise AssertionError(f"process {process} has returned")

    def await_all(self) -> None:
        before = [self.life.board.count(process) for process in range(PROCESSES)]
        end = time.monotonic() + 60
        while waiting := [p for p in range(PROCESSES) if self.life.board.count(p) == before[p]]:
            for process in waiting:
                self.must_run(process)
            assert time.monotonic() < end, f"processes {waiting} make no progress"
            time.sleep(0.001)

    def strike(self) -> None:
        """Kill or stop a process."""
        process, what = self.chance.randrange(PROCESSES), self.chance.choice(["KILL", "KILL", "SEGV", "STOP", "FULL"])
        if self.chance.random() < 0.002:
            return self.restart()
        self.must_run(process)
        child = self.running[process]
        if what == "FULL":
            what = self.starve(child)
        else:
            child.signal(signal.Signals[f"SIG{what}"])
        self.happened[what] += 1
        if what == "STOP":
            time.sleep(self.chance.random() * 0.2)
            child.signal(signal.SIGCONT)
        else:
            child.kill()
            self.running[process] = Child(live, self.life, process, self.chance.random())
        return None

    def starve(self, child: Child) -> str:
        """Let the kernel kill a process because its control group has no memory left; return what happened instead."""
        if self.full is None:
            return "KILL"
        (self.full / "cgroup.procs").write_text(str(child.pid))
        end = time.monotonic() + 1
        while time.monotonic() < end:
            if ended := os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_code == os.CLD_EXITED:
                    with pytest.raises(AssertionError, match=r"MemoryError|Cannot allocate memory"):
                        child.join()
                return "FULL"
            time.sleep(0.001)
        return "KILL"  # it has needed no memory

    def restart(self) -> None:
        """Kill all, and start them with other options, so the store is made again."""
        self.happened["restart"] += 1
        for process in range(PROCESSES):
            self.must_run(process)
        self.kill_all()
        self.life.capacity = self.chance.choice([64, 96, 128]) << 10
        self.life.quota = self.chance.choice([0.25, 0.5, 1.0])
        self.start_all()

    def watch(self) -> None:
        """Look as an operator does: the store is sound, what is found has its bytes, and how long a find takes."""
        report = verify(self.life.name)
        wrong = [finding for finding in report.findings if finding.wrong]
        assert not wrong, report
        with ObjectStoreReader.attach(self.life.name, RANKS - 1, finds_only=True) as reader:
            times = []
            for key in range(KEYS):
                start = time.perf_counter()
                found = reader.find(str(key), namespace=ENCODED)
                times.append((time.perf_counter() - start) * 1e6)
                if found is not None:
                    check(reader.get(found.ref))
                    found.end()
        self.finds.append(statistics.median(times))
        self.memory.append(own_memory())

    def rage(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        strikes = 0
        while time.monotonic() < end:
            self.strike()
            strikes += 1
            time.sleep(self.chance.random() * 0.2)
            if strikes % 20 == 0:
                self.watch()
        self.await_all()
        self.watch()

    def calm(self) -> dict[str, Any]:
        """Kill all, take their arenas over, and return what the storm has cost."""
        self.kill_all()
        life, found = self.life, 0
        writers = [ObjectStoreWriter.join(life.name, index) for index in range(WRITERS)]
        with ExitStack() as stack:
            for writer in writers:
                stack.callback(writer.close)
            left = [writer.stats() for writer in writers]
            with ObjectStoreReader.attach(life.name, 0) as reader:
                for writer in writers:
                    writer.check_valid()
                    for key in writer.keys():
                        check(reader.get(writer.get_cached(key)))
                        found += 1
            assert verify(life.name).ok
            for writer in writers:
                writer.cancel_all()
            for writer in writers:  # no lease and no pin is left
                with writer.reserve("all", random_tensor(0, life.capacity - 256)):
                    pass
                assert ["all"] == writer.keys()
                writer.check_valid()
        made = sum(life.board.count(process, MADE) for process in range(PROCESSES))
        gone = sum(stats.evictions + stats.deletes for stats in left)
        return {
            **self.happened,
            "rounds": sum(life.board.count(process) for process in range(PROCESSES)),
            "objects checked at the end": found,
            "encoded": made,
            "evicted or deleted": gone,
            "remote_hits": sum(stats.remote_hits for stats in left),
        }


def descriptors() -> set[str]:
    """Return what this process has open."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{entry}"))
    return found


def own_memory() -> float:
    """Return how many KiB this process alone has."""
    pages = Path("/proc/self/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * mmap.PAGESIZE / 1024


def storm(seconds: float, seed: int) -> dict[str, Any]:
    """Rage for so long, and return the figures; AssertionError if a promise was broken."""
    before = descriptors()
    with ExitStack() as stack:
        life = Life(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(lambda: (SHM / life.name).unlink(missing_ok=True))
        tempest = Storm(life, seed, stack)
        tempest.rage(seconds)
        figures = tempest.calm()
        for what, values, most in (("us of a find", tempest.finds, 4.0), ("own KiB", tempest.memory, 1.1)):
            third = len(values) // 3
            if third >= 5:
                first, last = (round(statistics.median(part), 2) for part in (values[:third], values[-third:]))
                assert last <= most * first, f"{what}: {first} in the first third, {last} in the last one"
                figures[f"{what}, first and last third"] = (first, last)
        ObjectStoreWriter.unlink(life.name)
    assert not segments(), segments()
    assert descriptors() <= before, descriptors() - before
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.storm", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    if chosen.minutes <= 0:
        parser.error("--minutes must be above 0")
    for what, figure in storm(chosen.minutes * 60, chosen.seed).items():
        print(f"{what}: {figure}")
    print("no promise was broken")
    return 0


if __name__ == "__main__":
    sys.exit(main())
