"""Real engines that share encoder outputs: what is encoded, over meetings, deaths and restarts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from shmstore.inspect.inspector import StoreInspector
from shmstore.store import ObjectStoreReader, ObjectStoreWriter
from tests.layout import make_of_another_version
from tests.sglang.counting import calls, environment
from tests.sglang.processes import kill_tree
from tests.support import store_name

Tokens = list[list[int]]
Prompt = list[Any]
PICTURES: list[Prompt] = [[number] for number in range(8)]


class Engine:
    """An engine in a session of its own, which answers prompts; its encoder waits while the file `hold` exists."""

    def __init__(self, model: Path, folder: Path, options: dict[str, Any], ranks: int = 1, **env: str) -> None:
        hold = folder / f"hold-{os.urandom(3).hex()}"
        self.hold, self.log = hold, hold.with_suffix(".log")
        own = {
            "SGLANG_USE_PICKLE_IPC": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))),
            "SHMSTORE_SGLANG_ENCODER": json.dumps({"capacity_gb": 0.0625, "wait_s": 300.0, **options}),
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.sglang.engine", str(model), str(ranks), "serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **environment(folder, hold.name), **own, **env},
                start_new_session=True,
            )
        self._ids = count()
        self._answers: dict[int, Tokens] = {}

    def send(self, *prompts: Prompt, **more: Any) -> int:
        """Ask prompts at once, and return a number for their answers."""
        assert self.process.stdin
        number = next(self._ids)
        self.process.stdin.write(json.dumps({"id": number, "ask": prompts, **more}) + "\n")
        self.process.stdin.flush()
        return number

    def wait(self, number: int) -> Tokens:
        assert self.process.stdout
        while number not in self._answers:
            if not (line := self.process.stdout.readline()):
                raise AssertionError(f"no engine: {self.log.read_text()[-5000:]}")
            if line.startswith('{"id"'):
                answer = json.loads(line)
                self._answers[answer["id"]] = answer["tokens"]
        return self._answers[number]

    def ask(self, *prompts: Prompt, **more: Any) -> Tokens:
        return self.wait(self.send(*prompts, **more))

    def kill(self) -> None:
        """End all of its processes by SIGKILL at once."""
        kill_tree(self.process.pid)
        self.process.wait()

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(120)


class Host:
    """A folder in which calls are counted, and the name of a store."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder, self.name = model, folder, store_name()
        self._before = Counter[int]()

    @contextmanager
    def engine(self, ranks: int = 1, options: dict[str, Any] | None = None, **env: str) -> Iterator[Engine]:
        made = Engine(self.model, self.folder, {"store": self.name, **(options or {})}, ranks, **env)
        try:
            yield made
        finally:
            made.hold.unlink(missing_ok=True)
            if made.process.poll() is None:
                made.close()

    def encoded(self, rank: int = 0) -> int:
        """Return how many items were encoded since the last call."""
        before, self._before[rank] = self._before[rank], calls(self.folder, rank)
        return self._before[rank] - before

    def until_encoding(self, items: int) -> None:
        while (begun := self.encoded()) == 0:
            time.sleep(0.02)
        assert items == begun


@pytest.fixture
def host(model: Path, tmp_path: Path) -> Iterator[Host]:
    made = Host(model, tmp_path)
    yield made
    if Path("/dev/shm", made.name).exists():
        ObjectStoreWriter.unlink(made.name)


def with_another_encoder(model: Path, folder: Path) -> Path:
    """Return a copy of the model whose language model is the same."""
    shutil.copytree(model, folder)
    weights = safetensors.torch.load_file(file := folder / "model.safetensors")
    safetensors.torch.save_file({k: -v if "visual" in k else v for k, v in weights.items()}, file, {"format": "pt"})
    return folder


