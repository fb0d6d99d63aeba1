"""The processes of a demo with several API servers: a server, an engine, and a worker of it.

Every server has a pipe to every engine of its host, and every engine to its own workers. A server handles one request
at a time: it looks the image up, processes it if need be, sends it to the engine that the dealer has named, and waits
for the workers. An engine only passes on; what it passes has the number of the server. So each dies alone: a server
notices the loss of an engine and goes on with the others, and an engine does without a server.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, NoReturn, cast

from examples.demo.messages import (
    FeatureCodec,
    Link,
    Opening,
    PeerLostError,
    Progress,
    Rejected,
    Request,
    Signal,
    Taken,
    guarded,
)
from examples.demo.processing import Picture, PictureSource, item_bytes, item_digest
from shmstore import CacheMissError
from shmstore.multimodal import (
    BaseMultiModalProcessorCache,
    BaseMultiModalReceiverCache,
    MultiModalCacheConfig,
    MultiModalFeatureSpec,
    PlaceholderRange,
    processor_cache_from_config,
    worker_receiver_cache_from_config,
)
from shmstore.tiers import TierStats


@dataclass(frozen=True)
class Known:
    """What the workers must get of one image; computed once, before the run."""

    digest: bytes
    nbytes: int


@dataclass(frozen=True)
class Open:
    """Dealer to server: build your cache, and connect it to these engines. It answers with `Opened`."""

    config: MultiModalCacheConfig
    known: tuple[Known, ...]
    engines: tuple[int, ...]


@dataclass(frozen=True)
class Opened:
    """Server to dealer."""

    recovered: int
    """Objects that an earlier server has left."""


@dataclass(frozen=True)
class Attach:
    """Dealer to server: connect your cache to this engine, too. It answers with the same."""

    engine: int


@dataclass(frozen=True)
class Deal:
    """Dealer to server: one request. It answers with an `Answer`."""

    number: int
    image: int
    engine: int
    """The pipe to send it through."""
    group: int
    """The number of the engine among those that live: another one may have taken its place."""


@dataclass(frozen=True)
class Flush:
    """Dealer to server: wait until your tier has what you have stored. It answers with its `TierStats`."""

    timeout: float


@dataclass(frozen=True)
class Answer:
    """Server to dealer: what came of a request."""

    number: int
    processed: bool
    stored: int
    """Bytes of tensors that the server has put into its cache for it."""
    sent: int
    """Bytes that went through pipes for it."""
    found_ns: int
    """What the server waited for the item: a lookup, or also a tier or the processor."""
    latency_ns: int | None
    """From then to the last worker; None if the engine died or rejected it, and it is to be dealt again."""
    wrong: int = 0
    """Workers that got a wrong byte."""


def server_process(
    source: PictureSource, first: bool, engines: dict[int, Link], dealer: Link, status: Connection
) -> None:
    """Load the images, then do what the dealer says; the first server also computes what the workers must get."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the cleanup
        sys.exit(128 + number)  # as an exception, so that the store is closed

    def body() -> None:
        pictures, known = [], []
        for picture in source:
            pictures.append(picture)
            if first:
                item, _ = picture.process()
                known.append(Known(item_digest(item), item_bytes(item)))
                dealer.send(Progress("processing", len(known), len(source)))
        dealer.send(tuple(known))
        while isinstance(message := dealer.receive(), Open):
            cache = processor_cache_from_config(message.config)
            if cache is None:
                raise TypeError(f"this configuration has no cache to compare: {message.config.describe()}")
            with cache:
                _Server(message, pictures, cache, engines, dealer).run()
            dealer.send(Signal.FINISH)  # the store is closed

    def until_the_end() -> None:
        try:
            body()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Python's own exit must not be interrupted

    signal.signal(signal.SIGTERM, stop)
    guarded(status, until_the_end)


