"""The manager against the model: random schedulers, every answer and the whole state compared, invariants checked."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from shmstore.scheduler import KVCacheManager, Request
from tests.scheduler import model
from tests.scheduler.helpers import features, hasher, manager

# (groups, hash block size, options): every kind alone and with full attention, unlike sizes, several of a kind,
# several kinds in any order, and groups of a draft model.
SETUPS: list[tuple[list[tuple[Any, ...]], int, dict[str, Any]]] = [
    ([("full", 4)], 4, {}),
    ([("mla", 4)], 4, {"use_eagle": True}),
    ([("sw", 4, 6)], 4, {}),
    ([("sw", 4, 1)], 4, {"use_eagle": True}),
    ([("sw", 2, 9)], 2, {"use_eagle": True}),
    ([("chunk", 4, 8)], 4, {}),
    ([("chunk", 4, 6)], 4, {}),
    ([("mamba", 4, 0)], 4, {}),
    ([("mamba", 4, 2)], 4, {}),
    ([("full", 4), ("sw", 4, 5)], 4, {"use_eagle": True}),
    ([("full", 4), ("sw", 4, 8), ("sw", 4, 8)], 4, {}),
    ([("sw", 2, 5), ("full", 4)], 2, {}),
    ([("full", 2), ("full", 2), ("sw", 4, 7)], 2, {}),
    ([("full", 4), ("sw", 6, 13)], 2, {}),
    ([("full", 4), ("chunk", 4, 12)], 4, {}),
    ([("mamba", 8, 1), ("mamba", 8, 1), ("full", 4)], 4, {}),
    ([("full", 8), ("mamba", 4, 0)], 4, {}),
    ([("full", 4), ("full", 4)], 4, {"use_eagle": True}),
    ([("sw", 4, 8), ("full", 4), ("mla", 4), ("sw", 4, 13), ("full", 4)], 4, {}),
    ([("mamba", 8, 0), ("sw", 4, 9), ("full", 4), ("chunk", 4, 8), ("sw", 4, 9)], 4, {}),
    ([("sw", 4, 9), ("chunk", 6, 12), ("sw", 2, 3)], 2, {}),
    ([("mamba", 4, 0), ("sw", 4, 5)], 4, {"use_eagle": True}),
    ([("sw", 2, 9), ("full", 4), ("sw", 6, 7), ("mamba", 2, 0)], 2, {"marked": (0, 2)}),
    ([("full", 4), ("sw", 4, 5)], 4, {"marked": (0,)}),
    ([("full", 4), ("chunk", 4, 8), ("sw", 4, 5), ("sw", 4, 9)], 4, {"marked": (2, 3)}),
    ([("full", 4), ("sw", 2, 3), ("chunk", 3, 6)], 4, {"enable_caching": False, "uneven": True}),
    ([("full", 4), ("cross", 4)], 4, {"enable_caching": False}),
]


class Pair:
    """The manager and the model side by side; every operation does both and compares."""

    def __init__(
        self, setup: int, num_blocks: int, free_order: str, events: bool, max_model_len: int = 1 << 20
    ) -> None:
        groups, self.size, options = SETUPS[setup]
        options = dict(options)
        if options.pop("uneven", False):  # chunked local attention needs equal block sizes
            groups = [(kind, 4, *rest) for kind, _, *rest in groups]
        options |= {"free_order": free_order, "enable_kv_cache_events": events, "int_event_hashes": setup % 2 == 0}
        self.kv: KVCacheManager = manager(
            num_blocks, *groups, hash_block_size=self.size, log_stats=True, max_model_len=max_model_len, **options
        )
        self.model = model.ModelManager(num_blocks, groups, max_model_len, self.size, **options)
        self.caching = self.kv.enable_caching
        self.cross = any(group[0] == "cross" for group in groups)
        self.hasher = hasher(self.size, "hashlib" if setup % 3 == 0 else "auto")
        self.setup = setup
        self.met: Counter[str] = Counter()

    def request(self, name: str, tokens: list[int], plain: bool = False, **options: Any) -> Request:
        made = Request(name, tokens, block_hasher=self.hasher if self.caching else None, **options)
        if plain:
            made.block_hashes = list(made.block_hashes)  # type: ignore[assignment]
        if self.caching:
            assert model.block_hashes(made, self.size) == made.block_hashes
        return made

    def admit(self, req: Request, at_most: int, lookahead: int, delay: bool, encoder: int, look: bool = True) -> bool:
        found, hit = self.kv.get_computed_blocks(req) if look else (self.kv.empty_kv_cache_blocks, 0)
        want, want_hit = self.model.get_computed_blocks(req) if look else ([[] for _ in self.model.groups], 0)
        assert (want, want_hit) == ([list(ids) for ids in found.get_block_ids()], hit)
        self.met["hit"] += hit > 0
        self.met["hit with null blocks"] += any(0 in ids for ids in want)
        new = min(at_most, req.num_tokens - hit)
        if not self.allocate(req, new, hit, found, want, lookahead, delay, encoder):
            return False
        req.num_computed_tokens = hit + new
        return True

    def step(
        self, req: Request, token: int, at_most: int, lookahead: int, delay: bool, encoder: int, drafts: int = 0
    ) -> bool:
        if req.num_computed_tokens >= req.num_tokens:
            req.append_output_token_ids(token)
            if self.caching and req.num_tokens % self.size == 0:
                assert model.block_hashes(req, self.size) == req.block_hashes
        new = min(at_most, req.num_tokens - req.num_computed_tokens)
        if not self.allocate(req, new + drafts, 0, None, None, lookahead, delay, encoder):
            return False
        req.num_computed_tokens += new
        return True

    def allocate(
        self, req: Request, new: int, hit: int, found: Any, want_found: Any, lookahead: int, delay: bool, encoder: int
    ) -> bool:
        encoder = encoder if self.cross else 0
        want = self.model.allocate_slots(req, new, hit, want_found, lookahead, delay, encoder)
        got = self.kv.allocate_slots(req, new, hit, found, lookahead, delay, encoder)
        assert want == (None if got is None else [list(ids) for ids in got.get_block_ids()])
        if got is not None and not any(want or ()):
            assert got is self.kv.empty_kv_cache_blocks
        self.met["refused"] += got is None
        self.met["nothing to do"] += got is self.kv.empty_kv_cache_blocks
        return got is not None

    def free(self, req: Request) -> None:
        self.model.free(req)
        self.kv.free(req)

    def cache(self, req: Request, num_tokens: int) -> None:
        if self.caching:
            self.model.cache_blocks(req, num_tokens)
        self.kv.cache_blocks(req, num_tokens)

    def compare(self, names: list[str]) -> None:
        kv, pool = self.kv, self.kv.block_pool
        kv.check_valid()
        assert list(self.model.pool.free) == pool.free_block_ids()
        assert {i: n for i, n in enumerate(self.model.pool.ref) if n} == pool.ref_counts()
        assert [i for i, key in enumerate(self.model.pool.key) if key] == pool.cached_block_ids()
        assert len(self.model.pool.map) == pool.num_cached_keys
        for name in names:
            assert self.model.get_block_ids(name) == [list(ids) for ids in kv.get_block_ids(name)]
            assert self.model.get_num_common_prefix_blocks(name) == kv.get_num_common_prefix_blocks(name)

    def compare_records(self) -> None:
        s = self.kv.make_prefix_cache_stats()
        assert s is not None
        got = [s.reset, s.requests, s.queries, s.hits, s.preempted_requests, s.preempted_queries, s.preempted_hits]
        assert self.model.make_prefix_cache_stats() == got
        events = self.model.take_events()
        assert events == [tuple(event.to_list()) for event in self.kv.take_events()]
        self.met.update(event[0] for event in events)


class Scheduler:
    """Whatever a scheduler may do, with choices drawn from `rng`: any object with ``randint(a, b)``."""

    def __init__(self, rng: Any, setup: int | None = None) -> None:
        self.rng = rng
        draw = rng.randint
        self.pair = Pair(
            draw(0, len(SETUPS) - 1) if setup is None else setup,
            draw(2, 40),
            ["tail", "uncached_first"][draw(0, 1)],
            bool(draw(0, 1)),
            [1 << 20, 23][draw(0, 4) == 0],
        )
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.delayed: set[str] = set()
        self.count = 0

    def do(self, kind: str) -> bool:
        """Do one operation, if it can be done, and compare everything."""
        if kind == "arrive" and len(self.waiting) > 4:
            return False
        if kind in ("admit", "abort_waiting") and not self.waiting:
            return False
        if kind in ("step", "decode", "preempt", "finish") and not self.running:
            return False
        getattr(self, kind)()
        self.pair.compare([req.request_id for req in self.running[-2:] + self.waiting[:1]])
        return True

    def pick(self, requests: list[Request]) -> Request:
        at: int = self.rng.randint(0, len(requests) - 1)
        return requests[at]

    def arrive(self) -> None:
        draw = self.rng.randint
        self.count += 1
        common = [(7 * i) % 13 for i in range(draw(0, 24))]  # prompts that share prefixes, of few letters
        tokens = common + [draw(0, 1) for _ in range(draw(0, 12))] or [3]
        options: dict[str, Any] = {}
        if draw(0, 4) == 0:
            options["cache_salt"] = ["", "salt"][draw(0, 1)]
        if draw(0, 4) == 0:
            options |= {"lora_name": "adapter", "lora_id": 5}
        if draw(0, 4) == 0:
            at = sorted(draw(0, 20) for _ in range(draw(1, 3)))
            options["mm_features"] = features(*((f"img{draw(0, 1)}", offset, draw(0, 9)) for offset in at))
        options["skip_reading_prefix_cache"] = draw(0, 9) == 0
        plain = draw(0, 9) == 0
        self.waiting.append(self.pair.request(f"r{self.count}", tokens, plain, **options))

    def admit(self) -> None:
        draw, req = self.rng.randint, self.pick(self.waiting)
        delay = draw(0, 7) == 0
        if self.pair.admit(req, [64, 5][draw(0, 1)], draw(0, 1) * draw(0, 6), delay, draw(0, 9), draw(0, 9) > 0):
            self.waiting.remove(req)
            self.running.append(req)
            if delay:
                self.delayed.add(req.request_id)

    def step(self) -> None:
        draw, req = self.rng.randint, self.pick(self.running)
        delay = req.request_id in self.delayed and draw(0, 1) == 0
        drafts = draw(0, 3) if draw(0, 4) == 0 else 0  # tokens that the request does not have yet
        done = self.pair.step(req, draw(0, 1), draw(1, 9), draw(0, 1) * draw(0, 6), delay, draw(0, 9), drafts)
        if not done and draw(0, 1):
            self.preempt()
        elif not delay:
            self.delayed.discard(req.request_id)

    def decode(self) -> None:
        """One step of every running request, as most steps are."""
        for req in list(self.running):
            if req.request_id not in self.delayed:
                self.pair.step(req, self.rng.randint(0, 1), 1, 0, False, 0)

    def arrived_late(self) -> None:
        """The contents of a delayed request have come."""
        req = next((req for req in self.running if req.request_id in self.delayed), None)
        if req is not None:
            self.delayed.discard(req.request_id)
            tables = zip(self.pair.kv.get_block_ids(req.request_id), self.pair.model.groups, strict=True)
            held = [len(ids) * group.size for ids, group in tables]
            self.pair.cache(req, min(req.num_computed_tokens, *held))

    def preempt(self) -> None:
        req = self.running.pop()
        self.pair.free(req)
        self.delayed.discard(req.request_id)
        req.num_computed_tokens = 0
        req.num_preemptions += 1
        self.waiting.insert(0, req)

    def finish(self) -> None:
        req = self.pick(self.running)
        self.running.remove(req)
        self.delayed.discard(req.request_id)
        self.pair.free(req)
        self.pair.free(req)  # once more is nothing

    def abort_waiting(self) -> None:
        req = self.pick(self.waiting)
        self.waiting.remove(req)
        self.pair.free(req)

    def evict(self) -> None:
        n = self.pair.model.pool.num_blocks
        ids = [self.rng.randint(0 if self.rng.randint(0, 9) == 0 else 1, n) for _ in range(self.rng.randint(0, 4))]
        outcomes = []
        for evict in (self.pair.model.pool.evict, self.pair.kv.evict_blocks):
            try:
                evict(ids)
                outcomes.append("done")
            except ValueError:
                outcomes.append("refused")
        assert outcomes[0] == outcomes[1]

    def reset(self) -> None:
        assert self.pair.model.reset_prefix_cache() == self.pair.kv.reset_prefix_cache()


KINDS = ["arrive"] * 6 + ["admit"] * 10 + ["step"] * 14 + ["decode"] * 3 + ["finish"] * 4
KINDS += ["arrived_late", "preempt", "abort_waiting", "evict", "reset"]


@settings(max_examples=60, deadline=None)
@given(rng=st.randoms(use_true_random=False), kinds=st.lists(st.sampled_from(KINDS), min_size=30, max_size=90))
def test_any_scheduler_and_the_model_agree(rng: random.Random, kinds: list[str]) -> None:
    """What fails here is shrunk to a short story."""
    s = Scheduler(rng)
    for kind in kinds:
        s.do(kind)
    s.pair.compare_records()


def run_random_scheduler(setup: int, rng: random.Random) -> Counter[str]:
    """Compare 400 random operations of a scheduler with this setup, and return the events it met."""
    s = Scheduler(random.Random(rng.getrandbits(64)), setup)
    for _ in range(400):
        if s.do(rng.choice(KINDS)) and rng.randrange(8) == 0:
            s.pair.compare_records()
    s.pair.compare_records()
    return s.pair.met


@pytest.mark.parametrize("setup", range(len(SETUPS)))
def test_random_schedulers_and_the_model_agree_until_they_have_met_everything(setup: int) -> None:
    groups, _, options = SETUPS[setup]
    expected = {"refused", "nothing to do"}
    if options.get("enable_caching", True):
        expected |= {"hit", "BlockStored", "BlockRemoved", "AllBlocksCleared"}
        if any(group[0] in ("sw", "chunk", "mamba") for group in groups):
            expected.add("hit with null blocks")
    rng, met = random.Random(setup), Counter[str]()
    for number in range(40):
        met += run_random_scheduler(setup, rng)
        if number and expected <= met.keys():
            return
    raise AssertionError(f"not met: {expected - met.keys()}")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_random_schedulers_and_the_model_agree_over_a_million_operations() -> None:
    rng = random.Random(3)
    for number in range(2500):
        run_random_scheduler(number % len(SETUPS), rng)
