"""torch.multiprocessing: tensors moved into shared memory of their own, handles sent by the pickler."""

from typing import Any, ClassVar

import torch.multiprocessing

from bench.peers.interface import Receiver, SpawnedPeer, Tree


class _Reader(Receiver):
    def __init__(self, rank: int, channel: Any, endpoint: Any, ticket: Any) -> None:
        super().__init__(rank, channel, endpoint, ticket)
        torch.multiprocessing.set_sharing_strategy(ticket)

    def receive(self) -> Tree | None:
        found: Tree | None = self.channel.recv()  # the pipe's pickler knows tensors once torch is imported
        return found


class _Shared(SpawnedPeer):
    receiver = _Reader
    package = "torch"
    strategy: ClassVar[str]

    def begin(self, nbytes: int, n_readers: int) -> str:
        torch.multiprocessing.set_sharing_strategy(self.strategy)
        self._last: Tree | None = None
        return self.strategy

    def send(self, number: int, value: Tree) -> None:
        for channel in self.channels:
            channel.send(value)
        self._last = value

    def send_again(self) -> None:
        for channel in self.channels:
            channel.send(self._last)

    def end(self) -> None:
        for channel in self.channels:
            channel.send(None)

    def release(self) -> None:
        self._last = None


class FileDescriptor(_Shared):
    """The default on Linux: descriptors are passed by a thread of the sender."""

    title = "torch.multiprocessing, file_descriptor"
    name = "torch_file_descriptor"
    strategy = "file_descriptor"
    how = "Tensors sent over the common pipe; torch moves each into shared memory, passes its descriptor. A hit: again."


class FileSystem(_Shared):
    """Names instead of descriptors, kept by a daemon."""

    title = "torch.multiprocessing, file_system"
    name = "torch_file_system"
    strategy = "file_system"
    how = "The same with names instead of descriptors."
