"""lmdb in a folder of /dev/shm: the tree as four values, written in one transaction, read in place."""

import pickle
import shutil
import tempfile
from typing import Any

import lmdb
import numpy as np

from bench.peers.interface import Arrays, Receiver, SpawnedPeer, Tree, arrays, tensors

_OBJECTS = 4


class _Reader(Receiver):
    def __init__(self, rank: int, channel: Any, endpoint: Any, ticket: Any) -> None:
        super().__init__(rank, channel, endpoint, ticket)
        folder, map_size = ticket
        self._env = lmdb.open(folder, map_size=map_size, readonly=True, readahead=False)
        self._transaction: Any = None

    def receive(self) -> Tree | None:
        key = self.channel.recv_bytes()
        if not key:
            return None
        self._transaction = self._env.begin(buffers=True)
        fields = pickle.loads(self._transaction.get(key))
        return tensors(
            {
                name: np.frombuffer(self._transaction.get(key + name.encode()), dtype).reshape(shape)
                for name, dtype, shape in fields
            }
        )

    def release_all(self) -> None:
        self._transaction.abort()
        self._transaction = None

    def close(self) -> None:
        self._env.close()


class Lmdb(SpawnedPeer):
    """No synchronisation with a disk, a writable map: as fast as it goes, as a store in memory may be."""

    title = "lmdb on /dev/shm"
    name = "lmdb"
    package = "lmdb"
    how = (
        "One transaction of four values (writable map, no sync), the key over the common pipe, a read transaction over "
        "the map. A hit: the key."
    )
    ahead = (
        "It opens no lease, counts no use of an object and checks no reference. The writer sends a key, and only the "
        "reader's transaction keeps pages in place. In turn a slow reader keeps the pages of every later transaction "
        "from being reused, not only its own object's. Nothing is evicted: the benchmark overwrites its keys."
    )
    receiver = _Reader

    def begin(self, nbytes: int, n_readers: int) -> tuple[str, int]:
        self._folder = tempfile.mkdtemp(prefix="lmdb", dir="/dev/shm")
        map_size = 4 * _OBJECTS * nbytes + (64 << 20)
        self._env = lmdb.open(
            self._folder, map_size=map_size, writemap=True, sync=False, metasync=False, readahead=False, meminit=False
        )
        return self._folder, map_size

    def prepare(self, tree: Tree) -> Arrays:
        return arrays(tree)

    def send(self, number: int, value: Arrays) -> None:
        key = b"%d" % (number % _OBJECTS)  # overwrites the fourth last: lmdb has no eviction of its own
        fields = [(name, array.dtype.str, array.shape) for name, array in value.items()]
        with self._env.begin(write=True) as transaction:
            transaction.put(key, pickle.dumps(fields))
            for name, array in value.items():
                transaction.put(key + name.encode(), memoryview(array).cast("B"))
        self._key = key
        self.tell(key)

    def send_again(self) -> None:
        self.tell(self._key)

    def release(self) -> None:
        self._env.close()
        shutil.rmtree(self._folder)
