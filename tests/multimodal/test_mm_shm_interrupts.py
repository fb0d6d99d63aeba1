"""A call of the `shm` sender that fails, or that an interrupt ends at any place, leaves everything as it was."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shmstore import CacheMissError, ObjectRef, ObjectStoreWriter, refs, store
from shmstore.bindings import store as native
from shmstore.multimodal import (
    CacheInfo,
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    ShmObjectStoreSenderCache,
    processor_cache_from_config,
    shm_pair,
)
from shmstore.multimodal.caches import shadow
from tests.interrupts import Interrupt, interrupted_at
from tests.multimodal.helpers import MIB, config, features, item, update

FILES = [module.__file__ for module in (native, store, refs, shadow, shm_pair)]


def _sender(book: int = 2500) -> ShmObjectStoreSenderCache:
    """A and b are cached; c is stored, but its updates have gone; there is no room for d's beside theirs."""
    sender = processor_cache_from_config(config(book, MIB, cache_type="shm", shm_max_object_size_mb=1))
    assert isinstance(sender, ShmObjectStoreSenderCache)
    for mm_hash in "cab":
        sender.release([sender.get_and_update_item(_given(mm_hash), mm_hash)[0]])
    return sender


def _given(mm_hash: str, nbytes: int = 30) -> tuple[MultiModalKwargsItem, list[Any]]:
    return item(nbytes), [update(mm_hash * 1000)]


def _unknown() -> MultiModalKwargsItem:
    """An item with nothing in it that the serializer knows."""
    return MultiModalKwargsItem.from_elems([MultiModalFieldElem("image", "k", object(), MultiModalBatchedField())])


def _state(sender: ShmObjectStoreSenderCache) -> dict[str, Any]:
    return {
        "leases": sender.writer.stats().open_leases,
        "keys": sender.writer.keys(),
        "updates": dict(sender._book._entries),
        "nbytes": sender._book.nbytes,
        "counts": sender.make_stats(),
        "inline": (sender.inline_full, sender.inline_too_large),
        "cached": sender.is_cached(list("abcd")),
    }


def _batch(*pairs: tuple[str, Any]) -> Callable[[ShmObjectStoreSenderCache], Any]:
    hashes = [mm_hash for mm_hash, _ in pairs]
    inputs = [given for _, given in pairs]
    return lambda sender: sender.get_and_update(inputs, hashes)


CALLS: dict[str, Callable[[ShmObjectStoreSenderCache], Any]] = {
    "hit": lambda sender: sender.get_and_update_item(None, "a"),
    "miss": lambda sender: sender.get_and_update_item((item(30), []), "d"),
    "miss that pushes updates out": lambda sender: sender.get_and_update_item(_given("d"), "d"),
    "miss of updates only": lambda sender: sender.get_and_update_item(_given("c"), "c"),
    "too large": lambda sender: sender.get_and_update_item(_given("d", 2 * MIB), "d"),
    "batch of one": _batch(("d", _given("d"))),
    "batch": _batch(("a", None), ("d", _given("d")), ("c", _given("c")), ("b", None), ("e", _given("e", 2 * MIB))),
    "batch of misses": _batch(("d", (item(30), [])), ("e", (item(30), []))),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_interrupted_leaves_everything_as_it_was(name: str) -> None:
    number, again = 0, True
    while again:
        number += 1
        with _sender() as sender:
            before = _state(sender)
            again = interrupted_at(number, lambda: CALLS[name](sender), *FILES, exact=True)
            if again:
                assert before == _state(sender), f"interrupt {number}"
                sender.writer.check_valid()
                CALLS[name](sender)  # no lock, no protection is left
    assert number > 10


@pytest.mark.parametrize("name", ["hit", "miss", "miss that pushes updates out", "batch"])
def test_what_a_second_interrupt_leaves_of_the_first_the_next_call_undoes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: ShmObjectStoreSenderCache) -> None:
        raise Interrupt  # before its first step

    number, again = 0, True
    while again:
        number += 1
        with _sender() as sender:
            before = _state(sender)
            with monkeypatch.context() as patch:
                patch.setattr(ShmObjectStoreSenderCache, "_mend_surely", interrupted)
                again = interrupted_at(number, lambda: CALLS[name](sender), *FILES, exact=True)
            if again:
                sender.release([])
                assert before == _state(sender), f"interrupt {number}"
                sender.writer.check_valid()
    assert number > 10


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("call", [lambda s: s.invalidate(["a", "b"]), lambda s: s.clear_cache()])
def test_an_interrupt_while_items_are_taken_out_leaves_no_updates_without_an_item(
    call: Callable[[ShmObjectStoreSenderCache], Any], exact: bool
) -> None:
    number, again = 0, True
    while again:
        number += 1
        with _sender() as sender:
            again = interrupted_at(number, lambda: call(sender), *FILES, exact=exact)
            assert set(sender._book._entries) <= set(sender.writer.keys()), f"interrupt {number}"
            assert sender._book.nbytes == sum(size for _, size in sender._book._entries.values())
            sender.writer.check_valid()
            call(sender)
            assert [False, False] == sender.is_cached(["a", "b"])
    assert number > 10


