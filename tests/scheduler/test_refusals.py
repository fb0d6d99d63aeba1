"""What the managers refuse, with a typed error and nothing changed; and collectors that misbehave."""

from __future__ import annotations

import array
import logging
import types
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from shmstore.bindings.blockhash import NO_EXTRAS, sha256_chain
from shmstore.scheduler import (
    BlockHasher,
    BlockHashes,
    BlockPool,
    BlockRemoved,
    BlockStored,
    ChunkedLocalAttentionSpec,
    EncoderCacheManager,
    EncoderDecoderCacheManager,
    FullAttentionSpec,
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    Request,
    RequestEncoderCacheManager,
    SlidingWindowSpec,
    make_kv_cache_config,
)
from tests.scheduler.helpers import Feature, Place, admit, features, manager, request
from tests.scheduler.model import block_hashes

BEYOND = [-1, -(2**63) - 1, 2**60, 2**63, 2**64 + 1]


def pool_state(pool: BlockPool) -> Any:
    pool.check_valid()
    return pool.free_block_ids(), pool.ref_counts(), pool.cached_block_ids(), pool.num_cached_keys


def state(kv: KVCacheManager) -> Any:
    kv.check_valid()
    return pool_state(kv.block_pool), kv.get_block_ids("a"), kv.get_block_ids("b")


# ---- metrics collectors ----


class Meddler:
    """A collector that does something of its own whenever it is told anything."""

    def __init__(self, meddle: Callable[[], Any]) -> None:
        self.meddle = meddle
        self.heard: list[tuple[str, int]] = []

    def note(self, what: str, block_id: int) -> None:
        self.heard.append((what, block_id))
        self.meddle()

    def on_block_allocated(self, block: Any) -> None:
        self.note("allocated", block.block_id)

    def on_block_accessed(self, block: Any) -> None:
        self.note("accessed", block.block_id)

    def on_block_evicted(self, block: Any) -> None:
        self.note("evicted", block.block_id)

    def reset(self) -> None:
        self.note("reset", 0)


def story(meddle: Callable[[KVCacheManager], Any] | None) -> tuple[list[Any], list[tuple[str, int]]]:
    """What a manager with such a collector answers; without one for None."""
    collector = Meddler(lambda: meddle(kv) if meddle is not None else None)
    kv = manager(
        9, ("full", 4), ("sw", 4, 8), free_order="tail", enable_kv_cache_events=True, log_stats=True,
        metrics_collector=None if meddle is None else collector,
    )  # fmt: skip
    answers: list[Any] = []
    a, b = request("a", range(12)), request("b", [*range(8), *range(70, 75)])
    for req in (a, b):
        answers += [admit(kv, req), kv.get_block_ids(req.request_id)]
        kv.free(req)
    a.num_computed_tokens = 0
    answers.append(kv.allocate_slots(a, 9, delay_cache_blocks=True))
    kv.cache_blocks(a, 8)
    answers += [kv.get_block_ids("a"), [event.to_list() for event in kv.take_events()]]
    kv.evict_blocks([1, 2, 3, 4, 5, 6, 7, 8])
    kv.free(a)
    answers += [kv.reset_prefix_cache(), kv.take_events(), kv.make_prefix_cache_stats(), state(kv)]
    return [x.get_block_ids() if isinstance(x, KVCacheBlocks) else x for x in answers], collector.heard


def ask_everything(kv: KVCacheManager) -> None:
    probe = request("probe", range(8))
    kv.get_computed_blocks(request("probe", range(8), skip_reading_prefix_cache=True))
    kv.get_num_common_prefix_blocks("a")
    for request_id in ("a", "b", "probe"):
        kv.get_block_ids(request_id)
    kv._tables.find(probe.block_hashes, 7)  # a look-up that no statistics count
    kv.check_valid()


