"""One session over all peers: a host process for each, the same batches in turn, one peer at work at a time."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from bench.peers import LIMITS, PEERS, interface
from bench.peers.host import HIT, PUT, Batch, host_main
from bench.peers.interface import UnavailableError, load

KIB, MIB = 1 << 10, 1 << 20
SIZES = (KIB, 64 * KIB, MIB, 6 * MIB, 64 * MIB)
READERS = (1, 2, 4)
LARGE = 16 * MIB
"""From here on there are fewer batches: each has at least one exchange, and those of some peers take a second."""
PATIENCE = 120.0
"""Seconds after which a peer that has not answered is given up."""


@dataclass(slots=True)
class Cell:
    """The figures of one peer at one size, number of readers and path."""

    peer: str
    nbytes: int
    n_readers: int
    path: str
    samples: int = 0
    median: float = 0.0
    p99: float = 0.0
    cpu: float = 0.0
    """CPU seconds an exchange, all processes of the peer, without what was prepared."""
    memory: int = 0
    """Resident bytes of all processes of the peer, shared pages counted once."""
    batches: list[float] = field(default_factory=list)
    """The median of each batch, in the order in which all peers had theirs."""


@dataclass(slots=True)
class Results:
    """A whole session, as it is written to disk."""

    machine: dict[str, str]
    versions: dict[str, str]
    missing: dict[str, str] = field(default_factory=dict)
    """Peer: why it is not here, or from where on it failed."""
    idle_memory: dict[str, int] = field(default_factory=dict)
    idle_cpu: dict[str, float] = field(default_factory=dict)
    """CPU seconds a second while nothing is asked of the peer."""
    cells: list[Cell] = field(default_factory=list)
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> "Results":
        saved = json.loads(path.read_text())
        saved["cells"] = [Cell(**cell) for cell in saved["cells"]]
        return cls(**saved)


class PeerError(Exception):
    """A peer did not do what it was asked."""


class Host:
    """The harness's end of a peer's host process."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self._orders, theirs = interface.CONTEXT.Pipe()
        self._process = interface.CONTEXT.Process(target=host_main, args=(name, count, theirs))
        self._process.start()
        theirs.close()

    def begin(self, *order: Any) -> None:
        """Give an order and don't wait."""
        self._orders.send(order)

    def answer(self) -> Any:
        """Wait for the answer and return it; PeerError with the reason if the peer failed."""
        try:
            if not self._orders.poll(PATIENCE):
                raise PeerError(f"no answer within {PATIENCE:.0f} s")
            good, said = self._orders.recv()
        except (EOFError, ConnectionError):
            raise PeerError("the process ended") from None
        if not good:
            raise PeerError(said)
        return said

    def ask(self, *order: Any) -> Any:
        self.begin(*order)
        return self.answer()

    def end(self) -> None:
        """Stop the peer; one that does not stop is killed, and its readers end as their pipe does."""
        try:
            self.ask("stop")
        except (PeerError, OSError):
            self._process.kill()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._orders.close()


def percentile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that `part` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def machine() -> dict[str, str]:
    """Return what the figures depend on."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "processor": cpu,
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.0f} GiB",
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str:
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of what the peers come from."""
    found = {}
    for package in ("torch", "numpy", *(load(name).package for name in names)):
        if package is not None:
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                found[package] = "from the source tree"
    return found


class Measurement:
    """A session: start it, measure cells, stop it."""

    def __init__(
        self,
        names: Sequence[str],
        most_readers: int,
        say: Callable[[str], None] = lambda text: None,
        idle_seconds: float = 3.0,
    ) -> None:
        self._say = say
        self._hosts: dict[str, Host] = {}
        importable = []
        missing = {}
        for name in names:
            try:
                load(name)
                importable.append(name)
            except UnavailableError as error:
                missing[name] = str(error)
        self.results = Results(machine(), versions(importable), missing)
        self._begun = time.monotonic()
        for name in importable:  # two at a time: each imports torch once for itself and once for each reader
            self._hosts[name] = Host(name, most_readers)
            self._hosts[name].begin("start")
            if len(self._hosts) % 2 == 0:
                self._settle()
        self._settle()
        self._idle(idle_seconds)

    def _settle(self) -> None:
        for name in [name for name in self._hosts if name not in self.results.idle_memory]:
            try:
                self.results.idle_memory[name] = self._hosts[name].answer()
                self._say(f"started {name}")
            except PeerError as error:
                self._lose(name, str(error))

    def _idle(self, seconds: float) -> None:
        """See what the peers take while nobody asks them for anything."""
        before = {name: self._try(name, "idle", "cpu") for name in list(self._hosts)}
        time.sleep(seconds)
        for name in list(self._hosts):
            after = self._try(name, "idle", "cpu")
            if after is not None:
                self.results.idle_cpu[name] = max(0.0, after - before[name]) / seconds

    def _lose(self, name: str, why: str) -> None:
        self._say(f"lost {name}: {why}")
        self.results.missing[name] = why
        self._hosts.pop(name).end()

    def measure(self, nbytes: int, n_readers: int, budget: float = 0.4, batches: int = 8, at_most: int = 800) -> None:
        """Measure every peer at one size: `batches` of them in turn, `budget` seconds for each peer and path."""
        where = f"{nbytes} bytes, {n_readers} readers"
        self._say(where)
        taken: dict[tuple[str, str], list[Batch]] = {}
        for name in list(self._hosts):
            self._try(name, where, "open", nbytes, n_readers)
        for number in range(batches):
            turn = list(self._hosts)
            turn = turn[number % len(turn) :] + turn[: number % len(turn)]
            for path in (PUT, HIT):
                for name in turn:
                    if name in self._hosts:
                        batch = self._try(name, where, "run", path, budget / batches, -(-at_most // batches))
                        if batch is not None:
                            taken.setdefault((name, path), []).append(batch)
        memory = {name: self._try(name, where, "memory") for name in list(self._hosts)}
        for name in list(self._hosts):
            self._try(name, where, "close")
        for (name, path), found in taken.items():
            seconds = [one for batch in found for one in batch.seconds]
            self.results.cells.append(
                Cell(
                    name,
                    nbytes,
                    n_readers,
                    path,
                    len(seconds),
                    median(seconds),
                    percentile(seconds, 0.99),
                    max(0.0, sum(batch.cpu - batch.prepared for batch in found) / len(seconds)),
                    memory.get(name) or 0,
                    [median(batch.seconds) for batch in found],
                )
            )

    def _try(self, name: str, where: str, *order: Any) -> Any:
        try:
            return self._hosts[name].ask(*order)
        except PeerError as error:
            self._lose(name, f"{where}: {error}")
            return None

    def stop(self) -> Results:
        """End every process and return what was measured."""
        for name in list(self._hosts):
            self._hosts.pop(name).end()
        self.results.seconds = time.monotonic() - self._begun
        return self.results


def run(
    names: Sequence[str] = tuple(PEERS),
    sizes: Sequence[int] = SIZES,
    readers: Sequence[int] = READERS,
    budget: float = 0.4,
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> Results:
    """Measure `names` at every size and number of readers; the limits are always among them."""
    chosen = [*LIMITS, *(name for name in names if name not in LIMITS)]
    session = Measurement(chosen, max(readers), say)
    try:
        for n_readers in readers:
            for nbytes in sizes:
                session.measure(nbytes, n_readers, budget, batches=8 if nbytes < LARGE else 4)
    finally:
        results = session.stop()
    return results