def test_an_interrupt_while_a_failed_batch_is_undone_leaves_everything_as_it_was() -> None:
    call = _batch(("a", None), ("d", _given("d")), ("c", _given("c")), ("bad", (_unknown(), [])))
    number, again = 0, True
    while again:
        number += 1
        with _sender() as sender:
            before = _state(sender)
            try:
                again = interrupted_at(number, lambda: call(sender), *FILES, exact=True)
            except TypeError:
                again = False
            assert before == _state(sender), f"interrupt {number}"
    assert number > 50


def test_an_interrupt_while_a_sender_is_made_leaves_the_writer_to_the_next_though_its_traceback_is_kept() -> None:
    settings = config(MIB, cache_type="shm")
    kept: list[BaseException] = []

    def make(writer: ObjectStoreWriter) -> None:
        try:
            ShmObjectStoreSenderCache(settings, writer)
        except BaseException as error:
            kept.append(error)
            raise

    number = 0
    while True:
        number += 1
        with ObjectStoreWriter.create(capacity=MIB, n_readers=1) as writer:
            if not interrupted_at(number, lambda writer=writer: make(writer), shm_pair.__file__, exact=True):
                break
            ShmObjectStoreSenderCache(settings, writer)
    assert number - 1 == len(kept) > 5


@pytest.mark.parametrize("bad", [False, True], ids=["alone", "and then the batch fails"])
def test_an_interrupt_while_the_store_evicts_leaves_no_updates_without_an_item(bad: bool) -> None:
    more = [("bad", (_unknown(), []))] if bad else []
    call = _batch(("d", _given("d", MIB // 2)), *more)
    number, again = 0, True
    while again:
        number += 1
        with processor_cache_from_config(config(MIB, MIB, cache_type="shm")) as sender:
            assert isinstance(sender, ShmObjectStoreSenderCache)
            for mm_hash in "abc":
                sender.release([sender.get_and_update_item(_given(mm_hash, MIB // 4), mm_hash)[0]])
            try:
                again = interrupted_at(number, lambda: call(sender), *FILES, exact=True)
            except TypeError:
                assert bad
                again = False
            assert set(sender.writer.keys()) == set(sender._book._entries), f"interrupt {number}"
            assert sum(size for _, size in sender._book._entries.values()) == sender._book.nbytes
            assert int(not again and not bad) == sender.writer.stats().open_leases, f"interrupt {number}"
    assert number > 10


# --- ordinary failures ---------------------------------------------------------------------------------------------


def _leases(sender: ShmObjectStoreSenderCache, left: int = 0) -> list[ObjectRef]:
    """Hold all entries for leases but so many."""
    return [sender.writer.get_cached("a") for _ in range(sender.writer.stats().max_leases - left)]


def test_a_batch_that_fails_keeps_the_updates_of_an_item_whose_lease_was_refused() -> None:
    with _sender() as sender:
        held = _leases(sender)
        before = _state(sender)
        with pytest.raises(TypeError, match="no serializer"):
            sender.get_and_update([_given("a"), (_unknown(), [])], ["a", "bad"])
        assert before == _state(sender)
        assert sender.is_cached_item("a")
        assert len(held) == sender.release(held)


def test_a_batch_that_fails_pushes_no_updates_out() -> None:
    with _sender() as sender:
        before = _state(sender)
        with pytest.raises(TypeError, match="no serializer"):
            sender.get_and_update([_given("d"), (_unknown(), [])], ["d", "bad"])
        assert before == _state(sender)
        assert [True, True, False, False] == sender.is_cached(list("abcd"))


@pytest.mark.parametrize("left", [0, 1])
def test_where_leases_run_out_all_that_is_missing_is_named_and_nothing_dropped(left: int) -> None:
    with _sender(book=MIB) as sender:
        held = _leases(sender, left)
        before = _state(sender)
        inputs: Sequence[Any] = [None, None, _given("d"), None, None, None]
        hashes = ["a", "b", "d", "c", "d", "b"]
        with pytest.raises(CacheMissError) as caught:
            sender.get_and_update(inputs, hashes)
        assert ("a", "b", "c")[left:] == caught.value.mm_hashes
        assert before == _state(sender)
        assert [True, True, True] == sender.is_cached(list("abc"))
        sent = sender.get_and_update([_given(mm_hash) for mm_hash in hashes], hashes)
        assert 6 - left == sum(isinstance(what, MultiModalKwargsItem) for what, _ in sent)
        assert [update(mm_hash * 1000) for mm_hash in hashes] == [updates[0] for _, updates in sent]
        sender.release(held)


def test_an_item_that_was_given_goes_inline_where_its_second_lease_is_refused() -> None:
    with _sender() as sender:
        _leases(sender, 1)
        sent = sender.get_and_update([_given("a"), None], ["a", "a"])
        assert [ObjectRef, MultiModalKwargsItem] == [type(what) for what, _ in sent]
        assert CacheInfo(1, 5) == sender.make_stats()


# --- what the caller keeps -----------------------------------------------------------------------------------------


def test_stored_updates_are_nobodys_list() -> None:
    with _sender() as sender:
        mine = [update("d")]
        sender.get_and_update([(item(3), mine), (item(3), mine)], ["d", "e"])
        mine.append(update("later"))
        for _ in range(2):
            outputs = [
                sender.get_and_update_item(None, "d"),
                *sender.get_and_update([None, None, None], ["d", "e", "d"]),
            ]
            for _, updates in outputs:
                assert [update("d")] == updates
                assert isinstance(updates, list)
                updates[0] = updates[0].with_item_idx(5)
                updates.append(update("later"))
        mine = [update("f")]
        sender.get_and_update_item((item(3), mine), "f")[1].append(update("later"))  # type: ignore[attr-defined]
        assert [update("f")] == sender.get_and_update_item(None, "f")[1]


def test_release_of_what_is_no_reference_item_or_none_is_an_error_and_gives_nothing_back() -> None:
    with _sender() as sender:
        output = sender.get_and_update_item(None, "a")
        ref = output[0]
        for wrong in ([output], features(["a"], [ref]), [ref, output], [ref, b""], item(3)):
            with pytest.raises(TypeError, match="ObjectRef, MultiModalKwargsItem or None"):
                sender.release(wrong)  # type: ignore[arg-type]
            assert 1 == sender.writer.stats().open_leases
        assert 1 == sender.release(iter([None, item(3), ref]))
