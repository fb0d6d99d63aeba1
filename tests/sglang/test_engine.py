"""A real engine on a CPU: with the plug-in it says what it says without, and deaths leave nothing that stays."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.sglang.conftest import left_of
from tests.sglang.processes import tree_of

Answers = dict[str, Any]


def start(model: Path, ranks: int, *scenarios: str, **environment: str) -> subprocess.Popen[str]:
    """Start an engine in a session of its own, so that its whole tree can be killed."""
    env = {
        **os.environ,
        "SGLANG_USE_PICKLE_IPC": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))),
        "SGLANG_MM_PRECOMPUTE_HASH": "1" if ranks == 1 else "0",
        **environment,
    }
    command = [sys.executable, "-m", "tests.sglang.engine", str(model), str(ranks), *scenarios]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True)


def answers_of(engine: subprocess.Popen[str]) -> Answers:
    assert engine.stdout
    return next(json.loads(line) for line in engine.stdout if line.startswith("{"))


def kill_under_load(engine: subprocess.Popen[str], *, scheduler_only: bool) -> None:
    """Kill one scheduler, or all, when some requests are answered and others wait; return when none of them lives."""
    assert engine.stdout
    assert 3 == len(list(itertools.islice((line for line in engine.stdout if "answered" in line), 3)))
    tree = tree_of(engine.pid)
    victims = [one for one in tree if "scheduler" in one.name()][:1] if scheduler_only else tree
    assert victims
    for one in victims:
        one.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(tree[1:], timeout=120)
    engine.kill()  # if it outlives its schedulers, it answers nothing
    engine.wait()
    assert [] == [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def check_next_start_sweeps(pid: int) -> None:
    assert len(left_of(pid, "shmstore")) <= 1
    command = "from shmstore.integrations.sglang import register; register()"
    subprocess.run([sys.executable, "-c", command], check=True)
    assert [] == left_of(pid, "shmstore", "sgl_shm_mm")


@pytest.fixture(scope="session")
def stock(model: Path) -> Callable[[int], Answers]:
    """What an engine of so many ranks answers with the plug-in switched off; asked once."""

    @functools.cache
    def of(ranks: int) -> Answers:
        with start(model, ranks, "answers", SHMSTORE_SGLANG="0") as engine:
            return answers_of(engine)

    return of


def done(puts: int, hits: int) -> dict[str, int]:
    return {"puts": puts, "hits": hits}


def test_one_rank_says_the_same_and_images_with_a_hash_are_stored_once(
    model: Path, stock: Callable[[int], Answers]
) -> None:
    with start(model, 1, "answers") as engine:
        ours = answers_of(engine)
    assert stock(1)["tokens"] == ours["tokens"]
    assert {"repeated": done(2, 1), "three images": done(2, 1), "samples": done(1, 3)} == ours["done"]
    assert (0, 0) == (ours["store"]["open_leases"], ours["store"]["refusals"])
    assert [] == left_of(engine.pid, "shmstore", "sgl_shm_mm")


def test_two_ranks_say_the_same_and_what_a_kill_of_all_leaves_is_swept(
    model: Path, stock: Callable[[int], Answers]
) -> None:
    engine = start(model, 2, "answers", "for ever")
    ours = answers_of(engine)
    kill_under_load(engine, scheduler_only=False)
    check_next_start_sweeps(engine.pid)
    assert stock(2)["tokens"] == ours["tokens"]
    assert {"repeated": done(3, 0), "three images": done(3, 0), "samples": done(1, 3)} == ours["done"]
    assert (0, 0) == (ours["store"]["open_leases"], ours["store"]["refusals"])


def test_with_a_full_store_an_engine_says_the_same(model: Path, stock: Callable[[int], Answers]) -> None:
    with start(model, 1, "answers", SHMSTORE_SGLANG_GB="0.012") as engine:
        ours = answers_of(engine)
    assert stock(1)["tokens"] == ours["tokens"]
    assert 0 < ours["store"]["refusals"]
    assert 0 == ours["store"]["open_leases"]
    assert [] == left_of(engine.pid, "shmstore", "sgl_shm_mm")


def test_what_a_kill_of_a_scheduler_leaves_is_swept(model: Path) -> None:
    engine = start(model, 2, "for ever")
    kill_under_load(engine, scheduler_only=True)
    check_next_start_sweeps(engine.pid)


def test_switched_off_it_is_stock(stock: Callable[[int], Answers]) -> None:
    assert [None, {"repeated": None, "three images": None, "samples": None}] == [stock(1)["store"], stock(1)["done"]]
