"""What spawned processes run in the tests of the store: importable by name, and with little to import."""

import hashlib
from multiprocessing.connection import Connection
from typing import Any

from shmstore import ObjectRef, ObjectStoreReader, StoreHandle
from tests.support import bits


def digest(tensor: Any) -> str:
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
