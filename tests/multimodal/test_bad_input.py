"""What each of the six caches says to what is no input, and that nothing has changed then."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shmstore import CacheMissError, NestingError, ObjectRef, UnsupportedValueError
from shmstore.bindings import store as native
from shmstore.multimodal import (
    BaseMultiModalProcessorCache,
    BaseMultiModalReceiverCache,
    CacheInfo,
    MirroredProcessingCache,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
    MultiModalSharedField,
    ResolvedPromptUpdate,
    ShmObjectStoreReceiverCache,
    ShmObjectStoreSenderCache,
    engine_receiver_cache_from_config,
    processor_cache_from_config,
    processor_only_cache_from_config,
    worker_receiver_cache_from_config,
)
from shmstore.multimodal.caches.checks import MAX_HASH
from tests.multimodal.helpers import MIB, config, features, item, update

GOOD = (item(2), [update("new")])
SHM = config(MIB, MIB, cache_type="shm")


class OfOneMethod(BaseMultiModalProcessorCache):
    """A processor cache of somebody else's, which has only what it must have."""

    def __init__(self):
        self.stored = {}

    def is_cached_item(self, mm_hash):
        return mm_hash in self.stored

    def get_and_update_item(self, mm_item, mm_hash):
        return self.stored.setdefault(mm_hash, mm_item)

    def touch_sender_cache_item(self, mm_hash):
        pass

    def clear_cache(self):
        self.stored.clear()

    def make_stats(self, delta=False):
        return CacheInfo(0, 0)


@pytest.fixture(params=["only", "lru", "shm", "of one method"])
def p0(request):
    """A processor cache that holds "old"."""
    if request.param == "shm":
        with processor_cache_from_config(SHM) as cache:
            cache.release([cache.get_and_update_item((item(2), []), "old")[0]])
            yield cache
        return
    makers = {
        "only": lambda: MultiModalProcessorOnlyCache(config(MIB)),
        "lru": lambda: MultiModalProcessorSenderCache(config(MIB)),
        "of one method": OfOneMethod,
    }
    cache = makers[request.param]()
    cache.get_and_update([(item(2), [])], ["old"])
    yield cache


@pytest.fixture(params=["lru", "shm", "mirrored"])
def receive(request):
    """`get_and_update` of a receiver; of the earlier form, of both its sides."""
    if request.param == "lru":
        yield MultiModalReceiverCache(config(MIB)).get_and_update
    elif request.param == "mirrored":
        yield MirroredProcessingCache(config(MIB)).get_and_update_p1
    else:
        with processor_cache_from_config(SHM) as sender:
            with worker_receiver_cache_from_config(SHM, 0, sender.handle) as worker:
                yield worker.get_and_update


def state(cache):
    return cache.is_cached(["old", "new"]), cache.make_stats(), getattr(cache, "order", None)


BAD_INPUTS = {
    "a tensor": (torch.zeros(3), "got Tensor"),
    "an array": (np.zeros(2), "got ndarray"),
    "an item without updates": (item(2), "got MultiModalKwargsItem"),
    "a tuple of one": ((item(2),), "got a tuple of 1"),
    "a tuple of three": ((item(2), [], None), "got a tuple of 3"),
    "a tensor and updates": ((torch.zeros(3), []), r"got \(Tensor, list\)"),
    "None and updates": ((None, []), r"got \(None, list\)"),
    "an item and None": ((item(2), None), r"got \(MultiModalKwargsItem, None\)"),
    "an item and text": ((item(2), "<image>"), r"got \(MultiModalKwargsItem, str\)"),
    "an item and one update": ((item(2), update("new")), r"got \(MultiModalKwargsItem, ResolvedPromptUpdate\)"),
    "an item and its hash": ((item(2), 7), r"got \(MultiModalKwargsItem, int\)"),
}
BAD_UPDATES = {"texts": (["abc"], 0, "str"), "a number": ([update("x"), 3], 1, "int"), "None": ((None,), 0, "None")}
BAD_UPDATES["what only looks like one"] = ([SimpleNamespace(target="<image>", content="x")], 0, "SimpleNamespace")


