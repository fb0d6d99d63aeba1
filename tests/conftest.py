"""Fixtures for all tests: stores that are closed at the end, and the check that nothing is left behind."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shmstore import ObjectStoreReader, ObjectStoreWriter
from tests.support import children, segments, store_name

torch.set_num_threads(1)  # forked children have no use for a pool of threads, and two cores are few


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a segment in /dev/shm or a process, running or not waited for."""
    segments_before, children_before = segments(), children()
    yield
    left = segments() - segments_before
    running = children() - children_before
    assert (set(), set()) == (left, running), f"left in /dev/shm: {left or 'nothing'}, processes: {running or 'none'}"


class Stores:
    """Creates writers and attaches readers that are closed when the test ends."""

    def __init__(self) -> None:
        self._opened: list[Any] = []

    def create(self, capacity: int = 1 << 20, n_readers: int = 1, **options: Any) -> ObjectStoreWriter:
        name = options.pop("name", None) or store_name()
        return self.keep(ObjectStoreWriter.create(name, capacity=capacity, n_readers=n_readers, **options))

    def attach(self, store: Any, rank: int = 0, **options: Any) -> ObjectStoreReader:
        handle = store.handle if isinstance(store, ObjectStoreWriter) else store
        return self.keep(ObjectStoreReader.attach(handle, rank, **options))

    def recover(self, store: Any) -> ObjectStoreWriter:
        return self.keep(ObjectStoreWriter.recover(store))

    def keep(self, opened: Any) -> Any:
        self._opened.append(opened)
        return opened

    def close(self) -> None:
        for opened in reversed(self._opened):
            opened.close()
        self._opened.clear()


@pytest.fixture
def stores() -> Iterator[Stores]:
    made = Stores()
    yield made
    made.close()
    gc.collect()
