"""What any way of doing it is measured against: one memcpy of the bytes, and a message without any."""

import itertools
import mmap
from typing import Any

import numpy as np

from bench.peers.interface import Arrays, Peer, Receiver, SpawnedPeer, Tree, arrays, touch


class Memcpy(Peer):
    """The tree's bytes once into warm shared memory, four places in turn. No reader, no message."""

    title = "a plain memcpy"
    how = "The three tensors copied once into warm shared memory, in this process, without a message."

    def start(self, count: int) -> None:
        self._sum = 0

    def open(self, nbytes: int, n_readers: int) -> None:
        self._map = mmap.mmap(-1, 4 * nbytes)
        memory = np.frombuffer(self._map, np.uint8)
        memory[:] = 1
        self._places = itertools.cycle([memory[i * nbytes : (i + 1) * nbytes] for i in range(4)])
        self._last: Any = None

    def prepare(self, tree: Tree) -> Arrays:
        self._sum = touch(tree)
        return {name: array.view(np.uint8) for name, array in arrays(tree).items()}

    def send(self, number: int, value: Arrays) -> None:
        place = next(self._places)
        at = 0
        for array in value.values():
            np.copyto(place[at : at + array.nbytes], array)
            at += array.nbytes
        self._last = value

    def send_again(self) -> None:
        self.send(0, self._last)

    def wait(self) -> list[int]:
        return [self._sum]

    def close(self) -> None:
        del self._map, self._places, self._last

    def stop(self) -> None:
        pass


class _Nothing(Receiver):
    def receive(self) -> Tree | None:
        return {} if self.channel.recv_bytes() else None


class Channel(SpawnedPeer):
    """A message of one byte to each reader and its acknowledgement: what the common channel takes by itself."""

    title = "an empty message"
    name = "channel"
    how = "One byte over the common pipe to each reader, and its acknowledgement; no tree at all."
    receiver = _Nothing

    def begin(self, nbytes: int, n_readers: int) -> None:
        self._sum = 0

    def prepare(self, tree: Tree) -> None:
        self._sum = touch(tree)

    def send(self, number: int, value: None) -> None:
        self.tell(b"!")

    def send_again(self) -> None:
        self.tell(b"!")

    def wait(self) -> list[int]:
        return [total + self._sum for total in super().wait()]
