"""Prompt updates are stored with their item, if they are data, and stay in P0 if they are not."""

import functools
import json
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import torch

from shmstore import CacheMissError, ObjectRef, ObjectStoreReader, ObjectStoreWriter
from shmstore.bindings import store as native
from shmstore.errors import CorruptStoreError
from shmstore.inspect.inspector import StoreInspector
from shmstore.multimodal import CacheTypes, ResolvedPromptUpdate, ShmObjectStoreSenderCache
from shmstore.multimodal.caches import stored_updates
from shmstore.multimodal.values.types import MULTIMODAL
from shmstore.multimodal.values.updates import _MAX_REPEATED, decode_updates, encode_updates, shortened
from shmstore.scheduler.events import KVCacheEvent, KVEventBatch
from shmstore.serde.encode import encode_tree
from tests.multimodal.helpers import MIB, config, item, update
from tests.support import in_child, raises, store_name

KIB = 1 << 10
NOT_DATA = [ResolvedPromptUpdate("image", 0, "insert", "", frozenset((1,)))]


@contextmanager
def sender_of(
    writer: ObjectStoreWriter, types: CacheTypes[Any, Any] = MULTIMODAL
) -> Iterator[ShmObjectStoreSenderCache[Any, Any]]:
    settings = config(MIB, writer.stats().capacity, cache_type="shm")
    with ShmObjectStoreSenderCache(settings, writer, types=types) as sender:
        yield sender


def make(capacity: int = MIB, **options: Any) -> ObjectStoreWriter:
    return ObjectStoreWriter.create(store_name(), capacity=capacity, n_readers=1, **options)


def send(sender: ShmObjectStoreSenderCache[Any, Any], mm_hash: str, updates: Any, nbytes: int = 10) -> Any:
    sent, given = sender.get_and_update_item((item(nbytes), updates), mm_hash)
    sender.release([sent])
    return given


def hit(sender: ShmObjectStoreSenderCache[Any, Any], mm_hash: str) -> Any:
    sent, updates = sender.get_and_update_item(None, mm_hash)
    sender.release([sent])
    return updates


def restarted(writer: ObjectStoreWriter) -> ObjectStoreWriter:
    writer.close(unlink=False)
    return ObjectStoreWriter.recover(writer.name)


CONTENTS = [
    "",
    "<image>",
    "é\x00",
    [1, 2, 151655],
    [1, 2, True],
    [1, 2.0],
    [1, -(2**31), 2**31 - 1],
    [1, 2**31],
    [1, [2]],
    *([7] * 40 + [last] for last in (8, True, False, 2.0, 2**31, "8")),
    (),
    (1, ("a", [2, (3,)])),
    {"a": (1,), 2: None, "b": [True, 1.5, b"\xff"]},
    -(2**63),
    2**64,
    "\ud800",
    list(range(100_000)),
]


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: str(content)[:20])
def test_data_comes_back_as_it_was(content: Any) -> None:
    updates = [
        ResolvedPromptUpdate("image", 3, "replace", content, "x"),
        ResolvedPromptUpdate("v", 0, "insert", 1, content),
    ]
    packed = encode_updates(updates)
    rows = [[each.modality, each.item_idx, each.mode, each.target, *shortened(each.content)] for each in updates]
    assert packed is not None
    assert encode_tree(rows).meta == packed
    assert updates == decode_updates(packed)
    assert repr(updates) == repr(decode_updates(packed))


@pytest.mark.parametrize("content", [{1, 2}, torch.zeros(2), len, type("S", (str,), {})("s")])
def test_what_is_not_data_is_not_encoded(content: Any) -> None:
    assert encode_updates([ResolvedPromptUpdate("image", 3, "replace", content, "x")]) is None


def packed_row(modality: Any = "image", content: Any = "") -> bytes:
    return bytes(msgpack.packb([[modality, 0, "insert", "", 0, content]]))


@pytest.mark.parametrize(
    "packed",
    [b"", b"\xc1", b"\x01", b"\x91\x01", b"\x91\x95\x01\x01\x01\x01\x01", b"\x91\xd4\x07\x01", packed_row([1])],
)
def test_other_bytes_are_refused(packed: bytes) -> None:
    with raises((ValueError, TypeError)):
        decode_updates(packed)


def nested(depth: int) -> Any:
    return (nested(depth - 1),) if depth else 1


def test_updates_are_nested_as_deep_as_they_can_be_read_and_no_deeper() -> None:
    found = {}
    for depth in range(90, 101):
        updates = [ResolvedPromptUpdate("image", 0, "insert", "", nested(depth))]
        packed = encode_updates(updates)
        assert packed is None or updates == decode_updates(packed)
        found[packed is None] = depth
    assert {False, True} == set(found)
    with raises(CorruptStoreError):
        decode_updates(packed_row(content=json.loads("[" * 100 + "]" * 100)))


