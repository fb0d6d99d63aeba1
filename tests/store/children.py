"""What spawned processes run in the tests of the store: importable by name, and without torch, which takes seconds."""

import hashlib
import signal
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter, StoreHandle


def marked(mark: int) -> Any:
    """Return the value that the writers below put."""
    return np.full(500, mark, np.uint8)


def digest(tensor: Any) -> str:
    from tests.support import bits

    return hashlib.sha256(bits(tensor)).hexdigest()


def read_what_comes(handle: StoreHandle, rank: int, pipe: Connection) -> None:
    """Attach, answer each reference with the digests of its tensors, keep the views; end at None."""
    kept = []
    with ObjectStoreReader.attach(handle, rank) as reader:
        pipe.send("attached")
        while (packed := pipe.recv()) is not None:
            value = reader.get(ObjectRef.from_bytes(packed))
            kept.append(value)
            pipe.send({name: digest(tensor) for name, tensor in value.items()})
    pipe.send([{name: digest(tensor) for name, tensor in value.items()} for value in kept])


def put_and_wait(handle: StoreHandle, mark: int, pipe: Any) -> None:
    """Join a store, put one object, and be killed."""
    with ObjectStoreWriter.join(handle) as writer:
        ref = writer.put(f"k{mark}", marked(mark))
        pipe.send((writer.index, writer.recovered, ref.to_bytes()))
        signal.pause()