def use_the_manager(kv: KVCacheManager) -> None:
    """Allocates, caches and frees through another request, and leaves no trace."""
    one = Request("other", [1])
    if kv.block_pool.get_num_free_blocks() >= 2 and not kv.get_blocks("other").packed_ids:
        collector, kv.block_pool.metrics = kv.block_pool.metrics, None
        kv.allocate_slots(one, 1)
        kv.free(one)
        kv.block_pool.metrics = collector


def test_a_collector_that_asks_the_manager_spoils_no_answer() -> None:
    want, _ = story(None)
    got, heard = story(ask_everything)
    assert want == got
    assert {"allocated", "accessed", "evicted", "reset"} == {what for what, _ in heard}


def test_a_collector_that_allocates_spoils_neither_counts_nor_stored_events() -> None:
    collector = Meddler(lambda: use_the_manager(kv))
    kv = manager(
        20, ("full", 4), ("sw", 4, 8), free_order="tail", enable_kv_cache_events=True, metrics_collector=collector
    )
    a = request("a", range(12))
    assert (0, ([1, 2, 3], [4, 5, 6])) == admit(kv, a)
    stored = [event for event in kv.take_events() if isinstance(event, BlockStored)]
    assert [(a.block_hashes[:], 0), (a.block_hashes[:], 1)] == [(e.block_hashes, e.group_id) for e in stored]
    kv.check_valid()


def test_a_collector_that_raises_loses_nothing_and_each_call_logs_it_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: KVCacheManager) -> None:
        raise RuntimeError("a collector's own mistake")

    want, _ = story(None)
    with caplog.at_level(logging.ERROR):
        got, heard = story(fail)
    assert want == got
    _, undisturbed = story(lambda kv: None)
    assert undisturbed == heard
    # three allocations, one eviction, one reset
    assert 5 == len(caplog.records)
    assert {"RuntimeError"} == {record.exc_info[0].__name__ for record in caplog.records}  # type: ignore[index, union-attr]


def test_an_interrupt_inside_a_collector_comes_through_and_finds_the_state_complete() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    kv = manager(9, ("full", 4), enable_kv_cache_events=True, metrics_collector=Meddler(interrupt))
    a = request("a", range(9))
    with pytest.raises(KeyboardInterrupt):
        kv.allocate_slots(a, 9)
    assert ([[1, 2, 3]], 1) == (list(kv.get_block_ids("a")), len(kv.take_events()))
    kv.free(a)
    with pytest.raises(KeyboardInterrupt):
        kv.reset_prefix_cache()
    assert (0, 1) == (kv.block_pool.num_cached_keys, len(kv.take_events()))


def test_a_pool_notes_that_it_was_reset_before_its_collector_hears_of_it() -> None:
    seen: list[Any] = []
    kv = manager(
        9, ("full", 4), enable_kv_cache_events=True, log_stats=True,
        metrics_collector=Meddler(lambda: seen.append((kv.take_events(), kv.make_prefix_cache_stats()))),
    )  # fmt: skip
    assert kv.reset_prefix_cache() is True
    ((events, stats),) = seen
    assert (["AllBlocksCleared"], True) == ([type(event).__name__ for event in events], stats.reset)


def test_a_pool_tells_what_was_touched_and_never_of_the_null_block() -> None:
    collector = Meddler(lambda: None)
    pool = BlockPool(9, True, metrics=collector)
    one = pool.get_new_blocks(1)
    pool.touch([[pool.null_block, *one]])
    assert [("evicted", 1), ("allocated", 1), ("accessed", 1)] == collector.heard
    kv = manager(9, ("sw", 4, 4), metrics_collector=collector, free_order="tail")
    admit(kv, request("a", range(13)))
    collector.heard.clear()
    b = request("b", range(13))
    found, hit = kv.get_computed_blocks(b)
    assert ([0, 0, 3],) == found.get_block_ids()
    assert kv.allocate_slots(b, 13 - hit, hit, found) is not None
    assert [("accessed", 3), ("evicted", 5), ("allocated", 5)] == collector.heard