def test_all_lists_that_repeat_one_int_have_one_limit() -> None:
    half = [7] * (_MAX_REPEATED // 2)
    two, three = ([ResolvedPromptUpdate("image", 0, "insert", "", half)] * n for n in (2, 3))
    assert two == decode_updates(encode_updates(two) or b"")
    assert encode_updates(three) is None
    with raises(CorruptStoreError, names=[str(_MAX_REPEATED)]):
        decode_updates(msgpack.packb([["image", 0, "insert", "", len(half), 7]] * 3))


def _ext(code: int, data: bytes) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(code, data)))


ATTACKS = {
    "ext types in ext types": functools.reduce(lambda packed, _: _ext(0, b"\x91" + packed), range(200), b"\x01"),
    "tuples in tuples": b"\x92\xc7\x00\x01" * 200 + b"\x01",
    "a run of 2^27": msgpack.packb([["image", 0, "insert", "", 1 << 27, 1]]),
    "2^14 runs of 2^20": msgpack.packb([["image", 0, "insert", "", 1 << 20, 1]] * (1 << 14)),
    "an array of many in an array of many": b"\xdd\x00\x0f\xff\xf0" * 900 + b"\0" * (1 << 20),
}


def _refused(decode: Callable[[bytes], Any]) -> int:
    """Return how many attacks are refused; a process that runs it has 3 seconds and 300 MB."""
    resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for packed in ATTACKS.values():
        try:
            decode(packed)
        except (ValueError, TypeError):
            refused += 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000
    return refused


@pytest.mark.parametrize("decode", [decode_updates, KVCacheEvent.from_msgpack, KVEventBatch.from_msgpack])
def test_a_short_attack_takes_no_stack_no_memory_and_no_time(decode: Callable[[bytes], Any]) -> None:
    assert in_child(_refused, decode) == len(ATTACKS)


def test_an_object_with_such_updates_is_a_miss_for_the_next_writer() -> None:
    attacks = iter(ATTACKS.values())
    types = replace(MULTIMODAL, encode_updates=lambda _: next(attacks))
    with sender_of(make(8 * MIB), types) as sender:
        for attack in ATTACKS:
            send(sender, attack, NOT_DATA)
        writer = restarted(sender.writer)
    with sender_of(writer) as sender:
        assert [True] * len(ATTACKS) == sender.is_cached(list(ATTACKS))
        for attack in ATTACKS:
            with pytest.raises(CacheMissError):
                sender.get_and_update_item(None, attack)
            assert not sender.is_cached_item(attack)


@pytest.mark.parametrize("checksums", [False, True])
def test_the_next_process_finds_the_updates_of_a_killed_one(checksums: bool) -> None:
    name = store_name()
    pid = os.fork()
    if pid == 0:
        writer = ObjectStoreWriter.create(name, capacity=4 * MIB, n_readers=1, checksums=checksums)
        with sender_of(writer) as sender:
            for mm_hash in "abc":
                send(sender, mm_hash, [update(mm_hash), update(mm_hash * 200_000)])
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    with sender_of(ObjectStoreWriter.recover(name)) as sender, ObjectStoreReader.attach(name) as reader:
        assert [True] * 3 == sender.is_cached(list("abc"))
        for _ in range(2):
            outputs = sender.get_and_update([None] * 3, list("abc"))
            for mm_hash, (ref, updates) in zip("abc", outputs, strict=True):
                assert [update(mm_hash), update(mm_hash * 200_000)] == updates
                assert isinstance(ref, ObjectRef)
                assert item(10) == reader.get(ref)
        with StoreInspector.open(name) as inspector:
            assert all(slot.extra_len > 200_000 for slot in inspector.slots())
        assert (6, 6) == (sender.make_stats().hits, sender.make_stats().total)


def test_updates_that_are_not_data_stay_in_the_process() -> None:
    with sender_of(make()) as sender:
        assert NOT_DATA == send(sender, "a", NOT_DATA)
        assert sender.is_cached_item("a")
        assert NOT_DATA == hit(sender, "a")
        writer = restarted(sender.writer)
    with sender_of(writer) as sender:
        assert not sender.is_cached_item("a")
        with pytest.raises(CacheMissError):
            sender.get_and_update_item(None, "a")
        assert NOT_DATA == send(sender, "a", NOT_DATA)
        assert (2, NOT_DATA) == (writer.stats().puts, hit(sender, "a"))
        assert (1, 2) == (sender.make_stats().hits, sender.make_stats().total)


