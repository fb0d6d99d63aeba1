"""An offline engine in a process group of its own, which a test can kill: `python -m tests.vllm.encoder.engine`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.vllm.encoder import counting

Asked = list[dict[str, Any]]
"""Prompts: the numbers of their pictures, and what else `answer` takes."""


def connector(store: str, **options: Any) -> dict[str, Any]:
    return {
        "ec_connector": "ShmstoreECConnector",
        "ec_connector_module_path": "shmstore.integrations.vllm.encoder",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"store": store, "capacity_gb": 0.0625, **options},
    }


class Engine:
    """An engine in a process group of its own, which answers prompts; `env` adds to its environment."""

    def __init__(self, model: Path, folder: Path, *, env: dict[str, str] | None = None, **settings: Any) -> None:
        common = {"cache": "lru", "disable_log_stats": True}
        self.log = folder / f"engine-{os.urandom(3).hex()}.log"
        # With hash seeds of their own, vLLM's ranks measure image and video in different orders, and gloo ends one.
        own = os.environ | counting.environment(folder) | {"SHMSTORE_VLLM": "0", "PYTHONHASHSEED": "0"} | (env or {})
        command = [sys.executable, "-m", "tests.vllm.encoder.engine", str(model), json.dumps(common | settings)]
        self._down, down = os.pipe()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(down)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=own,
                pass_fds=[down],
                start_new_session=True,
            )
        os.close(down)
        self._answers = os.fdopen(self._down)

    def wait(self) -> Any:
        """Return the next answer."""
        if not (line := self._answers.readline()):
            raise AssertionError(f"no engine: {self.log.read_text()[-5000:]}")
        return json.loads(line)

    def send(self, what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, *prompts: list[int], **more: Any) -> list[list[int]]:
        """Return the tokens of each prompt, which is the numbers of its pictures."""
        self.send({"ask": prompts, **more})
        tokens: list[list[int]] = self.wait()
        return tokens

    def kill(self) -> None:
        """End all of its processes by SIGKILL at once."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        os.killpg(self.process.pid, signal.SIGKILL)
        for one in family:
            if one.is_running():
                one.kill()
        psutil.wait_procs(family)
        self.close()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(120)
        self._answers.close()


@contextmanager
def engine(model: Path, folder: Path, **settings: Any) -> Iterator[Engine]:
    with engines(model, folder, settings) as (one,):
        yield one


@contextmanager
def engines(model: Path, folder: Path, *settings: dict[str, Any]) -> Iterator[list[Engine]]:
    """Yield engines that start together."""
    running = [Engine(model, folder, **each) for each in settings]
    try:
        for one in running:
            assert one.wait() == "ready"
        yield running
    finally:
        for one in running:
            if one.process.poll() is None:
                one.close()


def main(model: str, settings: str, answers: str) -> None:
    from tests.vllm.inputs import photograph, picture_prompt
    from tests.vllm.offline import offline

    def prompt(asked: dict[str, Any], pictures: list[int], i: int) -> dict[str, Any]:
        made = picture_prompt(*(photograph(number, tuple(asked.get("size", (320, 240)))) for number in pictures))
        if "uuids" in asked:
            made["multi_modal_uuids"] = {"image": asked["uuids"][i]}
        return made

    given = json.loads(settings)
    with (
        os.fdopen(int(answers), "w") as out,
        offline(Path(model), given.pop("cache"), **given) as one,
    ):

        def say(what: Any) -> None:
            print(json.dumps(what), file=out, flush=True)

        say("ready")
        for line in sys.stdin:
            asked = json.loads(line)
            if asked.get("reset"):
                one.llm.llm_engine.reset_encoder_cache()
            say(one.ask(*(prompt(asked, pictures, i) for i, pictures in enumerate(asked["ask"]))))


if __name__ == "__main__":
    main(*sys.argv[1:])
