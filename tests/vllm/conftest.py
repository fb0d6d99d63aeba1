"""Tests of the plug-in in a real vLLM, which `make test-vllm` runs in an environment of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import distributions
from inspect import isfunction, unwrap
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from shmstore.files import PREFIX, holders
from shmstore.store import ObjectStoreWriter

collect_ignore_glob = [] if "vllm" in {one.name for one in distributions()} else ["test_*", "encoder/test_*"]

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
    "SHMSTORE_VLLM": "strict",
    "SHMSTORE_VLLM_RUN": f"shmstore-{os.getpid()}-tests",
}

VLLMS = ("psm_", "vllm_dist_", "sem.loky-", "sem.mp-")
"""How the names of vLLM's own files in /dev/shm begin."""


def change(monkeypatch: pytest.MonkeyPatch, path: str, old: str) -> None:
    """Let this be another vLLM, in which a function, or those of a class, use "other" in the place of a name."""

    def other(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple("other" if name == old else name for name in names)

    found = resolve_name(f"vllm.{path}")
    functions = [one for one in (vars(found).values() if isinstance(found, type) else [found]) if isfunction(one)]
    uses = [one for one in map(unwrap, functions) if old in one.__code__.co_names + one.__code__.co_varnames]
    assert uses
    for one in uses:
        code = one.__code__
        code = code.replace(co_names=other(code.co_names), co_varnames=other(code.co_varnames))
        monkeypatch.setattr(one, "__code__", code)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """Engines are shared by tests; what they leave is looked at when a module is done."""


@pytest.fixture(autouse=True, scope="module")
def _no_segment_left_behind() -> Iterator[None]:
    """Fail if a store is left; remove what a vLLM that was killed has left of its own."""
    before = set(os.listdir("/dev/shm"))
    yield
    left = set(os.listdir("/dev/shm")) - before
    for path in (Path("/dev/shm", name) for name in left if name.startswith(VLLMS)):
        with suppress(FileNotFoundError):  # of another program, which has removed it
            about = path.stat()
            if not holders(about.st_dev, about.st_ino):
                path.unlink()
    assert set() == {name for name in left if name.startswith(PREFIX)}


@pytest.fixture
def desk() -> Iterator[Any]:
    """A desk that requests come to, with a store of its own."""
    from tests.vllm.parts import Desk

    with ObjectStoreWriter.create(capacity=1 << 20, n_readers=1) as writer:
        yield Desk(writer)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.vllm.model import make_model

    return make_model(tmp_path_factory.mktemp("model"), pixels=1 << 18)


@pytest.fixture(scope="session")
def lru(model: Path) -> dict[str, Any]:
    """What vLLM's `lru` answers in each scenario; asked once, since neither workers nor steps change a token."""
    from tests.vllm.offline import answers, offline

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        with offline(model, "lru") as engine:
            return answers(engine, ours=False)
