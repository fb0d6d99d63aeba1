"""multiprocessing.Queue: one for each reader; its thread pickles and writes."""

from collections.abc import Sequence
from typing import Any

from bench.peers import interface
from bench.peers.interface import Arrays, Receiver, SpawnedPeer, Tree, arrays, tensors


class _Reader(Receiver):
    def receive(self) -> Tree | None:
        found = self.endpoint.get()
        return None if found is None else tensors(found)


class PickleQueue(SpawnedPeer):
    """numpy arrays, as with the pipe."""

    title = "multiprocessing Queue"
    name = "queue"
    how = "The tree put into a queue for each reader; a hit is sent again."
    receiver = _Reader

    def endpoints(self, count: int) -> Sequence[Any]:
        self._queues = [interface.CONTEXT.Queue() for _ in range(count)]
        return self._queues

    def begin(self, nbytes: int, n_readers: int) -> None:
        self._active = self._queues[:n_readers]
        self._last: Any = None

    def prepare(self, tree: Tree) -> Arrays:
        return arrays(tree)

    def send(self, number: int, value: Arrays) -> None:
        self._last = value
        for queue in self._active:
            queue.put(value)

    def send_again(self) -> None:
        self.send(0, self._last)

    def end(self) -> None:
        for queue in self._active:
            queue.put(None)

    def release(self) -> None:
        self._last = None
