"""A real engine on a CPU: with the plug-in it says what it says without, and deaths leave nothing that stays."""

from __future__ import annotations

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

Answers = dict[str, Any]


def start(model: Path, ranks: int, scenario: str, **environment: str) -> subprocess.Popen[str]:
    """Start an engine in a session of its own, so that its whole tree can be killed."""
    env = {
        **os.environ,
        "SGLANG_USE_PICKLE_IPC": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))),
        **environment,
    }
    command = [sys.executable, "-m", "tests.sglang.engine", str(model), str(ranks), scenario]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True)


def lines(process: subprocess.Popen[str]) -> list[Any]:
    assert process.stdout
    return [json.loads(line) for line in process.stdout if line.startswith(("{", '"'))]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.vllm.model import make_model

    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def stock(model: Path) -> Callable[[int], Answers]:
    """What an engine of so many ranks answers without the plug-in; asked once."""
    made: dict[int, Answers] = {}

    def of(ranks: int) -> Answers:
        if ranks not in made:
            made[ranks] = lines(start(model, ranks, "answers", SHMSTORE_SGLANG="0"))[-1]
        return made[ranks]

    return of


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_says_the_same_and_its_samples_share_what_is_stored(
    ranks: int, model: Path, stock: Callable[[int], Answers]
) -> None:
    engine = start(model, ranks, "answers")
    ours = lines(engine)[-1]
    assert stock(ranks)["tokens"] == ours["tokens"]
    assert (None, {"puts": 1, "hits": 3}) == (stock(ranks)["store"], ours["samples"])
    assert (0, 0) == (ours["store"]["open_leases"], ours["store"]["refusals"])
    assert [] == left_of(engine.pid, "shmstore", "sgl_shm_mm")


def test_with_a_full_store_an_engine_says_the_same(model: Path, stock: Callable[[int], Answers]) -> None:
    engine = start(model, 1, "answers", SHMSTORE_SGLANG_GB="0.012")
    ours = lines(engine)[-1]
    assert stock(1)["tokens"] == ours["tokens"]
    assert 0 < ours["store"]["refusals"]
    assert [] == left_of(engine.pid, "shmstore", "sgl_shm_mm")


@pytest.mark.parametrize("whom", ["a scheduler", "the whole tree"])
def test_what_a_kill_under_load_leaves_is_bounded_and_swept_by_the_next_start(whom: str, model: Path) -> None:
    engine = start(model, 2, "for ever")
    assert engine.stdout
    answered = 0
    for line in engine.stdout:
        answered += "answered" in line
        if answered == 3:
            break
    tree = [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]
    victims = [one for one in tree if "scheduler" in one.name()][:1] if whom == "a scheduler" else tree
    assert victims
    for one in victims:
        one.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(tree[1:], timeout=120)
    engine.kill()  # if it outlives its schedulers, it answers nothing
    engine.wait()
    assert [] == [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert len(left_of(engine.pid, "shmstore")) <= 1
    command = "from shmstore.integrations.sglang import register; register()"
    subprocess.run([sys.executable, "-c", command], check=True)
    assert [] == left_of(engine.pid, "shmstore", "sgl_shm_mm")
