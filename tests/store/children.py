"""What spawned processes run in the tests of the store: importable by name, and with little to import."""

import hashlib
import time
from multiprocessing.connection import Connection
from typing import Any

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter, StoreHandle
from tests.support import bits, random_tensor


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


def put_and_end(name: str, options: dict[str, Any], seed: int, pipe: Any) -> None:
    """Be one of the writers of a store of that name, and close it."""
    with ObjectStoreWriter.open(name, **options, n_writers=2) as writer:
        pipe.send(writer.put(f"k{seed}", random_tensor(seed, 500)).to_bytes())


def put_and_wait(handle: StoreHandle, seed: int, pipe: Any) -> None:
    """Join a store, put one object, and be killed."""
    with ObjectStoreWriter.join(handle) as writer:
        ref = writer.put(f"k{seed}", random_tensor(seed, 500))
        pipe.send((writer.index, writer.recovered, ref.to_bytes()))
        time.sleep(600)
