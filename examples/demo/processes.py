"""The engine process and a worker process, as functions that `multiprocessing` starts.

Both are wired as an engine's author would wire them: each makes its part of the configuration by its factory, and
forwards items unchanged if that is None. A process also stops when another one closes its end of a pipe, so one death
ends them all. The API process closes and unlinks the store on its way out.
"""

from __future__ import annotations

import pickle
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from examples.demo.messages import Link, Opening, Request, Signal, Taken, guarded
from examples.demo.processing import item_digest
from shmstore.multimodal import (
    BaseMultiModalReceiverCache,
    engine_receiver_cache_from_config,
    worker_receiver_cache_from_config,
)


def engine_process(workers: tuple[Link, ...], api: Link, status: Connection) -> None:
    """Forward each request to every worker, with its items if the engine caches them, and each report to the API."""
    guarded(status, _Engine(workers, api).run)


class _Engine:
    def __init__(self, workers: tuple[Link, ...], api: Link) -> None:
        self._workers = workers
        self._api = api
        self._cache: BaseMultiModalReceiverCache | None = None

    def run(self) -> None:
        by_connection = {worker.incoming: worker for worker in self._workers}
        while True:
            for ready in wait([self._api.incoming, *by_connection]):
                if ready is not self._api.incoming:
                    self._api.send(by_connection[cast(Connection, ready)].receive())
                elif self._take(self._api.receive()) is Signal.FINISH:
                    return

    def _take(self, message: object) -> object:
        if isinstance(message, Request):
            self._tell_workers(message, self._filled_in(self._api.receive_bytes()))
            return message
        self._tell_workers(message)
        if isinstance(message, Opening):
            self._cache = engine_receiver_cache_from_config(message.config)
        return message

    def _tell_workers(self, message: object, payload: bytes | None = None) -> None:
        for worker in self._workers:
            worker.send(message)
            if payload is not None:
                worker.send_bytes(payload)

    def _filled_in(self, payload: bytes) -> bytes:
        """Return the workers' payload, which is `payload` itself without a cache."""
        if self._cache is None:
            return payload
        features = pickle.loads(payload)
        self._cache.get_and_update_features(features)
        return pickle.dumps(features, pickle.HIGHEST_PROTOCOL)


def worker_process(rank: int, engine: Link, status: Connection) -> None:
    """Take the items of each step, then compare every byte of them with what was sent."""

    def body() -> None:
        opening: Opening = engine.receive()
        cache = worker_receiver_cache_from_config(opening.config, rank, opening.handle)
        with cache or nullcontext():
            engine.send(Signal.READY)
            _take_all(engine, cache)

    guarded(status, body)


def _take_all(engine: Link, cache: BaseMultiModalReceiverCache | None) -> None:
    step: list[tuple[Request, Any, int]] = []
    while (message := engine.receive()) is not Signal.FINISH:
        if isinstance(message, Request):
            features = pickle.loads(engine.receive_bytes())
            if cache is not None:
                cache.get_and_update_features(features)
            step.append((message, features[0].data, time.monotonic_ns()))
        elif message is Signal.STEP_END:
            taken = [Taken(sent.number, at, item_digest(item) == sent.digest) for sent, item, at in step]
            step.clear()  # the views first: its reader may count on their room
            engine.send(taken)
