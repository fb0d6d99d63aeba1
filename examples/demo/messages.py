"""The messages between the demo's processes, and the pipes that carry them.

A request travels as a `Request` and then its pickled features as separate raw bytes, so an engine without a cache
forwards them unread. Each pipe has one direction: an `os.pipe` is twice as fast here as a socket pair.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from multiprocessing.connection import Connection
from typing import Any, cast

from examples.demo.images import ImageError
from examples.demo.memory import Memory, resident_memory
from shmstore import StoreHandle
from shmstore.multimodal import MultiModalCacheConfig, MultiModalFeatureSpec


class PeerLostError(Exception):
    """The process at the other end of a pipe is gone."""


class Signal(Enum):
    """A message without contents."""

    READY = auto()
    """Worker to API: this rank has its cache."""
    STEP_END = auto()
    """API to workers: check and drop the items of this step, then answer with a list of `Taken`."""
    ACCOUNT = auto()
    """API to engine and workers: answer with a `Tally`."""
    FINISH = auto()
    """API to engine and workers: this is the last message."""


@dataclass(frozen=True)
class Opening:
    """API to engine and workers: build your part of this configuration. Each worker answers with READY."""

    config: MultiModalCacheConfig
    handle: StoreHandle | None
    """Handle of the store, if there is one."""


@dataclass(frozen=True)
class Request:
    """API to workers: one request; its features follow."""

    number: int
    digest: bytes
    """`item_digest` of its item, computed before anything was stored or sent."""


@dataclass(frozen=True)
class Taken:
    """One item in one worker."""

    number: int
    taken_ns: int
    """`time.monotonic_ns`, one clock for all processes, when the tensors were there and not yet checked."""
    equal: bool
    """Whether every byte is as it was sent."""


@dataclass(frozen=True)
class Tally:
    """What one process has moved so far, and its memory."""

    process: str
    copied: int
    """Bytes copied into or out of a pipe, the store, or a pickle."""
    piped: int
    """The bytes of these that were written to pipes."""
    memory: Memory


@dataclass(frozen=True)
class Progress:
    """API to supervisor: how far it is. `stage` is "processing" or "sending"."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class Halfway:
    """API to supervisor: half of the requests are answered, and this process is to be killed."""

    known: tuple[tuple[str, bytes, int], ...]
    """Hash, digest and size of each image's item, so that the next API process need not process it to check it."""


@dataclass(frozen=True)
class Killed:
    """Supervisor to the API process that it starts after a kill."""

    at_ns: int
    """`time.monotonic_ns` of the kill."""
    known: tuple[tuple[str, bytes, int], ...]
    """As in `Halfway`."""


@dataclass(frozen=True)
class Failure:
    """Any process to supervisor: why it is about to end."""

    text: str
    usage: bool
    """Whether the input is to blame, not the run."""


class Link:
    """Both directions between two processes; it counts the bytes that it moves.

    Raises `PeerLostError` if the process at the other end is gone.
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
        """Wait for the next value and return it."""
        return pickle.loads(self.receive_bytes())

    def send_bytes(self, payload: bytes) -> None:
        """Send raw bytes; the other end must call `receive_bytes`."""
        try:
            self._outgoing.send_bytes(payload)
        except OSError as error:
            raise PeerLostError from error
        self.sent += len(payload)

    def receive_bytes(self) -> bytes:
        """Wait for the next message and return it as raw bytes."""
        try:
            payload = self.incoming.recv_bytes()
        except (EOFError, OSError) as error:
            raise PeerLostError from error
        self.received += len(payload)
        return payload

    def close(self) -> None:
        """Close both directions, which the other end notices."""
        self.incoming.close()
        self._outgoing.close()


class FeatureCodec:
    """Turns the features of a request into bytes for a pipe and back; it counts the bytes."""

    def __init__(self) -> None:
        self.copied = 0

    def encode(self, features: list[MultiModalFeatureSpec]) -> bytes:
        """Return the features pickled, with the tensors that are still in them."""
        payload = pickle.dumps(features, pickle.HIGHEST_PROTOCOL)
        self.copied += len(payload)
        return payload

    def decode(self, payload: bytes) -> list[MultiModalFeatureSpec]:
        """Return the features."""
        self.copied += len(payload)
        return cast(list[MultiModalFeatureSpec], pickle.loads(payload))


def tally(process: str, links: Sequence[Link], codec: FeatureCodec, stored: int = 0) -> Tally:
    """Return the tally of this process: the bytes of its links and codec, and those that it stored."""
    sent = sum(link.sent for link in links)
    received = sum(link.received for link in links)
    return Tally(process, sent + received + codec.copied + stored, sent, resident_memory())


def guarded(status: Connection, body: Callable[[], None]) -> None:
    """Run `body`; send the supervisor one line about a failure, and exit with status 1.

    The loss of a peer is not a failure: the supervisor reports how that process ended.
    """
    try:
        body()
    except PeerLostError:
        return
    except Exception as error:
        text = str(error) if isinstance(error, ImageError) else f"{type(error).__name__}: {error}"
        with suppress(PeerLostError):
            Link(status, status).send(Failure(text, usage=isinstance(error, ImageError)))
        sys.exit(1)
