"""multiprocessing.shared_memory, in the two ways in which it is used: a block for each object, or one for all."""

import pickle
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from bench.peers.interface import Arrays, Packed, Receiver, SpawnedPeer, Tree, arrays, unpacked


class _Reader(Receiver):
    """Keeps the last block attached, so that a hit finds it."""

    def __init__(self, rank: int, channel: Any, endpoint: Any, ticket: Any) -> None:
        super().__init__(rank, channel, endpoint, ticket)
        self._block: SharedMemory | None = None

    def receive(self) -> Tree | None:
        message = self.channel.recv_bytes()
        if not message:
            return None
        name, fields = pickle.loads(message)
        if self._block is None or self._block.name != name:
            self.close()
            self._block = SharedMemory(name)
        return unpacked(fields, self._block.buf)

    def close(self) -> None:
        if self._block is not None:
            self._block.close()
            self._block = None


class _Blocks(SpawnedPeer):
    receiver = _Reader

    def begin(self, nbytes: int, n_readers: int) -> None:
        self._block: SharedMemory | None = None
        self._old: SharedMemory | None = None
        self._message = b""

    def prepare(self, tree: Tree) -> Arrays:
        return arrays(tree)

    def _put(self, value: Arrays, packed: Packed) -> None:
        assert self._block is not None
        packed.write(self._block.buf, value)
        self._message = pickle.dumps((self._block.name, packed.fields))
        self.tell(self._message)

    def send_again(self) -> None:
        self.tell(self._message)

    def release(self) -> None:
        for block in (self._block, self._old):
            if block is not None:
                block.close()
                block.unlink()
        self._block = self._old = None


class BlockPerObject(_Blocks):
    """Created, filled, told, and unlinked when the next one is there: nothing is overwritten."""

    title = "shared_memory, a block an object"
    name = "shared_memory"
    how = "A new block for each object, removed when the next has come; its name over the common pipe. A hit: the name."
    ahead = (
        "On a hit both sides have the block of the only object at hand, so that only a name is sent. Nothing is looked "
        "up, counted or protected, and no process could take the block away."
    )

    def send(self, number: int, value: Arrays) -> None:
        packed = Packed(value)
        self._old, self._block = self._block, SharedMemory(create=True, size=packed.nbytes)
        self._put(value, packed)

    def settle(self) -> None:
        if self._old is not None:
            self._old.close()
            self._old.unlink()
            self._old = None


class OneBlock(_Blocks):
    """One block, overwritten by each object: the least that can be done, and no store."""

    title = "shared_memory, one block reused"
    name = "shared_memory_reused"
    how = "One warm block, overwritten by each object after all readers have acknowledged the last. A hit: its name."
    ahead = (
        "It is not a store: one block, overwritten each time, with no key, no second object, no lifetime, no check. It "
        "is here as the least work that shared memory allows; the difference is what the rest costs."
    )

    def send(self, number: int, value: Arrays) -> None:
        packed = Packed(value)
        if self._block is None:
            self._block = SharedMemory(create=True, size=packed.nbytes)
        self._put(value, packed)