def test_a_pool_notes_the_keys_that_go_with_blocks_handed_out() -> None:
    pool = BlockPool(2, True, events=True)
    req = request("r", range(4))
    pool.cache_full_blocks(req, pool.get_new_blocks(1), 0, 1, 4, 0)
    pool.free_blocks([KVCacheBlock(pool, 1)])
    pool.take_events()
    pool.get_new_blocks(1)
    assert [BlockRemoved([req.block_hashes[0]], "GPU", 0)] == pool.take_events()


# ---- requests ----


def failing_hasher(wrong: Any) -> Callable[[Any], Any]:
    hasher = BlockHasher(4)

    def hash_blocks(req: Any) -> Any:
        if req.num_tokens <= 8:
            return hasher(req)
        if isinstance(wrong, BaseException):
            raise wrong
        return wrong

    return hash_blocks


def broken_half_way() -> Any:
    yield 1
    raise OSError("the tokens' source")


@pytest.mark.parametrize("own_list", [False, True])
@pytest.mark.parametrize(
    ("tokens", "hasher", "error"),
    [
        (lambda: [9, 9, 9, "x"], BlockHasher(4), TypeError),
        (lambda: [9, 9, 2**70, 9], BlockHasher(4), ValueError),
        (broken_half_way, BlockHasher(4), OSError),
        (lambda: None, BlockHasher(4), TypeError),
        (lambda: [1, 2], failing_hasher(RuntimeError("no")), RuntimeError),
        (lambda: [1, 2], failing_hasher(7), TypeError),
        (lambda: 1, failing_hasher(RuntimeError("no")), RuntimeError),
        (lambda: 1, failing_hasher(KeyboardInterrupt()), KeyboardInterrupt),
    ],
)
def test_appending_tokens_that_cannot_be_hashed_appends_none(
    tokens: Any, hasher: Any, error: type[BaseException], own_list: bool
) -> None:
    req = Request("r", range(7), block_hasher=hasher)
    if own_list:
        req.block_hashes = list(req.block_hashes)  # type: ignore[assignment]
    req.append_output_token_ids(7)
    before = (req.all_token_ids[:], list(req.block_hashes))
    with pytest.raises(error):
        req.append_output_token_ids(tokens())
    assert before == (req.all_token_ids[:], list(req.block_hashes))
    assert (8, 1) == (req.num_tokens, req.num_output_tokens)


def test_hashes_that_come_one_by_one_are_appended_together_or_not_at_all() -> None:
    def hasher(req: Any) -> Any:
        return iter([b"y" * 32]) if req.num_tokens == 5 else halting() if req.num_tokens > 5 else []

    def halting() -> Any:
        yield b"z" * 32
        raise OSError("no more hashes")

    req = Request("r", range(4), block_hasher=hasher)
    req.block_hashes = []  # type: ignore[assignment]
    req.append_output_token_ids(1)
    assert [b"y" * 32] == req.block_hashes
    with pytest.raises(OSError, match="no more"):
        req.append_output_token_ids(2)
    assert [[b"y" * 32], 5] == [req.block_hashes, req.num_tokens]


def test_a_hash_among_others_that_is_none_takes_its_tokens_back_too() -> None:
    req = Request("r", range(8), block_hasher=failing_hasher([b"x" * 32, 5]))
    before = (req.num_tokens, req.block_hashes[:])
    with pytest.raises(TypeError):
        req.append_output_token_ids([1, 2])
    assert before == (req.num_tokens, req.block_hashes[:])


def duck(items: list[Feature], tokens: int = 16) -> Any:
    return types.SimpleNamespace(
        block_hashes=[], num_tokens=tokens, all_token_ids=list(range(tokens)), mm_features=items,
        lora_name=None, cache_salt=None, prompt_embeds=None,
    )  # fmt: skip


