"""What the demo's processes say to each other, and the pipes they say it through.

An item travels as a `Request` and then its payload, as raw bytes of their own, so that the engine passes the payload on
without looking into it. Every pipe has one direction: an `os.pipe`, which is twice as fast as a socket pair here.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


class PeerLostError(Exception):
    """The process at the other end of a pipe has gone."""


@dataclass(frozen=True)
class Opening:
    """API to workers: attach with this. Answered by `Ready`."""

    opening: Any


@dataclass(frozen=True)
class Ready:
    """Worker to API: this rank has attached."""

    rank: int


@dataclass(frozen=True)
class Request:
    """API to workers: one item; its payload follows."""

    number: int
    digest: bytes
    """`item_digest` of the tensors, made before they were stored or pickled."""
    inline: bool
    """Whether the payload holds the tensors themselves."""
    last: bool
    """Whether the step ends here: take no more, check what was taken, and report."""


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
    """Worker to API: a whole step was taken and checked."""

    rank: int
    taken: tuple[Taken, ...]


@dataclass(frozen=True)
class Finish:
    """API to engine and workers: nothing more comes. Each answers with its `Tally` and ends."""


@dataclass(frozen=True)
class Tally:
    """The bytes that one process moved."""

    process: str
    copied: int
    """Into or out of a pipe, the store, or a pickle."""
    piped: int
    """Of these, written to pipes."""


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
