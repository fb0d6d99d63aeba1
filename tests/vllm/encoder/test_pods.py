"""Two `vllm serve` in two pods, which share a tmpfs: what each has made, and how they die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import SHM, store_name, until
from tests.vllm.encoder import counting
from tests.vllm.encoder.engine import connector
from tests.vllm.inputs import photograph
from tests.vllm.server import Server

_SPACES = "--mount --pid --ipc --user --map-root-user --fork --kill-child --mount-proc"
UNSHARE = ["unshare", *_SPACES.split(), "sh", "-c"]
IMAGES = range(3)
LOST = 3
"""The photograph about which one is asked when it dies."""
Lru = dict[str, list[list[int]]]


class Pods:
    """Servers that have the common folder at a path of their own, and a tier for what they process."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder, self.common = model, folder, SHM / store_name()
        ran = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
        self.refused = ran.stderr if ran.returncode else ""
        """Why this user may make no namespaces; then the servers run without."""
        self.started: list[Server] = []
        self.common.mkdir()
        (folder / "tier").mkdir()

    def start(self, name: str) -> Server:
        """Start a server; who calls this waits for it. A file of its name in the folder holds its encoder."""
        mount = self.folder / f"{name}.mount"
        mount.mkdir(exist_ok=True)
        shell = f'mount --bind {self.common} {mount} && mount -t tmpfs none /dev/shm && exec "$@"'
        within = [] if self.refused else [*UNSHARE, shell, "sh"]
        transfer = json.dumps(connector("outputs", dir=str(self.common if self.refused else mount), engines=2))
        settings = ("--ec-transfer-config", transfer, "--mm-processor-cache-gb", "0.02", "--max-num-seqs", "2")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHMSTORE_TIER", (self.folder / "tier").as_uri())
            for variable, value in counting.environment(self.folder, name).items():
                patch.setenv(variable, value)
            self.started.append(Server(self.model, self.folder / f"{name}.log", *settings, within=within))
        return self.started[-1]

    def made(self) -> tuple[int, int]:
        """Return how many images the pods have processed and encoded."""
        return counting.processed(self.folder), counting.calls(self.folder)


@pytest.fixture(scope="module")
def pods(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    made = Pods(model, tmp_path_factory.mktemp("pods"))
    try:
        yield made
    finally:
        for one in made.started:
            one.stop(signal.SIGKILL)
        for left in made.common.iterdir():
            left.unlink()
        made.common.rmdir()


@pytest.fixture(scope="module")
def two(pods: Pods) -> tuple[Server, Server]:
    one, other = pods.start("a"), pods.start("b")
    for server in (one, other):
        server.wait()
    return one, other


def test_what_one_pod_has_processed_and_encoded_the_other_finds(
    pods: Pods, two: tuple[Server, Server], lru: Lru
) -> None:
    expected = [(200, [tokens]) for tokens in lru["photographs"][: len(IMAGES)]]
    one, other = two
    before = pods.made()
    assert expected == [one.ask(photograph(number)) for number in IMAGES]
    made = pods.made()
    assert (len(IMAGES),) * 2 == (made[0] - before[0], made[1] - before[1])
    until(lambda: len(IMAGES) == one.metric("shmstore_tier_published_total"))  # a thread sends them
    assert expected == [other.ask(photograph(number)) for number in IMAGES]
    assert made == pods.made()
    assert len(IMAGES) == other.metric("shmstore_tier_hits_total")


def test_each_pod_has_namespaces_of_its_own(pods: Pods, two: tuple[Server, Server]) -> None:
    if pods.refused:
        pytest.skip(f"this user may make no namespaces: {pods.refused}")
    processes = ["self", *(str(server.family()[-1].pid) for server in two)]
    for space in ("mnt", "pid", "ipc", "user"):
        assert 3 == len({os.readlink(f"/proc/{process}/ns/{space}") for process in processes})


def test_a_pod_that_is_killed_in_its_encoder_is_replaced_by_the_one_that_waits(
    pods: Pods, two: tuple[Server, Server], lru: Lru
) -> None:
    one, other = two
    (pods.folder / "a").touch()
    _, before = pods.made()
    lost = one.send(photograph(LOST))
    until(lambda: pods.made()[1] == before + 1)
    waits = other.send(photograph(LOST))
    until(lambda: other.metric("shmstore_encoder_deferred_total") == 1)
    assert 200 == other.ask(text="and without a picture")[0]
    one.stop(signal.SIGKILL)
    assert (200, [lru["photographs"][LOST]]) == other.answer(waits)
    assert before + 2 == pods.made()[1]
    shown = [other.metric(f"shmstore_encoder_{name}_total") for name in ("encoded", "hits", "stored", "unclaimed")]
    assert [1, len(IMAGES), 1, 0] == shown
    lost.close()
    waits.close()
    (pods.folder / "a").unlink()


def test_a_pod_that_was_killed_finds_all_when_it_is_back(pods: Pods, two: tuple[Server, Server], lru: Lru) -> None:
    again = pods.start("a")
    again.wait()
    before = pods.made()
    images = [*IMAGES, LOST]
    assert [(200, [lru["photographs"][number]]) for number in images] == [again.ask(photograph(n)) for n in images]
    assert before == pods.made()
    assert [0, len(images)] == [again.metric(f"shmstore_encoder_{name}_total") for name in ("encoded", "hits")]
