"""Servers over HTTP, started as the guide says, also with several tokenizer processes and several replicas."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import psutil
import pytest

from shmstore.inspect.inspector import StoreInspector
from shmstore.store import ObjectStoreWriter
from tests.sglang.conftest import left_of
from tests.sglang.counting import environment, processed
from tests.sglang.engine import SETTINGS, picture
from tests.sglang.processes import kill_tree
from tests.support import store_name, until
from tests.vllm.inputs import IMAGE, chat, message, photograph

Ask = Callable[..., str]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def server(model: Path, folder: Path, *flags: str, port: str = "", **env: str) -> Iterator[tuple[int, Ask]]:
    """Yield the process of a server, and what asks it."""
    port = port or str(free_port())
    for key, value in SETTINGS.items():
        flags += (f"--{key.replace('_', '-')}", *([] if value is True else [str(value)]))
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", port, *flags]
    with (log := folder / "log").open("wb") as out:
        env = os.environ | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} | env
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)

    def ask(path: str, body: object = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=300) as answer:
            return str(answer.read().decode())

    try:
        while True:
            assert process.poll() is None, log.read_text()[-5000:]
            try:
                ask("/health")
                break
            except (URLError, ConnectionError):
                time.sleep(0.2)
        yield process.pid, ask
    finally:
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        process.wait(120)
        for one in psutil.wait_procs(family, 60)[1]:  # workers of the server that do not end
            one.kill()


def test_a_server_answers_over_http_and_its_metrics_have_both_stores(model: Path, tmp_path: Path) -> None:
    name = store_name()
    options = json.dumps({"store": name, "capacity_gb": 0.0625})
    with server(model, tmp_path, "--enable-metrics", SHMSTORE_SGLANG_ENCODER=options) as (_, ask):
        body = {"messages": message(photograph(1)), "model": "any", "max_tokens": 4, "temperature": 0}
        said = [json.loads(ask("/v1/chat/completions", body))["choices"][0]["message"]["content"] for _ in range(2)]
        assert said[0] == said[1]
        metrics = ask("/metrics")
        assert f'shmstore_encoder_encoded_total{{engine="0",model_name="{model}"}} 1.0' in metrics
        assert "shmstore_puts_total" in metrics
    ObjectStoreWriter.unlink(name)


@pytest.mark.parametrize("flag", ["--tokenizer-worker-num", "--dp-size"])
def test_two_processes_store_a_picture_once_and_no_lease_is_left(flag: str, model: Path, tmp_path: Path) -> None:
    with server(model, tmp_path, flag, "2", SGLANG_MM_PRECOMPUTE_HASH="1") as (pid, ask):
        sampling = {"max_new_tokens": 2, "temperature": 0, "n": 3}
        body = {"text": chat(IMAGE, "what is this"), "image_data": picture(1), "sampling_params": sampling}
        said = [[one["output_ids"] for one in json.loads(ask("/generate", body))] for _ in range(8)]
        assert [said[0][:1] * 3] * 8 == said
        (name,) = left_of(pid, "shmstore")
        with StoreInspector.open(name) as store:
            until(lambda: store.facts().open_leases == 0)  # they end after the answer
            facts = store.facts()
            assert facts.puts == 1
            assert facts.hits >= 8 * 3
    assert [] == left_of(pid, "shmstore")


def test_servers_process_an_image_once_in_all_and_find_the_work_of_a_killed_one(model: Path, tmp_path: Path) -> None:
    """Each has two tokenizer processes."""
    name = store_name()
    options = json.dumps({"store": name, "capacity_gb": 0.0625})
    env = environment(tmp_path) | {"SHMSTORE_SGLANG_PREPROCESS": options}
    flags = ("--tokenizer-worker-num", "2", "--mm-preprocess-cache-size-mb", "64", "--enable-metrics")

    def asked(ask: Ask, number: int) -> list[int]:
        sampling = {"max_new_tokens": 2, "temperature": 0}
        body = {"text": chat(IMAGE, "what is this"), "image_data": picture(number), "sampling_params": sampling}
        tokens: list[int] = json.loads(ask("/generate", body))["output_ids"]
        return tokens

    with server(model, tmp_path, *flags, **env) as (pid, one), server(model, tmp_path, *flags, **env) as (_, two):
        said = [asked(one, number) for number in (1, 2) * 4]
        assert said == said[:2] * 4
        assert said[:2] == [asked(two, number) for number in (1, 2)]
        assert 2 == processed(tmp_path)
        new = asked(one, 3)
        kill_tree(pid)
        Path(f"/dev/shm/multi_tokenizer_args_{pid}").unlink(missing_ok=True)  # SGLang's
        assert new == asked(two, 3)
        assert 3 == processed(tmp_path)
        hits = re.findall(r"^shmstore_preprocess_hits_total\S+ (\S+)", two("/metrics"), re.MULTILINE)
        assert ["3.0"] == hits
    ObjectStoreWriter.unlink(name)
