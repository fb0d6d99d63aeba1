"""What the processes of a queue do in its tests, and how they die: at a call of the kernel or of the store."""

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from shmstore import ObjectStoreReader, ObjectStoreWriter, Queue

HOMES = {
    name: home
    for home, names in (
        (os, ("close", "link", "listdir", "mknod", "read", "rename", "rmdir", "unlink", "write")),
        (ObjectStoreWriter, ("cancel", "delete", "get_cached", "join", "keys", "put")),
        (ObjectStoreReader, ("attach", "claimed", "find", "find_or_claim", "get")),
    )
    for name in names
}


def value(number: int, size: int = 5000) -> Any:
    return np.full(size, number, np.int64)


def number_of(found: Any) -> int:
    """Return the number of a value, all of whose bytes must be right."""
    assert (found == found[0]).all()
    return int(found[0])


def die_at(step: str) -> None:
    """Be killed before or after the call of that name: "before link 3" is the third one from now on."""
    when, name, count = step.split()
    home, left = HOMES[name], [int(count)]
    real: Callable[..., Any] = getattr(home, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        found = real(*args, **kwargs)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(home, name, staticmethod(call) if home is os or name in ("join", "attach") else call)


def produce(queue: Queue, said: Connection, first: int, count: int, step: str | None = None) -> None:
    """Put so many values, and tell each one after it was put."""
    if step:
        die_at(step)
    for number in range(first, first + count):
        queue.put(value(number))
        said.send(number)


def consume(queue: Queue, said: Connection, ack: bool = False, step: str | None = None) -> None:
    """Get values until the queue ends, and tell each one; with `ack`, say that it is done before it is told."""
    if step:
        die_at(step)
    if not ack:
        for found in queue:
            said.send(number_of(found))
        return
    while not queue.empty():
        delivery = queue.get(timeout=10, ack=True)
        number = number_of(delivery.value)
        delivery.done()
        said.send(number)


def spend(queue: Queue, said: Connection) -> None:
    """Get values for ever, and tell each one a moment after it was taken."""
    for found in queue:
        time.sleep(0.0005)
        said.send(number_of(found))
