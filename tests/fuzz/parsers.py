"""Targets for what Python parses, under libFuzzer: python -m tests.fuzz.parsers TARGET [options of libFuzzer].

Any bytes give a value or one of the errors that the function documents; another error is a finding, and so is a hang.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from errno import EWOULDBLOCK
from typing import Any
from unittest.mock import patch

import atheris
from redis.connection import UnixDomainSocketConnection

with atheris.instrument_imports(include=["shmstore"]):
    from shmstore import ObjectRef, ObjectStoreWriter, StoreHandle
    from shmstore.errors import CorruptStoreError, TierError
    from shmstore.multimodal import decode_updates
    from shmstore.serde import MsgpackSerde
    from shmstore.serde.decode import describe
    from shmstore.tiers.objects import Incoming
    from shmstore.tiers.resp import RespTier

from tests.serde.values import aligned, exact

PAYLOAD = aligned(256)


def reference(data: bytes) -> None:
    try:
        ref = ObjectRef.from_bytes(data)
    except ValueError:
        return
    assert ref.to_bytes() == data
    assert ObjectRef.from_words(ref.to_words()) == ref


def handle(data: bytes) -> None:
    with suppress(ValueError):
        read = StoreHandle.from_json(data.decode("utf-8", "replace"))
        assert StoreHandle.from_json(read.to_json()) == read


def metadata(data: bytes) -> None:
    with suppress(CorruptStoreError):
        exact(MsgpackSerde().decode(data, PAYLOAD))
    with suppress(CorruptStoreError):
        describe(data, len(PAYLOAD))


def updates(data: bytes) -> None:
    with suppress(TypeError, ValueError):
        decode_updates(data)


def span(writer: ObjectStoreWriter) -> Callable[[bytes], None]:
    """Return a target that fetches an object whose head are the bytes after the first, and whose payload is short."""

    def fetched(data: bytes) -> None:
        always: Any = lambda _: True  # noqa: E731
        incoming = Incoming(writer, "key", None, "name", always, always, always)
        for piece in (data[1:], bytes(data[0] if data else 0)):
            memory = incoming.into(len(piece))
            if memory is None:
                return
            memory[:] = piece
        if incoming.verifies():
            incoming.commit()
            writer.delete("key")

    return fetched


class Scripted:
    """The socket of a server that answers the first request with `answer`, and ends the connection."""

    answer = b""

    def __init__(self) -> None:
        self._arrived = b""
        self._ended = False

    def send(self, request: memoryview) -> int:
        if not self._ended:
            self._arrived += self.answer
            self._ended = True
        return len(request)

    def recv(self, size: int) -> bytes:
        if not self._arrived and not self._ended:
            raise BlockingIOError(EWOULDBLOCK, "nothing has arrived")
        taken, self._arrived = self._arrived[:size], self._arrived[size:]
        return taken

    def recv_into(self, memory: memoryview) -> int:
        taken = self.recv(len(memory))
        memory[: len(taken)] = taken
        return len(taken)

    def ignore(self, *_: object) -> None:
        """Take it as done."""

    settimeout = shutdown = close = ignore


def greet(connection: Any, check_health: bool = True) -> None:
    """Connect without redis-py's two questions to the server, which take longer than the answer."""
    connection._parser.on_connect(connection)


def resp(tier: RespTier) -> Callable[[bytes], None]:
    def answered(data: bytes) -> None:
        Scripted.answer = data
        with suppress(TierError):
            tier.fetch("key", lambda size: memoryview(bytearray(min(size, 4096))) if size <= 4096 else None)
        with suppress(TierError):
            tier.has(["key"])

    return answered


TARGETS: dict[str, Callable[[bytes], None]] = {
    "reference": reference,
    "handle": handle,
    "metadata": metadata,
    "updates": updates,
}


def main() -> None:
    name, *options = sys.argv[1:]
    with (
        ObjectStoreWriter.create(capacity=1 << 16, n_readers=1) as writer,
        patch.object(UnixDomainSocketConnection, "_connect", lambda _: Scripted()),
        patch.object(UnixDomainSocketConnection, "on_connect_check_health", greet),
    ):
        targets = {**TARGETS, "span": span(writer), "resp": resp(RespTier("unix:///unused", timeout=5.0))}
        atheris.Setup([name, *options], targets[name])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
