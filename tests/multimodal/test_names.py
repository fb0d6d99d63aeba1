"""A name may come with another content: what a receiver gets is an item and the updates that one call gave with it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmstore import CacheMissError, ObjectRef, ObjectStoreReader, ObjectStoreWriter
from shmstore.multimodal import (
    MirroredProcessingCache,
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalProcessorOnlyCache,
    MultiModalProcessorSenderCache,
    MultiModalReceiverCache,
    ResolvedPromptUpdate,
    ShmObjectStoreReceiverCache,
    ShmObjectStoreSenderCache,
)
from shmstore.tiers import StoreTier
from tests.multimodal.helpers import MIB, config, item, shm_sender, shm_worker, update
from tests.support import is_held, store_name
from tests.tiers.memory import MemoryTier

NOT_DATA = ResolvedPromptUpdate("image", 0, "insert", "", frozenset((1,)))
A, SAME_SIZE, LARGER = (item(10), [update("a")]), (item(10, 2), [update("b")]), (item(20, 3), [NOT_DATA])
CONTENTS = [A, SAME_SIZE, LARGER]
UNPUBLISHED = 2
"""Of them, the one whose prompt updates cannot leave the host."""


@contextmanager
def engine(mode: str, size: int = MIB) -> Iterator[tuple[Any, Callable[[list[Any]], list[Any]]]]:
    """Yield P0's cache, and what gives its inputs for the name "k" and returns the pairs that reach the model."""
    receive: Any
    with ExitStack() as stack:
        if mode == "only":
            cache: Any = MultiModalProcessorOnlyCache(config(size))
            receive = lambda sent, _: sent  # noqa: E731
        elif mode == "lru":
            cache = MultiModalProcessorSenderCache(config(MIB, size))
            receive = MultiModalReceiverCache(config(MIB, size)).get_and_update
        else:
            chosen = config(MIB, size, cache_type="shm")
            cache = stack.enter_context(shm_sender(chosen))
            receive = stack.enter_context(shm_worker(chosen, 0, cache.handle)).get_and_update

        def request(inputs: list[Any]) -> list[Any]:
            outputs = cache.get_and_update(inputs, ["k"] * len(inputs))
            got = receive([sent for sent, _ in outputs], ["k"] * len(inputs))
            return [(one, updates) for one, (_, updates) in zip(got, outputs, strict=True)]

        yield cache, request


MODES = pytest.mark.parametrize("mode", ["only", "lru", "shm"])


@MODES
def test_another_content_replaces_the_one_before_and_an_equal_one_is_a_hit(mode: str) -> None:
    with engine(mode) as (cache, request):
        for content in (A, SAME_SIZE, LARGER, A):
            for again in (content, (item(*sizes(content)), content[1]), None):
                assert [content] == request([again])
        assert (8, 12) == (cache.make_stats().hits, cache.make_stats().total)


def sizes(content: Any) -> tuple[int, int]:
    data = content[0]["pixels"].data
    return len(data), int(data[0])


@MODES
def test_repetitions_in_one_call_that_differ_are_two_objects(mode: str) -> None:
    twin = (item(10, 4), A[1])  # differs from A in neither size nor updates
    for before in (None, A, SAME_SIZE):
        with engine(mode) as (cache, request):
            if before:
                request([before])
            assert [A, A, twin, twin, SAME_SIZE, A] == request([A, None, twin, None, SAME_SIZE, A])
            assert [A] == request([None])
            assert mode != "shm" or not is_held(cache.writer)


@MODES
def test_what_fits_no_more_leaves_nothing_under_its_name(mode: str) -> None:
    large = (item(3 * MIB, 5), [update("large")])
    with engine(mode, 2 * MIB) as (cache, request):
        request([A])
        assert [large] * 2 == request([large, None])
        assert not cache.is_cached_item("k")
    book = config(1000, MIB)
    lru = MultiModalProcessorSenderCache(book)
    for content in (A, (item(2000), [update("b")])):  # P0 would have to keep it
        assert content == lru.get_and_update_item(content, "k")
    assert not lru.is_cached_item("k")


def test_mirrored_sides_compare_items_too() -> None:
    p0, p1 = (MirroredProcessingCache(config(MIB)) for _ in range(2))
    for content, sent in ((A[0], True), (item(10), False), (SAME_SIZE[0], True), (None, False)):
        [out] = p0.get_and_update_p0([content], ["k"])
        assert (out is not None) == sent
        [got] = p1.get_and_update_p1([out], ["k"])
        assert (content or SAME_SIZE[0]) == got


def test_lru_compares_sizes_and_once_a_name_has_changed_items() -> None:
    with engine("lru") as (_, request):
        for content in (A, (item(11), A[1]), (item(11, 4), A[1])):
            assert [content] == request([content])


def test_lru_counts_on_nothing_after_a_change_whose_request_was_dropped() -> None:
    with engine("lru") as (cache, request):
        request([A])
        cache.get_and_update([SAME_SIZE], ["k"])  # never reaches P1
        assert [SAME_SIZE] == request([None])


def holding(data: object) -> MultiModalKwargsItem:
    return MultiModalKwargsItem.from_elems([MultiModalFieldElem("image", "k", data, MultiModalBatchedField())])


