"""Fixtures for all tests: stores that are closed at the end, and the check that nothing is left behind."""

import gc
import importlib.util
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import SHM, Stores, children, segments, store_name

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts in the background ignore it


class _NoTorch:
    """Skips what imports torch: `make test-newest` runs the rest on a Python that has no torch for CPUs."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "torch":
            raise pytest.skip.Exception("there is no torch", allow_module_level=True)


if importlib.util.find_spec("torch"):
    import torch

    torch.set_num_threads(1)  # forked children have no use for a pool of threads, and two cores are few
else:
    sys.meta_path.insert(0, _NoTorch)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the package's sources next to the tests, if there are none: an installed package is tested."""
    if not (Path(__file__).resolve().parent.parent / "shmstore").exists():
        for item in items:
            if item.get_closest_marker("checkout"):
                item.add_marker(pytest.mark.skip(reason="it needs a checkout, and an installed package is tested"))


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_is_no_garbage() -> None:
    """Keep what is loaded by now, torch above all, out of the many collections of garbage that tests make."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a segment in /dev/shm or a process, running or not waited for."""
    segments_before, children_before = segments(), children()
    yield
    left = segments() - segments_before
    running = children() - children_before
    assert (set(), set()) == (left, running), f"left in /dev/shm: {left or 'nothing'}, processes: {running or 'none'}"


@pytest.fixture
def stores() -> Iterator[Stores]:
    made = Stores()
    yield made
    made.close()


@pytest.fixture
def name() -> Iterator[str]:
    """Return a name for a store, and remove what has it in the end."""
    made = store_name()
    yield made
    (SHM / made).unlink(missing_ok=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder of a tmpfs that no other test has."""
    path = SHM / store_name()
    path.mkdir()
    yield path
    for left in path.iterdir():
        left.unlink()
    path.rmdir()


@pytest.fixture
def often() -> Iterator[None]:
    """Let threads take turns a hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)
