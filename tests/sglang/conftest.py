"""Tests of the plug-in in a real SGLang, which `make test-sglang` runs in an environment of their own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path

import pytest

from shmstore.files import holders

collect_ignore_glob = [] if "sglang" in {one.name for one in distributions()} else ["test_*"]

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_USE_PICKLE_IPC": "0",  # messages by msgpack; engines take the default, which is pickle
    "SHMSTORE_SGLANG_GB": "0.0625",
}

SGLANGS = ("sgl_shm_", "sglang_loads_")
"""How the names of SGLang's own files in /dev/shm begin."""


def left_of(pid: int, *kinds: str) -> list[str]:
    """Return the names in /dev/shm that a process has made: SGLang's kind, or "shmstore", and then its pid."""
    return sorted(name for name in os.listdir("/dev/shm") if re.match(rf"({'|'.join(kinds)})[-_]{pid}[-_]", name))


def remove_files_since(before: set[str]) -> None:
    """Remove SGLang's own files that have come to /dev/shm and that no process has open."""
    for path in (Path("/dev/shm", name) for name in set(os.listdir("/dev/shm")) - before if name.startswith(SGLANGS)):
        with suppress(FileNotFoundError):  # its process has removed it meanwhile
            about = path.stat()
            if not holders(about.st_dev, about.st_ino):
                path.unlink()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.vllm.model import make_model

    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are shared by tests; what they leave is looked at when a module is done.

    A test that imports SGLang has loaded the plug-in here. A server is the process at the top all the same.
    """
    monkeypatch.delenv("SHMSTORE_SGLANG_AGREED", raising=False)


@pytest.fixture(autouse=True, scope="module")
def _no_segment_left_behind() -> Iterator[None]:
    """Fail if a store is left; remove what SGLang leaves of its own, also after an orderly end."""
    before = set(os.listdir("/dev/shm"))
    yield
    remove_files_since(before)
    assert [] == left_of(os.getpid(), "shmstore")