@pytest.mark.parametrize(("bad", "got"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_a_processor_cache_says_what_it_expects_and_has_changed_nothing(p0, bad, got):
    before = state(p0)
    with pytest.raises(TypeError, match=f"^input of 'bad': expected None or a tuple .*, {got}$"):
        p0.get_and_update([GOOD, None, bad], ["new", "old", "bad"])
    with pytest.raises(TypeError, match=f"^input of 'bad': .*, {got}$"):
        p0.get_and_update([bad], ["bad"])
    if not isinstance(p0, OfOneMethod):
        with pytest.raises(TypeError, match=f"^input of 'bad': .*, {got}$"):
            p0.get_and_update_item(bad, "bad")
        with pytest.raises(TypeError, match=f"^input of 'old': .*, {got}$"):  # also where it is not needed
            p0.get_and_update_item(bad, "old")
    assert before == state(p0)


@pytest.mark.parametrize(("updates", "index", "kind"), BAD_UPDATES.values(), ids=BAD_UPDATES)
def test_what_is_no_prompt_update_is_refused_before_anything_is_changed(p0, updates, index, kind):
    before = state(p0)
    said = f"^input of 'bad': expected a ResolvedPromptUpdate as prompt update {index}, got {kind}$"
    with pytest.raises(TypeError, match=said):
        p0.get_and_update([GOOD, (item(2), updates)], ["new", "bad"])
    if not isinstance(p0, OfOneMethod):
        with pytest.raises(TypeError, match=said):
            p0.get_and_update_item((item(2), updates), "bad")
        with pytest.raises(TypeError, match=said.replace("bad", "old")):
            p0.get_and_update_item((item(2), updates), "old")
    assert before == state(p0)


def test_updates_may_be_any_sequence(p0):
    for updates in ((update("new"),), [], ()):
        p0.clear_cache()
        _, got = p0.get_and_update([(item(2), updates)], ["new"])[0]
        assert got is updates


@pytest.mark.parametrize("bad", [None, 7, b"new", ["new"]], ids=["None", "int", "bytes", "list"])
def test_a_hash_that_is_no_text_is_a_type_error_and_nothing_has_changed(p0, bad):
    before = state(p0)
    said = rf"^expected a str as mm_hash(es\[1\])?, got {'None' if bad is None else type(bad).__name__}$"
    for given in (GOOD, None):
        with pytest.raises(TypeError, match=said):
            p0.get_and_update([GOOD, given], ["new", bad])
        if not isinstance(p0, OfOneMethod):
            with pytest.raises(TypeError, match=said):
                p0.get_and_update_item(given, bad)
    assert before == state(p0)


def test_one_hash_where_several_are_expected_is_not_taken_for_its_letters(p0):
    said = "^expected a sequence of hashes as mm_hashes, got one str$"
    calls = [p0.is_cached, lambda mm_hashes: p0.get_and_update([None] * 3, mm_hashes)]
    calls += [p0.invalidate] if hasattr(p0, "invalidate") else []
    for call in calls:
        with pytest.raises(TypeError, match=said):
            call("old")
    with pytest.raises(TypeError, match="got one str"):
        MirroredProcessingCache(config(MIB)).invalidate("old")


@pytest.mark.parametrize("bad", [None, 7, b"old", ["old"]], ids=["None", "int", "bytes", "list"])
def test_a_question_about_or_a_miss_of_what_is_no_hash_is_an_error_and_has_changed_nothing(p0, bad):
    before = state(p0)
    calls = [p0.is_cached] + ([p0.invalidate] if hasattr(p0, "invalidate") else [])
    for call in calls:
        with pytest.raises(TypeError, match=r"^expected a str as mm_hashes\[1\], got "):
            call(["old", bad])
        with pytest.raises(TypeError, match=r"^expected a str as mm_hashes\[1\], got "):
            call(mm_hash for mm_hash in ("old", bad))
        if bad in (None, 7):
            with pytest.raises(TypeError, match=r"^expected a sequence of hashes as mm_hashes, got "):
                call(bad)
    assert before == state(p0)


def test_different_lengths_change_nothing_either_way(p0):
    before = state(p0)
    for inputs, mm_hashes in (([GOOD], ["new", "old"]), ([GOOD, None], ["new"]), ([], ["new"])):
        with pytest.raises(ValueError, match=f"^{len(inputs)} items but {len(mm_hashes)} hashes$"):
            p0.get_and_update(inputs, mm_hashes)
    assert before == state(p0)


def test_an_empty_batch_is_nothing(p0):
    before = state(p0)
    assert [] == p0.get_and_update([], [])
    assert [] == p0.is_cached([])
    assert before == state(p0)


NO_KEYS = ["", "x" * 100_000, "é" * (MAX_HASH // 2 + 1), "\udc80"]


@pytest.mark.parametrize("bad", NO_KEYS, ids=["empty", "long", "long in UTF-8", "surrogate"])
def test_a_hash_that_the_store_could_not_keep_is_the_same_error_in_every_mode(p0, receive, bad):
    assert native.MAX_KEY == MAX_HASH
    before = state(p0)
    said = rf"^expected a str (of 1 to {MAX_HASH} bytes in UTF-8|that UTF-8 can encode) as mm_hash(es\[1\])?, got "
    calls = [
        lambda: p0.get_and_update([GOOD, GOOD], ["new", bad]),
        lambda: p0.get_and_update([None], [bad]),
        lambda: p0.is_cached(["old", bad]),
        lambda: p0.invalidate(["old", bad]),
        lambda: receive([item(2), item(2)], ["new", bad]),
    ]
    if not isinstance(p0, OfOneMethod):
        calls += [
            lambda: p0.get_and_update_item(GOOD, bad),
            lambda: p0.get_and_update_item(None, bad),
            lambda: p0.is_cached_item(bad),
            lambda: p0.touch_sender_cache_item(bad),
        ]
    for call in calls:
        with pytest.raises(ValueError, match=said):
            call()
    assert before == state(p0)
    longest = ["é" * (MAX_HASH // 2), "x" * MAX_HASH]
    p0.get_and_update([GOOD] * 2, longest)
    assert [True, True] == p0.is_cached(longest)


@pytest.mark.parametrize("bad", [None, 7, ["old"]], ids=["None", "int", "list"])
def test_what_is_no_hash_cannot_be_asked_for_or_touched(p0, receive, bad):
    if not isinstance(p0, OfOneMethod):
        for call in (p0.is_cached_item, p0.touch_sender_cache_item):
            with pytest.raises(TypeError, match=r"^expected a str as mm_hash, got "):
                call(bad)
    if isinstance(receive.__self__, BaseMultiModalReceiverCache):
        with pytest.raises(TypeError, match=r"^expected a str as mm_hash, got "):
            receive.__self__.touch_receiver_cache_item(bad)


def image(**data):
    return MultiModalKwargsItem.from_elems(
        [MultiModalFieldElem("image", key, value, MultiModalSharedField(1)) for key, value in data.items()]
    )


def quantised():
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


def nested(**more):
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], **more)


BAD_VALUES = {
    "sparse": (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
    "meta": (torch.zeros(2, device="meta"), "on the meta device"),
    "deep": ([{"x": torch.eye(2).to_sparse()}], "layout torch.sparse_coo"),
    "quantised": (quantised(), "dtype torch.quint8 .hint: store tensor.dequantize"),
    "nested": (nested(), "nested tensor .hint: store the list of its tensors"),
    "jagged": (nested(layout=torch.jagged), "([nN]ested ?[tT]ensor) .hint: store the list of its tensors"),
    "objects": (np.array([3, "a"], object), "array of object dtype .hint: store array.tolist"),
    "strings": (np.array(["a"], np.dtypes.StringDType()), "array of object dtype .hint: store numpy.array"),
}


@pytest.mark.parametrize(("bad", "why"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_a_tensor_or_array_that_the_store_refuses_is_the_same_error_in_every_mode(p0, receive, bad, why):
    if isinstance(p0, OfOneMethod):
        return
    before = state(p0)
    item_of_it = image(fine=torch.zeros(3), px=bad)
    said = rf"^item of 'bad': value<MultiModalKwargsItem>\['px'\].*: no serializer for .*{why}"
    for call in (
        lambda: p0.get_and_update_item((item_of_it, []), "bad"),
        lambda: p0.get_and_update([GOOD, (item_of_it, [])], ["new", "bad"]),
    ):
        with pytest.raises(UnsupportedValueError, match=said) as caught:
            call()
        assert caught.value.path.startswith("value<MultiModalKwargsItem>['px']")
    assert before == state(p0)
    if not isinstance(receive.__self__, ShmObjectStoreReceiverCache):  # which keeps nothing
        with pytest.raises(UnsupportedValueError, match=said):
            receive([item(2), item_of_it], ["new", "bad"])
        with pytest.raises(CacheMissError):
            receive([None], ["new"])


def test_an_item_that_contains_itself_is_the_same_error_in_every_mode(p0, receive):
    if isinstance(p0, OfOneMethod):
        return
    data = [torch.zeros(3)]
    data.append(data)
    endless = image(px=data)
    before = state(p0)
    with pytest.raises(NestingError, match=r"^item of 'bad'.*contain"):
        p0.get_and_update([GOOD, (endless, [])], ["new", "bad"])
    assert before == state(p0)
    if not isinstance(receive.__self__, ShmObjectStoreReceiverCache):  # to which it cannot come
        with pytest.raises(NestingError, match=r"^item of 'bad'.*contain"):
            receive([endless], ["bad"])


@pytest.mark.parametrize("bad", [torch.eye(2).to_sparse(), None], ids=["sparse", "contains itself"])
def test_prompt_updates_that_have_no_size_are_named_with_their_item_in_every_mode(p0, bad):
    if isinstance(p0, OfOneMethod):
        return
    content = ["<image>", bad]
    if bad is None:
        content.append(content)
    before = state(p0)
    updates = [ResolvedPromptUpdate("image", 0, "insert", "", content)]
    for inputs, hashes in (([(item(2), updates)], ["bad"]), ([GOOD, (item(2), updates)], ["new", "bad"])):
        with pytest.raises((NestingError, UnsupportedValueError), match=r"^prompt updates of 'bad': "):
            p0.get_and_update(inputs, hashes)
    assert before == state(p0)


def test_what_the_store_cannot_keep_is_named_with_its_item():
    deep = torch.zeros(1)
    for _ in range(3000):
        deep = [deep]
    with processor_cache_from_config(SHM) as sender:
        for value, kind in (({1, 2}, TypeError), (deep, ValueError)):
            for call in (sender.get_and_update_item, lambda *one: sender.get_and_update([GOOD, one[0]], ["a", one[1]])):
                with pytest.raises(
                    kind,
                    match=r"^item of 'bad': (value<MultiModalKwargsItem>\['px'\]: no .* set|the value is nested)",
                ):
                    call((image(px=value), []), "bad")
        assert ([], CacheInfo(0, 0)) == (sender.writer.keys(), sender.make_stats())


BAD_ITEMS = {
    "a tensor": (torch.zeros(3), "Tensor"),
    "what the sender takes": (GOOD, r"tuple \(hint: the first member .*\)"),
    "bytes of a reference": (b"x" * 40, "bytes"),
    "a dict": ({"pixels": torch.zeros(3)}, "dict"),
}


@pytest.mark.parametrize(("bad", "kind"), BAD_ITEMS.values(), ids=BAD_ITEMS)
def test_a_receiver_says_what_it_expects_and_has_changed_nothing(receive, bad, kind):
    said = f"^item of 'bad': expected None or a MultiModalKwargsItem, got {kind}$"
    for batch in ([item(2), bad], [bad, item(2)]):
        with pytest.raises(TypeError, match=said):
            receive(batch, ["new" if piece is not bad else "bad" for piece in batch])
    with pytest.raises(CacheMissError):
        receive([None], ["new"])
    cache = receive.__self__
    if isinstance(cache, BaseMultiModalReceiverCache):
        with pytest.raises(TypeError, match=said):
            cache.get_and_update_item(bad, "bad")
        batch = features(["new", "bad"], [item(2), bad])
        with pytest.raises(TypeError, match=said):
            cache.get_and_update_features(batch)
        assert item(2) == batch[0].data
        assert batch[1].data is bad


def test_a_receiver_takes_no_hash_that_is_no_text_and_no_other_number_of_them(receive):
    for bad in (None, 7):
        for given in (None, item(2)):
            with pytest.raises(TypeError, match=r"expected a str as mm_hashes\[1\]"):
                receive([item(2), given], ["new", bad])
    with pytest.raises(TypeError, match="got one str"):
        receive([item(2)], "n")
    with pytest.raises(ValueError, match=r"^1 items but 2 hashes$"):
        receive([item(2)], ["new", "old"])
    with pytest.raises(CacheMissError):
        receive([None], ["new"])
    assert [] == receive([], [])


def test_a_worker_asked_for_nothing_under_no_hash_is_told_so():
    with processor_cache_from_config(SHM) as sender:
        with worker_receiver_cache_from_config(SHM, 0, sender.handle) as worker:
            with pytest.raises(TypeError, match="expected a str as mm_hash, got None"):
                worker.get_and_update_item(None, None)


def test_a_worker_reads_no_reference_of_a_batch_in_which_another_input_is_none():
    with processor_cache_from_config(SHM) as sender:
        with worker_receiver_cache_from_config(SHM, 0, sender.handle) as worker:
            ref, _ = sender.get_and_update_item(GOOD, "new")
            assert isinstance(ref, ObjectRef)
            with pytest.raises(TypeError, match="item of 'bad'"):
                worker.get_and_update([ref, torch.zeros(3)], ["new", "bad"])
            assert 0 == worker.reader.stats().gets


def test_the_sending_side_of_the_earlier_form_takes_items_and_texts_alone():
    cache = MirroredProcessingCache(config(MIB))
    for bad, kind in BAD_ITEMS.values():
        with pytest.raises(TypeError, match=f"^item of 'bad': .*, got {kind}$"):
            cache.get_and_update_p0([item(2), bad], ["new", "bad"])
    with pytest.raises(TypeError, match=r"mm_hashes\[1\], got None"):
        cache.get_and_update_p0([item(2), item(2)], ["new", None])
    assert (None, CacheInfo(0, 0)) == (cache.get_item("new"), cache.make_stats())


NO_FEATURES = {
    "a reference": (ObjectRef(bytes(40)), "got ObjectRef$"),
    "references": ([ObjectRef(bytes(40))], "got one with ObjectRef in it"),
    "hashes": (["a"], "got one with str in it"),
    "None": (None, "got None$"),
}


@pytest.mark.parametrize(("bad", "got"), NO_FEATURES.values(), ids=NO_FEATURES)
def test_a_receiver_says_that_it_expects_features(receive, bad, got):
    cache = receive.__self__
    if isinstance(cache, BaseMultiModalReceiverCache):
        with pytest.raises(TypeError, match=f"^expected a sequence of MultiModalFeatureSpec as features, {got}"):
            cache.get_and_update_features(bad)
        good = features(["a"], [item(2)])
        with pytest.raises(TypeError, match="MultiModalFeatureSpec as features"):
            cache.get_and_update_features([*good, item(2)])
        with pytest.raises(CacheMissError):
            receive([None], ["a"])


def test_whoever_takes_a_configuration_says_what_it_was_given_instead():
    takers = [
        processor_cache_from_config,
        processor_only_cache_from_config,
        engine_receiver_cache_from_config,
        lambda settings: worker_receiver_cache_from_config(settings, 0),
        MultiModalProcessorOnlyCache,
        MultiModalProcessorSenderCache,
        MultiModalReceiverCache,
        MirroredProcessingCache,
        lambda settings: ShmObjectStoreSenderCache(settings, None),
    ]
    for taker in takers:
        for bad in ({"cache_type": "lru"}, None):
            with pytest.raises(TypeError, match=f"^config must be a MultiModalCacheConfig, not {type(bad).__name__}$"):
                taker(bad)


def test_swapped_or_wrong_roles_are_named():
    with processor_cache_from_config(SHM) as sender:
        with pytest.raises(TypeError, match=r"^config must be a MultiModalCacheConfig, not ObjectStoreWriter$"):
            ShmObjectStoreSenderCache(sender.writer, SHM)
        with pytest.raises(TypeError, match=r"^writer must be an ObjectStoreWriter, not StoreHandle$"):
            ShmObjectStoreSenderCache(SHM, sender.handle)
        with pytest.raises(TypeError, match=r"^reader must be an ObjectStoreReader, not ObjectStoreWriter$"):
            ShmObjectStoreReceiverCache(sender.writer)
        for bad in (sender.handle.to_json(), sender.writer):
            with pytest.raises(TypeError, match=f"^handle must be a StoreHandle, not {type(bad).__name__}"):
                worker_receiver_cache_from_config(SHM, 0, bad)
    for settings in (SHM, config(MIB)):
        for rank in (None, "0"):
            with pytest.raises(TypeError, match=f"^rank must be an int, not {type(rank).__name__}$"):
                worker_receiver_cache_from_config(settings, rank)