@pytest.mark.parametrize("library", ["auto", "hashlib"])
@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([("a", 0, 2), ("b", 9, 2), ("c", 5, 2)], "item 2 begins before item 1"),
        ([("a", 0, 2), ("b", -1, 2)], "item 1"),
        ([("a", 0, 2), ("b", 3, -2)], "item 1"),
        ([("a", 0, 2), ("b", 3, 2**60)], "item 1"),
        ([("a", -1, 9)], "the offset of item 0"),
        ([("a", 0, -2)], "the length of item 0"),
        ([("a", 2, 2**60 - 2)], "the end of item 0"),
        ([("a", 3, 2**63)], "item 0"),
        ([("a", 2**63, 1)], "item 0"),
    ],
)
def test_items_that_no_block_key_can_name_are_refused_by_number(library: str, items: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockHasher(4, library=library)(duck(features(*items)))


def test_an_item_that_reaches_far_beyond_the_prompt_is_in_every_key() -> None:
    req = duck(features(("a", 2, 2**60 - 3)))
    assert block_hashes(req, 4) == list(BlockHasher(4)(req)) == list(BlockHasher(4, library="hashlib")(req))


# ---- block hashes ----


class LongBytes(bytes):
    """Says that it is longer than it is."""

    def __len__(self) -> int:
        return 32


class Padded:
    """Has a length of 32 and a buffer of nothing."""

    def __len__(self) -> int:
        return 32

    def __bytes__(self) -> bytes:
        return b""


@pytest.mark.parametrize("make", [LongBytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)])
def test_a_hash_is_the_bytes_that_its_object_really_has(make: Any) -> None:
    hashes = BlockHashes()
    hashes.append(make(b"ab"))
    hashes.extend([make(b"cd"), make(b"ef")])
    assert ([b"ab", b"cd", b"ef"], 2) == (hashes[:], hashes.width)
    hashes.check_valid()
    words = BlockHashes([cast(Any, array.array("H", [1, 2]))])
    assert [array.array("H", [1, 2]).tobytes()] == words[:]


@pytest.mark.parametrize("make", [Padded, lambda: LongBytes(b""), lambda: "ab", lambda: 32, lambda: [1] * 32])
def test_what_has_no_bytes_is_no_hash(make: Any) -> None:
    hashes = BlockHashes([b"x" * 32])
    for put in (hashes.append, lambda item: hashes.extend([item]), lambda item: hashes.extend([b"y" * 32, item])):
        with pytest.raises((TypeError, ValueError)):
            put(make())
    assert [b"x" * 32] == hashes[:]


def test_a_pool_looks_up_the_bytes_that_the_hash_really_has() -> None:
    pool = BlockPool(9, True)
    req = types.SimpleNamespace(block_hashes=[b"ab"], all_token_ids=[1])
    blocks = pool.get_new_blocks(1)
    pool.cache_full_blocks(req, blocks, 0, 1, 1, 0)
    assert [blocks[0]] == pool.get_cached_block(LongBytes(b"ab"), [0])
    assert [blocks[0]] == pool.get_cached_block(cast(Any, bytearray(b"ab")), [0])
    assert None is pool.get_cached_block(b"", [0])
    assert None is pool.get_cached_block(b"a" * 33, [0])


def test_a_parent_is_the_bytes_that_it_really_has() -> None:
    req = duck([], 8)
    req.block_hashes = [LongBytes(b"short")]
    want = list(BlockHasher(4, library="hashlib")(types.SimpleNamespace(**vars(req) | {"block_hashes": [b"short"]})))
    assert want == list(BlockHasher(4)(req)) == list(BlockHasher(4, library="hashlib")(req))


def test_c_copies_a_parent_only_of_the_size_of_its_hashes() -> None:
    for parent in (b"", b"short", b"x" * 31, b"x" * 33):
        with pytest.raises(ValueError, match="32 bytes"):
            sha256_chain(BlockHashes(), parent, 0, 4, [1, 2, 3, 4], NO_EXTRAS)


# ---- the pool ----