def test_updates_too_large_for_the_store_stay_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_updates, "MAX_EXTRA", 1000)
    large = [update("x" * 1000)]
    with sender_of(make()) as sender:
        assert [large, large] == [send(sender, "a", large), hit(sender, "a")]
        assert not sender.writer._writer.extra(sender.writer.get_cached("a").to_bytes())


def test_what_stays_in_the_process_is_dropped_with_its_items() -> None:
    with sender_of(make(64 * KIB)) as sender:
        for number in range(5000):
            send(sender, str(number), NOT_DATA, 3000)
        assert sender.writer.stats().evictions > 4900
        assert len(sender._updates._beside) < 1100
        assert [NOT_DATA] * len(sender.writer) == [hit(sender, key) for key in sender.writer.keys()]


def test_updates_belong_to_one_object_and_not_to_its_successor() -> None:
    with sender_of(make()) as sender:
        send(sender, "a", NOT_DATA)
        sender.writer.delete("a")
        sender.writer.cancel(sender.writer.put("a", item(10)))
        with pytest.raises(CacheMissError):
            sender.get_and_update_item(None, "a")
        assert not sender.is_cached_item("a")
        send(sender, "a", [update("new")])
        assert sender.is_cached_item("a")
        assert [update("new")] == hit(sender, "a")
        sender.invalidate("a")
        send(sender, "a", [update("newer")])
        assert [update("newer")] == hit(sender, "a")


def broken(packed: bytes) -> Any:
    raise KeyError("written by another version")


def test_an_item_whose_updates_cannot_be_decoded_is_stored_again(caplog: pytest.LogCaptureFixture) -> None:
    types: CacheTypes[Any, Any] = CacheTypes(dict, encode_updates=str.encode, decode_updates=bytes.decode)
    with sender_of(make(), types) as sender:
        sender.release([sender.get_and_update_item(({"x": 1}, "updates"), "a")[0]])
        assert "updates" == hit(sender, "a")
        writer = restarted(sender.writer)
    newer: CacheTypes[Any, Any] = CacheTypes(dict, encode_updates=str.encode, decode_updates=broken)
    with sender_of(writer, newer) as sender:
        with caplog.at_level(logging.WARNING), pytest.raises(CacheMissError):
            sender.get_and_update_item(None, "a")
        assert "written by another version" in caplog.text
        assert (False, 0) == (sender.is_cached_item("a"), writer.stats().open_leases)
        sender.release([sender.get_and_update_item(({"x": 2}, "new"), "a")[0]])
        assert "new" == hit(sender, "a")
        writer = restarted(writer)
    with sender_of(writer, newer) as sender:
        sent, _ = sender.get_and_update_item(({"x": 3}, "newer"), "a")
        assert (1, 2, "newer") == (writer.stats().open_leases, writer.stats().next_id - 2, hit(sender, "a"))
        assert 1 == sender.release([sent])


def test_an_item_removed_before_its_updates_are_read_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with sender_of(make()) as sender:
        send(sender, "a", [update("a")])
        writer = restarted(sender.writer)
    with sender_of(writer) as sender:
        writer.retire(0)  # no lease waits for anybody
        extra = native.Writer.extra

        def overtaken(self: native.Writer, packed: bytes) -> bytes:
            writer.delete("a")
            return extra(self, packed)

        monkeypatch.setattr(native.Writer, "extra", overtaken)
        with pytest.raises(CacheMissError):
            sender.get_and_update_item(None, "a")


@pytest.mark.parametrize("wrong", ["text", 5, bytearray(b"x")])
def test_a_codec_must_return_bytes(wrong: Any) -> None:
    types: CacheTypes[Any, Any] = CacheTypes(dict, encode_updates=lambda _: wrong, decode_updates=broken)
    with sender_of(make(), types) as sender, raises(TypeError, names=["'a'", "encode_updates", type(wrong).__name__]):
        sender.get_and_update([({"x": 1}, b"")], ["a"])


def test_more_items_than_the_cache_of_decoded_updates_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_updates, "_MAX_DECODED", 2)
    with sender_of(make()) as sender:
        for mm_hash in "abcde":
            send(sender, mm_hash, [update(mm_hash)])
        for mm_hash in "abcdeabcdeedcba":
            assert [update(mm_hash)] == hit(sender, mm_hash)
        assert len(sender._updates._decoded) <= 2


@pytest.mark.parametrize("half", [{"encode_updates": str.encode}, {"decode_updates": bytes.decode}])
def test_half_a_codec_is_an_error(half: dict[str, Callable[..., Any]]) -> None:
    with raises(ValueError, names=["encode_updates", "decode_updates"]):
        CacheTypes(dict, **half)
