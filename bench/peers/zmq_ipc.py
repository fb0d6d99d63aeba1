"""pyzmq over ipc://: a PUSH socket for each reader, the tree as a multipart message."""

import pickle
import shutil
import tempfile
from typing import Any, ClassVar

import numpy as np
import zmq

from bench.peers.interface import Arrays, Receiver, SpawnedPeer, Tree, arrays, tensors


class _Reader(Receiver):
    def __init__(self, rank: int, channel: Any, endpoint: Any, ticket: Any) -> None:
        super().__init__(rank, channel, endpoint, ticket)
        folder, self._copy = ticket
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.connect(f"ipc://{folder}/{rank}")

    def receive(self) -> Tree | None:
        parts: list[Any] = self._socket.recv_multipart(copy=self._copy)
        if not self._copy:
            parts = [part.buffer for part in parts]
        if len(parts) == 1:
            return None
        fields = pickle.loads(parts[0])
        return tensors(
            {
                name: np.frombuffer(part, dtype).reshape(shape)
                for (name, dtype, shape), part in zip(fields, parts[1:], strict=True)
            }
        )

    def close(self) -> None:
        self._context.destroy(linger=0)


class _Zmq(SpawnedPeer):
    receiver = _Reader
    package = "pyzmq"
    copy: ClassVar[bool]

    def begin(self, nbytes: int, n_readers: int) -> tuple[str, bool]:
        self._folder = tempfile.mkdtemp(prefix="zmq")
        self._context = zmq.Context()
        self._sockets = []
        for rank in range(n_readers):
            self._sockets.append(self._context.socket(zmq.PUSH))
            self._sockets[-1].bind(f"ipc://{self._folder}/{rank}")
        self._last: Any = None
        return self._folder, self.copy

    def prepare(self, tree: Tree) -> Arrays:
        return arrays(tree)

    def send(self, number: int, value: Arrays) -> None:
        header = pickle.dumps([(name, array.dtype.str, array.shape) for name, array in value.items()])
        for socket in self._sockets:
            socket.send_multipart([header, *value.values()], copy=self.copy)
        self._last = value

    def send_again(self) -> None:
        self.send(0, self._last)

    def end(self) -> None:
        for socket in self._sockets:
            socket.send(b"")

    def release(self) -> None:
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder)
        self._last = None


class Copying(_Zmq):
    """Parts are copied into messages and out of them."""

    title = "pyzmq ipc, copy"
    name = "zmq_copy"
    copy = True
    how = "A multipart message to each reader, `copy=True`; a hit is sent again."


class NoCopy(_Zmq):
    """Messages refer to the arrays; the socket still carries every byte."""

    title = "pyzmq ipc, no copy"
    name = "zmq_nocopy"
    copy = False
    how = "The same with `copy=False`: no copies in Python's process, but every byte still goes through the socket."
