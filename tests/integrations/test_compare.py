"""How an engine is compared with what a plug-in knows of it: here with a stand-in for the engine."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

import pytest

from shmstore.integrations.compare import Has, Uses, difference
from shmstore.integrations.vllm import compare as vllm_compare


class Manager:
    """One version of a class that a plug-in stands for."""

    def find(self, request: Any, limit: Any = None) -> None: ...

    def free(self, request: Any) -> None: ...


class Scheduler:
    """What calls it."""

    manager: Any

    def step(self) -> None:
        self.manager.find(1)
        [self.manager.free(request) for request in "ab"]  # code in a code object of its own, until Python 3.12

    @property
    def usage(self) -> Any:
        return self.manager.usage

    @classmethod
    @functools.lru_cache
    def made(cls, manager: Any) -> Any:
        return manager.made


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, core = ModuleType("engine"), ModuleType("engine.core")
    vars(engine)["__version__"] = "1.5.1+cpu"
    vars(core).update(Manager=Manager, Scheduler=Scheduler)
    for module in (engine, core):
        monkeypatch.setitem(sys.modules, module.__name__, module)


FOUND: list[tuple[Has | Uses, str]] = [
    (Has("core:Manager", "find(request limit) free(request)", only=True), ""),
    (Has("core:Manager", "find(request limit? more?)"), ""),
    (Has("core:Manager", "find(request ...) free"), ""),
    (Has("core:Manager", "find(request)"), "core:Manager.find has the parameters (request, limit), not (request)"),
    (Has("core:Manager", "find(limit request)"), "not (limit, request)"),
    (Has("core:Manager", "find(request limit more)"), "not (request, limit, more)"),
    (Has("core:Manager", "find(limit ...)"), "not (limit, ...)"),
    (Has("core:Manager", "find pop"), "core:Manager.pop is missing"),
    (Has("core:Manager", "find", only=True), "core:Manager.free is new"),
    (Has("core:Manager", "find free(request) usage made", asked_by="core:Scheduler.manager"), ""),
    (Has("core:Manager", "find free made", asked_by="core:Scheduler.manager"), "manager is asked for usage"),
    (Has("core:Manager", "find free made usage pop", asked_by="core:Scheduler.manager"), "is not asked for pop"),
    (Uses("core:Scheduler.step", "manager.find manager.free self.manager"), ""),
    (Uses("core:Scheduler.step", "manager.usage"), "core:Scheduler.step does not use manager.usage"),
    (Uses("core:Gone", "name"), "AttributeError: module 'engine.core' has no attribute 'Gone'"),
    (Uses("gone:Gone", "name"), "ModuleNotFoundError: No module named 'engine.gone'"),
]


@pytest.mark.parametrize(("row", "said"), FOUND, ids=[f"{row.names} {said}" for row, said in FOUND])
def test_the_first_difference_is_named(row: Has | Uses, said: str) -> None:
    assert said in (difference("engine", "~=1.5", [row]) or "")
    assert bool(said) == (difference("engine", "~=1.5", [row]) is not None)


def test_a_second_argument_of_a_look_up_is_refused_by_a_plugin_that_knows_one() -> None:
    """vLLM 0.33 gave `get_computed_blocks` one with a default, so nothing failed."""
    (row, *_) = vllm_compare.KV_CACHE
    assert "get_computed_blocks(request max_cache_hit_length?)" in row.names
    assert difference("engine", "~=1.5", [Has("core:Manager", "find(request)")])


@pytest.mark.parametrize(
    ("tested", "known"), [("~=1.5", True), (">=1.4,<1.6", True), (">=1.6", False), ("==1.5", False)]
)
def test_a_version_that_was_not_tested_differs(tested: str, known: bool) -> None:
    assert known == (difference("engine", tested, ()) is None)
