"""multiprocessing.Pipe: the arrays pickled once, the bytes written to each reader."""

import pickle
from typing import Any

from bench.peers.interface import Arrays, Receiver, SpawnedPeer, Tree, arrays, tensors


class _Reader(Receiver):
    def receive(self) -> Tree | None:
        message = self.channel.recv_bytes()
        return tensors(pickle.loads(message)) if message else None


class PicklePipe(SpawnedPeer):
    """numpy arrays rather than tensors: torch would put those into shared memory, and is measured by itself."""

    title = "multiprocessing Pipe"
    name = "pipe"
    how = "The tree pickled once (protocol 5), the bytes to each reader; a hit is sent again."
    receiver = _Reader

    def begin(self, nbytes: int, n_readers: int) -> None:
        self._last: Any = None

    def prepare(self, tree: Tree) -> Arrays:
        return arrays(tree)

    def send(self, number: int, value: Arrays) -> None:
        self._last = value
        self.tell(pickle.dumps(value, protocol=5))

    def send_again(self) -> None:
        self.send(0, self._last)

    def release(self) -> None:
        self._last = None
