"""The caches with an engine's own types: items are values that the store takes, and updates are any objects."""

import mmap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from shmstore import CacheMissError, ObjectRef
from shmstore.multimodal import (
    BaseMultiModalProcessorCache,
    BaseMultiModalReceiverCache,
    CacheTypes,
    ShmObjectStoreSenderCache,
    engine_receiver_cache_from_config,
    processor_cache_from_config,
    worker_receiver_cache_from_config,
)
from tests.multimodal.helpers import MIB, config, item, update
from tests.support import in_child, is_held, raises

Picture = dict[str, Any]
KIB = 1 << 10


class Updates:
    """Prompt updates that hold a function, cannot be pickled or compared, and are not a sequence."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.size: Callable[[], int] = lambda: 1000


def size_of(updates: Updates, mm_hash: str) -> int:
    if not isinstance(updates, Updates):
        raise TypeError(f"updates of {mm_hash!r} must be Updates")
    return updates.size()


TYPES: CacheTypes[Picture, Updates] = CacheTypes(dict, updates_size=size_of)


@dataclass
class Feature:
    data: Any
    identifier: str


def picture(name: str, nbytes: int = 4 * KIB) -> Picture:
    return {"pixels": torch.full((nbytes,), len(name), dtype=torch.uint8), "grid": [(1, 2), None], "name": name}


def same(left: Picture, right: Picture) -> bool:
    return bool(
        left.keys() == right.keys() and left["name"] == right["name"] and torch.equal(left["pixels"], right["pixels"])
    )


Engine = tuple[BaseMultiModalProcessorCache[Picture, Updates], BaseMultiModalReceiverCache[Picture] | None]
MODES = {
    "only": config(MIB, 0),
    "lru": config(MIB, cache_type="lru"),
    "shm": config(MIB, cache_type="shm", shm_max_object_size_mb=1),
}


@pytest.fixture(params=[*MODES])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    settings = MODES[request.param]
    sender = processor_cache_from_config(settings, types=TYPES)
    assert sender is not None
    with sender:
        receiver = engine_receiver_cache_from_config(settings, types=TYPES)
        receiver = receiver or worker_receiver_cache_from_config(settings, 0, sender.handle, types=TYPES)
        yield sender, receiver
        if receiver is not None:
            receiver.close()


def test_an_engines_own_items_and_updates_go_through_every_mode(engine: Engine) -> None:
    sender, receiver = engine
    updates = Updates("a")
    for new in (True, False, False):
        assert [not new] == sender.is_cached(["a"])
        sent, given = sender.get_and_update_item((picture("a"), updates) if new else None, "a")
        assert given is updates, "opaque: neither copied nor looked at"
        arrived = sent if receiver is None else receiver.get_and_update_item(sent, "a")
        assert isinstance(arrived, dict)
        assert same(picture("a"), arrived)
        sender.release([sent])
    assert (2, 3) == (sender.make_stats().hits, sender.make_stats().total)
    if receiver is not None:
        sender.invalidate("a")
        with pytest.raises(CacheMissError):
            sender.get_and_update([None], ["a"])


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (item(8), "MultiModalKwargsItem"),
        ((item(8), Updates("a")), "(MultiModalKwargsItem, Updates)"),
        (picture("a"), "dict"),
        ((picture("a"), [update("a")]), "Updates"),
        ((torch.zeros(2), Updates("a")), "(Tensor, Updates)"),
    ],
    ids=["our item", "our item and updates", "no updates", "our updates", "a tensor"],
)
def test_other_types_than_the_engines_are_refused(engine: Engine, bad: Any, named: str) -> None:
    sender, _ = engine
    for call in (lambda: sender.get_and_update_item(bad, "a"), lambda: sender.get_and_update([bad], ["a"])):
        with raises(TypeError, names=("'a'", named)):
            call()
    assert [False] == sender.is_cached(["a"])
    assert 0 == sender.make_stats().total


# ---- leases that last for the request, and what a worker gets


Pair = tuple[ShmObjectStoreSenderCache[Picture, Updates], list[ObjectRef]]
SHM = config(MIB, 64 * KIB, cache_type="shm", shm_max_object_size_mb=1, world_size=2)


@pytest.fixture
def held() -> Iterator[Pair]:
    """Yield a sender whose leases are held, after it has sent "a" twice."""
    sender = processor_cache_from_config(SHM, types=TYPES, hold=True)
    assert isinstance(sender, ShmObjectStoreSenderCache)
    with sender:
        first, _ = sender.get_and_update_item((picture("a", 16 * KIB), Updates("a")), "a")
        again, _ = sender.get_and_update_item(None, "a")
        assert isinstance(first, ObjectRef)
        assert isinstance(again, ObjectRef)
        yield sender, [first, again]


def worker(sender: ShmObjectStoreSenderCache[Picture, Updates], rank: int, policy: Any) -> Any:
    return worker_receiver_cache_from_config(SHM, rank, sender.handle, types=TYPES, policy=policy)


@pytest.mark.parametrize("policy", ["views", "copy", "private"])
def test_held_references_are_read_again_until_the_request_ends(held: Pair, policy: str) -> None:
    sender, refs = held
    workers = [worker(sender, rank, policy) for rank in range(2)]
    for _ in range(3):
        for cache in workers:
            for ref in refs:
                assert same(picture("a", 16 * KIB), cache.get_and_update_item(ref, "a"))
    assert is_held(sender.writer)
    assert 1 == sender.release(refs[:1])
    assert is_held(sender.writer)
    assert [1, 0] == [sender.release(refs), sender.release(refs)]
    assert not is_held(sender.writer)
    for cache in workers:
        cache.close()


def test_a_private_item_for_which_there_is_no_mapping_is_a_copy(held: Pair, caplog: pytest.LogCaptureFixture) -> None:
    sender, refs = held
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 1 << 17:
        pytest.skip(f"a process may have {limit} mappings here, which takes long")

    def read() -> tuple[int, int, int]:
        with worker(sender, 0, "private") as cache, ExitStack() as mappings:
            with suppress(OSError):
                while True:
                    mappings.enter_context(mmap.mmap(-1, 1))
            items = [cache.get_and_update_item(ref, "a") for ref in refs]
            items[0]["pixels"].add_(1)
            assert same(picture("a", 16 * KIB), items[1])
            return int(items[0]["pixels"][0]), cache.reader.stats().live_views, len(caplog.records)

    assert (2, 0, 1) == in_child(read)


@pytest.mark.parametrize(("policy", "pins", "writable"), [("views", 1, 0), ("private", 1, 1), ("copy", 0, 1)])
def test_views_and_private_items_keep_their_bytes_in_the_store_and_copies_do_not(
    held: Pair, policy: str, pins: int, writable: int
) -> None:
    sender, refs = held
    with worker(sender, 0, policy) as cache:
        features = [Feature(refs[0], "a")]
        cache.get_and_update_features(features)
        sender.release(refs)
        if writable:
            features[0].data["pixels"].add_(1)
            assert 2 == features[0].data["pixels"][0]
        assert is_held(sender.writer) is bool(pins)
        features.clear()
        assert not is_held(sender.writer)


@dataclass(frozen=True)
class Frozen:
    data: Any
    identifier: str


def test_an_error_leaves_every_feature_as_it_was(held: Pair) -> None:
    sender, refs = held
    with worker(sender, 0, "views") as cache:
        features: list[Any] = [Feature(refs[0], "a"), Frozen(refs[1], "a")]
        with pytest.raises(AttributeError):
            cache.get_and_update_features(features)
        assert refs == [feature.data for feature in features]
        with raises(TypeError, names=["data and identifier"]):
            cache.get_and_update_features([picture("a")])


class Stranger:
    """A class whose size only the engine knows."""


@pytest.mark.parametrize("mode", ["only", "lru"])
def test_a_leaf_of_unknown_size_is_refused_where_sizes_count(mode: str) -> None:
    types: CacheTypes[Picture, Updates] = CacheTypes(dict, updates_size=size_of)
    sender = processor_cache_from_config(MODES[mode], types=types)
    assert sender is not None
    with raises(TypeError, names=("'a'", "Stranger"), hint=["item_size"]):
        sender.get_and_update_item(({"pixels": Stranger()}, Updates("a")), "a")


@pytest.mark.parametrize("wrong", [list, object, str, bytes, ObjectRef, type(None)])
def test_an_item_type_that_cannot_be_told_apart_is_refused(wrong: type[Any]) -> None:
    with raises(ValueError, names=("item_type", wrong.__name__)):
        CacheTypes(wrong)


def test_an_error_of_an_engines_function_reaches_it_and_leaves_no_lease() -> None:
    def broken(kept: Any) -> Any:
        raise KeyError("the engine's own")

    types: CacheTypes[Picture, Any] = CacheTypes(dict, give_updates=broken)
    sender = processor_cache_from_config(SHM, types=types)
    assert sender is not None
    with sender:
        sender.release([sender.get_and_update_item((picture("a"), None), "a")[0]])
        with pytest.raises(KeyError, match="the engine's own"):
            sender.get_and_update_item(None, "a")
        assert sender.writer is not None
        assert 0 == sender.writer.stats().open_leases
