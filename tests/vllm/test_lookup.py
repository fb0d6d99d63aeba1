"""The look-up over random groups finds what vLLM's own finds: the same length, blocks and null blocks."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from math import lcm
from typing import Any

import vllm

from shmstore.scheduler import KVCacheConfig, KVCacheGroupSpec, KVCacheManager
from tests.scheduler.helpers import spec

Group = tuple[Any, ...]
BLOCKS = 400
OLD = vllm.__version__.startswith("0.32")
"""Since 0.33, Mamba states and prefixes for EAGLE are found in another way, and vLLM's own manager stays there."""


def theirs(groups: Sequence[Group], marked: Sequence[bool], use_eagle: bool, hash_block_size: int) -> Any:
    """vLLM's coordinator over these groups."""
    import torch
    from vllm.v1 import kv_cache_interface
    from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator

    def spec_of(kind: str, size: int, *parameter: int) -> Any:
        attention = {"block_size": size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
        match kind:
            case "full":
                return kv_cache_interface.FullAttentionSpec(**attention)
            case "sw":
                return kv_cache_interface.SlidingWindowSpec(**attention, sliding_window=parameter[0])
            case "chunk":
                return kv_cache_interface.ChunkedLocalAttentionSpec(**attention, attention_chunk_size=parameter[0])
        return kv_cache_interface.MambaSpec(
            block_size=size, shapes=((4,),), dtypes=(torch.float16,), mamba_cache_mode="all"
        )

    made = [
        kv_cache_interface.KVCacheGroupSpec([f"layer{i}"], spec_of(*group), is_eagle_group=mark)
        for i, (group, mark) in enumerate(zip(groups, marked, strict=True))
    ]
    return get_kv_cache_coordinator(
        kv_cache_interface.KVCacheConfig(BLOCKS, [], made), max_model_len=1 << 20, max_in_flight_tokens=1 << 20,
        use_eagle=use_eagle,
        enable_caching=True, enable_kv_cache_events=False, dcp_world_size=1, pcp_world_size=1,
        scheduler_block_size=lcm(*(group[1] for group in groups)), hash_block_size=hash_block_size,
        allow_partial_hash_hits=False,
    )  # fmt: skip


def ours(groups: Sequence[Group], marked: Sequence[bool], use_eagle: bool, hash_block_size: int) -> KVCacheManager:
    made = [KVCacheGroupSpec([], spec(*group), mark) for group, mark in zip(groups, marked, strict=True)]
    return KVCacheManager(KVCacheConfig(BLOCKS, made), 1 << 20, hash_block_size, use_eagle=use_eagle, free_order="tail")


class Stored:
    """A request that is stored or looked up, for which only its hashes and its number of tokens matter."""

    request_id, num_preemptions, skip_reading_prefix_cache = "r", 0, False
    num_computed_tokens = 0
    all_token_ids: Sequence[int] = ()

    def __init__(self, words: Sequence[int], num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.block_hashes: list[bytes] = []
        parent = b""
        for word in words:
            parent = hashlib.sha256(parent + bytes([word])).digest()
            self.block_hashes.append(parent)


class Both:
    """Our manager and vLLM's coordinator, with equal contents: a block that gets a key in one gets it in the other."""

    def __init__(self, rng: random.Random, groups: Sequence[Group], hash_block_size: int) -> None:
        self.rng, self.groups, self.size = rng, groups, hash_block_size
        self.marked = [OLD and rng.randint(0, 3) == 0 for _ in groups]
        # Alone, `use_eagle` keeps the recorded behaviour for one group, and for full attention and one other spec.
        specs = set(groups)
        recorded = len(specs) == 1 or (len(specs) == 2 and 1 == sum(group[0] == "full" for group in specs))
        use_eagle = OLD and rng.randint(0, 1) == 1 and (any(self.marked) or not recorded)
        self.eagle = use_eagle or any(self.marked)
        self.theirs = theirs(groups, self.marked, use_eagle, hash_block_size)
        self.ours = ours(groups, self.marked, use_eagle, hash_block_size)
        self.common = [rng.randint(0, 1) for _ in range(40)]
        self.users: dict[int, Any] = {}

    def request(self) -> Stored:
        """A request that begins as others do."""
        words = self.common[: self.rng.randint(0, 40)] + [self.rng.randint(0, 1) for _ in range(self.rng.randint(0, 4))]
        return Stored(words, max(1, len(words) * self.size + self.rng.randint(0, self.size - 1)))

    def store(self) -> None:
        """Give some blocks of a request their keys in each group."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        request = self.request()
        share = self.rng.choice([0.5, 0.9, 0.97, 1.0])
        for group, (_, size, *_) in enumerate(self.groups):
            for i in range(len(request.block_hashes) * self.size // size):
                pool = self.ours.block_pool
                if self.rng.random() > share or not pool.get_num_free_blocks():
                    continue
                (block,) = pool.get_new_blocks(1)
                pool.cache_full_blocks(request, [block] * (i + 1), i, i + 1, size, group)
                name = make_block_hash_with_group_id(request.block_hashes[(i + 1) * size // self.size - 1], group)
                copy = self.theirs.block_pool.blocks[block.block_id]
                self.theirs.block_pool.cached_block_hash_to_block.insert(name, copy)
                self.users[block.block_id] = (name, block)

    def evict(self) -> None:
        for number in self.rng.sample(sorted(self.users), self.rng.randint(0, len(self.users) // 4)):
            name, block = self.users.pop(number)
            self.ours.evict_blocks([number])
            self.ours.block_pool.free_blocks([block])
            self.theirs.block_pool.cached_block_hash_to_block.pop(name, number)

    def found(self) -> tuple[tuple[list[list[int]], int], tuple[list[list[int]], int]]:
        request = self.request()
        blocks, length = self.ours.get_computed_blocks(request)
        got, their_length, *_ = self.theirs.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        mine = [list(ids) for ids in blocks.get_block_ids()]
        return (mine, length), ([[block.block_id for block in column] for column in got], their_length)


def random_groups(rng: random.Random, hash_block_size: int) -> list[Group]:
    """2 to 6 groups of 1 to 4 kinds, in any order.

    No window is 1: there vLLM wants one block more than the context and EAGLE need. Chunks are whole blocks, of the
    largest size: vLLM refuses a look-up with others.
    """
    uneven = rng.randint(0, 1)

    def kind() -> Group:
        size = hash_block_size * rng.choice([1, 1, 2, 3] if uneven else [1])
        match rng.choice(["full", "sw", "sw", "chunk", *["mamba"] * OLD]):
            case "full":
                return "full", size
            case "sw":
                return "sw", size, rng.choice([2, 5, 8, 9, 13, 21])
            case "chunk":
                return "chunk", size, rng.choice([1, 2, 3])
        return "mamba", size

    kinds = [kind() for _ in range(rng.randint(1, 4))]
    largest = lcm(*(size for _, size, *_ in kinds))
    kinds = [("chunk", largest, kind[2] * largest) if kind[0] == "chunk" else kind for kind in kinds]
    return [rng.choice(kinds) for _ in range(rng.randint(2, 6))]


def test_random_groups_find_what_vllm_finds() -> None:
    rng = random.Random(1)
    met: Counter[str] = Counter()
    while met["look-ups"] < 1500:
        size = rng.choice([2, 4])
        groups = random_groups(rng, size)
        try:
            both = Both(rng, groups, size)
        except ValueError:  # EAGLE and chunked local attention
            continue
        for _ in range(20):
            rng.choice([both.store, both.evict])()
            mine, others = both.found()
            assert others == mine, (groups, both.marked, both.eagle)
            met["look-ups"] += 1
            kinds = {group[0] for group in groups}
            case = [f"{len(set(groups))} kinds"] * (mine[1] > 0)
            case += [*kinds, "EAGLE" if both.eagle else "no EAGLE"] if mine[1] else []
            case += ["no full attention"] * (mine[1] > 0 and "full" not in kinds)
            met.update(case)
    wanted = {"1 kinds", "2 kinds", "3 kinds", "4 kinds", "full", "sw", "chunk", "no EAGLE"}
    wanted |= {"no full attention"} | ({"mamba", "EAGLE"} if OLD else set())
    assert set() == {what for what in wanted if met[what] < 15}, met
