"""What the `shm` caches cost beyond the store, and what they save: pytest bench/bench_multimodal.py --benchmark-only.

*Budgets* time one call of a cache and one call of the store for the same three tensors, as a plain dict, in turn and in
changing order: both on the same ring, whose next place each meets as cold as the other, and each with the one eviction
that its own put needs. The item's fields have been stored before, as those of all but the first of a batch have; what a
first one costs more is the text of its fields, 0.5 us. `over_us` is the median of the pairs' differences, since the
time of a large copy drifts by more than what is to be measured. It is the same work for every size, but after a copy
that has emptied the processor's caches all code runs at the pace of memory: so `over_us` grows with the size.

*Delivery* times an item from the API server's hands until a worker process has answered, by shared memory, by pickle
over a pipe, and by torch.multiprocessing; the ratio within a group of one size is the figure.
"""

import multiprocessing
import pickle
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
    """Three tensors of `nbytes` together: pixels, a grid and token types."""
    # Not zeros: the system would give one page for all of them, which is not read from memory.
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


def rounds_for(nbytes):
    return 2000 if nbytes <= 64 * KIB else 200 if nbytes <= 8 * MIB else 30


def pairs_for(nbytes):
    """Odd: the pairs' order changes, and the last one has to be complete."""
    return 4001 if nbytes <= 64 * KIB else 1501 if nbytes <= 8 * MIB else 801


@pytest.fixture(params=SIZES.values(), ids=SIZES)
def nbytes(request):
    return request.param


@pytest.fixture
def engine(nbytes):
    """A warm store: its pages have been touched by puts all over the ring."""
    settings = settings_for(nbytes)
    with processor_cache_from_config(settings) as sender:
        with worker_receiver_cache_from_config(settings, 0, sender.handle) as worker:
            item = make_item(nbytes)
            for n in range(2 * settings.ipc_cache_bytes // nbytes):
                sender.release([sender.get_and_update_item((item, UPDATES), f"warm{n}")[0]])
            yield sender, worker, item


def paired(benchmark, nbytes, call, baseline, prepare, undo):
    """Time `call(*prepare())` and `baseline(*prepare())` in pairs: this one first, then that one first, and so on."""
    calls, baselines = [], []
    turn = count()

    def timed(function, times, arguments):
        start = time.perf_counter()
        made = function(*arguments)
        times.append(time.perf_counter() - start)
        undo(made)

    def setup():
        if next(turn) % 2 == 0:
            for _ in range(1 + len(calls) - len(baselines)):  # the pair before ends with it, this one begins with it
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
        sender.invalidate([])  # what the baseline has evicted is not for the next miss to clear up

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


def answer(conn, settings, handle):
    """The worker: an item, whichever way it comes, is answered as soon as its tensors can be used."""
    torch.set_num_threads(1)
    with worker_receiver_cache_from_config(settings, 0, handle) as worker:
        conn.send(None)
        while (received := conn.recv()) is not None:
            item = worker.get_and_update_item(received, "item")
            conn.send(item["pixel_values"].data.nbytes)
            del received, item


@pytest.mark.parametrize("way", ["shm-miss", "shm-hit", "pipe", "torch-multiprocessing"])
@pytest.mark.benchmark
def test_delivery(benchmark, nbytes, way):
    benchmark.group = f"delivery of {next(name for name, size in SIZES.items() if size == nbytes)}"
    item = make_item(nbytes)
    expected = item["pixel_values"].data.nbytes
    numbers = count()
    package = torch.multiprocessing if way == "torch-multiprocessing" else multiprocessing
    context = package.get_context("spawn")
    settings = settings_for(nbytes)
    with processor_cache_from_config(settings) as sender:
        mine, theirs = context.Pipe()
        process = context.Process(target=answer, args=(theirs, settings, sender.handle))
        process.start()
        theirs.close()
        mine.recv()

        def by_reference(mm_item, mm_hash):
            mine.send(sender.get_and_update_item(mm_item, mm_hash)[0])
            assert mine.recv() == expected

        def by_value(mm_item):
            mine.send(mm_item)
            assert mine.recv() == expected

        def by_pickle(mm_item):
            # Not `send`: where torch.multiprocessing is imported, that sends a handle of shared memory instead.
            mine.send_bytes(pickle.dumps(mm_item, pickle.HIGHEST_PROTOCOL))
            assert mine.recv() == expected

        call, setup = {
            "shm-miss": (by_reference, lambda: (((item, UPDATES), str(next(numbers))), {})),
            "shm-hit": (by_reference, lambda: ((None, "hit"), {})),
            "pipe": (by_pickle, lambda: ((item,), {})),
            # Sending moves a tensor's memory into a file of its own, once; so each round has tensors of its own.
            "torch-multiprocessing": (by_value, lambda: ((make_item(nbytes),), {})),
        }[way]
        if way == "shm-hit":
            by_reference((item, UPDATES), "hit")
        benchmark.pedantic(call, setup=setup, rounds=max(10, rounds_for(nbytes) // 10), warmup_rounds=8)
        mine.send(None)
        process.join()
        mine.close()
