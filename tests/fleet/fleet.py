"""Several API servers, engines and hosts: deals the requests at random, and replaces a process that it has killed.

Each image is requested once a round, in another order each time. A round begins when the one before it is answered, so
an image that is processed twice was not cached where it was requested. The same processes serve every mode.

A process to be killed gets its successor's pipes made at the start. The requests that are lost with it are dealt again
at once, to those that live. The last round waits for the successor.

With two hosts the second one gets its requests when the first one has answered all of its own, and when its tier has
what it has published.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from multiprocessing.connection import wait
from statistics import median
from typing import Any

from examples.demo.api import SHARE_OF_SHM, percentile, request_order, room_for_all
from examples.demo.images import ImageError
from examples.demo.messages import Failure, Link, PeerLostError, Progress, Signal
from examples.demo.processing import PictureSource
from examples.demo.supervisor import (
    SHM,
    Child,
    DemoError,
    Observer,
    end_all,
    how_it_ended,
    interrupts_held_back,
    next_message,
    start_one,
)
from shmstore.multimodal import MultiModalCacheConfig
from shmstore.tiers import TierStats
from shmstore.tiers.urls import shown_url
from tests.fleet.fleet_processes import (
    Answer,
    Attach,
    Deal,
    Flush,
    Known,
    Open,
    Opened,
    engine_process,
    server_process,
    worker_process,
)
from tests.fleet.records import HOSTS, TIER, FleetFigures, FleetReport, FleetSettings, Successor
from tests.fleet.tier_server import FleetTier, fleet_tier

_GIB, _MIB = 1 << 30, 1 << 20
_FLUSH_S = 60.0
"""How long the second host waits for the write-behind of the first one."""

PICKLE, OWN, SHARED = "pickle", "own", "shared"
FLEET_MODES = (PICKLE, OWN, SHARED)
"""Each server pickles the items that it keeps through every pipe; has a store of its own; or all have one store."""
APART = "no tier"
HOST_MODES = (APART, TIER)
"""Each host has a store alone, or publishes its items to a tier that it asks before it processes an image."""


def run_fleet(
    settings: FleetSettings, source: PictureSource, *, modes: Sequence[str] = FLEET_MODES, observer: Observer
) -> FleetReport:
    """Run the same requests in each of `modes`, and return the figures.

    Raises `DemoError` if a process failed or died, and `ImageError` if the images are to blame. When it returns or
    raises, all processes are reaped and no segment is left.
    """
    with fleet_tier(settings.tier) if settings.hosts > 1 else nullcontext() as tier:
        fleet = _Fleet(settings, source, tier, observer)
        clean = False
        try:
            with interrupts_held_back():
                try:
                    fleet.start()
                except OSError as error:  # no more processes or file descriptors, for example
                    raise DemoError(f"the processes could not be started: {error} (use fewer of them)") from error
            report = fleet.run(modes)
            clean = True
            return report
        finally:
            with interrupts_held_back():  # a second Ctrl-C must not interrupt this
                fleet.end(in_order=clean)


class _Fleet:
    """The processes of one run, and what each of them is doing."""

    def __init__(
        self, settings: FleetSettings, source: PictureSource, tier: FleetTier | None, observer: Observer
    ) -> None:
        self._settings = settings
        self._tier = tier
        self._n_servers, self._n_engines = settings.hosts * settings.api_servers, settings.hosts * settings.engines
        self._source = source
        self._observer = observer
        self._name = f"shmstore-demo-{os.getpid()}-{secrets.token_hex(4)}"
        self._context = multiprocessing.get_context("spawn")
        self._children: list[Child] = []
        self._watched: dict[Any, Child] = {}
        self._leaving: set[str] = set()
        """The processes that end because one of them has been killed."""
        kind, _, number = (settings.kill or "").partition(":")
        self._kind, self._victim = kind, int(number or 0)
        self._group = self._victim if kind == "engine" else self._victim // settings.workers
        """Of the engine to be killed."""
        self._servers: dict[int, Link] = {}
        self._open: set[int] = set()
        """The servers that have a cache of the mode, so that requests can be dealt to them."""
        self._engines: dict[int, int] = {}
        """The group of each engine that the servers are connected to."""
        self._workers_ready = self._attached = 0
        """Of the engine that takes the place of a killed one: its workers, and the servers that are connected to it."""
        self._known: tuple[Known, ...] = ()
        self._capacity = 0
        self._todo: deque[int] = deque()
        self._out: dict[int, int] = {}
        """The server of each request in flight."""
        self._answers: list[Answer] = []
        self._flushed: list[TierStats] = []
        self._dealt_again = 0
        self._killed_at_ns: int | None = None
        self._successor: Successor | None = None

    # ---- processes

    def start(self) -> None:
        """Start all processes, and make the pipes of the successor of one that is to be killed."""
        servers = range(self._n_servers + (self._kind == "api"))
        engines = range(self._n_engines + (self._kind in ("engine", "worker")))
        self._pipes = {
            (server, engine): self._pair()
            for server in servers
            for engine in engines
            if self._host_of_server(server) == self._host_of_engine(engine)
        }
        for server in servers[: self._n_servers]:
            self._start_server(server, first=server == 0)
        for engine in engines[: self._n_engines]:
            self._start_engine(engine, group=engine % self._settings.engines)
        self._observer.started("fleet", {child.name: child.process.pid or 0 for child in self._children})

    def _host_of_server(self, slot: int) -> int:
        return min(slot // self._settings.api_servers, self._settings.hosts - 1)  # a successor comes behind the last

    def _host_of_engine(self, slot: int) -> int:
        return min(slot // self._settings.engines, self._settings.hosts - 1)

    def _pair(self) -> tuple[Link, Link]:
        (one_in, two_out), (two_in, one_out) = self._context.Pipe(duplex=False), self._context.Pipe(duplex=False)
        return Link(one_in, one_out), Link(two_in, two_out)

    def _start_server(self, slot: int, *, first: bool = False) -> None:
        mine, theirs = self._pair()
        ends = {engine: pair[0] for (server, engine), pair in self._pipes.items() if server == slot}
        self._servers[slot] = mine
        arguments, host = (self._source, first, ends, theirs), self._host_of_server(slot)
        self._start(f"API server {slot}", host, server_process, arguments, [*ends.values(), theirs])

    def _start_engine(self, slot: int, *, group: int) -> None:
        pairs = [self._pair() for _ in range(self._settings.workers)]
        ends = {server: pair[1] for (server, engine), pair in self._pipes.items() if engine == slot}
        mine, host = tuple(mine for mine, _ in pairs), self._host_of_engine(slot)
        self._start(f"engine {slot}", host, engine_process, (mine, ends), [*mine, *ends.values()])
        for number, (_, theirs) in enumerate(pairs):
            rank = group * self._settings.workers + number
            self._start(f"worker {rank} of engine {slot}", host, worker_process, (rank, theirs), [theirs])

    def _start(self, name: str, host: int, target: Any, arguments: tuple[Any, ...], links: Sequence[Link]) -> None:
        try:
            with self._tier.network.entered(host) if self._tier else nullcontext():
                start_one(self._context, name, target, arguments, self._children)
        finally:
            for link in links:
                link.close()  # a copy here would hide from each process that its peer is gone
        child = self._children[-1]
        self._watched[child.status] = self._watched[child.process.sentinel] = child

    def end(self, *, in_order: bool) -> None:
        """Reap all processes, and remove what they have left."""
        for link in self._servers.values():
            link.close()
        for pair in self._pipes.values():
            for link in pair:
                link.close()
        end_all(self._children, in_order=in_order)
        for left in SHM.glob(f"{self._name}*"):  # if a server was killed last
            left.unlink(missing_ok=True)

    def _next(self) -> tuple[int, Any]:
        """Return the next message of a server with its number."""
        while True:
            by_link = {link.incoming: number for number, link in self._servers.items()}
            for ready in wait([*self._watched, *by_link]):
                if ready in by_link:
                    try:
                        return by_link[ready], self._servers[by_link[ready]].receive()
                    except PeerLostError:
                        self._servers.pop(by_link[ready]).close()  # its sentinel says how it ended
                    continue
                child = self._watched[ready]
                if ready is child.status:
                    self._take(child)
                elif child.status not in self._watched:  # its messages come first
                    del self._watched[ready]
                    child.process.join()
                    self._has_ended(child)

    def _take(self, child: Child) -> None:
        message = next_message(child.status)
        if message is None:
            del self._watched[child.status]
        elif isinstance(message, Failure):
            raise ImageError(message.text) if message.usage else DemoError(f"{child.name}: {message.text}")
        elif child.name.endswith(f" of engine {self._n_engines}"):
            self._workers_ready += 1
            if self._workers_ready == self._settings.workers:
                for server in self._open:
                    self._send(server, Attach(self._n_engines))

    def _has_ended(self, child: Child) -> None:
        if child.name not in self._leaving:
            raise DemoError(f"{child.name} (pid {child.process.pid}) {how_it_ended(child.process)}")
        self._leaving.discard(child.name)
        if not self._leaving and self._kind != "api":  # now the ranks are free
            with interrupts_held_back():
                self._start_engine(self._n_engines, group=self._group)

    def _send(self, server: int, message: object) -> None:
        with suppress(PeerLostError, KeyError):  # its sentinel says how it ended
            self._servers[server].send(message)

    def _kill(self) -> None:
        """Kill the process of `--kill`; a server's successor starts at once, an engine's when its ranks are free."""
        self._killed_at_ns = time.monotonic_ns()
        if self._kind == TIER:
            if self._tier and self._tier.kill:
                self._tier.kill()
            return
        if self._kind == "api":
            name = f"API server {self._victim}"
            self._leaving = {name}
        else:
            del self._engines[self._group]
            name = f"engine {self._group}"
            if self._kind == "worker":
                name = f"worker {self._victim} of {name}"
            self._leaving = {child.name for child in self._children if child.name.endswith(f"engine {self._group}")}
        next(child for child in self._children if child.name == name).process.kill()
        if self._kind == "api":
            self._servers.pop(self._victim).close()
            self._open.discard(self._victim)
            self._deal_again([number for number, server in self._out.items() if server == self._victim])
            with interrupts_held_back():
                self._start_server(self._n_servers)

    def _deal_again(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            del self._out[number]
        self._todo.extend(numbers)
        self._dealt_again += len(numbers)

    # ---- requests

    def run(self, modes: Sequence[str]) -> FleetReport:
        """Run the modes one after the other, and return the figures."""
        for _ in range(self._n_servers):
            while isinstance(message := self._next()[1], Progress):
                self._observer.progressed("fleet", message)
            self._known = self._known or message
        sizes = [known.nbytes for known in self._known]
        stat = os.statvfs(SHM)
        room = int(stat.f_bavail * stat.f_frsize * SHARE_OF_SHM) // self._n_servers
        self._capacity = self._settings.capacity or max(1, min(room_for_all(sizes), room))
        figures = {name: found for mode in modes for name, found in self._run_mode(mode)}
        for server in self._servers:
            self._send(server, Signal.FINISH)
        network, tier = (self._tier.network.words, shown_url(self._tier.url)) if self._tier else ("", "")
        return FleetReport(
            self._settings, len(sizes), sum(sizes), self._capacity, figures, self._successor, network, tier
        )

    def _opening(self, mode: str, server: int) -> Open:
        host, own = self._host_of_server(server), mode in (PICKLE, OWN)
        config = MultiModalCacheConfig(
            processor_cache_gb=self._capacity / _GIB,
            ipc_cache_gb=0 if mode == PICKLE else self._capacity / _GIB,
            cache_type="shm",
            world_size=self._settings.workers,
            api_process_count=1 if own else self._settings.api_servers,
            data_parallel_size=self._settings.engines,
            shm_max_object_size_mb=-(-self._capacity // _MIB),
            shm_name=f"{self._name}-{server if own else host}",
            # Time a store in use, not the kernel that clears its pages for the first time.
            shm_prefault=True,
            tier_url=self._tier.url if self._tier and mode == TIER else None,
            tier_namespace=self._name,  # what an earlier run may have left is not for this one
        )
        return Open(config, self._known, tuple(self._engines_of(host)))

    def _engines_of(self, host: int) -> list[int]:
        return sorted(engine for engine in self._engines if self._host_of_engine(engine) == host)

    def _servers_of(self, host: int) -> list[int]:
        return sorted(server for server in self._open if self._host_of_server(server) == host)

    def _run_mode(self, mode: str) -> Iterator[tuple[str, FleetFigures]]:
        """Yield the figures with the name of the mode; of two hosts, the figures of each."""
        self._engines = {engine: engine % self._settings.engines for engine in range(self._n_engines)}
        for server in self._servers:
            self._send(server, self._opening(mode, server))
        while len(self._open) < len(self._servers):
            self._hear(mode)
        for host in range(self._settings.hosts):
            name = mode if self._settings.hosts == 1 else f"{mode}, {HOSTS[host]}"
            yield name, self._run_host(mode, name, host)
        for server in self._open:
            self._send(server, Signal.FINISH)
        while self._open:
            self._hear(mode)

    def _run_host(self, mode: str, name: str, host: int) -> FleetFigures:
        items = len(self._known)
        order = request_order(items, self._settings.rounds, self._settings.seed)
        deal = random.Random(self._settings.seed)
        half = (items if self._kind == TIER else len(order)) / 2
        to_kill = bool(self._kind) and (self._kind != TIER or (mode, host) == (TIER, 1))
        self._answers.clear()
        start = time.perf_counter()
        for first in range(0, len(order), items):
            while self._kind != TIER and self._killed_at_ns and first + items == len(order) and not self._successor:
                self._hear(mode)
            self._todo.extend(range(first, first + items))
            while self._todo or self._out:
                while self._todo and len(self._out) < self._settings.in_flight:
                    number = self._todo.popleft()
                    server, engine = deal.choice(self._servers_of(host)), deal.choice(self._engines_of(host))
                    self._out[number] = server
                    self._send(server, Deal(number, order[number], engine, self._engines[engine]))
                self._hear(mode)
                done = first + items - len(self._todo) - len(self._out)
                self._observer.progressed(name, Progress("sending", done, len(order)))
                if to_kill and self._killed_at_ns is None and done >= half:
                    self._kill()
        total_s = time.perf_counter() - start
        return self._figures(items, len(order), total_s, self._flush(mode, host))

    def _flush(self, mode: str, host: int) -> TierStats:
        """Wait until the tier has what this host has published, and return the tier's figures."""
        if mode != TIER:
            return TierStats()
        self._flushed.clear()
        asked = self._servers_of(host)
        for server in asked:
            self._send(server, Flush(_FLUSH_S))
        while len(self._flushed) < len(asked):
            self._hear(mode)
        return TierStats(**{name: sum(one[name] for one in map(asdict, self._flushed)) for name in asdict(TierStats())})

    def _hear(self, mode: str) -> None:
        """Wait for the next message of a server, and act on it."""
        server, message = self._next()
        if isinstance(message, Answer):
            self._answers.append(message)
            if message.latency_ns is None:
                self._deal_again([message.number])
            else:
                del self._out[message.number]
        elif isinstance(message, Opened):
            self._open.add(server)
            if self._killed_at_ns:
                self._successor = Successor(message.recovered, self._since_the_kill())
        elif isinstance(message, Attach):
            self._attached += 1
            if self._attached == len(self._open):
                self._engines[message.engine] = self._group
                self._successor = Successor(0, self._since_the_kill())
        elif isinstance(message, TierStats):
            self._flushed.append(message)
        elif message is Signal.FINISH:
            self._open.discard(server)
        else:  # the successor has loaded the images
            self._send(server, self._opening(mode, server))

    def _since_the_kill(self) -> float:
        return (time.monotonic_ns() - (self._killed_at_ns or 0)) / 1e9

    def _figures(self, items: int, requests: int, total_s: float, tier: TierStats) -> FleetFigures:
        done = [(answer, answer.latency_ns) for answer in self._answers if answer.latency_ns is not None]
        latencies = [latency for _, latency in done]
        processing = [answer.found_ns for answer in self._answers if answer.processed]
        fetching = [one.found_ns for one, _ in done if one.number < items and not one.processed]
        return FleetFigures(
            requests=requests,
            processed=sum(answer.processed for answer in self._answers),
            stored_bytes=sum(answer.stored for answer in self._answers),
            sent_bytes=sum(answer.sent for answer in self._answers),
            latency_median_us=median(latencies) / 1e3,
            latency_p99_us=percentile(latencies, 99) / 1e3,
            first_median_ms=median(one.found_ns + latency for one, latency in done if one.number < items) / 1e6,
            checked=len(latencies) * self._settings.workers,
            mismatches=sum(answer.wrong for answer in self._answers),
            dealt_again=self._dealt_again,
            total_s=total_s,
            tier=tier,
            processing_ms=median(processing) / 1e6 if processing else None,
            fetching_ms=median(fetching) / 1e6 if fetching else None,
            longest_ms=max(answer.found_ns for answer in self._answers) / 1e6,
        )
