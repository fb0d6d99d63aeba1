"""Our block tables compared with vLLM's: random schedulers with connectors, steps in flight and gates.

vLLM's manager is the reference. Both get the same requests and the same calls. Their block ids must be equal, so that
one that hands out, keeps or gives back another block is found at once.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core.kv_cache_manager import KVCacheManager as Theirs
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request, RequestStatus

from shmstore.scheduler import KVCacheManager
from tests.scheduler.helpers import manager

SIZE, MAX_LEN = 4, 120
SETUPS: list[tuple[list[tuple[Any, ...]], dict[str, Any]]] = [
    ([("full", SIZE)], {}),
    ([("sw", SIZE, 9)], {}),
    ([("sw", SIZE, 16)], {"max_in_flight_tokens": 5}),
    ([("full", SIZE), ("sw", SIZE, 7)], {"max_in_flight_tokens": 12}),
    ([("full", SIZE), ("chunk", SIZE, 8)], {"max_in_flight_tokens": 8}),
    ([("full", SIZE), ("sw", 2 * SIZE, 9)], {"enable_caching": False}),
    ([("full", SIZE), ("sw", SIZE, 5), ("sw", SIZE, 5)], {"max_in_flight_tokens": 20}),
    ([("sw", SIZE, 9), ("full", SIZE), ("chunk", SIZE, 8), ("sw", SIZE, 5), ("full", SIZE)], {}),
    ([("chunk", SIZE, 12), ("sw", SIZE, 13)], {}),
]

init_none_hash(sha256)
HASHER = get_request_block_hasher(SIZE, sha256)


def theirs(num_blocks: int, groups: list[tuple[Any, ...]], **options: Any) -> Theirs:
    made = []
    for i, (kind, size, *parameter) in enumerate(groups):
        shape: dict[str, Any] = {"block_size": size, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float16}
        match kind:
            case "full":
                spec: Any = interface.FullAttentionSpec(**shape)
            case "sw":
                spec = interface.SlidingWindowSpec(**shape, sliding_window=parameter[0])
            case "chunk":
                spec = interface.ChunkedLocalAttentionSpec(**shape, attention_chunk_size=parameter[0])
        made.append(interface.KVCacheGroupSpec([f"layer{i}"], spec))
    return Theirs(
        kv_cache_config=interface.KVCacheConfig(num_blocks, [], made), scheduler_block_size=max(g[1] for g in groups),
        hash_block_size=SIZE, max_model_len=MAX_LEN, **options,
    )  # fmt: skip


class Pair:
    """One random scheduler over both managers."""

    def __init__(self, seed: int, setup: int) -> None:
        self.rng = random.Random(seed)
        groups, options = SETUPS[setup]
        num_blocks = self.rng.randint(12, 60)
        options = {"watermark": self.rng.choice([0.0, 0.1, 0.25]), "log_stats": True, **options}
        self.theirs = theirs(num_blocks, groups, **options)
        self.ours: KVCacheManager = manager(num_blocks, *groups, hash_block_size=SIZE, max_model_len=MAX_LEN, **options)
        self.running: list[Any] = []
        self.steps: dict[str, deque[int]] = {}  # tokens of each step in flight
        self.loading: dict[str, int] = {}  # external tokens that each waits for
        self.deferred: deque[tuple[Any, Any]] = deque()
        self.met: Counter[str] = Counter()
        self.count = 0

    def compare(self) -> None:
        self.ours.check_valid()
        assert [b.block_id for b in self.theirs.block_pool.free_block_queue.get_all_free_blocks()] == (
            self.ours.block_pool.free_block_ids()
        )
        for req in self.running:
            name = req.request_id
            assert self.theirs.get_block_ids(name) == self.ours.get_block_ids(name)
            want, got = self.theirs.estimate_cached_tokens(req), self.ours.estimate_cached_tokens(req)
            passed = any(ids[:1] == [0] for ids in self.ours.get_block_ids(name))
            assert want == got or (want == 0 and passed)  # vLLM does not count blocks that a window has passed

    def allocate(self, req: Any, new: int, found: Any = None, has_scheduled_reqs: bool = True, **given: Any) -> bool:
        want_found, got_found = found or (None, None)
        want = self.theirs.allocate_slots(
            req, new, new_computed_blocks=want_found, has_scheduled_reqs=has_scheduled_reqs, **given
        )
        got = self.ours.allocate_slots(
            req, new, new_computed_blocks=got_found,
            admission=has_scheduled_reqs and req.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED), **given,
        )  # fmt: skip
        if want is None or got is None:
            assert want is got
            self.met["refused"] += 1
            return False
        if not given.get("num_external_computed_tokens"):  # vLLM leaves the blocks for external tokens out
            assert want.get_block_ids() == got.get_block_ids()
        return True

    def admit(self) -> None:
        draw = self.rng.randint
        self.count += 1
        tokens = [(7 * i) % 13 for i in range(draw(0, 60))] + [draw(0, 1) for _ in range(draw(1, 30))]
        req = Request(f"r{self.count}", tokens, SamplingParams(max_tokens=64), None, block_hasher=HASHER)
        req.status = self.rng.choice([RequestStatus.WAITING, RequestStatus.PREEMPTED])
        req.num_in_flight_tokens = draw(0, 1) * draw(0, 9)  # of before it was preempted
        want, n, _ = self.theirs.get_computed_blocks(req)
        got, m = self.ours.get_computed_blocks(req, record_stats=False)
        assert (want.get_block_ids(), n) == (got.get_block_ids(), m)
        external = draw(0, 1) * draw(0, len(tokens) - 1 - n)
        load = external > 0 and draw(0, 1) == 0
        new = 0 if load else draw(1, len(tokens) - n - external)
        self.met["loads"] += load
        self.met["external behind found"] += external > 0 and n > 0
        if not self.allocate(
            req, new, (want, got), draw(0, 1) == 0, num_new_computed_tokens=n, num_external_computed_tokens=external,
            num_lookahead_tokens=0 if load else draw(0, 1) * draw(0, 5), delay_cache_blocks=load,
            full_sequence_must_fit=draw(0, 1) == 0, reserved_blocks=draw(0, 1) * draw(0, 12),
        ):  # fmt: skip
            return
        for kv in (self.theirs, self.ours):
            kv.record_prefix_cache_stats(req, n)
        req.num_computed_tokens = n + external + new
        self.steps[req.request_id] = deque()
        if load:
            self.loading[req.request_id] = external
        else:
            req.status = RequestStatus.RUNNING
            self.start(req, new)
        self.running.append(req)

    def start(self, req: Any, n: int) -> None:
        req.num_in_flight_tokens += n
        self.steps[req.request_id].append(n)

    def step(self) -> None:
        req = self.rng.choice(self.running)
        if req.request_id in self.loading:  # what it waited for has come, or a part of it
            external = self.loading.pop(req.request_id)
            req.num_computed_tokens -= self.rng.randint(0, 1) * self.rng.randint(0, external)
            for kv in (self.theirs, self.ours):
                kv.cache_blocks(req, req.num_computed_tokens)
        new = min(self.rng.choice([1, 1, 6]), MAX_LEN - req.num_computed_tokens)
        if new < 1:
            return self.finish(req)
        if self.allocate(req, new, num_lookahead_tokens=self.rng.randint(0, 1) * self.rng.randint(0, 5)):
            req.status = RequestStatus.RUNNING
            req.num_computed_tokens += new
            self.met["step behind a step in flight"] += req.num_in_flight_tokens > 0
            self.start(req, new)
            if req.num_computed_tokens >= req.num_tokens:
                req.append_output_token_ids([self.rng.randint(0, 1)] * (req.num_computed_tokens + 1 - req.num_tokens))

    def output(self) -> None:
        req = self.rng.choice(self.running)
        steps = self.steps[req.request_id]
        if steps:
            req.num_in_flight_tokens -= steps.popleft()

    def finish(self, req: Any = None) -> None:
        req = req or self.rng.choice(self.running)
        self.running.remove(req)
        self.loading.pop(req.request_id, None)
        if self.rng.randint(0, 1):
            self.theirs.free(req)
            self.ours.free(req)
        else:
            self.met["deferred"] += 1
            want, got = self.theirs.pop_blocks_for_free(req), self.ours.pop_blocks_for_free(req)
            # 0.33 leaves out the null blocks at the beginning, which nobody frees.
            assert [b.block_id for b in want if b.block_id] == [b.block_id for b in got if b.block_id]
            self.deferred.append((want, got))

    def free_deferred(self) -> None:
        if self.deferred:
            want, got = self.deferred.popleft()
            self.theirs.block_pool.free_blocks(reversed(want))
            self.ours.block_pool.free_blocks(reversed(got))

    def run(self, operations: int) -> Counter[str]:
        for _ in range(operations):
            kind = self.rng.choice(["admit"] * 3 + ["step"] * 8 + ["output"] * 5 + ["finish", "free_deferred"])
            if self.running or kind == "admit":
                getattr(self, kind)()
                self.compare()
        want, got = self.theirs.make_prefix_cache_stats(), self.ours.make_prefix_cache_stats()
        assert want is not None
        assert got is not None
        assert (want.requests, want.queries, want.hits) == (got.requests, got.queries, got.hits)
        return self.met


@pytest.mark.parametrize("setup", range(len(SETUPS)))
def test_every_answer_is_that_of_vllm(setup: int) -> None:
    met: Counter[str] = Counter()
    for seed in range(6):
        met += Pair(seed, setup).run(300)
    expected = {"refused", "loads", "step behind a step in flight", "deferred"}
    if SETUPS[setup][1].get("enable_caching", True):
        expected.add("external behind found")
    assert set() == expected - set(met)