@pytest.mark.parametrize(
    ("num_cached", "num_full", "block_size", "group"),
    [
        (-1, 1, 4, 0), (0, -1, 4, 0), (-3, -1, 4, 0), (-2, 3, 4, 0), (0, 4, 4, 0), (4, 3, 4, 0), (2**63, 2**63, 4, 0),
        (0, 2, 0, 0), (0, 2, -4, 0), (0, 2, 2**62, 0), (0, 2, 2**63, 0), (0, 2, 4, -1), (0, 2, 4, 2**31),
    ],
)  # fmt: skip
@pytest.mark.parametrize("hash_block_size", [None, 4])
def test_a_range_of_blocks_outside_those_given_is_refused(
    hash_block_size: int | None, num_cached: int, num_full: int, block_size: int, group: int
) -> None:
    pool = BlockPool(9, True, events=True, hash_block_size=hash_block_size)
    blocks = pool.get_new_blocks(3)
    before = pool_state(pool)
    req = request("r", range(12))
    with pytest.raises(ValueError, match=r"blocks|block_size|group_id"):
        pool.cache_full_blocks(req, blocks, num_cached, num_full, block_size, group)
    assert (before, []) == (pool_state(pool), pool.take_events())


def test_a_range_without_blocks_is_nothing_to_do() -> None:
    pool = BlockPool(9, True, events=True)
    blocks = pool.get_new_blocks(3)
    before = pool_state(pool)
    for num_cached, num_full in ((0, 0), (3, 3), (2, 1)):
        pool.cache_full_blocks(request("r", range(12)), blocks, num_cached, num_full, 4, 0)
    assert (before, []) == (pool_state(pool), pool.take_events())


def test_a_group_that_cannot_be_is_refused_by_a_look_up() -> None:
    pool = BlockPool(9, True)
    for group in (-1, 2**31, 2**63):
        with pytest.raises(ValueError, match="group"):
            pool.get_cached_block(b"x" * 32, [0, group])


def test_a_pool_refuses_the_blocks_of_another() -> None:
    pool, other = BlockPool(9, True), BlockPool(9, True)
    mine, theirs = pool.get_new_blocks(2), other.get_new_blocks(2)
    before = pool_state(pool)
    req = request("r", range(8))
    for blocks in (theirs, list(theirs), [mine[0], theirs[1]]):
        for call in (
            lambda b: pool.touch([b]),
            pool.free_blocks,
            lambda b: pool.cache_full_blocks(req, b, 0, 2, 4, 0),
        ):
            with pytest.raises(ValueError, match="another pool"):
                call(blocks)
    with pytest.raises(ValueError, match="another pool"):
        pool.free_blocks(iter(theirs))
    with pytest.raises(ValueError, match="another pool"):
        KVCacheBlocks([[mine[0], theirs[1]]])
    assert before == pool_state(pool)
    # Where there is no block there is nobody else's; and a block may be anything that has an id.
    one: Any = types.SimpleNamespace(block_id=1)
    pool.touch([theirs[:0], [], [one]])
    pool.free_blocks(iter([one]))
    assert mine == KVCacheBlocks([mine, theirs[:0]]).blocks[0]
    assert before == pool_state(pool)


def test_computed_blocks_of_another_manager_are_refused_before_anything_changes() -> None:
    kv, other = (manager(9, ("full", 4), free_order="tail") for _ in range(2))
    a, b = request("a", range(9)), request("b", range(9))
    admit(kv, a)
    admit(other, a)
    found, hit = other.get_computed_blocks(b)
    before = state(kv), state(other)
    for foreign in (found, KVCacheBlocks([[KVCacheBlock(other.block_pool, 1)]])):
        with pytest.raises(ValueError, match="another"):
            kv.allocate_slots(b, 9 - hit, hit, foreign)
    with pytest.raises(ValueError, match="another"):
        kv.create_kv_cache_blocks(found.blocks)
    assert before == (state(kv), state(other))
    assert (8, ([4],)) == admit(kv, b)


