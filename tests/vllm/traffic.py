"""Requests at random: one or several pictures, three answers, rejections, and clients that hang up.

`SHMSTORE_VLLM=0 python -m tests.vllm.traffic 60 -- --mm-processor-cache-type lru` shows the memory of vLLM's own cache.
"""

from __future__ import annotations

import argparse
import http.client
import os
import random
import tempfile
import time
from pathlib import Path

from tests.vllm.inputs import photograph
from tests.vllm.model import make_model
from tests.vllm.server import Server, server

LONG = "w" * 8140
"""A text that fits, but not together with a picture, which is stored when that is found."""
STORE = os.environ.get("SHMSTORE_VLLM") != "0"
KNOWN = 12
"""The photographs from 0 that come again and again; their answers are asked for."""


class Traffic:
    """Clients of one server."""

    def __init__(self, to: Server, seed: int) -> None:
        self._server, self._luck = to, random.Random(seed)
        self._open: list[http.client.HTTPConnection] = []

    def send(self) -> tuple[int, list[list[int]]] | None:
        """Send one request; return the number and tokens of a known photograph that was asked about by itself."""
        luck, to = self._luck, self._server
        several = range(luck.choice((1, 1, 1, 2, 3)))
        numbers = [luck.randrange(KNOWN) if luck.random() < 0.5 else luck.randrange(400, 520) for _ in several]
        pictures = [photograph(number) for number in numbers]
        what = luck.random()
        found = None
        if what < 0.1:
            assert 400 == to.ask(*pictures, text=LONG)[0]
        elif what < 0.3:
            self._open.append(to.send(*pictures, max_tokens=200))
        elif what < 0.4:
            assert 200 == to.ask(*pictures, n=3, temperature=1, top_k=1)[0]
        else:
            status, tokens = to.ask(*pictures)
            assert 200 == status
            if len(numbers) == 1 and numbers[0] < KNOWN:
                found = numbers[0], tokens
        if len(self._open) > 3:
            self._open.pop(luck.randrange(4)).close()
        return found

    def hang_up(self) -> None:
        """Close what is open, without an answer."""
        while self._open:
            self._open.pop().close()


def soak(minutes: float, model: Path, log: Path, *settings: str) -> None:
    """Send requests for so long, and print memory and leases once a minute; AssertionError for a lease that stays."""
    with server(model, log, "--max-num-seqs", "4", "--mm-processor-cache-gb", "0.02", *settings) as one:
        traffic, requests = Traffic(one, 7), 0
        expected: dict[int, list[list[int]]] = {}
        began = reported = time.monotonic()
        while time.monotonic() < began + 60 * minutes:
            if found := traffic.send():
                assert expected.setdefault(found[0], found[1]) == found[1]
            requests += 1
            if time.monotonic() > reported + 60:
                reported = time.monotonic()
                print(f"{(reported - began) / 60:.0f} min, {requests} requests, {about(one)}", flush=True)
        traffic.hang_up()
        deadline = time.monotonic() + 60
        while one.metric("vllm:num_requests_running") + one.metric("vllm:num_requests_waiting"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert 200 == one.ask()[0]  # its token says that the workers are past what was aborted
        print(f"at the end, {requests} requests, {about(one)}")
        assert not STORE or 0 == one.store().facts.open_leases


def about(one: Server) -> str:
    store = ""
    if STORE:
        facts = one.store().facts
        store = f"{facts.open_leases} leases, {facts.evictions} evictions, {facts.refusals} refusals, "
    memory = ", ".join(f"{process.memory_full_info().uss >> 20}" for process in one.family())
    preempted = int(one.metric("vllm:num_preemptions_total"))
    return f"{store}{preempted} preemptions, private MiB of each process: {memory}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=soak.__doc__)
    parser.add_argument("minutes", type=float)
    parser.add_argument("settings", nargs="*", help="more options of `vllm serve`")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak(arguments.minutes, make_model(Path(folder, "model")), Path(folder, "log"), *arguments.settings)
