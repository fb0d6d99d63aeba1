"""Two `vllm serve` in two pods: namespaces and a /dev/shm of their own, and one common tmpfs for encoder outputs."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import SHM, store_name
from tests.vllm.encoder import counting
from tests.vllm.encoder.counting import calls
from tests.vllm.encoder.engine import connector
from tests.vllm.inputs import photograph
from tests.vllm.server import Server

_SPACES = "--mount --pid --ipc --user --map-root-user --fork --kill-child --mount-proc"
UNSHARE = ["unshare", *_SPACES.split(), "sh", "-c"]
IMAGES = range(3)


@pytest.fixture
def start(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Server]]:
    """Start a server in a pod that has the common folder at a path of its own; who calls this waits for it."""
    if (ran := subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"this user may make no namespaces: {ran.stderr}")
    for name, value in counting.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    common = SHM / store_name()
    common.mkdir()
    started: list[Server] = []

    def pod(name: str) -> Server:
        mount = tmp_path / name
        mount.mkdir(exist_ok=True)
        shell = f'mount --bind {common} {mount} && mount -t tmpfs none /dev/shm && exec "$@"'
        transfer = json.dumps(connector("outputs", dir=str(mount), engines=2))
        settings = ("--ec-transfer-config", transfer, "--mm-processor-cache-gb", "0.02")
        started.append(Server(model, tmp_path / f"{name}.log", *settings, within=[*UNSHARE, shell, "sh"]))
        return started[-1]

    try:
        yield pod
    finally:
        for one in started:
            one.stop(signal.SIGKILL)
        for left in common.iterdir():
            left.unlink()
        common.rmdir()


def test_what_one_pod_has_encoded_the_other_loads_and_so_does_the_first_after_its_death(
    start: Callable[[str], Server], tmp_path: Path
) -> None:
    def encoded_while(*servers: Server) -> tuple[int, list[list[tuple[int, list[list[int]]]]]]:
        before = calls(tmp_path)
        answers = [[server.ask(photograph(number)) for number in IMAGES] for server in servers]
        return calls(tmp_path) - before, answers

    one, other = start("a"), start("b")
    for server in (one, other):
        server.wait()
    encoded, (first, second) = encoded_while(one, other)
    assert ({200}, len(IMAGES)) == ({status for status, _ in first}, encoded)
    assert first == second
    one.stop(signal.SIGKILL)
    one = start("a")
    one.wait()
    assert (0, [first]) == encoded_while(one)
    for server in (one, other):
        figures = [server.metric(f"shmstore_encoder_{name}_total") for name in ("encoded", "hits")]
        assert [0, len(IMAGES)] == figures
