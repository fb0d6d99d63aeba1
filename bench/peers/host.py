"""The process that a peer writes from: runs batches of exchanges on demand and says what they took."""

import os
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from bench.peers.interface import Peer, UnavailableError, fresh, load, make_tree, touch

PUT, HIT = "put", "hit"


@dataclass(frozen=True, slots=True)
class Batch:
    """What one batch took."""

    seconds: list[float]
    """Of each exchange, from before the put to the last acknowledgement."""
    cpu: float
    """Seconds of all processes of the peer, for the exchanges and what is prepared between them."""
    prepared: float
    """The part of `cpu` that went into preparing, which is no part of an exchange."""


def family() -> list[int]:
    """Return this process and everything below it."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
        except OSError:
            continue  # has just ended
    found = [os.getpid()]
    for pid in found:
        found += parents.get(pid, [])
    return found


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU time of processes, all threads, to the nanosecond; those that have ended count nothing."""
    total = 0.0
    for pid in pids:
        try:
            total += time.clock_gettime((~pid << 3) | 2)  # the kernel's number for the CPU clock of another process
        except OSError:
            continue
    return total


def memory(pids: list[int]) -> int:
    """Return the resident bytes of processes, shared pages divided among those that map them."""
    total = 0
    for pid in pids:
        try:
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
        except OSError:
            continue
    return total


class Session:
    """One peer with objects of one size for so many readers."""

    def __init__(self, peer: Peer, nbytes: int, n_readers: int) -> None:
        self._peer = peer
        self._n_readers = n_readers
        self._source = make_tree(nbytes)
        self._number = 0
        self._sum = 0
        self._pids = family()
        peer.open(nbytes, n_readers)
        self.run(PUT, 1.0, 6)  # a store of four objects has then used every place of it
        self.run(HIT, 0.2, 2)

    def run(self, path: str, budget: float, at_most: int) -> Batch:
        """Make exchanges until `budget` seconds have gone into them, one at least and no more than `at_most`."""
        spent: list[float] = []
        prepared = 0.0
        if path == HIT:
            self._put()
        before = cpu_seconds(self._pids)
        while (not spent or sum(spent) < budget) and len(spent) < max(at_most, 1):
            if path == HIT:
                start = time.perf_counter()
                self._peer.send_again()
                found = self._peer.wait()
                spent.append(time.perf_counter() - start)
                self._check(found)
            else:
                seconds, preparing = self._put()
                spent.append(seconds)
                prepared += preparing
        return Batch(spent, cpu_seconds(self._pids) - before, prepared)

    def _put(self) -> tuple[float, float]:
        cpu = time.process_time()
        self._number += 1
        tree = fresh(self._source, self._number)
        self._sum = touch(tree)
        value = self._peer.prepare(tree)
        preparing = time.process_time() - cpu
        start = time.perf_counter()
        self._peer.send(self._number, value)
        found = self._peer.wait()
        self._peer.settle()
        seconds = time.perf_counter() - start
        self._check(found)
        return seconds, preparing

    def _check(self, found: list[int]) -> None:
        if set(found) != {self._sum}:
            raise RuntimeError(f"the readers saw {found}, not {self._sum}")

    def memory(self) -> int:
        return memory(self._pids)

    def close(self) -> None:
        self._peer.close()


def host_main(name: str, count: int, orders: Connection) -> None:
    """Run a peer with `count` readers; every order gets one answer: (True, result) or (False, reason)."""
    torch.set_num_threads(1)
    peer: Peer | None = None
    session: Session | None = None
    try:
        while True:
            order, *arguments = orders.recv()
            try:
                answer: object = None
                if order == "start":
                    peer = load(name)()
                    peer.start(count)
                    answer = memory(family())
                elif order == "cpu":
                    answer = cpu_seconds(family())
                elif peer is None:
                    raise RuntimeError("not started")
                elif order == "open":
                    session = Session(peer, *arguments)
                elif order == "stop":
                    peer.stop()
                    orders.send((True, None))
                    return
                elif session is None:
                    raise RuntimeError("no session")
                elif order == "run":
                    answer = session.run(*arguments)
                elif order == "memory":
                    answer = session.memory()
                elif order == "close":
                    session.close()
                    session = None
                orders.send((True, answer))
            except UnavailableError as error:
                orders.send((False, str(error)))
            except Exception as error:
                last = traceback.format_exception(error)[-1].strip().splitlines()[0]
                orders.send((False, f"{order}: {last}"))
    except (EOFError, BrokenPipeError):
        return
