"""What a peer is: a `Peer` in a host process of its own, which writes, and a `Receiver` in each of its readers.

One exchange, timed as a whole: `send` puts a tree of tensors and tells every reader; each reader gets the tree, touches
every page of it, lets it go and acknowledges; the exchange ends with the last acknowledgement. `send_again` does it
for the object of the last exchange (the hit path): a peer that keeps no objects sends it again.

Every peer acknowledges over the same pipe, and tells over it, too, unless it has a channel of its own.
"""

import importlib
import multiprocessing
import struct
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import numpy as np
import torch

from bench.peers import PEERS

Tree = dict[str, torch.Tensor]
Arrays = dict[str, "np.ndarray[Any, Any]"]

CONTEXT: Any = multiprocessing.get_context("spawn")
"""Starts all processes."""
PAGE = 4096
_ACK = struct.Struct("<Q")


class UnavailableError(Exception):
    """The peer cannot run here; the text says why."""


def load(name: str) -> "type[Peer]":
    """Return the class of a peer; UnavailableError, with the reason, where what it needs cannot be imported."""
    module, _, cls = PEERS[name].partition(":")
    try:
        return getattr(importlib.import_module(module), cls)  # type: ignore[no-any-return]
    except ImportError as error:
        raise UnavailableError(f"cannot be imported: {error}") from error


