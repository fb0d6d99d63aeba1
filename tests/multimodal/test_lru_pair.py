"""The caches without a store: each row of the tables, the lockstep of `lru`, and recovery when the sides differ."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shmstore import CacheMissError, ObjectRef
from shmstore.multimodal import (
    CacheInfo,
    MirroredProcessingCache,
    MultiModalFeatureSpec,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
)
from shmstore.multimodal.caches import shadow
from tests.multimodal.helpers import OwnProcessorCache, OwnReceiverCache, config, features, item, shm_sender, update

BOOK = 1 << 20
Pair = tuple[MultiModalProcessorSenderCache, MultiModalReceiverCache]


def pair(capacity: int = 6) -> Pair:
    settings = config(BOOK, capacity)
    return MultiModalProcessorSenderCache(settings), MultiModalReceiverCache(settings)


def request(
    sender: MultiModalProcessorSenderCache, receiver: MultiModalReceiverCache, sizes: dict[str, int], given: Any = None
) -> Sequence[MultiModalFeatureSpec]:
    """Send one request through both sides, as an engine does; return the features."""
    mm_hashes = list(sizes)
    cached = sender.is_cached(mm_hashes)
    inputs = [None if hit else (item(sizes[h]), [update(h)]) for h, hit in zip(mm_hashes, cached, strict=True)]
    outputs = sender.get_and_update(given or inputs, mm_hashes)
    batch = features(mm_hashes, [sent for sent, _ in outputs])
    return receiver.get_and_update_features(batch)


# --- rows of the tables --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["only", "sender"])
def test_a_hit_gives_the_stored_item_or_nothing_and_a_miss_the_input(mode: str) -> None:
    cache = P0[mode]()
    stored, updates = item(3), [update("a")]
    first = cache.get_and_update_item((stored, updates), "a")
    assert updates == first[1]
    assert first[0] is stored
    for again in (None, (item(3), [update("a").with_item_idx(1)])):
        hit = cache.get_and_update_item(again, "a")
        assert hit[0] is (stored if mode == "only" else None)
        assert updates == hit[1]
    assert CacheInfo(2, 3) == cache.make_stats()


def test_the_sender_keeps_no_item_alive() -> None:
    import gc
    import weakref

    sender, _ = pair(1000)
    mine = item(500)
    alive = weakref.ref(mine["pixels"].data)
    sender.get_and_update_item((mine, [update("a")]), "a")
    assert sender.is_cached_item("a")
    del mine
    gc.collect()
    assert alive() is None


def test_receiver_hit_gives_the_stored_item_and_a_payload_replaces_it() -> None:
    _, receiver = pair()
    first, second = item(3), item(3, fill=2)
    assert receiver.get_and_update_item(first, "a") is first
    assert receiver.get_and_update_item(None, "a") is first
    assert receiver.get_and_update_item(second, "a") is second
    assert receiver.get_and_update_item(None, "a") is second
    assert 3 == receiver.nbytes


def test_mirrored_sides_store_both() -> None:
    p0, p1 = (MirroredProcessingCache(config(6)) for _ in range(2))
    a = item(3)
    assert [a] == p0.get_and_update_p0([a], ["a"])
    assert [None] == p0.get_and_update_p0([a], ["a"])
    assert p1.get_and_update_p1([a], ["a"])[0] is a
    assert p1.get_and_update_p1([None], ["a"])[0] is a
    assert CacheInfo(1, 2) == p0.make_stats(delta=True)
    assert p0.reset()
    assert [a] == p0.get_and_update_p0([a], ["a"])
    p1.reset()
    with pytest.raises(CacheMissError):
        p1.get_and_update_p1([None], ["a"])
    assert CacheInfo(0, 1) == p0.make_stats()


P0: dict[str, Callable[[], Any]] = {
    "only": lambda: MultiModalProcessorOnlyCache(config(BOOK)),
    "sender": lambda: MultiModalProcessorSenderCache(config(BOOK)),
}


@pytest.mark.parametrize("make", P0.values(), ids=P0)
def test_a_touch_is_a_use_asking_is_none_and_clear_forgets_all(make: Callable[[], Any]) -> None:
    cache = make()
    cache.get_and_update([(item(1), []), (item(2), []), None], ["a", "b", "b"])
    for _ in range(3):
        assert [True, True, False] == cache.is_cached(["a", "b", "x"])
    assert (("a", "b"), CacheInfo(1, 3)) == (cache.order, cache.make_stats(delta=True))
    cache.touch_sender_cache_item("a")
    cache.touch_sender_cache_item("missing")
    assert (("b", "a"), CacheInfo(0, 0)) == (cache.order, cache.make_stats(delta=True))
    assert CacheInfo(1, 3) == cache.make_stats()
    cache.clear_cache()
    assert (CacheInfo(0, 0), (), False) == (cache.make_stats(), cache.order, cache.is_cached_item("a"))
    with pytest.raises(CacheMissError):
        cache.get_and_update_item(None, "a")


def test_receiver_miss_names_all_missing_and_changes_nothing() -> None:
    _, receiver = pair()
    receiver.get_and_update([item(1), item(2)], ["a", "b"])
    batch = features(["x", "a", "new", "y"], [None, None, item(1), None])
    with pytest.raises(CacheMissError) as caught:
        receiver.get_and_update_features(batch)
    assert ("x", "y") == caught.value.mm_hashes
    assert ("a", "b") == receiver.order
    assert features(["x", "a", "new", "y"], [None, None, item(1), None]) == batch


def test_a_reference_is_no_item_for_the_engine_core() -> None:
    _, receiver = pair()
    with pytest.raises(TypeError, match="reference"):
        receiver.get_and_update([item(1), ObjectRef(bytes(40))], ["a", "b"])
    assert () == receiver.order


# --- the cases of the specification --------------------------------------------------------------------------------


def test_six_bytes_what_is_asked_for_again_is_kept_and_the_other_goes() -> None:
    sender, receiver = pair(6)
    request(sender, receiver, {"A": 2, "B": 2, "C": 2})
    out = request(sender, receiver, {"D": 1, "E": 1, "A": 2, "C": 2})
    assert [item(1), item(1), item(2), item(2)] == [feature.data for feature in out]
    assert ("D", "E", "A", "C") == sender.order
    assert ("D", "E", "A", "C") == receiver.order
    assert [True, False] == sender.is_cached(["A", "B"])
    assert CacheInfo(2, 7) == sender.make_stats()


# --- within a batch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [None, (item(2), [update("A")])])
def test_the_same_item_twice_in_a_batch_is_one_miss_and_one_hit(second: Any) -> None:
    sender, receiver = pair(6)
    outputs = sender.get_and_update([(item(2), [update("A")]), second], ["A", "A"])
    assert [item(2), None] == [sent for sent, _ in outputs]
    assert [[update("A")]] * 2 == [updates for _, updates in outputs]
    assert CacheInfo(1, 2) == sender.make_stats()
    out = receiver.get_and_update([sent for sent, _ in outputs], ["A", "A"])
    assert [item(2)] * 2 == out
    assert 2 == receiver.nbytes


def test_the_same_item_twice_and_too_large_for_the_cache_is_sent_twice() -> None:
    sender, receiver = pair(6)
    outputs = sender.get_and_update([(item(7), []), None, (item(1), [])], ["A", "A", "B"])
    assert [item(7), item(7), item(1)] == [sent for sent, _ in outputs]
    assert CacheInfo(0, 3) == sender.make_stats()
    assert [item(7), item(7), item(1)] == receiver.get_and_update([sent for sent, _ in outputs], ["A", "A", "B"])
    assert (("B",), ("B",)) == (sender.order, receiver.order)
    only = MultiModalProcessorOnlyCache(config(6))
    outputs = only.get_and_update([(item(7), []), None, (item(2), []), None], ["A", "A", "B", "B"])
    assert [item(7), item(7), item(2), item(2)] == [got for got, _ in outputs]
    assert (("B",), CacheInfo(1, 4)) == (only.order, only.make_stats())


def test_a_hit_that_the_batch_itself_pushes_out_is_still_answered() -> None:
    sender, receiver = pair(6)
    request(sender, receiver, {"A": 3})
    out = request(sender, receiver, {"B": 5, "A": 3})
    assert [item(5), item(3)] == [feature.data for feature in out]
    assert (("B",), ("B",)) == (sender.order, receiver.order)
    only = MultiModalProcessorOnlyCache(config(6))
    only.get_and_update([(item(3), [])], ["A"])
    assert [item(5), item(3)] == [got for got, _ in only.get_and_update([(item(5), []), None], ["B", "A"])]
    assert (("B",), CacheInfo(1, 3)) == (only.order, only.make_stats())


# --- prompt updates ------------------------------------------------------------------------------------------------


def test_prompt_updates_count_against_the_size_of_the_processor_cache() -> None:
    updates = [update("x" * 1000)]
    only = MultiModalProcessorOnlyCache(config(2500))
    for mm_hash in "abc":
        only.get_and_update_item((item(1), updates), mm_hash)
    assert ("b", "c") == only.order
    sender = MultiModalProcessorSenderCache(config(2500, BOOK))
    for mm_hash in "abc":
        sender.get_and_update_item((item(1), updates), mm_hash)
    assert [False, True, True] == sender.is_cached(["a", "b", "c"])


@pytest.mark.parametrize("make", [*P0.values(), lambda: shm_sender(config(BOOK, BOOK, cache_type="shm"))])
def test_what_a_caller_does_to_the_updates_it_has_changes_no_later_hit(make: Callable[[], Any]) -> None:
    with make() as cache:
        updates = [update("a")]
        [(_, missed)] = cache.get_and_update([(item(4), updates)], ["a"])
        missed.append(update("of the miss"))
        updates.append(update("of the input"))
        [(_, hit), (_, again)] = cache.get_and_update([None, None], ["a", "a"])
        assert [update("a")] == hit == again
        hit[0] = hit[0].with_item_idx(7)
        hit.append(update("of the hit"))
        assert [update("a")] == again == cache.get_and_update_item(None, "a")[1]
        mine = [update("b")]
        cache.get_and_update_item((item(4), mine), "b")[1].append(update("of the miss"))
        assert [update("b")] == cache.get_and_update_item(None, "b")[1]


def test_an_item_whose_updates_are_gone_is_sent_again_and_both_sides_stay_in_step() -> None:
    rng = random.Random(7)
    settings = config(1500, 40)
    sender, receiver = MultiModalProcessorSenderCache(settings), MultiModalReceiverCache(settings)
    sizes = {f"h{n}": rng.randint(1, 9) for n in range(12)}
    resent = 0
    for _ in range(300):
        mm_hashes = rng.choices(list(sizes), k=rng.randint(1, 4))
        inputs = [
            None if sender.is_cached_item(h) else (item(sizes[h]), [update(h * rng.choice([10, 100, 1000]))])
            for h in mm_hashes
        ]
        resent += sum(given is not None and h in receiver.order for given, h in zip(inputs, mm_hashes, strict=True))
        outputs = sender.get_and_update(inputs, mm_hashes)
        out = receiver.get_and_update([sent for sent, _ in outputs], mm_hashes)
        assert [item(sizes[h]) for h in mm_hashes] == out
        assert receiver.order == sender.order
        assert sender._kept.nbytes <= 1500
        assert set(sender._kept.entries) <= set(sender.order)
    assert resent > 20  # the case was met


# --- healing -------------------------------------------------------------------------------------------------------


def test_invalidate_takes_back_what_was_sent_with_and_after_the_missing_item() -> None:
    sender, receiver = pair(20)
    request(sender, receiver, {"old": 2})
    sender.get_and_update([(item(2), []), (item(2), [])], ["beside", "lost"])
    with pytest.raises(CacheMissError) as caught:
        request(sender, receiver, {"lost": 2, "new": 2})
    sender.invalidate([*caught.value.mm_hashes, "unknown"])
    assert [True, False, False, False] == sender.is_cached(["old", "lost", "new", "beside"])


def test_what_is_remembered_of_keys_that_have_gone_is_bounded() -> None:
    sender, _ = pair(6)
    for n in range(shadow._REMEMBERED + 10):
        sender.get_and_update([(item(6), []), None], [f"h{n}"] * 2)
        sender.get_and_update([None], [f"h{n}"])
    assert shadow._REMEMBERED == len(sender._departed)


def test_an_invalidated_item_that_p1_still_has_keeps_its_place_in_the_order() -> None:
    sender, receiver = pair(6)
    request(sender, receiver, {"A": 2, "B": 2, "C": 2})
    sender.invalidate(["B"])  # an error told twice
    assert not sender.is_cached_item("B")
    request(sender, receiver, {"D": 2})
    assert (("B", "C", "D"), ("B", "C", "D")) == (sender.order, receiver.order)
    assert [item(2), item(2)] == [feature.data for feature in request(sender, receiver, {"B": 2, "C": 2})]
    assert receiver.order == sender.order


def test_items_of_no_size_are_bounded_in_number_and_both_sides_agree_which() -> None:
    sender, receiver = pair(6)
    only = MultiModalProcessorOnlyCache(config(6))
    request(sender, receiver, {"A": 3})
    for n in range(3000):
        mm_hash = f"h{n}"
        [(sent, _)] = sender.get_and_update([(item(0), [])], [mm_hash])
        assert [item(0)] == receiver.get_and_update([sent], [mm_hash])
        only.get_and_update([(item(0), [])], [mm_hash])
    expected = tuple(f"h{n}" for n in range(3000 - 1024, 3000))
    assert expected == sender.order == receiver.order == only.order
    assert sender.is_cached_item(expected[0])


def test_an_item_that_comes_again_and_is_too_large_now_is_forgotten_on_both_sides() -> None:
    sender, receiver = pair(6)
    request(sender, receiver, {"A": 2})
    sender.invalidate(["A"])
    request(sender, receiver, {"A": 7})
    assert ((), ()) == (sender.order, receiver.order)


# --- the interfaces, as users subclass them ------------------------------------------------------------------------


def test_a_processor_cache_needs_only_the_methods_for_one_item() -> None:
    cache = OwnProcessorCache()
    a: Any = (item(1), [])
    b: Any = (item(2), [])
    assert [a, a, b] == cache.get_and_update([a, None, b], ["a", "a", "b"])
    order = [("touch", "a"), ("touch", "a"), ("touch", "b"), ("get", "a"), ("get", "a"), ("get", "b")]
    assert order == cache.log
    with pytest.raises(CacheMissError) as caught:
        cache.get_and_update([None, None, None], ["x", "a", "y"])
    assert (("x", "y"), order) == (caught.value.mm_hashes, cache.log)
    with pytest.raises(ValueError, match="items but"):
        cache.get_and_update([], ["a"])


def test_a_receiver_cache_touches_all_features_before_it_replaces_the_first() -> None:
    cache = OwnReceiverCache()
    batch = features(["a", "b", "a"], [item(1), item(2), None])
    assert batch is cache.get_and_update_features(batch)
    assert [item(1), item(2), item(1)] == [feature.data for feature in batch]
    assert [("touch", h) for h in "aba"] + [("get", h) for h in "aba"] == cache.log
    with pytest.raises(ValueError, match="items but"):
        cache.get_and_update([], ["a"])
