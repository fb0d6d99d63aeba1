"""Leases last as long as their request: `vllm.v1.engine.output_processor.OutputProcessor`, through which each one goes.

A request is over for the workers when the engine core says so. If the API server ends it first (the client hung up, or
a stop string came), it may be on its way to a worker. Its leases then last until the first token of a request that was
added later for the same engine: a core takes messages in order, so each of its workers is past the steps in which the
first one can have been. Which engine that is, `AsyncMPClient._send_input` says; another engine's tokens say nothing.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable
from typing import Any

from vllm.v1.engine import EngineCoreRequestType

from shmstore.integrations.vllm.items import ReferenceItem

__all__ = ["RequestLeases", "follow", "follow_engines"]


class RequestLeases:
    """The references that unfinished requests of one `OutputProcessor` have sent. An item's end is its lease's."""

    total = 0
    """How many requests this process has had."""
    engines: dict[str, bytes | None] = {}  # noqa: RUF012  of all instances: who sends a request knows none of them
    """To which engine each unfinished request was sent; None before, and if there is one engine."""

    def __init__(self) -> None:
        self._added = 0
        self._sent: dict[str, tuple[int, list[ReferenceItem]]] = {}
        self._aborted: dict[bytes | None, deque[tuple[int, list[ReferenceItem]]]] = {}

    def add(self, request: Any) -> None:
        """Keep what this request, or one more part of it, sends. The children of one request share their items."""
        self._added += 1
        RequestLeases.total += 1
        RequestLeases.engines.setdefault(request.request_id, None)
        # The first part's number: a token of it says nothing about requests that came between it and a later part.
        number, items = self._sent.get(request.request_id, (self._added, []))
        found = [feature.data for feature in request.mm_features or () if isinstance(feature.data, ReferenceItem)]
        self._sent[request.request_id] = number, items + found

    def finish(self, request_id: str) -> None:
        """Let go: the engine core has finished the request."""
        self._sent.pop(request_id, None)
        RequestLeases.engines.pop(request_id, None)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Let go as soon as the workers are past these requests, which the engine core has not finished."""
        for request_id in request_ids:
            _, items = self._sent.pop(request_id, (0, []))
            engine = RequestLeases.engines.pop(request_id, None)
            self._aborted.setdefault(engine, deque()).append((self._added, items))

    def answer(self, request_id: str) -> None:
        """Let go of what its engine had, or none, and was aborted before this request was added, whose tokens came."""
        number, _ = self._sent.get(request_id, (0, []))
        for engine in {None, RequestLeases.engines.get(request_id)}:
            aborted = self._aborted.get(engine)
            while aborted and aborted[0][0] < number:
                aborted.popleft()


def follow(processor: type[Any]) -> None:
    """Wrap the three methods of `OutputProcessor` through which requests come and go; idempotent."""
    if hasattr(processor, "_shmstore_leases"):
        return
    add_request, abort_requests = processor.add_request, processor.abort_requests
    process_outputs = processor.process_outputs

    def leases(self: Any) -> RequestLeases:
        return self.__dict__.setdefault("_shmstore_leases", RequestLeases())  # type: ignore[no-any-return]

    @functools.wraps(add_request)
    def add_and_keep(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        done = add_request(self, request, *args, **kwargs)
        if request.request_id in self.request_states:
            leases(self).add(request)
        else:
            leases(self).finish(request.request_id)  # the last part of an input stream
        return done

    @functools.wraps(abort_requests)
    def abort_and_keep(self: Any, *args: Any, **kwargs: Any) -> Any:
        aborted = abort_requests(self, *args, **kwargs)
        leases(self).abort(aborted)
        return aborted

    @functools.wraps(process_outputs)
    def process_and_end(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        ours = leases(self)
        for output in engine_core_outputs:
            if output.new_token_ids or output.pooling_output is not None:
                ours.answer(output.request_id)
        done = process_outputs(self, engine_core_outputs, *args, **kwargs)
        for output in engine_core_outputs:
            if output.request_id not in self.request_states:
                # The core may abort requests whose steps are still on their way to the workers.
                over = output.finished and str(output.finish_reason) != "abort"
                ours.finish(output.request_id) if over else ours.abort([output.request_id])
        return done

    processor._shmstore_leases = None
    processor.add_request, processor.abort_requests = add_and_keep, abort_and_keep
    processor.process_outputs = process_and_end


def follow_engines(client: type[Any]) -> None:
    """Wrap the method of `AsyncMPClient` that sends to the engine that was chosen; idempotent."""
    send = client._send_input
    if hasattr(send, "__wrapped__"):
        return

    @functools.wraps(send)
    def note_and_send(self: Any, request_type: Any, request: Any, engine: bytes | None = None) -> Any:
        if request_type is EngineCoreRequestType.ADD and request.request_id in RequestLeases.engines:
            RequestLeases.engines[request.request_id] = engine
        return send(self, request_type, request, engine)

    client._send_input = note_and_send
