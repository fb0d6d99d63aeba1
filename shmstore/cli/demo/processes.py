"""The engine process and a worker process, as functions for `multiprocessing` to start.

Both are wired as an engine's author would: each makes its part from the configuration by its factory, and where that
gives None it lets things pass as they are. Any process that sees another's end of a pipe closed stops too, so that one
death ends them all; the API process closes and unlinks the store on the way out.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import cast

from shmstore import CacheMissError
from shmstore.cli.demo.memory import resident_memory
from shmstore.cli.demo.messages import (
    Account,
    FeatureCodec,
    Finish,
    Link,
    Opening,
    Ready,
    Rejected,
    Request,
    StepEnd,
    StepReport,
    Taken,
    Tally,
    guarded,
)
from shmstore.cli.demo.processing import item_digest
from shmstore.multimodal import (
    BaseMultiModalReceiverCache,
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    engine_receiver_cache_from_config,
    worker_receiver_cache_from_config,
)


def engine_process(workers: tuple[Link, ...], api: Link, status: Connection) -> None:
    """Pass each request to every worker, its items filled in where the cache is here, and each report back."""
    guarded("the engine process", status, _Engine(workers, api).run)


class _Engine:
    def __init__(self, workers: tuple[Link, ...], api: Link) -> None:
        self._workers = workers
        self._api = api
        self._cache: BaseMultiModalReceiverCache | None = None
        self._codec = FeatureCodec()

    def run(self) -> None:
        by_connection = {worker.incoming: worker for worker in self._workers}
        while True:
            for ready in wait([self._api.incoming, *by_connection]):
                if ready is not self._api.incoming:
                    self._api.send(by_connection[cast(Connection, ready)].receive())
                elif isinstance(self._take(self._api.receive()), Finish):
                    return

    def _take(self, message: object) -> object:
        if isinstance(message, Request):
            payload = self._filled_in(message.number, self._api.receive_bytes())
            if payload is not None:
                self._tell_workers(message, payload)
            return message
        self._tell_workers(message)
        if isinstance(message, Opening):
            self._cache = engine_receiver_cache_from_config(message.config)
        elif isinstance(message, Account):
            links = (self._api, *self._workers)
            sent = sum(link.sent for link in links)
            copied = sent + sum(link.received for link in links) + self._codec.copied
            self._api.send(Tally("engine", copied, sent, resident_memory()))
        return message

    def _tell_workers(self, message: object, payload: bytes | None = None) -> None:
        for worker in self._workers:
            worker.send(message)
            if payload is not None:
                worker.send_bytes(payload)

    def _filled_in(self, number: int, payload: bytes) -> bytes | None:
        """Return what the workers get: the payload unseen where the cache is not here; None where it was rejected."""
        if self._cache is None:
            return payload
        features = self._codec.decode(payload)
        try:
            self._cache.get_and_update_features(features)
        except CacheMissError as miss:
            self._api.send(Rejected(number, tuple(miss.mm_hashes)))
            return None
        return self._codec.encode(features)


def worker_process(rank: int, engine: Link, status: Connection) -> None:
    """Take the items of each step, then compare every byte of them with what was sent."""

    def body() -> None:
        opening: Opening = engine.receive()
        cache = worker_receiver_cache_from_config(opening.config, rank, opening.handle)
        with cache or nullcontext():
            engine.send(Ready(rank))
            _Worker(rank, engine, cache).run()

    guarded(f"worker {rank}", status, body)


@dataclass
class _Step:
    taken: list[tuple[Request, MultiModalKwargsItem, int]] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)


class _Worker:
    def __init__(self, rank: int, engine: Link, cache: BaseMultiModalReceiverCache | None) -> None:
        self._rank = rank
        self._engine = engine
        self._cache = cache
        self._codec = FeatureCodec()

    def run(self) -> None:
        step = _Step()
        while not isinstance(message := self._engine.receive(), Finish):
            if isinstance(message, Request):
                self._take(message, step)
            elif isinstance(message, StepEnd):
                taken = tuple(
                    Taken(request.number, at, item_digest(item) == request.digest) for request, item, at in step.taken
                )
                rejected = tuple(step.rejected)
                step = _Step()  # before the report: whoever reads it may count on the room that these views took
                self._engine.send(StepReport(self._rank, taken, rejected))
            elif isinstance(message, Account):
                self._engine.send(self._tally())

    def _take(self, request: Request, step: _Step) -> None:
        features = self._codec.decode(self._engine.receive_bytes())
        try:
            if self._cache is not None:
                self._cache.get_and_update_features(features)
        except CacheMissError as miss:
            step.rejected.append(Rejected(request.number, tuple(miss.mm_hashes)))
            return
        step.taken.append((request, _item(features), time.monotonic_ns()))

    def _tally(self) -> Tally:
        copied = self._engine.sent + self._engine.received + self._codec.copied
        return Tally(f"worker {self._rank}", copied, self._engine.sent, resident_memory())


def _item(features: list[MultiModalFeatureSpec]) -> MultiModalKwargsItem:
    """Return the only item of a request."""
    (feature,) = features
    if not isinstance(feature.data, MultiModalKwargsItem):
        raise TypeError(f"expected an item, got {feature.data!r}")
    return feature.data