class _Server:
    """One server with its cache of one mode."""

    def __init__(
        self,
        opening: Open,
        pictures: Sequence[Picture],
        cache: BaseMultiModalProcessorCache,
        engines: dict[int, Link],
        dealer: Link,
    ) -> None:
        self._opening = opening
        self._pictures = pictures
        self._cache = cache
        self._engines = engines
        self._dealer = dealer
        self._codec = FeatureCodec()
        self._workers = opening.config.world_size

    def run(self) -> None:
        """Answer until the dealer ends the mode."""
        for engine in self._opening.engines:
            self._tell(engine, Opening(self._opening.config, self._cache.handle))
        self._dealer.send(Opened(self._cache.writer.recovered if self._cache.writer else 0))
        while (message := self._dealer.receive()) is not Signal.FINISH:
            if isinstance(message, Deal):
                self._dealer.send(self._answer(message))
            elif isinstance(message, Flush):
                self._dealer.send(self._flushed(message.timeout))
            else:
                self._tell(message.engine, Opening(self._opening.config, self._cache.handle))
                self._dealer.send(message)
        for engine in self._engines:
            with suppress(PeerLostError):  # one that has died, or that has never lived
                self._tell(engine, Signal.FINISH)
        if self._cache.tier:  # it may outlive the demo
            self._cache.tier.remove(picture.mm_hash() for picture in self._pictures)

    def _tell(self, engine: int, message: object) -> None:
        """Send it to the workers of an engine, and wait for their READY."""
        self._engines[engine].send(message)
        self._receive(engine)

    def _receive(self, engine: int) -> list[Any]:
        return [self._engines[engine].receive() for _ in range(self._workers)]

    def _answer(self, deal: Deal) -> Answer:
        picture, cache = self._pictures[deal.image], self._cache
        known = self._opening.known[deal.image]
        mm_hash = picture.mm_hash()
        asked = time.monotonic_ns()
        given = None if cache.is_cached_item(mm_hash) else picture.process()
        before = self._stored()
        start = time.monotonic_ns()
        try:
            data, updates = cache.get_and_update_item(given, mm_hash)
        except CacheMissError:  # it has gone meanwhile
            given = picture.process()
            data, updates = cache.get_and_update_item(given, mm_hash)
        stored = known.nbytes if cache.writer is None and given is not None else self._stored() - before
        cache.assign_group([data], deal.group)
        update = updates[0].with_item_idx(0)
        place = PlaceholderRange(0, len(update.content))  # the only item of a prompt
        payload = self._codec.encode([MultiModalFeatureSpec(data, update.modality, mm_hash, place)])
        sent = (1 + self._workers) * len(payload)
        replies: list[Any] = []
        try:
            self._engines[deal.engine].send(Request(deal.number, known.digest))
            self._engines[deal.engine].send_bytes(payload)
            replies = self._receive(deal.engine)
        except PeerLostError:
            cache.release([data])
        if any(isinstance(reply, Rejected) for reply in replies):
            cache.release([data])
            cache.invalidate(mm_hash)
        taken = [reply for reply in replies if isinstance(reply, Taken)]
        if len(taken) < self._workers:
            return Answer(deal.number, given is not None, stored, sent, start - asked, None)
        latency, wrong = max(one.taken_ns for one in taken) - start, sum(not one.equal for one in taken)
        return Answer(deal.number, given is not None, stored, sent, start - asked, latency, wrong)

    def _flushed(self, timeout: float) -> TierStats:
        tier = self._cache.tier
        if tier is None:
            return TierStats()
        tier.flush(timeout)
        return tier.stats()

    def _stored(self) -> int:
        return self._cache.writer.stats().put_bytes if self._cache.writer else 0


def engine_process(workers: tuple[Link, ...], servers: dict[int, Link], status: Connection) -> None:
    """Pass on what each server sends, and each worker's answer to the server that it is for, while servers live."""

    def lost(server: int) -> None:
        living.pop(servers[server].incoming, None)
        for worker in workers:
            worker.send((server, Signal.FINISH))

    def take(server: int) -> None:
        try:
            message = servers[server].receive()
            payload = servers[server].receive_bytes() if isinstance(message, Request) else None
        except PeerLostError:
            lost(server)
            return
        for worker in workers:
            worker.send((server, message))
            if payload is not None:
                worker.send_bytes(payload)

    def answer(worker: Link) -> None:
        server, reply = worker.receive()
        with suppress(PeerLostError):  # the end of its own pipe says so
            servers[server].send(reply)

    def body() -> None:
        while living:
            for ready in wait([*living, *by_connection]):
                if ready in by_connection:
                    answer(by_connection[ready])
                else:
                    take(living[ready])

    living: dict[Any, int] = {server.incoming: number for number, server in servers.items()}
    by_connection: dict[Any, Link] = {worker.incoming: worker for worker in workers}
    guarded(status, body)


def worker_process(rank: int, engine: Link, status: Connection) -> None:
    """Take each item, note the time, and compare every byte with what was sent."""

    def body() -> None:
        Link(status, status).send(Signal.READY)
        caches: dict[int, tuple[Opening, BaseMultiModalReceiverCache | None]] = {}
        codec = FeatureCodec()

        def close(server: int) -> None:
            _, cache = caches.pop(server, (None, None))
            if cache is not None and all(cache is not other for _, other in caches.values()):
                cache.close()

        def opened(opening: Opening) -> BaseMultiModalReceiverCache | None:
            for other, cache in caches.values():
                if other.handle == opening.handle:  # a store that another server has, too
                    return cache
            return worker_receiver_cache_from_config(opening.config, rank, opening.handle)

        def taken(server: int, request: Request) -> Taken | Rejected:
            features = codec.decode(engine.receive_bytes())
            cache = caches[server][1]
            try:
                if cache is not None:
                    cache.get_and_update_features(features)
            except CacheMissError as miss:
                return Rejected(request.number, tuple(miss.mm_hashes))
            at = time.monotonic_ns()
            (feature,) = features
            return Taken(request.number, at, item_digest(cast(Any, feature.data)) == request.digest)

        try:
            while True:
                server, message = engine.receive()
                if isinstance(message, Request):
                    engine.send((server, taken(server, message)))
                else:
                    close(server)
                    if isinstance(message, Opening):
                        caches[server] = message, opened(message)
                    engine.send((server, Signal.READY))
        finally:
            for server in list(caches):
                close(server)

    guarded(status, body)