def make_tree(nbytes: int) -> Tree:
    """Return three tensors of `nbytes` together, random but the same each time: pixels, ids and a mask."""
    rest = nbytes // 8
    rng = np.random.default_rng(nbytes)
    return {
        "pixels": torch.from_numpy(rng.random((nbytes - 2 * rest) // 4, dtype=np.float32)),
        "ids": torch.from_numpy(rng.integers(0, 1 << 40, rest // 8)),
        "mask": torch.from_numpy(rng.integers(0, 2, rest, dtype=np.uint8)),
    }


def fresh(tree: Tree, number: int) -> Tree:
    """Return a private copy, as a preprocessor would have just made it, with `number` marked in it."""
    copy = {name: tensor.clone() for name, tensor in tree.items()}
    copy["mask"][0] = number % 251
    return copy


def touch(tree: Tree) -> int:
    """Read one byte of every page of every tensor and return their sum."""
    return sum(int(t.numpy().view(np.uint8)[::PAGE].sum(dtype=np.uint64)) for t in tree.values())


def arrays(tree: Tree) -> Arrays:
    """Return the same memory as numpy arrays, for peers that know no tensors."""
    return {name: tensor.numpy() for name, tensor in tree.items()}


def tensors(found: Arrays) -> Tree:
    """Return the same memory as tensors."""
    return {name: torch.from_numpy(array) for name, array in found.items()}


class Packed:
    """How a tree lies in one block of bytes, for peers that have blocks and no objects: 64-byte aligned."""

    def __init__(self, tree: Arrays) -> None:
        self.fields = []
        end = 0
        for name, array in tree.items():
            start = -(-end // 64) * 64
            self.fields.append((name, array.dtype.str, array.shape, start))
            end = start + array.nbytes
        self.nbytes = end

    def write(self, block: memoryview, tree: Arrays) -> None:
        """Copy the tree into `block`."""
        for (_, dtype, shape, start), array in zip(self.fields, tree.values(), strict=True):
            np.copyto(np.ndarray(shape, dtype, block, start), array)


def unpacked(fields: Any, block: memoryview) -> Tree:
    """Return views of `block` by the `fields` of a `Packed`."""
    return tensors({name: np.ndarray(shape, dtype, block, start) for name, dtype, shape, start in fields})


class Receiver(ABC):
    """One reader's side of one session; made in the reader's process."""

    def __init__(self, rank: int, channel: Connection, endpoint: Any, ticket: Any) -> None:
        self.rank = rank
        self.channel = channel
        self.endpoint = endpoint

    @abstractmethod
    def receive(self) -> Tree | None:
        """Wait for the next object and return it as tensors; None at the session's end."""

    def release_all(self) -> None:  # noqa: B027 - most have nothing to do
        """Called when the tree has been touched and dropped, before the acknowledgement."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """End the session."""


class Peer(ABC):
    """The writing side; lives in a host process, with sessions one after the other."""

    title: ClassVar[str]
    """For tables and plots."""
    package: ClassVar[str | None] = None
    """The distribution whose version is shown."""
    how: ClassVar[str]
    """One sentence for the page: what an exchange and what a hit is here."""
    ahead: ClassVar[str] = ""
    """Why it may be faster than shmstore."""

    @abstractmethod
    def start(self, count: int) -> None:
        """Start `count` readers; Unavailable where this machine does not let it."""

    @abstractmethod
    def open(self, nbytes: int, n_readers: int) -> None:
        """Begin a session for objects of `nbytes` and the first `n_readers` readers."""

    def prepare(self, tree: Tree) -> Any:
        """Bring a tree that this process owns into the form that `send` takes; not timed."""
        return tree

    @abstractmethod
    def send(self, number: int, value: Any) -> None:
        """Put `value` and tell the readers."""

    @abstractmethod
    def send_again(self) -> None:
        """Tell the readers of the object of the last `send`."""

    @abstractmethod
    def wait(self) -> list[int]:
        """Wait for all acknowledgements; the sums of the bytes that were touched."""

    def settle(self) -> None:  # noqa: B027 - most have nothing to do
        """Give back what the last exchange needed, where the peer does not do so by itself; timed."""

    @abstractmethod
    def close(self) -> None:
        """End the session."""

    @abstractmethod
    def stop(self) -> None:
        """End the readers."""


class SpawnedPeer(Peer):
    """A peer whose readers are spawned processes with one pipe each."""

    receiver: ClassVar[type[Receiver]]
    name: ClassVar[str]

    def start(self, count: int) -> None:
        self._all: list[Connection] = []
        self._processes = []
        for rank, endpoint in enumerate(self.endpoints(count)):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=reader_main, args=(self.name, rank, theirs, endpoint), daemon=True)
            process.start()
            theirs.close()
            self._all.append(ours)
            self._processes.append(process)
        for channel in self._all:
            channel.recv()  # it has imported what it needs
        self.channels: list[Connection] = []

    def endpoints(self, count: int) -> Sequence[Any]:
        """Return what each reader inherits when it is spawned."""
        return [None] * count

    def open(self, nbytes: int, n_readers: int) -> None:
        self.channels = self._all[:n_readers]
        ticket = self.begin(nbytes, n_readers)
        for channel in self.channels:
            channel.send(("open", ticket))
        for channel in self.channels:
            said = channel.recv()
            if said != "ready":
                raise UnavailableError(said)

    @abstractmethod
    def begin(self, nbytes: int, n_readers: int) -> Any:
        """Make what the session needs on this side; return what each receiver is made with."""

    def tell(self, message: bytes) -> None:
        """Send a message to every reader over the common channel."""
        for channel in self.channels:
            channel.send_bytes(message)

    def wait(self) -> list[int]:
        return [_ACK.unpack(channel.recv_bytes())[0] for channel in self.channels]

    def close(self) -> None:
        self.end()
        for channel in self.channels:
            if channel.recv() != "closed":
                raise RuntimeError("a reader did not end its session")
        self.release()
        self.channels = []

    def end(self) -> None:
        """Tell the readers that the session is over, in the way in which they are told of objects."""
        self.tell(b"")

    def release(self) -> None:
        """Give back what `begin` made."""

    def stop(self) -> None:
        for channel in self._all:
            channel.send(("stop", None))
        for process in self._processes:
            process.join(20)


def reader_main(name: str, rank: int, channel: Connection, endpoint: Any) -> None:
    """Run one reader: sessions, until told to stop or until the host has gone."""
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    torch.set_num_threads(1)
    cls = load(name)
    assert issubclass(cls, SpawnedPeer)
    try:
        channel.send("here")
        while True:
            command, ticket = channel.recv()
            if command == "stop":
                return
            try:
                receiver = cls.receiver(rank, channel, endpoint, ticket)
            except Exception as error:
                channel.send(f"{type(error).__name__}: {error}")
                continue
            channel.send("ready")
            while _take(receiver, channel):
                pass
            receiver.close()
            channel.send("closed")
    except (EOFError, BrokenPipeError):
        return


def _take(receiver: Receiver, channel: Connection) -> bool:
    tree = receiver.receive()
    if tree is None:
        return False
    total = touch(tree)
    del tree
    receiver.release_all()
    channel.send_bytes(_ACK.pack(total))
    return True
