"""A put into pages that nobody has touched takes several times as long; this touches them before."""

import mmap
import threading

import numpy as np

from shmstore.store.writer import ObjectStoreWriter

_AT_ONCE = 4 << 20
"""Bytes that are touched while other threads run; then one of them may go first."""


def touch_pages(writer: ObjectStoreWriter) -> None:
    """Start a thread that touches every page of the writer's arena, from its start on, as puts fill it.

    It only reads, and keeps the mapping. The space is reserved already, so this takes none.
    """
    data = np.frombuffer(writer._writer.data()[0], np.uint8)[:: mmap.PAGESIZE]

    def touch() -> None:
        for start in range(0, len(data), _AT_ONCE // mmap.PAGESIZE):
            data[start : start + _AT_ONCE // mmap.PAGESIZE].max()

    threading.Thread(target=touch, name="shmstore-touch", daemon=True).start()
