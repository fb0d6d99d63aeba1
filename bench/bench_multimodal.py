"""Measure what the `shm` caches cost beyond the store, and what they save.

Run with ``pytest bench/bench_multimodal.py --benchmark-only``.

*Budgets* time one call of a cache and one call of the store, in turn and in alternating order. Both get the same three
tensors; the store gets them as a plain dict. Both use the same ring, so the next place is equally cold for each, and
each put has one eviction. The fields of the item have been stored before, as for all items of a batch but the first. A
first item costs 0.5 us more, for the text of its fields. `over_us` is the median of the differences of the pairs,
because the time of a large copy drifts by more than the difference. The work is the same for every size. But a large
copy empties the processor's caches and slows the code after it, so `over_us` grows with the size.
"""

import statistics
import time
from itertools import count

import pytest
import torch
import torch.multiprocessing

from shmstore.multimodal import (
    MultiModalBatchedField,
    MultiModalCacheConfig,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
    ResolvedPromptUpdate,
    processor_cache_from_config,
    worker_receiver_cache_from_config,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = {"1KiB": KIB, "1MiB": MIB, "6MiB": 6 * MIB, "64MiB": 64 * MIB}
UPDATES = [ResolvedPromptUpdate("image", 0, "replace", "<image>", [151655] * 256)]


def make_item(nbytes):
    """Return an item of three tensors, `nbytes` in all: pixels, a grid and token types."""
    # Not zeros: the system would map one page for all of them, which is not read from memory.
    pixels = torch.ones((nbytes - 24 - 128) // 2, dtype=torch.bfloat16)
    elems = [
        MultiModalFieldElem("image", "pixel_values", pixels, MultiModalFlatField([slice(0, len(pixels))])),
        MultiModalFieldElem("image", "image_grid_thw", torch.tensor([1, 16, 16]), MultiModalBatchedField()),
        MultiModalFieldElem("image", "token_types", torch.zeros(32, dtype=torch.int32), MultiModalSharedField(1)),
    ]
    return MultiModalKwargsItem.from_elems(elems)


def settings_for(nbytes):
    capacity = max(4 * nbytes, MIB)
    return MultiModalCacheConfig(cache_type="shm", processor_cache_gb=1, ipc_cache_gb=capacity / GIB)


def pairs_for(nbytes):
    """Return an odd number of pairs: their order alternates, and the last pair must be complete."""
    return 4001 if nbytes <= 64 * KIB else 1501 if nbytes <= 8 * MIB else 801


@pytest.fixture(params=SIZES.values(), ids=SIZES)
def nbytes(request):
    return request.param


@pytest.fixture
def engine(nbytes):
    """A warm store: earlier puts have touched all pages of the ring."""
    settings = settings_for(nbytes)
    with processor_cache_from_config(settings) as sender:
        with worker_receiver_cache_from_config(settings, 0, sender.handle) as worker:
            item = make_item(nbytes)
            for n in range(2 * settings.ipc_cache_bytes // nbytes):
                sender.release([sender.get_and_update_item((item, UPDATES), f"warm{n}")[0]])
            yield sender, worker, item


def paired(benchmark, nbytes, call, baseline, prepare, undo):
    """Time `call(*prepare())` and `baseline(*prepare())` in pairs of alternating order."""
    calls, baselines = [], []
    turn = count()

    def timed(function, times, arguments):
        start = time.perf_counter()
        made = function(*arguments)
        times.append(time.perf_counter() - start)
        undo(made)

    def setup():
        if next(turn) % 2 == 0:
            for _ in range(1 + len(calls) - len(baselines)):  # ends the pair before, and starts this one
                timed(baseline, baselines, prepare())
        return (call, calls, prepare()), {}

    benchmark.pedantic(timed, setup=setup, rounds=pairs_for(nbytes))
    store = statistics.median(baselines) * 1e6
    own = statistics.median(calls) * 1e6
    over = statistics.median(mine - its for mine, its in zip(calls, baselines, strict=True)) * 1e6
    benchmark.extra_info.update(store_us=round(store, 2), own_us=round(own, 2), over_us=round(over, 2))
    print(f"\n{benchmark.name}: store {store:.2f} us, cache {own:.2f} us, over {over:+.2f} us", end=" ")


@pytest.mark.benchmark(group="sender miss, beyond put: at most 6 us")
def test_sender_miss(benchmark, nbytes, engine):
    sender, _, item = engine
    plain = item.get_data()
    numbers = count()

    def undo(ref):
        sender.release([ref])
        sender.invalidate([])  # so that the next miss need not handle the evictions of the baseline

    paired(
        benchmark,
        nbytes,
        lambda key: sender.get_and_update_item((item, UPDATES), key)[0],
        lambda key: sender.writer.put(key, plain),
        lambda: (str(next(numbers)),),
        undo,
    )


@pytest.mark.benchmark(group="sender hit: at most 3 us")
def test_sender_hit(benchmark, nbytes, engine):
    sender, _, item = engine
    sender.release([sender.get_and_update_item((item, UPDATES), "hit")[0]])
    paired(
        benchmark,
        nbytes,
        lambda key: sender.get_and_update_item(None, key)[0],
        lambda key: sender.writer.get_cached(key),
        lambda: ("hit",),
        lambda ref: sender.release([ref]),
    )


@pytest.mark.benchmark(group="receiver, beyond get: at most 5 us")
def test_receiver(benchmark, nbytes, engine):
    sender, worker, item = engine
    ref, _ = sender.get_and_update_item((item, UPDATES), "read")
    plain = sender.writer.put("plain", item.get_data())
    paired(
        benchmark,
        nbytes,
        lambda: worker.get_and_update_item(ref, "read"),
        lambda: worker.reader.get(plain),
        lambda: (),
        lambda made: None,
    )
