"""A put into pages that nobody has touched takes several times as long; this touches them before."""

import mmap
import os
import threading
from typing import Any

import numpy as np

from shmstore.store.writer import ObjectStoreWriter

_AT_ONCE = (4 << 20) // mmap.PAGESIZE
"""Pages that are touched while other threads run, and a fork waits."""
_lock = threading.RLock()
_left: list[Any] = []
"""What the thread has not touched yet. A forked child has no such thread, and must not keep the mappings."""


def touch_pages(writer: ObjectStoreWriter) -> None:
    """Have a thread touch every page of the writer's arena, from its start on, as puts fill it.

    It only reads, and keeps the mapping. The space is reserved already, so this takes none.
    """
    with _lock:
        _left.append(np.frombuffer(writer._writer.data()[0], np.uint8)[:: mmap.PAGESIZE])
        if len(_left) == 1:
            threading.Thread(target=_touch, name="shmstore-touch", daemon=True).start()


def _touch() -> None:
    while True:
        with _lock:
            _left[0][:_AT_ONCE].max()
            _left[0] = _left[0][_AT_ONCE:]
            if not len(_left[0]):
                del _left[0]
            if not _left:
                return


def _after_fork() -> None:
    _left.clear()
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_fork)
