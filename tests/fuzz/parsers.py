"""Targets for what Python parses, under libFuzzer: python -m tests.fuzz.parsers TARGET [options of libFuzzer].

Any bytes give a value or one of the errors that the function documents; another error is a finding, and so is a hang.
"""

import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["shmstore"]):
    from shmstore import ObjectRef, ObjectStoreWriter, StoreHandle
    from shmstore.errors import CorruptStoreError, TierError
    from shmstore.inspect.tree import parse_tree
    from shmstore.multimodal import decode_updates
    from shmstore.serde import MsgpackSerde
    from shmstore.tiers.objects import Incoming
    from shmstore.tiers.relay_client import parsed
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
        parse_tree(data, len(PAYLOAD))


def updates(data: bytes) -> None:
    with suppress(TypeError, ValueError):
        decode_updates(data)


def relay(data: bytes) -> None:
    with suppress(TypeError, ValueError):
        parsed(data)


def span(writer: ObjectStoreWriter) -> Callable[[bytes], None]:
    """Return a target that fetches an object whose head are the bytes behind the first, and whose payload is short."""

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


class Server:
    """Sends the same bytes to each client, whatever it asks, and ends the connection."""

    def __init__(self, path: str) -> None:
        self.says = b""
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            with suppress(OSError), self._listening.accept()[0] as connected:
                while b"SETINFO" in connected.recv(1 << 16):
                    connected.sendall(b"+OK\r\n")
                connected.sendall(self.says)
                connected.shutdown(socket.SHUT_WR)
                while connected.recv(1 << 16):
                    pass


def resp(folder: str) -> Callable[[bytes], None]:
    path = str(Path(folder, "socket"))
    server = Server(path)

    def answered(data: bytes) -> None:
        server.says = data
        tier = RespTier(f"unix://{path}", timeout=5.0)
        try:
            with suppress(TierError):
                tier.fetch("key", lambda size: memoryview(bytearray(min(size, 4096))) if size <= 4096 else None)
            with suppress(TierError):
                tier.has(["key"])
        finally:
            tier.close()

    return answered


TARGETS: dict[str, Callable[[bytes], None]] = {
    "reference": reference,
    "handle": handle,
    "metadata": metadata,
    "updates": updates,
    "relay": relay,
}


def main() -> None:
    name, *options = sys.argv[1:]
    with (
        tempfile.TemporaryDirectory() as folder,
        ObjectStoreWriter.create(capacity=1 << 16, n_readers=1) as writer,
    ):
        targets = {**TARGETS, "span": span(writer), "resp": resp(folder)}
        atheris.Setup([name, *options], targets[name])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
