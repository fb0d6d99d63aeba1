"""The messages between the demo's processes, and the pipes that carry them.

A request travels as a `Request` and then its pickled features as separate raw bytes, so an engine without a cache
forwards them unread. Each pipe has one direction: an `os.pipe` is twice as fast here as a socket pair.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from multiprocessing.connection import Connection
from typing import Any

from shmstore import StoreHandle
from shmstore.multimodal import MultiModalCacheConfig


class PeerLostError(Exception):
    """The process at the other end of a pipe is gone."""


class Signal(Enum):
    """A message without contents."""

    READY = auto()
    """Worker to API: this rank has its cache."""
    STEP_END = auto()
    """API to workers: check and drop the items of this step, then answer with a list of `Taken`."""
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
class Progress:
    """API to supervisor: how far it is. `stage` is "processing" or "sending"."""

    stage: str
    done: int
    total: int
    first: bool
    """Whether it is the first one of this stage."""


@dataclass(frozen=True)
class Halfway:
    """API to supervisor, which kills it and passes this on to the next: half of the requests are answered."""

    known: tuple[tuple[str, bytes, int], ...]
    """Hash, digest and size of each image's item, so that the next API process need not process it to check it."""
    killed_ns: int = 0
    """`time.monotonic_ns` of the kill."""


@dataclass(frozen=True)
class Failure:
    """Any process to supervisor: why it is about to end."""

    text: str


class Link:
    """Both directions between two processes.

    Raises `PeerLostError` if the process at the other end is gone.
    """

    def __init__(self, incoming: Connection, outgoing: Connection) -> None:
        self.incoming = incoming
        self._outgoing = outgoing

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

    def receive_bytes(self) -> bytes:
        """Wait for the next message and return it as raw bytes."""
        try:
            return self.incoming.recv_bytes()
        except (EOFError, OSError) as error:
            raise PeerLostError from error

    def close(self) -> None:
        """Close both directions, which the other end notices."""
        self.incoming.close()
        self._outgoing.close()


def guarded(status: Connection, body: Callable[[], None]) -> None:
    """Run `body`; send the supervisor one line about a failure, and exit with status 1.

    The loss of a peer is not a failure: the supervisor reports how that process ended.
    """
    try:
        body()
    except PeerLostError:
        return
    except Exception as error:
        with suppress(PeerLostError):
            Link(status, status).send(Failure(f"{type(error).__name__}: {error}"))
        sys.exit(1)
