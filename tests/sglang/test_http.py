"""The server of the guide's own command, over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import psutil

from shmstore.store import ObjectStoreWriter
from tests.sglang.engine import SETTINGS
from tests.support import store_name
from tests.vllm.inputs import message, photograph


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_a_server_answers_over_http_and_its_metrics_have_both_stores(model: Path, tmp_path: Path) -> None:
    name, port = store_name(), free_port()
    flags = [
        part
        for key, value in SETTINGS.items()
        for part in (f"--{key.replace('_', '-')}", *([] if value is True else [str(value)]))
    ]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port), *flags]
    env = {"SHMSTORE_SGLANG_ENCODER": json.dumps({"store": name, "capacity_gb": 0.0625})}
    env |= {"SGLANG_CPU_OMP_THREADS_BIND": "0", "SGLANG_MM_PRECOMPUTE_HASH": "1"}
    log = tmp_path / "log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*command, "--enable-metrics"], stdout=out, stderr=out, env=os.environ | env, start_new_session=True
        )

    def get(path: str, body: object = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=300) as answer:
            return str(answer.read().decode())

    try:
        while True:
            assert server.poll() is None, log.read_text()[-5000:]
            try:
                get("/health")
                break
            except (URLError, ConnectionError):
                time.sleep(0.2)
        body = {"messages": message(photograph(1)), "model": "any", "max_tokens": 4, "temperature": 0}
        said = [json.loads(get("/v1/chat/completions", body))["choices"][0]["message"]["content"] for _ in range(2)]
        assert said[0] == said[1]
        metrics = get("/metrics")
        assert "shmstore_encoder_encoded_total 1.0" in metrics, metrics
        assert "shmstore_puts_total" in metrics
    finally:
        family = psutil.Process(server.pid).children(recursive=True)
        server.send_signal(signal.SIGTERM)
        server.wait(120)
        psutil.wait_procs(family, 60)
        ObjectStoreWriter.unlink(name)
