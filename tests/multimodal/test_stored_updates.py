"""Prompt updates are stored with their item, if they are data, and stay in P0 if they are not."""

import functools
import itertools
import json
import logging
import os
import random
import resource
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

from shmstore import CacheMissError, ObjectRef, ObjectStoreReader, ObjectStoreWriter, StoreHandle
from shmstore.bindings import store as native
from shmstore.errors import CorruptStoreError, TierError
from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.tree import parse_tree
from shmstore.multimodal import CacheTypes, ResolvedPromptUpdate, ShmObjectStoreSenderCache
from shmstore.multimodal.caches import stored_updates
from shmstore.multimodal.values.types import MULTIMODAL
from shmstore.multimodal.values.updates import _MAX_REPEATED, decode_updates, encode_updates
from shmstore.scheduler.events import AllBlocksCleared, BlockStored, KVCacheEvent, KVEventBatch
from shmstore.serde.decode import make_plan
from shmstore.serde.wire import TUPLE
from shmstore.tiers import mooncake, relay_client, table
from shmstore.tiers.directory import DirectoryTier, name_of
from shmstore.tiers.objects import Incoming, spans_of
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
    assert packed is not None
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
    "tuples of one hash as keys": b"\xdf\0\1\0\0"
    + b"".join(
        msgpack.packb([TUPLE, *key]) + b"\0"
        for key in itertools.islice(itertools.product((-1, -2), repeat=17), 1 << 16)
    ),
}


def _decode_limited(
    inputs: Iterable[bytes],
    seconds: int,
    decoders: Sequence[Callable[[bytes], Any]],
    slow: Sequence[Callable[[bytes], Any]] = (),
) -> int:
    """Decode all inputs, and every 15th by the slow decoders, in 300 MB more than this process has now.

    Return how many were refused. msgpack says ValueError where it gets no memory, so the limit itself is higher.
    """
    mapped = _kibibytes("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, ((mapped << 10) + 2_000_000_000,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    refused = 0
    for i, packed in enumerate(inputs):
        for decode in (*decoders, *slow) if i % 15 == 0 else decoders:
            try:
                decode(packed)
            except (ValueError, TypeError, OSError, TierError):  # OSError: where a stream ends
                refused += 1
    assert _kibibytes("VmPeak") - mapped < 300_000
    return refused


def _kibibytes(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


def _head_of_a_tier(writer: ObjectStoreWriter) -> Callable[[bytes], None]:
    def decode(packed: bytes) -> None:
        incoming = Incoming(writer, "a", None, "a", *[lambda _: True] * 3)
        if (memory := incoming.into(len(packed))) is not None:
            memory[:] = packed
            incoming.into(64)

    return decode


def _file_of_a_tier(path: Path) -> Callable[[bytes], object]:
    name = Path(name_of(str(path), "a"))
    name.parent.mkdir()
    tier = DirectoryTier(path, timeout=60)

    def decode(packed: bytes) -> object:
        name.write_bytes(packed)
        return tier.fetch("a", lambda size: None)

    return decode


_VALUES: list[Callable[[bytes], Any]] = [
    decode_updates,
    lambda meta: make_plan(meta, "copy"),
    partial(parse_tree, payload_bytes=0),
]
_EVENTS: list[Callable[[bytes], Any]] = [KVCacheEvent.from_msgpack, KVEventBatch.from_msgpack]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_short_attack_takes_no_stack_no_memory_and_no_time(attack: str) -> None:
    assert in_child(_decode_limited, [ATTACKS[attack]], 3, _VALUES[:1]) == 1
    in_child(_decode_limited, [ATTACKS[attack]], 3, _VALUES[1:])  # to them, long runs are rows like any
    assert in_child(_decode_limited, [ATTACKS[attack]], 3, _EVENTS) == 2


def test_random_and_mutated_bytes_take_a_bounded_amount_of_memory(tmp_path: Path) -> None:
    rng = random.Random(25)
    writer = make()
    writer.put("a", torch.ones(4))
    spans = spans_of(writer, "a", None, "a", 1)
    assert spans is not None
    event = BlockStored([b"a", 2], None, [1, 2], 2, None, "GPU")
    seeds = [
        *(encode_updates([ResolvedPromptUpdate("image", 0, "insert", "", content)]) or b"" for content in CONTENTS),
        *ATTACKS.values(),
        writer.handle.to_json().encode(),
        writer.get_cached("a").to_bytes(),
        relay_client.request("a", "namespace", 1.0),
        bytes(spans[0]),
        mooncake._head_of(spans),
        table.packed(spans) + b"abcd",
        b"shmstore tier 2\n" + table.packed(spans) + b"abcd",
        event.to_msgpack(),
        KVEventBatch(1.0, [event, AllBlocksCleared()]).to_msgpack("array"),
    ]
    short = [seed for seed in seeds if seed and len(seed) < 2000]
    decoders = [
        *_VALUES,
        *_EVENTS,
        StoreHandle.from_json,
        ObjectRef,
        relay_client.parsed,
        mooncake._parsed,
        table.sizes_in,
        _head_of_a_tier(writer),
    ]
    slow = [_file_of_a_tier(tmp_path)]

    def inputs() -> Iterator[bytes]:
        for i in range(20_000):
            if i % 2:
                yield rng.randbytes(rng.randrange(1, 64))
                continue
            packed = bytearray(rng.choice(short))
            for _ in range(rng.randrange(1, 4)):
                packed[rng.randrange(len(packed))] = rng.choice((rng.randrange(256), 0xDD, 0xDF, 0xC9, 0x92))
            yield bytes(packed)

    assert in_child(_decode_limited, inputs(), 60, decoders, slow) > 100_000
    writer.close()


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
        assert (1, NOT_DATA) == (writer.stats().puts, hit(sender, "a"))
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


def test_an_item_removed_before_its_updates_are_read_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