@pytest.mark.parametrize(
    ("ids", "counts"), [(b"\1\0\0\0", (2,)), (b"\1\0\0\0", (0,)), (b"\1\0\0\0\2", (1,)), (b"\1\0\0\0", (2**33,))]
)
def test_computed_blocks_whose_counts_are_not_those_of_their_ids_are_refused(
    ids: bytes, counts: tuple[int, ...]
) -> None:
    kv = manager(9, ("full", 4))
    before = state(kv)
    with pytest.raises(ValueError, match="counts"):
        kv.allocate_slots(request("b", range(9)), 1, 4, KVCacheBlocks.from_ids(kv.block_pool, ids, counts))
    assert before == state(kv)


def test_computed_blocks_for_an_id_that_has_blocks_say_that_ids_are_unique() -> None:
    kv = manager(9, ("full", 4))
    admit(kv, request("a", range(9)))
    again = request("a", range(9))
    found, hit = kv.get_computed_blocks(again)
    before = state(kv)
    with pytest.raises(ValueError, match=r"'a'.*unique"):
        kv.allocate_slots(again, 1, hit, found)
    assert before == state(kv)
    off = manager(9, ("full", 4), enable_caching=False)
    with pytest.raises(ValueError, match="need caching"):
        off.allocate_slots(again, 1, 4, KVCacheBlocks([[KVCacheBlock(off.block_pool, 1)]]))


def test_hashes_in_a_list_of_ones_own_are_cached_when_the_contents_come() -> None:
    kv = manager(9, ("full", 4), enable_kv_cache_events=True)
    a = request("a", range(9))
    a.block_hashes = list(a.block_hashes)  # type: ignore[assignment]
    assert kv.allocate_slots(a, 9, delay_cache_blocks=True) is not None
    kv.cache_blocks(a, 8)
    (event,) = kv.take_events()
    assert isinstance(event, BlockStored)
    assert [a.block_hashes, [1, 2]] == [event.block_hashes, kv.block_pool.cached_block_ids()]


# ---- numbers ----


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "field",
    ["num_computed_tokens", "num_new_tokens", "num_new_computed_tokens", "num_lookahead_tokens", "num_encoder_tokens"],
)
def test_a_number_of_tokens_out_of_range_is_refused_alike_everywhere(field: str, caching: bool, running: bool) -> None:
    kv = manager(20, ("full", 4), ("sw", 4, 8), enable_caching=caching)
    a, b = request("a", range(21)), request("b", range(40))
    admit(kv, a)
    a.num_computed_tokens = 18
    # With a table, where the call would have nothing to do, and without.
    req = a if running else b
    if running:
        assert kv.allocate_slots(a, 3) is kv.empty_kv_cache_blocks
    before = state(kv)
    for value in BEYOND:
        options: dict[str, Any] = {"num_new_tokens": 1}
        if field == "num_computed_tokens":
            req.num_computed_tokens = value
        else:
            options[field] = value
        with pytest.raises(ValueError, match=f"^{field} must be"):
            kv.allocate_slots(req, **options)
        assert before == state(kv)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("name", ["a", "b"])
def test_caching_a_number_of_tokens_out_of_range_is_refused_alike_everywhere(name: str, caching: bool) -> None:
    kv = manager(20, ("full", 4), enable_caching=caching)
    admit(kv, request("a", range(21)))
    before = state(kv)
    for value in BEYOND:
        with pytest.raises(ValueError, match=r"^num_computed_tokens must be"):
            kv.cache_blocks(request(name, range(21)), value)
        assert before == state(kv)


