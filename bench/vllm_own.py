"""`python -m bench.vllm_own`: what the plug-in for vLLM takes of a hit and of a miss, without an engine.

A hit is the API server's part (look, lease, reference) and a worker's (read in place). A miss is a put; beside it
stands the copy of as many bytes into shared memory that is there already. Medians, in turn.

Then what a worker takes to get an item, and to read or to write all of it once, by SHMSTORE_VLLM_READ: medians of the
thread's time, in turn. It keeps the last items, as of requests that have not ended.
"""

import itertools
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
)

from shmstore.integrations.vllm import shared
from shmstore.integrations.vllm.receiver import ReceiverCache
from shmstore.integrations.vllm.sender import SenderCache
from tests.vllm import parts

PATCHES = {"6 MB": (4900, 1176), "18 MB": (15408, 1176)}
"""Rows of pixels of a photograph, and bytes of each."""
HITS, MISSES, TURNS = 2000, 20, 5
USES: tuple[Callable[[Any], Any], ...] = (
    len,
    lambda pixels: np.bitwise_or.reduce(pixels, None),
    lambda pixels: pixels.fill(0),
)
"""Nothing, a pass over the bytes, and a write to each."""
KEPT, GETS = 4, 50


def item(rows: int, columns: int) -> MultiModalKwargsItem:
    pixels = torch.randint(0, 255, (rows, columns), dtype=torch.uint8)
    elems = {
        "pixel_values": MultiModalFieldElem(pixels, MultiModalFlatField(slices=[slice(0, rows)])),
        "image_grid_thw": MultiModalFieldElem(torch.tensor([1, 70, 70]), MultiModalBatchedField()),
    }
    return MultiModalKwargsItem(elems)


def median(call: Callable[[int], Any], times: int) -> float:
    """Return the median time of a call in microseconds; what it returns is dropped after it."""
    taken = []
    for number in range(times):
        begun = time.perf_counter_ns()
        kept = call(number)
        taken.append(time.perf_counter_ns() - begun)
        del kept
    return statistics.median(taken) / 1e3


def row(sender: SenderCache, worker: ReceiverCache, size: str) -> list[float]:
    """Return the medians for items of one size: the server's hit, the worker's, a miss, and the copy."""
    rows, columns = PATCHES[size]
    whole = item(rows, columns)
    source = whole["pixel_values"].data.numpy()
    places = torch.ones((MISSES, rows, columns), dtype=torch.uint8).share_memory_().numpy()
    sent = MultiModalKwargsItem(sender.get_and_update_item((whole, []), size)[0].data)

    def hit(_: int) -> Any:
        assert sender.is_cached_item(size)
        return sender.get_and_update_item(None, size)

    keys = (f"{size} {number}" for number in range(TURNS * MISSES))
    figures = [
        (
            median(hit, HITS),
            median(lambda _: worker.get_and_update_item(sent, ""), HITS),
            median(lambda _: sender.get_and_update_item((whole, []), next(keys)), MISSES),
            median(lambda number: np.copyto(places[number], source), MISSES),
        )
        for _ in range(TURNS)
    ]
    return [statistics.median(column) for column in zip(*figures, strict=True)]


def reads(sender: SenderCache, worker: ReceiverCache, size: str) -> dict[str, list[float]]:
    """Return by policy the median times of a get, of one and a pass over the bytes, and of one and a write to each."""
    whole = item(*PATCHES[size])
    sent = [sender.get_and_update_item((whole, []), f"{size}, kept, {n}")[0].data for n in range(2 * KEPT)]
    times: dict[tuple[str, int], list[float]] = {}
    kept: dict[tuple[str, int], Any] = {}
    for number in range(GETS):
        for policy, use in itertools.product(("copy", "private", "views"), USES):
            worker._policy, case = policy, (policy, USES.index(use))
            if case == ("views", 2):
                continue
            begun = time.thread_time_ns()
            found = worker.get_and_update_item(MultiModalKwargsItem(sent[number % len(sent)]), "")
            use(found["pixel_values"].data.numpy())
            kept.setdefault(case, deque(maxlen=KEPT)).append(found)  # which ends the first one
            times.setdefault(case, []).append((time.thread_time_ns() - begun) / 1e3)
    medians: dict[str, list[float]] = {}
    for (policy, _), taken in times.items():
        medians.setdefault(policy, []).append(statistics.median(taken))
    return medians


def main() -> None:
    os.environ["SHMSTORE_VLLM_READ"] = "views"
    shared.agree()
    sender = SenderCache(parts.config(gib=1, most=128))
    worker = ReceiverCache(None, None)
    print("| item | API server, hit | worker, hit | miss | copy alone | miss - copy |\n|---|---:|---:|---:|---:|---:|")
    for size in PATCHES:
        api, get, miss, copy = row(sender, worker, size)
        print(f"| {size} | {api:.1f} us | {get:.1f} us | {miss:.0f} us | {copy:.0f} us | {miss - copy:.0f} us |")
    print("\n| item | | get | get and read | get and write |\n|---|---|---:|---:|---:|")
    for size in PATCHES:
        for policy, medians in reads(sender, worker, size).items():
            print(f"| {size} | `{policy}` | {' | '.join(f'{taken:.0f} us' for taken in medians)} |")
    sender.close()


if __name__ == "__main__":
    main()