@pytest.mark.parametrize("data", [torch.eye(3).T[:2], np.arange(6.0)[::2], torch.arange(6)])
def test_what_is_equal_is_a_hit_however_it_lies_in_memory(data: Any) -> None:
    with shm_sender(config(MIB, MIB, cache_type="shm")) as sender:
        inputs = [holding(each) for each in (data, data * 1, data + 1, data)]
        refs: list[Any] = [sender.get_and_update_item((each, []), "k")[0] for each in inputs]
    first, again, other, third = [ref.monotonic_id for ref in refs]
    assert (first == again, len({first, other, third})) == (True, 3)


def test_an_item_that_cannot_be_stored_leaves_the_one_that_is() -> None:
    with engine("shm") as (_, request):
        request([A])
        with pytest.raises(TypeError, match=r"item of 'k': .*no serializer for object"):
            request([(holding(object()), [])])
        assert [A] == request([None])


def test_an_item_goes_inline_while_another_thread_fetches_one_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine("shm") as (cache, request):
        request([LARGER])
        cache._updates._beside.clear()  # as after a restart
        invalidate = cache.invalidate
        begun: list[Any] = []

        def overtaken(mm_hash: str) -> None:
            invalidate(mm_hash)
            begun.append(cache.writer.begin("k", torch.zeros(3)))

        monkeypatch.setattr(cache, "invalidate", overtaken)
        assert [LARGER] == request([LARGER])
        assert (1, 1) == (cache.inline_late, len(begun))


def test_updates_that_were_lost_are_never_those_of_another_item() -> None:
    """138 features for 638 places: the item that was stored, and the updates of the one that was given."""
    writer = ObjectStoreWriter.create(store_name(), capacity=MIB, n_readers=1)
    chosen = config(MIB, MIB, cache_type="shm")
    with ShmObjectStoreSenderCache(chosen, writer) as sender:
        old, _ = sender.get_and_update_item(LARGER, "k")
        writer.close(unlink=False)
    with ObjectStoreWriter.recover(writer.name) as writer, ObjectStoreReader.attach(writer.name) as reader:
        sender = ShmObjectStoreSenderCache(chosen, writer)
        ref, updates = sender.get_and_update_item(A, "k")
        assert isinstance(ref, ObjectRef)
        assert isinstance(old, ObjectRef)
        assert (reader.get(ref), updates) == A
        assert reader.get(old) == LARGER[0], "what was handed out stays valid"


class Fleet:
    """Two senders and a worker of one store, with a tier; and another host."""

    def __init__(self, stack: ExitStack) -> None:
        self.memory = MemoryTier()
        self.name = store_name()
        owner = ObjectStoreWriter.create(self.name, capacity=MIB, n_readers=1, n_writers=2, writes=False)
        self.senders = [self.sender(ObjectStoreWriter.join(self.name)) for _ in range(2)]
        self.elsewhere = self.sender(ObjectStoreWriter.create(capacity=MIB, n_readers=1, n_writers=2))
        reader = stack.enter_context(ObjectStoreReader.attach(self.name))
        self.worker: Any = ShmObjectStoreReceiverCache(reader)
        self.unread: list[tuple[Any, Any, list[Any]]] = []
        self.named: list[Any] = [None]
        """What the name may stand for: the last item given here, and those of the tier."""
        stack.callback(owner.close)
        stack.callback(lambda: [each.close() for each in [*self.senders, self.elsewhere]])

    def sender(self, writer: ObjectStoreWriter) -> Any:
        tier = StoreTier(writer, self.memory)
        tier._costs.worth = lambda nbytes: True  # type: ignore[method-assign]
        return ShmObjectStoreSenderCache(
            config(MIB, MIB, cache_type="shm", shm_name=self.name, api_process_count=2), writer, tier=tier
        )

    def give(self, who: int, content: int) -> None:
        mine = CONTENTS[content]
        self.unread.append((*self.senders[who].get_and_update_item(mine, "k"), [mine]))
        if content == UNPUBLISHED:  # the tier keeps what it has
            self.named.insert(0, mine)
        else:
            self.named[:1] = [mine]
        assert self.senders[who].tier.flush(10)

    def ask(self, who: int, content: int) -> None:
        with suppress(CacheMissError):
            if self.senders[who].is_cached_item("k"):
                self.unread.append((*self.senders[who].get_and_update_item(None, "k"), [*self.named]))

    def restart(self, who: int, content: int) -> None:
        index = self.senders[who].writer.index
        self.senders[who].close(unlink=False)
        self.senders[who] = self.sender(ObjectStoreWriter.join(self.name, index))

    def publish(self, who: int, content: int) -> None:
        self.elsewhere.get_and_update_item(CONTENTS[content], "k")
        assert self.elsewhere.tier.flush(10)
        self.named.append(CONTENTS[content])

    def evict(self, who: int, content: int) -> None:
        self.senders[who].writer.clear()

    def read(self, who: int, content: int) -> None:
        for sent, updates, expected in self.unread:
            with suppress(CacheMissError):  # its writer was restarted
                assert (self.worker.get_and_update_item(sent, "k"), updates) in expected
        self.unread.clear()


OPERATIONS = [Fleet.give, Fleet.give, Fleet.ask, Fleet.restart, Fleet.publish, Fleet.evict, Fleet.read]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 1), st.integers(0, 2)), max_size=12))
def test_a_receiver_gets_a_pair_that_one_call_gave_and_a_caller_its_own(steps: list[Any]) -> None:
    with ExitStack() as stack:
        fleet = Fleet(stack)
        for operation, who, content in steps:
            operation(fleet, who, content)
        fleet.read(0, 0)