@pytest.mark.parametrize("value", BEYOND)
def test_a_request_of_impossible_length_is_refused_and_not_counted(value: int) -> None:
    kv = manager(20, ("chunk", 1, 4), hash_block_size=1, log_stats=True)
    odd = types.SimpleNamespace(
        request_id="b", num_tokens=value, num_computed_tokens=0, num_preemptions=0, skip_reading_prefix_cache=False,
        all_token_ids=[1], block_hashes=[],
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^num_tokens must be (at least 0|below 2\*\*60), not"):
        kv.get_computed_blocks(odd)
    with pytest.raises(ValueError, match=r"^num_tokens must be (at least 0|below 2\*\*60), not"):
        kv.allocate_slots(odd, 1)
    stats = kv.make_prefix_cache_stats()
    assert stats is not None
    assert 0 == stats.requests
    assert ([],) == kv.get_block_ids("b")


def test_a_sum_of_tokens_out_of_range_is_refused() -> None:
    kv = manager(20, ("full", 4))
    a = request("a", range(4))
    a.num_computed_tokens = 2**59
    before = state(kv)
    with pytest.raises(ValueError, match=r"num_computed_tokens \+ num_new_computed_tokens"):
        kv.allocate_slots(a, 1, num_new_computed_tokens=2**59)
    assert before == state(kv)


def test_a_prompt_of_more_blocks_than_a_table_can_hold_is_refused_by_a_look_up() -> None:
    kv = manager(20, ("chunk", 1, 4), hash_block_size=1)
    odd = types.SimpleNamespace(num_tokens=2**40, num_preemptions=0, skip_reading_prefix_cache=False, block_hashes=[])
    with pytest.raises(ValueError, match="num_tokens"):
        kv.get_computed_blocks(odd)


def test_a_request_without_tokens_finds_nothing() -> None:
    kv = manager(20, ("full", 4))
    req = types.SimpleNamespace(num_tokens=0, num_preemptions=0, skip_reading_prefix_cache=False, block_hashes=[])
    assert (kv.empty_kv_cache_blocks, 0) == kv.get_computed_blocks(req)


@pytest.mark.parametrize("drafts", [2**31 - 1, 2**40, 2**61, 2**62, 2**63 - 1])
@pytest.mark.parametrize("groups", [1, 3])
def test_speculative_blocks_beyond_any_pool_never_fit(drafts: int, groups: int) -> None:
    kv = manager(20, *[("mamba", 1 << 20, drafts)] * groups, enable_caching=False)
    before = state(kv)
    assert None is kv.allocate_slots(Request("a", range(9)), 9)
    assert before == state(kv)


def test_a_window_beyond_any_prompt_leaves_decode_steps_quiet() -> None:
    kv = manager(20, ("sw", 4, 2**63 - 1))
    a = request("a", range(5))
    admit(kv, a)
    assert 7 == kv._tables.settled["a"]
    assert kv.allocate_slots(a, 1) is kv.empty_kv_cache_blocks


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ([("full", 4)], {"max_model_len": 2**63}, "max_model_len"),
        ([("full", 4)], {"hash_block_size": 2**31, "enable_caching": False}, "hash_block_size"),
        ([("full", 2**31)], {"enable_caching": False}, "block_size"),
        ([("full", 2**20)], {"dcp_world_size": 2**11, "enable_caching": False}, "block_size"),
        ([("full", 4)], {"dcp_world_size": 2**63, "enable_caching": False}, "dcp_world_size"),
        ([("full", 4)], {"pcp_world_size": 2**31, "enable_caching": False}, "pcp_world_size"),
        ([("sw", 4, 2**63)], {}, "sliding_window"),
        ([("chunk", 4, 2**63)], {}, "attention_chunk_size"),
        ([("mamba", 4, 2**63)], {}, "num_speculative_blocks"),
    ],
)
def test_numbers_too_large_for_a_manager_are_refused_by_name(groups: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        manager(9, *groups, **options)


def test_a_hasher_of_impossible_blocks_is_refused() -> None:
    for size in (-1, 0, 2**31, 2**63):
        with pytest.raises(ValueError, match="block_size"):
            BlockHasher(size)


# ---- specs ----


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: FullAttentionSpec(16, 0, 8, "float16"), "num_kv_heads"),
        (lambda: FullAttentionSpec(16, 4, 0, "float16"), "head_size"),
        (lambda: SlidingWindowSpec(16, 4, -8, "float16", 4), "head_size"),
        (lambda: ChunkedLocalAttentionSpec(16, -4, 8, "float16", 4), "num_kv_heads"),
        (lambda: FullAttentionSpec(16, 4, 8, "no such dtype"), "dtype"),
        (lambda: SlidingWindowSpec(16, 4, 8, "V0", 4), "dtype"),
        (lambda: MambaSpec(16, (), ()), "shapes"),
        (lambda: MambaSpec(16, ((4, 0),), ("float16",)), "shapes"),
        (lambda: MambaSpec(16, ((-4, -4),), ("float16",)), "shapes"),
        (lambda: MambaSpec(16, ((4,),), ("no such dtype",)), "dtypes"),
    ],
)
def test_a_spec_whose_page_would_be_empty_is_refused_when_made(make: Any, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        make()


def test_a_spec_of_ones_own_with_an_empty_page_is_refused_by_the_layers_name() -> None:
    class Own(KVCacheSpec):
        @property
        def page_size_bytes(self) -> int:
            return 0

    for layers in ({"l0": Own(4)}, {"l1": FullAttentionSpec(4, 1, 8, "float16"), "l0": Own(4)}):
        with pytest.raises(ValueError, match=r"'l0'.*page_size_bytes"):
            make_kv_cache_config(layers, 1 << 20)


@pytest.mark.parametrize("unlike", [False, True])
def test_too_little_memory_is_said_with_what_is_needed(caplog: pytest.LogCaptureFixture, unlike: bool) -> None:
    layer = FullAttentionSpec(4, 1, 8, "float16")
    other = SlidingWindowSpec(4, 1, 8, "float16", 8) if unlike else layer
    need = layer.page_size_bytes * (1 if unlike else 2)
    with caplog.at_level(logging.WARNING):
        assert 2 == make_kv_cache_config({"a": layer, "b": other}, 2 * need).num_blocks
    assert [] == caplog.records
    for memory, num_blocks in ((0, 0), (need - 1, 0), (2 * need - 1, 1)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            config = make_kv_cache_config({"a": layer, "b": other}, memory)
        assert num_blocks == config.num_blocks
        (record,) = caplog.records
        assert all(text in record.getMessage() for text in (f"{memory} bytes", f"{2 * need} bytes"))
    with pytest.raises(ValueError, match="num_blocks must be at least 1"):
        KVCacheManager(KVCacheConfig(0, [KVCacheGroupSpec(["a"], layer)]), 64, 4)


# ---- the encoder's cache ----


@pytest.mark.parametrize("make", [EncoderCacheManager, RequestEncoderCacheManager, EncoderDecoderCacheManager])
def test_an_item_of_negative_size_is_refused_and_takes_no_space(make: Any) -> None:
    cache = make(10)
    place = types.SimpleNamespace(offset=0, length=-4, get_num_embeds=-4)
    odd = types.SimpleNamespace(
        request_id="r", mm_features=[Feature("A", place)], get_num_encoder_tokens=lambda i: -4,  # type: ignore[arg-type]
    )  # fmt: skip
    budget = () if make is RequestEncoderCacheManager else (100, 0)
    with pytest.raises(ValueError, match=r"item 0.*-4"):
        cache.can_allocate(odd, 0, *budget)
    with pytest.raises(ValueError, match=r"item 0.*-4"):
        cache.allocate(odd, 0)
    if make is EncoderCacheManager:
        with pytest.raises(ValueError, match=r"item 0.*-4"):
            cache.check_and_update_cache(odd, 0)
    assert (10, set()) == (cache.num_free_slots, cache.get_cached_input_ids(odd))
    empty = Request("s", range(4), mm_features=[Feature("B", Place(0, 0))])
    cache.allocate(empty, 0)
    assert (10, {0}) == (cache.num_free_slots, cache.get_cached_input_ids(empty))
