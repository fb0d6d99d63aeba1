"""Measure the KV-cache manager: microseconds of each request operation, and of the same in plain Python.

    python -m pytest bench/bench_kv_cache.py --benchmark-only -q -o addopts= -o python_files='bench_*.py'

Each figure and its reference are measured in the same session. A table is printed at the end. A figure beyond its limit
fails.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest

from shmstore.scheduler import BlockHasher, BlockPool, KVCacheManager, Request
from tests.scheduler.helpers import config
from tests.scheduler.model import ModelManager, block_hashes

SIZE, BLOCKS = 16, 100_000
LENGTHS = [1024, 32768]
HASHER = BlockHasher(SIZE)
ROUNDS = {1024: 400, 32768: 120}
REFERENCE_ROUNDS = {1024: 40, 32768: 12}
NAMES = itertools.count()


def length_name(n: int) -> str:
    return f"{n // 1024}k tokens"


class PlainRequest:
    """The part of a request that the model reads, with a plain list of hashes."""

    def __init__(self, request: Request) -> None:
        self.request_id, self.lora_id, self.num_preemptions = request.request_id, None, 0
        self.skip_reading_prefix_cache = False
        self.all_token_ids = request.all_token_ids[:]
        self.num_tokens = len(self.all_token_ids)
        self.num_computed_tokens = 0
        self.block_hashes = list(request.block_hashes)


def new_request(n: int) -> Request:
    tokens = random.choices(range(128_000), k=n)
    return Request(f"r{next(NAMES)}", tokens, block_hasher=HASHER)


def new_manager(**options: Any) -> KVCacheManager:
    return KVCacheManager(config(BLOCKS, ("full", SIZE)), 1 << 20, SIZE, **options)


def plain_manager(**options: Any) -> ModelManager:
    return ModelManager(BLOCKS, [("full", SIZE)], 1 << 20, SIZE, **options)


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, float, float | None, float]]:
    return []


@pytest.fixture(scope="module", autouse=True)
def table(rows: list[tuple[str, float, float | None, float]], request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    lines = ["", "| operation | us | plain Python, us | ratio | limit | |", "|---|---:|---:|---:|---:|---|"]
    for name, ours, plain, limit in rows:
        reference = " | " if plain is None else f"{plain:.1f} | x {plain / ours:.1f}"
        shown = "" if limit == float("inf") else f"{limit:g}"
        lines.append(f"| {name} | {ours:.2f} | {reference} | {shown} | {'ok' if ours <= limit else 'MISSED'} |")
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n".join(lines))


class Figure:
    """Times a reference and then one operation with pytest-benchmark, one call in each round."""

    def __init__(self, benchmark: Any, rows: list[tuple[str, float, float | None, float]]) -> None:
        self.benchmark = benchmark
        self.rows = rows

    def __call__(
        self,
        name: str,
        limit_us: float,
        operation: Callable[..., Any],
        setup: Callable[[], tuple[Any, ...]],
        rounds: int,
        reference: Callable[..., Any] | None = None,
        reference_setup: Callable[[], tuple[Any, ...]] = tuple,
        reference_rounds: int = 10,
    ) -> None:
        plain: float | None = None
        if reference is not None:
            times = []
            for _ in range(reference_rounds):
                args = reference_setup()
                start = time.perf_counter()
                reference(*args)
                times.append(time.perf_counter() - start)
            plain = median(times[len(times) // 5 :]) * 1e6
        gc.collect()
        self.benchmark.extra_info.update(figure=name, kind="time", limit=limit_us, reference_us=plain)
        self.benchmark.pedantic(operation, setup=lambda: (setup(), {}), rounds=rounds, warmup_rounds=rounds // 10)
        ours = self.benchmark.stats.stats.median * 1e6
        self.rows.append((name, ours, plain, limit_us))
        assert ours <= limit_us, f"{name}: {ours:.2f} us, the limit is {limit_us:g} us"


@pytest.fixture
def figure(benchmark: Any, rows: list[tuple[str, float, float | None, float]]) -> Figure:
    return Figure(benchmark, rows)


def cached_twice(n: int) -> tuple[KVCacheManager, ModelManager, Request, PlainRequest]:
    """Return managers that have the contents of a request cached and free, and a request for the same contents."""
    ours, plain = new_manager(), plain_manager()
    first = new_request(n)
    again = Request("again", first.all_token_ids[:], block_hasher=HASHER)
    ours.allocate_slots(first, n)
    ours.free(first)
    plain.allocate_slots(PlainRequest(first), n)
    plain.free(first)
    return ours, plain, again, PlainRequest(again)


@pytest.mark.parametrize(("n", "limit"), [(1024, 6), (32768, 60)])
def test_prefix_look_up(figure: Figure, n: int, limit: float) -> None:
    ours, plain, request, plain_request = cached_twice(n)
    assert ours.get_computed_blocks(request)[1] == plain.get_computed_blocks(plain_request)[1] == n - SIZE
    figure(
        f"prefix look-up, full hit, {length_name(n)}",
        limit,
        ours.get_computed_blocks,
        lambda: (request,),
        ROUNDS[n],
        plain.get_computed_blocks,
        lambda: (plain_request,),
        REFERENCE_ROUNDS[n],
    )


def prefill(
    figure: Figure, name: str, n: int, limit: float, evicting: bool, ours: KVCacheManager, plain: ModelManager
) -> None:
    """Cycle through more prompts than the pool holds, so that no prompt finds its own contents."""
    count = BLOCKS * 5 // 4 // (n // SIZE) if evicting else 60
    prompts = [new_request(n) for _ in range(min(count, 2000))]
    if evicting and len(prompts) < count:  # the prompts are short: one long prompt fills the rest of the pool
        prompts.append(new_request((count - len(prompts)) * n))
    plain_prompts = [PlainRequest(prompt) for prompt in prompts]
    for manager, requests in ((ours, prompts), (plain, plain_prompts)):
        for prompt in requests if evicting else ():
            assert manager.allocate_slots(prompt, prompt.num_tokens) is not None
            manager.free(prompt)
            manager.take_events()

    def setup_of(manager: Any, requests: list[Any]) -> Callable[[], tuple[Any, ...]]:
        supply = itertools.cycle(requests[:2000])
        used: list[Any] = []

        def setup() -> tuple[Any, ...]:
            while used:
                manager.free(used.pop())
            if not evicting:
                assert manager.reset_prefix_cache()
            manager.take_events()
            used.append(next(supply))
            return used[0], used[0].num_tokens

        return setup

    def with_events(manager: Any) -> Callable[[Any, int], Any]:
        def allocate_and_take(request: Any, tokens: int) -> Any:
            manager.allocate_slots(request, tokens)
            return manager.take_events()

        return allocate_and_take

    told = ours.block_pool.events_enabled
    figure(
        f"{name}, {length_name(n)}",
        limit,
        with_events(ours) if told else ours.allocate_slots,
        setup_of(ours, prompts),
        ROUNDS[n],
        with_events(plain) if told else plain.allocate_slots,
        setup_of(plain, plain_prompts),
        REFERENCE_ROUNDS[n],
    )


@pytest.mark.parametrize(("n", "limit"), [(1024, 9), (32768, 120)])
def test_prefill_into_fresh_blocks(figure: Figure, n: int, limit: float) -> None:
    prefill(figure, "allocate_slots, prefill, fresh", n, limit, False, new_manager(), plain_manager())


@pytest.mark.parametrize(("n", "limit"), [(1024, 12), (32768, 180)])
def test_prefill_that_evicts(figure: Figure, n: int, limit: float) -> None:
    prefill(figure, "allocate_slots, prefill, evicting", n, limit, True, new_manager(), plain_manager())


@pytest.mark.parametrize(("n", "limit"), [(1024, 25), (32768, 350)])
def test_prefill_with_events(figure: Figure, n: int, limit: float) -> None:
    ours, plain = new_manager(enable_kv_cache_events=True), plain_manager(enable_kv_cache_events=True)
    prefill(figure, "with KV events, prefill and take_events", n, limit, False, ours, plain)


@pytest.mark.parametrize(("n", "limit"), [(1024, 6), (32768, 40)])
def test_allocate_on_a_full_hit(figure: Figure, n: int, limit: float) -> None:
    ours, plain, request, plain_request = cached_twice(n)

    def setup_of(manager: Any, req: Any) -> Callable[[], tuple[Any, ...]]:
        def setup() -> tuple[Any, ...]:
            manager.free(req)
            blocks, hit = manager.get_computed_blocks(req)
            assert hit == n - SIZE
            return req, n - hit, hit, blocks

        return setup

    figure(
        f"allocate_slots on a full hit, {length_name(n)}",
        limit,
        ours.allocate_slots,
        setup_of(ours, request),
        ROUNDS[n],
        plain.allocate_slots,
        setup_of(plain, plain_request),
        REFERENCE_ROUNDS[n],
    )


@pytest.mark.parametrize(("n", "limit"), [(1024, 3), (32768, 20)])
def test_free(figure: Figure, n: int, limit: float) -> None:
    ours, plain, request, plain_request = cached_twice(n)

    def setup_of(manager: Any, req: Any) -> Callable[[], tuple[Any, ...]]:
        def setup() -> tuple[Any, ...]:
            blocks, hit = manager.get_computed_blocks(req)
            manager.allocate_slots(req, n - hit, hit, blocks)
            return (req,)

        return setup

    figure(
        f"free, {length_name(n)}",
        limit,
        ours.free,
        setup_of(ours, request),
        ROUNDS[n],
        plain.free,
        setup_of(plain, plain_request),
        REFERENCE_ROUNDS[n],
    )


@pytest.mark.parametrize("n", LENGTHS, ids=length_name)
@pytest.mark.parametrize(("new_block", "limit"), [(False, 1.2), (True, 2.5)], ids=["no new block", "one new block"])
def test_decode(figure: Figure, n: int, new_block: bool, limit: float) -> None:
    ours, plain = new_manager(), plain_manager()
    request = new_request(n)

    class Growing(PlainRequest):
        def append_output_token_ids(self, tokens: list[int]) -> None:
            self.all_token_ids += tokens
            self.num_tokens += len(tokens)
            while len(self.block_hashes) < self.num_tokens // SIZE:
                self.block_hashes.append(random.randbytes(32))

    def setup_of(manager: Any, req: Any) -> Callable[[], tuple[Any, ...]]:
        manager.allocate_slots(req, n)
        req.num_computed_tokens = n

        def setup() -> tuple[Any, ...]:
            wanted = {0} if new_block else set(range(1, SIZE - 1))
            while True:
                req.append_output_token_ids([7])
                if req.num_computed_tokens % SIZE in wanted:
                    break
                assert manager.allocate_slots(req, 1) is not None
                req.num_computed_tokens += 1
            args = (req, 1)
            return args

        def next_setup() -> tuple[Any, ...]:
            if req.num_computed_tokens < req.num_tokens:  # the step that was timed before
                req.num_computed_tokens += 1
            return setup()

        return next_setup

    figure(
        f"decode step, {'one' if new_block else 'no'} new block, {length_name(n)}",
        limit,
        ours.allocate_slots,
        setup_of(ours, request),
        2000,
        plain.allocate_slots,
        setup_of(plain, Growing(request)),
        500,
    )


@pytest.mark.parametrize(("n", "limit"), [(1024, 30), (32768, 700)])
def test_hashing_a_new_prompt(figure: Figure, n: int, limit: float) -> None:
    def setup() -> tuple[Any, ...]:
        return (Request("r", random.choices(range(128_000), k=n)),)

    class WithoutExtras(PlainRequest):
        lora_name = cache_salt = prompt_embeds = None
        mm_features = ()

    figure(
        f"hashing a new prompt, {length_name(n)}",
        limit,
        HASHER,
        setup,
        ROUNDS[n],
        lambda request: block_hashes(request, SIZE),
        lambda: (WithoutExtras(setup()[0]),),
        5,
    )


@pytest.mark.parametrize("n", LENGTHS, ids=length_name)
def test_hashing_without_libcrypto(figure: Figure, n: int) -> None:
    hasher = BlockHasher(SIZE)
    hasher._in_c = False
    figure(
        f"hashing by hashlib, {length_name(n)}",
        float("inf"),
        hasher,
        lambda: (Request("r", random.choices(range(128_000), k=n)),),
        ROUNDS[n],
    )


def test_building_a_pool(figure: Figure) -> None:
    kept: list[BlockPool] = []  # keeps each pool, so that the next one does not get its warm memory
    figure(
        "pool of 100,000 blocks, build",
        3000,
        lambda: kept.append(BlockPool(BLOCKS, True)),
        tuple,
        20,
        plain_manager,
        tuple,
        5,
    )
    figure.benchmark.extra_info["bytes_per_block"] = kept[0].core.nbytes / BLOCKS
    assert kept[0].core.nbytes / BLOCKS <= 80


def test_one_step_of_256_requests(figure: Figure) -> None:
    ours, plain = new_manager(), plain_manager()
    running = [new_request(1024 + i) for i in range(256)]
    plain_running: list[Any] = [PlainRequest(request) for request in running]
    for manager, requests in ((ours, running), (plain, plain_running)):
        for request in requests:
            manager.allocate_slots(request, request.num_tokens)

    def setup_of(requests: list[Any]) -> Callable[[], tuple[Any, ...]]:
        def setup() -> tuple[Any, ...]:
            for request in requests:
                request.num_computed_tokens = request.num_tokens
                if isinstance(request, Request):
                    request.append_output_token_ids(7)
                else:
                    request.all_token_ids.append(7)
                    request.num_tokens += 1
                    if request.num_tokens % SIZE == 0:
                        request.block_hashes.append(random.randbytes(32))
            return ()

        return setup

    def step_of(manager: Any, requests: list[Any]) -> Callable[[], None]:
        def step() -> None:
            allocate = manager.allocate_slots
            for request in requests:
                allocate(request, 1)

        return step

    figure(
        "256 running requests, one decode step",
        250,
        step_of(ours, running),
        setup_of(running),
        400,
        step_of(plain, plain_running),
        setup_of(plain_running),
        100,
    )