def test_engines_encode_each_picture_once_over_meetings_and_deaths(host: Host, tmp_path: Path) -> None:
    with host.engine() as a, host.engine() as b:
        expected = a.ask(*PICTURES)
        assert 8 == host.encoded()
        assert expected == b.ask(*PICTURES)
        assert 0 == host.encoded()

        a.hold.touch()
        making = a.send([20])
        host.until_encoding(1)
        waiting = b.send([20])
        assert [expected[0]] == b.ask([0])  # a request that waits for another engine keeps none behind it
        assert waiting not in b._answers
        a.hold.unlink()
        assert a.wait(making) == b.wait(waiting)
        assert 0 == host.encoded()

        a.hold.touch()
        a.send([21])
        host.until_encoding(1)
        waiting = b.send([21])
        a.kill()
        made = b.wait(waiting)
        assert 1 == host.encoded()

        # Its successor has no cache of its own.
        with host.engine(SGLANG_VLM_CACHE_SIZE_MB="0") as c:
            assert [*expected, *made] == c.ask(*PICTURES, [21])
            assert 0 == host.encoded()
            new = [[number] for number in range(30, 38)]
            both = [b.send(*new), c.send(*new)]
            tokens = [one.wait(number) for one, number in zip((b, c), both, strict=True)]
            assert tokens[0] == tokens[1]
            assert 8 == host.encoded()
            for _ in range(2):
                assert tokens[1] == c.ask(*new)
            assert 0 == host.encoded()

            # The same blocks in two shapes: SGLang's hash covers only the bytes.
            wide, tall = b.ask([[8, 2]])[0], b.ask([[2, 8]])[0]
            assert wide != tall
            assert 2 == host.encoded()
            assert [tall, wide] == c.ask([[2, 8]], [[8, 2]])
            assert 0 == host.encoded()

            # New weights: what the old ones have made is not used, and c sees nothing of it.
            other = with_another_encoder(host.model, tmp_path / "other")
            assert expected[:1] != b.ask([0], weights=str(other))
            assert 1 == host.encoded()
            assert expected[:1] == c.ask([0])
            assert 0 == host.encoded()


def test_all_ranks_load_what_ranks_that_were_killed_have_encoded(host: Host) -> None:
    with host.engine(ranks=2) as one:
        expected = one.ask(*PICTURES)
        assert [8, 8] == [host.encoded(rank) for rank in (0, 1)]
        one.kill()
    with host.engine(ranks=2) as two:
        assert expected == two.ask(*PICTURES)
        assert [0, 0] == [host.encoded(rank) for rank in (0, 1)]


def said(engine: Engine, text: str) -> int:
    return engine.log.read_text().count(text)


def test_a_store_that_is_full_or_removed_costs_no_answer_and_one_line(host: Host) -> None:
    with host.engine(options={"capacity_gb": 2e-4}) as one:  # a few outputs
        for number in range(6):
            one.ask([number])
        with (
            StoreInspector.open(host.name) as store,
            ObjectStoreReader.attach(host.name, None, finds_only=True) as reader,
        ):
            stored = [(str(slot.key), slot.namespace) for slot in store.slots()]
            held = [reader.find(key, namespace=namespace) for key, namespace in stored]
            assert 1 <= len(stored) < 6
            one.ask([6])
            one.ask([7])
            assert stored == [(slot.key, slot.namespace) for slot in store.slots()]
            for found in filter(None, held):
                found.end()
            one.ask([8])  # which takes the place of another one
            assert stored != [(slot.key, slot.namespace) for slot in store.slots()]
        assert 9 == host.encoded()
        assert 1 == said(one, "some encoder outputs were not stored")
        Path("/dev/shm", host.name).unlink()
        one.ask([9])
        one.ask([10])
        assert 1 == said(one, "was removed")


NO_STORES: dict[str, Callable[[Path], object]] = {
    "there is no room": lambda _: None,
    "not a store": lambda path: path.write_bytes(b"something else" * 9999),
    "laid out by another version": make_of_another_version,
}


@pytest.mark.parametrize("why", NO_STORES)
def test_a_store_that_cannot_be_opened_costs_no_answer_and_one_line(host: Host, why: str) -> None:
    NO_STORES[why](Path("/dev/shm", host.name))
    with host.engine(options={"capacity_gb": 1000.0 if "room" in why else 0.0625}) as one:
        assert 1 == len(one.ask([0]))
        assert [1, 1] == [said(one, text) for text in ("encoder outputs are not shared", why)]
    Path("/dev/shm", host.name).unlink(missing_ok=True)
