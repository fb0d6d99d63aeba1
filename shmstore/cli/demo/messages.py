"""What the demo's processes say to each other, and the pipes they say it through.

A request travels as a `Request` and then its features, pickled, as raw bytes of their own, so that an engine without a
cache passes them on without looking into them. Every pipe has one direction: an `os.pipe`, which is twice as fast as a
socket pair here.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast

from shmstore import StoreHandle
from shmstore.cli.demo.images import ImageError
from shmstore.cli.demo.memory import Memory
from shmstore.multimodal import MultiModalCacheConfig, MultiModalFeatureSpec


class PeerLostError(Exception):
    """The process at the other end of a pipe has gone."""


@dataclass(frozen=True)
class Opening:
    """API to engine and workers: build your part of this configuration. Each worker answers with `Ready`."""

    config: MultiModalCacheConfig
    handle: StoreHandle | None
    """Of the store, where there is one."""


@dataclass(frozen=True)
class Ready:
    """Worker to API: this rank has its cache."""

    rank: int


@dataclass(frozen=True)
class Request:
    """API to workers: one request; its features follow."""

    number: int
    digest: bytes
    """`item_digest` of its item, made before anything was stored or sent."""


@dataclass(frozen=True)
class StepEnd:
    """API to workers: check what you took since the last one, let go of it, and answer with a `StepReport`."""


@dataclass(frozen=True)
class Rejected:
    """Engine to API, or in a worker's report: what the request counts on is not here; it went no further."""

    number: int
    mm_hashes: tuple[str, ...]


@dataclass(frozen=True)
class Taken:
    """One item as one worker saw it."""

    number: int
    taken_ns: int
    """`time.monotonic_ns` when the tensors were at hand, before they were checked; one clock for all processes."""
    equal: bool
    """Whether every byte was the one that was sent."""


@dataclass(frozen=True)
class StepReport:
    """Worker to API: what came in a whole step."""

    rank: int
    taken: tuple[Taken, ...]
    rejected: tuple[Rejected, ...]


@dataclass(frozen=True)
class Account:
    """API to engine and workers: each answers with its `Tally`."""


@dataclass(frozen=True)
class Tally:
    """What one process moved so far, and has."""

    process: str
    copied: int
    """Bytes into or out of a pipe, the store, or a pickle."""
    piped: int
    """Of these, written to pipes."""
    memory: Memory


@dataclass(frozen=True)
class Finish:
    """API to engine and workers: nothing more comes."""


@dataclass(frozen=True)
class Progress:
    """API to supervisor: how far it is. `stage` is "processing" or "sending"."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class Failure:
    """Any process to supervisor: why it is about to end."""

    process: str
    text: str
    usage: bool
    """Whether the input was to blame rather than the run."""


class Link:
    """Both directions between two processes, counting the bytes that it moves.

    Whatever shows that the other side has gone is raised as `PeerLostError`.
    """

    def __init__(self, incoming: Connection, outgoing: Connection) -> None:
        self.incoming = incoming
        self._outgoing = outgoing
        self.sent = 0
        self.received = 0

    def send(self, message: object) -> None:
        """Send a small value."""
        self.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def receive(self) -> Any:
        """Return the next value; waits for it."""
        return pickle.loads(self.receive_bytes())

    def send_bytes(self, payload: bytes) -> None:
        """Send raw bytes; the other side must call `receive_bytes`."""
        try:
            self._outgoing.send_bytes(payload)
        except OSError as error:
            raise PeerLostError from error
        self.sent += len(payload)

    def receive_bytes(self) -> bytes:
        """Return the next message as raw bytes; waits for it."""
        try:
            payload = self.incoming.recv_bytes()
        except (EOFError, OSError) as error:
            raise PeerLostError from error
        self.received += len(payload)
        return payload

    def close(self) -> None:
        """Close both directions; the other side then sees that this one has gone."""
        self.incoming.close()
        self._outgoing.close()


class FeatureCodec:
    """The features of a request as bytes for a pipe; counts them."""

    def __init__(self) -> None:
        self.copied = 0

    def encode(self, features: list[MultiModalFeatureSpec]) -> bytes:
        """Return the features pickled, with whatever tensors are still in them."""
        payload = pickle.dumps(features, pickle.HIGHEST_PROTOCOL)
        self.copied += len(payload)
        return payload

    def decode(self, payload: bytes) -> list[MultiModalFeatureSpec]:
        """Return the features."""
        self.copied += len(payload)
        return cast(list[MultiModalFeatureSpec], pickle.loads(payload))


def guarded(process: str, status: Connection, body: Callable[[], None]) -> None:
    """Run `body`; a failure is told to the supervisor in one line and becomes exit status 1.

    The loss of a peer is none: what is to be reported is how that one went.
    """
    try:
        body()
    except PeerLostError:
        return
    except Exception as error:
        text = str(error) if isinstance(error, ImageError) else f"{type(error).__name__}: {error}"
        with suppress(PeerLostError):
            Link(status, status).send(Failure(process, text, usage=isinstance(error, ImageError)))
        sys.exit(1)
