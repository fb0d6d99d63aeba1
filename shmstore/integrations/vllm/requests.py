"""Leases end with their request: `vllm.v1.engine.output_processor.OutputProcessor`, through which each one goes.

A request is over for the workers when the engine core says so. If the API server ends it first (the client hung up, or
a stop string came), it may be on its way to a worker. Its leases then last until the first token of a request that was
added later for the same engine: a core takes messages in order, so each of its workers is past the steps in which the
first one can have been. Which engine that is, `AsyncMPClient._send_input` says; another engine's tokens say nothing.

A request that the processor refuses never gets there. What was found for it ends when `BaseRenderer` fails.
"""

from __future__ import annotations

import functools
import traceback
from collections import deque
from collections.abc import Iterable
from typing import Any

from vllm.v1.engine import EngineCoreRequestType

from shmstore.integrations.vllm.items import ReferenceItem


class RequestLeases:
    """The references that requests of one `OutputProcessor` have sent, until no worker will read them.

    A request without items is noted only while something is aborted, because its token may be the one awaited.
    """

    total = 0
    """How many requests this process has had."""
    engines: dict[str, bytes | None] = {}  # noqa: RUF012  of all instances: who sends a request knows none of them
    """To which engine each noted request was sent; None before, and if there is one engine."""

    def __init__(self) -> None:
        self._added = 0
        self.sent: dict[str, tuple[int, list[ReferenceItem]]] = {}
        self.aborted: dict[bytes | None, deque[tuple[int, list[ReferenceItem]]]] = {}
        self.later: set[str] = set()  # requests that came after one of those, and have no token yet

    def add(self, request_id: str, items: list[ReferenceItem], part: bool) -> None:
        """Keep what this request sends, or one more part of it. The children of one request share their items."""
        if items or self.aborted:
            self._added += 1
            RequestLeases.engines.setdefault(request_id, None)
            # The first part's number: a token of it says nothing about requests that came between it and a later part.
            number, before = self.sent.get(request_id, (0 if part else self._added, []))
            if self.aborted:
                self.later.add(request_id)
            for item in items:
                item.users += 1
            self.sent[request_id] = number, before + items

    def finish(self, request_id: str) -> None:
        """Release its leases: the engine core has finished the request."""
        _let_go(self._pop(request_id)[0])

    def abort(self, request_ids: Iterable[str]) -> None:
        """Release their leases as soon as the workers are past them; the engine core has not finished them."""
        for request_id in request_ids:
            items, engine = self._pop(request_id)
            if items:
                self.aborted.setdefault(engine, deque()).append((self._added, items))

    def answer(self, request_id: str) -> None:
        """Release what was aborted before this request was added, by its engine or none: its first token has come."""
        self.later.discard(request_id)
        number, _ = self.sent[request_id]
        for engine in {None, RequestLeases.engines.get(request_id)}:
            aborted = self.aborted.get(engine, ())
            while aborted and aborted[0][0] < number:
                _let_go(aborted.popleft()[1])
            if not aborted:
                self.aborted.pop(engine, None)
        if not self.aborted:
            for other in [other for other, (_, items) in self.sent.items() if not items]:
                self._pop(other)

    def _pop(self, request_id: str) -> tuple[list[ReferenceItem], bytes | None]:
        self.later.discard(request_id)
        return self.sent.pop(request_id, (0, []))[1], RequestLeases.engines.pop(request_id, None)


def _let_go(items: list[ReferenceItem]) -> None:
    for item in items:
        item.release_all()


def follow(processor: type[Any]) -> None:
    """Wrap the three methods of `OutputProcessor` through which requests come and go; idempotent."""
    if hasattr(processor, "_shmstore_leases"):
        return
    add_request, abort_requests = processor.add_request, processor.abort_requests
    process_outputs = processor.process_outputs

    @functools.wraps(add_request)
    def add_and_keep(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        items = [feature.data for feature in request.mm_features or () if isinstance(feature.data, ReferenceItem)]
        for item in items:
            item.renew()
        part = request.request_id in self.request_states
        done = add_request(self, request, *args, **kwargs)
        RequestLeases.total += 1
        ours = self._shmstore_leases
        if items and ours is None:
            ours = self._shmstore_leases = RequestLeases()
        if ours is None:
            return done
        if request.request_id in self.request_states:
            ours.add(request.request_id, items, part)
        else:
            ours.finish(request.request_id)  # the last part of an input stream
        return done

    @functools.wraps(abort_requests)
    def abort_and_keep(self: Any, *args: Any, **kwargs: Any) -> Any:
        aborted = abort_requests(self, *args, **kwargs)
        if self._shmstore_leases is not None:
            self._shmstore_leases.abort(aborted)
        return aborted

    @functools.wraps(process_outputs)
    def process_and_end(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        ours = self._shmstore_leases
        if ours is None:
            return process_outputs(self, engine_core_outputs, *args, **kwargs)
        if ours.later:
            for output in engine_core_outputs:
                if output.request_id in ours.later and (output.new_token_ids or output.pooling_output is not None):
                    ours.answer(output.request_id)
        done = process_outputs(self, engine_core_outputs, *args, **kwargs)
        if ended := [request_id for request_id in ours.sent if request_id not in self.request_states]:
            # The core may abort requests whose steps are still on their way to the workers.
            over = {o.request_id for o in engine_core_outputs if o.finished and str(o.finish_reason) != "abort"}
            for request_id in ended:
                ours.finish(request_id) if request_id in over else ours.abort([request_id])
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


def follow_refusals(renderer: type[Any]) -> None:
    """Wrap the method of `BaseRenderer` that processes the items of a request; idempotent."""
    process = renderer._process_multimodal
    if hasattr(process, "__wrapped__"):
        return

    @functools.wraps(process)
    def process_or_let_go(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return process(self, *args, **kwargs)
        except BaseException as error:
            # Whoever keeps the error, such as a future in a cycle, would keep leases and claims in its frames.
            traceback.clear_frames(error.__traceback__)
            if (cache := self._mm_processor_cache) is not None:
                cache.release_sender_touches()
            raise

    renderer._process_multimodal = process_or_let_go
