"""Requests with tensors as a tokenizer process makes and sends them, and the ranks that read them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import zmq
from sglang.srt.managers import mm_utils
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams


class Ranks:
    """Scheduler ranks, and the socket to them."""

    def __init__(self, folder: Path, size: int, read: str, **environment: str) -> None:
        address = f"ipc://{folder}/scheduler"
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.PUSH)
        self.socket.connect(address)
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.sglang.ranks", str(rank), str(size), f"{folder}/met", address, read],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **environment},
            )
            for rank in range(size)
        ]
        assert ["ready"] * size == self.answers()

    def answers(self) -> list[Any]:
        return [json.loads(process.stdout.readline()) for process in self.processes if process.stdout]

    def kill(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
        self._context.destroy(linger=0)


@contextmanager
def ranks_of(folder: Path, size: int, read: str = "seen", **environment: str) -> Iterator[Ranks]:
    ranks = Ranks(folder, size, read, **environment)
    try:
        yield ranks
    finally:
        ranks.kill()


def request(*features: Any, hashes: tuple[int | None, ...] = (), **sampling: Any) -> TokenizedGenerateReqInput:
    """Return a request with these features, wrapped as a tokenizer process does."""
    known = [*hashes, *[None] * len(features)]
    items = [MultimodalDataItem(modality=Modality.IMAGE, feature=f, hash=h) for f, h in zip(features, known)]  # noqa: B905
    made = TokenizedGenerateReqInput(
        rid="r",
        input_text="",
        input_ids=array("q", [1]),
        input_embeds=None,
        mm_inputs=MultimodalProcessorOutput(mm_items=items),
        token_type_ids=None,
        sampling_params=SamplingParams(**sampling),
        return_logprob=False,
        logprob_start_len=0,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )
    return mm_utils.wrap_shm_features(made)


def send(ranks: Ranks, made: TokenizedGenerateReqInput) -> None:
    TokenizerManager._dispatch_to_scheduler(
        SimpleNamespace(tokenizer_ipc_name=None, send_to_scheduler=ranks.socket), made
    )
