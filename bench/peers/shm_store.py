"""shmstore itself, as an engine uses it."""

from typing import Any

from bench.peers.interface import Receiver, SpawnedPeer, Tree
from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter


class _Reader(Receiver):
    def __init__(self, rank: int, channel: Any, endpoint: Any, ticket: Any) -> None:
        super().__init__(rank, channel, endpoint, ticket)
        self._reader = ObjectStoreReader.attach(ticket, rank)

    def receive(self) -> Tree | None:
        message = self.channel.recv_bytes()
        return self._reader.get(ObjectRef.from_bytes(message)) if message else None

    def close(self) -> None:
        self._reader.close()


class ShmStore(SpawnedPeer):
    """put, the reference over the common channel, get."""

    title = "shmstore"
    name = "shmstore"
    package = "shmstore"
    how = "`put` into a warm ring of four objects, 40 bytes over the common pipe, `get`. A hit: `get_cached`, the same."
    receiver = _Reader

    def begin(self, nbytes: int, n_readers: int) -> Any:
        self._writer = ObjectStoreWriter.create(
            capacity=4 * nbytes + (1 << 20), n_readers=n_readers, max_objects=4096, prefault=True
        )
        return self._writer.handle

    def send(self, number: int, value: Tree) -> None:
        self._key = f"{number:064x}"  # as long as a content hash
        self.tell(self._writer.put(self._key, value).to_bytes())

    def send_again(self) -> None:
        self.tell(self._writer.get_cached(self._key).to_bytes())

    def release(self) -> None:
        self._writer.close()
