"""A data pipeline: worker processes decode arrays into shared memory, and the main process reads them in place.

One worker is killed while it decodes, and another one takes its place. docs/guides/pipelines.md explains each part.
Run it: `python pipeline.py`.
"""

import multiprocessing
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection

import numpy as np

from shmstore import ObjectRef, ObjectStoreReader, ObjectStoreWriter, StoreHandle

COUNT, BATCH, WORKERS = 24, 4, 2
FRAME = np.empty((512, 512, 3), np.uint8)  # the shape and the dtype of what is decoded
HELD = BATCH // WORKERS  # how many arrays of one worker main reads at a time
AHEAD = 2  # how many more the worker may have ready
CAPACITY = (HELD + AHEAD + 1) * (FRAME.nbytes + 1024)  # of each worker


def worker(
    store: StoreHandle, index: int, numbers: Sequence[int], results: Connection, killed_at: int | None = None
) -> None:
    """Decode these numbers, as far ahead as there is room, and send main a reference to each."""
    with ObjectStoreWriter.join(store, index, keep_leases=True) as writer:
        for number in numbers:
            key = str(number)
            if not writer.is_cached(key):  # else the worker before this one has decoded it
                with writer.reserve(key, FRAME, timeout=60) as frame:
                    frame[:] = number  # decode here, into memory that main will read
                    if number == killed_at:
                        os.kill(os.getpid(), signal.SIGKILL)
            results.send_bytes(writer.get_cached(key).to_bytes())


def main() -> None:
    """Read all arrays, in order, a batch at a time."""
    spawn = multiprocessing.get_context("spawn")

    def start(index: int, first: int, killed_at: int | None = None) -> Connection:
        """Start a worker for each number from `first` on that is its own; the pipe ends when it ends."""
        results, theirs = spawn.Pipe(duplex=False)
        arguments = owner.handle, index, range(first, COUNT, WORKERS), theirs, killed_at
        process = spawn.Process(target=worker, args=arguments, daemon=True)
        process.start()
        workers.callback(process.join)
        workers.callback(process.terminate)  # if main ends early: before the owner closes, which removes the store
        theirs.close()
        return results

    with (
        ObjectStoreWriter.create(capacity=CAPACITY, n_readers=1, n_writers=WORKERS, writes=False) as owner,
        ObjectStoreReader.attach(owner.handle, rank=0) as reader,
        ExitStack() as workers,
    ):
        pipes = [start(0, 0), start(1, 1, killed_at=15)]
        for first in range(0, COUNT, BATCH):
            refs = []
            for number in range(first, first + BATCH):
                index = number % WORKERS
                try:
                    message = pipes[index].recv_bytes()
                except EOFError:  # all that the worker has sent was received before
                    print(f"worker {index} died before it sent {number}")
                    pipes[index] = start(index, number)
                    message = pipes[index].recv_bytes()
                refs.append(ObjectRef.from_bytes(message))
            batch = [reader.get(ref) for ref in refs]  # views, no copy
            print("a batch:", [int(frame.mean()) for frame in batch])
            del batch  # from here on the workers may use the space again


if __name__ == "__main__":
    main()
