"""Each of the six caches refuses wrong input with an error that names the input, and does not change."""

import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shmstore import CacheMissError, NestingError, UnsupportedValueError
from shmstore.bindings import store as native
from shmstore.multimodal import (
    BaseMultiModalReceiverCache,
    MirroredProcessingCache,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
    MultiModalSharedField,
    ShmObjectStoreReceiverCache,
    ShmObjectStoreSenderCache,
)
from tests.multimodal.helpers import MIB, OwnProcessorCache, config, features, item, shm_sender, shm_worker, update
from tests.support import raises

GOOD = (item(2), [update("new")])
SHM = config(MIB, MIB, cache_type="shm")


@pytest.fixture(params=["only", "lru", "shm", "of one method"])
def p0(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A processor cache that holds "old"."""
    if request.param == "shm":
        with shm_sender(SHM) as cache:
            cache.release([cache.get_and_update_item((item(2), []), "old")[0]])
            yield cache
        return
    makers = {
        "only": lambda: MultiModalProcessorOnlyCache(config(MIB)),
        "lru": lambda: MultiModalProcessorSenderCache(config(MIB)),
        "of one method": OwnProcessorCache,
    }
    made = makers[request.param]()
    made.get_and_update([(item(2), [])], ["old"])
    yield made


@pytest.fixture(params=["lru", "shm", "mirrored"])
def receive(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Return `get_and_update` of each kind of receiver."""
    if request.param == "lru":
        yield MultiModalReceiverCache(config(MIB)).get_and_update
    elif request.param == "mirrored":
        yield MirroredProcessingCache(config(MIB)).get_and_update_p1
    else:
        with shm_sender(SHM) as sender:
            with shm_worker(SHM, 0, sender.handle) as worker:
                yield worker.get_and_update


def state(cache: Any) -> tuple[Any, ...]:
    return cache.is_cached(["old", "new"]), cache.make_stats(), getattr(cache, "order", None)


BAD_UPDATES: list[Any] = [(["abc"], "str"), ([update("x"), 3], "int"), ((None,), "None")]
BAD_UPDATES.append(([SimpleNamespace(target="<image>", content="x")], "SimpleNamespace"))
BAD_INPUTS: list[Any] = [
    (torch.zeros(3), "Tensor"),
    (item(2), "MultiModalKwargsItem"),
    ((item(2),), "tuple of 1"),
    ((item(2), [], None), "tuple of 3"),
    ((torch.zeros(3), []), "(Tensor, list)"),
    ((None, []), "(None, list)"),
    ((item(2), None), "None"),
    ((item(2), "<image>"), "str"),
    ((item(2), update("new")), "ResolvedPromptUpdate"),
    *(((item(2), updates), f"ResolvedPromptUpdate, not {kind}") for updates, kind in BAD_UPDATES),
]


@pytest.mark.parametrize(("bad", "got"), BAD_INPUTS, ids=[got for _, got in BAD_INPUTS])
def test_a_processor_cache_names_wrong_input_and_has_changed_nothing(p0: Any, bad: Any, got: str) -> None:
    before = state(p0)
    with raises(TypeError, names=("'bad'", got)):
        p0.get_and_update([GOOD, None, bad], ["new", "old", "bad"])
    with raises(TypeError, names=("'bad'", got)):
        p0.get_and_update([bad], ["bad"])
    if not isinstance(p0, OwnProcessorCache):
        with raises(TypeError, names=("'bad'", got)):
            p0.get_and_update_item(bad, "bad")
        with raises(TypeError, names=("'old'", got)):  # also for an item that is cached
            p0.get_and_update_item(bad, "old")
    assert before == state(p0)


def test_other_than_one_item_for_each_hash_changes_nothing(p0: Any, receive: Any) -> None:
    before = state(p0)
    for items, mm_hashes in ((1, ["new", "old"]), (2, ["new"]), (0, ["new"]), (1, [])):
        for call, one in ((p0.get_and_update, GOOD), (receive, item(2))):
            with raises(ValueError, names=(f"{items} items", f"{len(mm_hashes)} hashes")):
                call([one, None][:items], mm_hashes)
    for call in (p0.get_and_update, receive):
        with raises(TypeError, names=("mm_items", "None")):
            call(None, ["new"])
    assert [[]] * 3 == [p0.get_and_update([], []), p0.is_cached([]), receive([], [])]
    assert before == state(p0)
    with pytest.raises(CacheMissError):
        receive([None], ["new"])


def test_what_nobody_has_is_a_miss_that_names_all_of_it_once_and_changes_nothing(p0: Any) -> None:
    before = state(p0)
    with pytest.raises(CacheMissError) as caught:
        p0.get_and_update([None, None, GOOD, None, None, None], ["x", "old", "new", "y", "x", "new"])
    assert ("x", "y") == caught.value.mm_hashes
    assert before == state(p0)


BAD_HASHES: list[Any] = [(None, TypeError, "None"), (7, TypeError, "int"), (b"old", TypeError, "bytes")]
BAD_HASHES += [("", ValueError, "empty"), ("\udc80", ValueError, r"'\udc80'")]


@pytest.mark.parametrize(("bad", "kind", "named"), BAD_HASHES, ids=[named for *_, named in BAD_HASHES])
def test_a_wrong_hash_is_the_same_error_in_every_mode_and_has_changed_nothing(
    p0: Any, receive: Any, bad: Any, kind: type[Exception], named: str
) -> None:
    before = state(p0)
    calls: list[Callable[[], object]] = [
        lambda: p0.get_and_update([GOOD, None], ["new", bad]),
        lambda: p0.get_and_update([None], [bad]),
        lambda: p0.is_cached(["old", bad]),
        lambda: p0.is_cached(mm_hash for mm_hash in ("old", bad)),
        lambda: p0.begin(["old", bad]),
        lambda: p0.invalidate(["old", bad]),
        lambda: receive([item(2), None], ["new", bad]),
    ]
    if not isinstance(p0, OwnProcessorCache):
        calls += [partial(p0.get_and_update_item, given, bad) for given in (GOOD, None)]
        calls += [partial(p0.is_cached_item, bad), partial(p0.touch_sender_cache_item, bad)]
    receiver = receive.__self__
    if isinstance(receiver, BaseMultiModalReceiverCache):
        calls += [partial(receiver.touch_receiver_cache_item, bad), partial(receiver.get_and_update_item, None, bad)]
    for call in calls:
        with raises(kind, names=(named,)) as caught:
            call()
        assert re.search(r"\bmm_hash(es\[[01]\])?(?!\w)", str(caught.value))
    assert before == state(p0)
    with pytest.raises(CacheMissError):
        receive([None], ["new"])


def test_one_hash_where_several_are_expected_is_not_taken_for_its_letters(p0: Any, receive: Any) -> None:
    calls: list[Callable[[Any], object]] = [
        p0.is_cached,
        p0.begin,
        lambda mm_hashes: p0.get_and_update([None] * 3, mm_hashes),
        lambda mm_hashes: receive([item(2)] * 3, mm_hashes),
    ]
    for call in calls:
        with raises(TypeError, names=("mm_hashes", "str")):
            call("old")
    for wrong in (None, 7):
        for call in (p0.is_cached, p0.begin, p0.invalidate):
            with raises(TypeError, names=("mm_hashes", "None" if wrong is None else "int")):
                call(wrong)
    for wait, kind in ((-1, ValueError), (float("nan"), ValueError), ("1", TypeError)):
        with raises(kind, names=("wait",)):
            p0.begin(["old"], wait=wait)


def test_a_hash_that_is_too_long_for_a_key_is_one_like_any_other(p0: Any) -> None:
    longs = ["x" * native.MAX_KEY, "é" * native.MAX_KEY, "é" * native.MAX_KEY + "x"]
    p0.get_and_update([GOOD] * 3, longs)
    assert [True, True, True, False] == p0.is_cached([*longs, longs[2] + "x"])
    if not isinstance(p0, OwnProcessorCache):
        outputs = p0.get_and_update([None] * 3, longs)
        p0.release([sent for sent, _ in outputs])
        assert (3, 7) == (p0.make_stats().hits, p0.make_stats().total)
        for long in longs:
            assert p0.is_cached_item(long)
            p0.touch_sender_cache_item(long)
            p0.release([p0.get_and_update_item(None, long)[0]])
    p0.invalidate(longs[1])
    p0.invalidate(longs[2:])
    if isinstance(p0, ShmObjectStoreSenderCache):
        assert [True, False, False] == p0.is_cached(longs)
        assert {"old", longs[0]} == set(p0.writer.keys())


def image(**data: Any) -> MultiModalKwargsItem:
    return MultiModalKwargsItem.from_elems(
        [MultiModalFieldElem("image", key, value, MultiModalSharedField(1)) for key, value in data.items()]
    )


def jagged() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


ENDLESS: list[Any] = [torch.zeros(3)]
ENDLESS.append(ENDLESS)
BAD_VALUES: dict[str, tuple[Any, type[Exception], list[str]]] = {
    "sparse": (torch.eye(2).to_sparse(), UnsupportedValueError, ["no serializer for", "torch.sparse_coo"]),
    "deep": ([{"x": torch.eye(2).to_sparse()}], UnsupportedValueError, ["no serializer for", "torch.sparse_coo"]),
    "jagged": (jagged(), UnsupportedValueError, ["no serializer for"]),
    "contains itself": (ENDLESS, NestingError, []),
}


@pytest.mark.parametrize(("bad", "error", "names"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_what_cannot_be_stored_is_the_same_error_in_every_mode(
    p0: Any, receive: Any, bad: Any, error: type[Exception], names: list[str]
) -> None:
    if isinstance(p0, OwnProcessorCache):
        return
    before = state(p0)
    item_of_it = image(fine=torch.zeros(3), px=bad)
    names = ["item of 'bad'", *names]
    calls: list[Callable[[], object]] = [
        lambda: p0.get_and_update_item((item_of_it, []), "bad"),
        lambda: p0.get_and_update([GOOD, (item_of_it, [])], ["new", "bad"]),
    ]
    for call in calls:
        with raises(error, names):
            call()
    assert before == state(p0)
    if not isinstance(receive.__self__, ShmObjectStoreReceiverCache):  # it keeps nothing
        with raises(error, names):
            receive([item(2), item_of_it], ["new", "bad"])
        with pytest.raises(CacheMissError):
            receive([None], ["new"])


BAD_ITEMS: list[Any] = [(torch.zeros(3), "Tensor"), (GOOD, "tuple"), (b"x" * 40, "bytes"), ({"px": 1}, "dict")]


@pytest.mark.parametrize(("bad", "kind"), BAD_ITEMS, ids=[kind for _, kind in BAD_ITEMS])
def test_a_receiver_names_wrong_input_and_has_changed_nothing(receive: Any, bad: Any, kind: str) -> None:
    names = ("item of 'bad'", "MultiModalKwargsItem", kind)
    hint = ["first"] if kind == "tuple" else []
    for batch in ([item(2), bad], [bad, item(2)]):
        with raises(TypeError, names, hint):
            receive(batch, ["new" if piece is not bad else "bad" for piece in batch])
    with pytest.raises(CacheMissError):
        receive([None], ["new"])
    cache = receive.__self__
    if isinstance(cache, BaseMultiModalReceiverCache):
        with raises(TypeError, names, hint):
            cache.get_and_update_item(bad, "bad")
        batch = features(["new", "bad"], [item(2), bad])
        with raises(TypeError, names, hint):
            cache.get_and_update_features(batch)
        assert item(2) == batch[0].data
        assert batch[1].data is bad
