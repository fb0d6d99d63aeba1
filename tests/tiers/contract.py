"""What every back end of a tier does: a test of a back end inherits `Contract` and has a fixture `tier`.

pytest does not rewrite the assertions of this module, and so it compares no megabytes for a message.
"""

import mmap
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shmstore.errors import TierError
from shmstore.tiers import Tier
from tests.support import SHM, store_name

MIB = 1 << 20
SIZES = (
    [1],
    [0],
    [300, 0],
    [0, 300],
    [0, 0, 0, 0],
    [200, 5 * MIB + 3],
    [3 * MIB, 7, 0, 2 * MIB + 1],
)


def random_bytes(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def views(values: list[bytes]) -> list[memoryview]:
    return [memoryview(value) for value in values]


def values_of(sizes: list[int], seed: int = 0) -> list[bytes]:
    return [random_bytes(seed + n, size) for n, size in enumerate(sizes)]


def fetch(tier: Tier, key: str) -> list[bytes] | None:
    """Return the spans of a key, or None for a miss."""
    spans: list[bytearray] = []

    def into(size: int) -> memoryview:
        spans.append(bytearray(size))
        return memoryview(spans[-1])

    return [bytes(span) for span in spans] if tier.fetch(key, into) else None


def checked(payload: bytes) -> list[bytes]:
    """Return a value whose first span verifies the second."""
    return [b"%d %d" % (len(payload), zlib.crc32(payload)), payload]


def verifies(value: list[bytes]) -> bool:
    return len(value) == 2 and value == checked(value[1])


class Contract:
    """The cases. Set `whole` where a fetch during publishes of its key finds exactly one of them, and never misses."""

    whole = False

    @pytest.fixture
    def key(self) -> str:
        """A key that no other test has, also on the same server."""
        return store_name()

    @pytest.fixture
    def shared(self) -> Iterator[memoryview]:
        """A mapping of 16 MiB in /dev/shm."""
        path = SHM / store_name()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        path.unlink()
        os.posix_fallocate(descriptor, 0, 16 * MIB)
        with mmap.mmap(descriptor, 16 * MIB) as mapping:
            os.close(descriptor)
            with memoryview(mapping) as view:
                yield view

    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_spans_come_back_in_number_size_order_and_bytes(self, tier: Tier, key: str, sizes: list[int]) -> None:
        values = values_of(sizes)
        tier.publish(key, views(values))
        assert values == fetch(tier, key)
        assert values == fetch(tier, key), "the second time"

    def test_memory_is_asked_for_when_the_span_before_is_filled(self, tier: Tier, key: str) -> None:
        values = values_of([300, 2 * MIB, 0, 5])
        tier.publish(key, views(values))
        spans: list[bytearray] = []

        def into(size: int) -> memoryview:
            assert values[: len(spans)] == spans
            spans.append(bytearray(size))
            return memoryview(spans[-1])

        assert tier.fetch(key, into)
        assert values == spans

    @pytest.mark.parametrize("readonly", [False, True])
    def test_spans_lie_anywhere_in_shared_memory(
        self, tier: Tier, key: str, shared: memoryview, readonly: bool
    ) -> None:
        values = values_of([333, 5 * MIB + 1])
        places = [1, 1001]
        for place, value in zip(places, values, strict=True):
            shared[place : place + len(value)] = value
        source = shared.toreadonly() if readonly else shared
        tier.publish(key, [source[at : at + len(value)] for at, value in zip(places, values, strict=True)])
        shared[:MIB] = bytes(MIB)  # the bytes were taken before publish returned
        targets = iter([8 * MIB + 3, 9 * MIB + 7])
        before = bytes(shared)

        def into(size: int) -> memoryview:
            at = next(targets)
            return shared[at : at + size]

        assert tier.fetch(key, into)
        expected = bytearray(before)
        for at, value in zip([8 * MIB + 3, 9 * MIB + 7], values, strict=True):
            expected[at : at + len(value)] = value
        assert expected == shared, "the spans are there, and nothing around them has changed"

    def test_what_is_not_there_is_a_miss_and_asks_for_no_memory(self, tier: Tier, key: str) -> None:
        assert not tier.fetch(key, lambda size: pytest.fail("there is nothing to read"))
        assert [] == tier.has([])
        assert [False] == tier.has([key])
        tier.remove([])
        tier.remove([key])

    @pytest.mark.parametrize("declined", [0, 1, 2])
    def test_a_declined_span_ends_the_fetch_and_nothing_else(self, tier: Tier, key: str, declined: int) -> None:
        values = values_of([300, 3 * MIB, 40])
        tier.publish(key, views(values))
        for _ in range(3):
            sizes: list[int] = []

            def into(size: int, sizes: list[int] = sizes) -> memoryview | None:
                sizes.append(size)
                return memoryview(bytearray(size)) if len(sizes) <= declined else None

            assert tier.fetch(key, into) is False
            assert [300, 3 * MIB, 40][: declined + 1] == sizes
            assert [True] == tier.has([key])
            assert values == fetch(tier, key)

    @pytest.mark.parametrize("failing", [0, 1])
    def test_an_error_of_into_arrives_and_the_next_call_works(self, tier: Tier, key: str, failing: int) -> None:
        values = values_of([300, 3 * MIB])
        tier.publish(key, views(values))
        calls = []

        def into(size: int) -> memoryview:
            calls.append(size)
            if len(calls) > failing:
                raise KeyError("a mistake of the caller")
            return memoryview(bytearray(size))

        with pytest.raises(KeyError, match="a mistake of the caller"):
            tier.fetch(key, into)
        assert values == fetch(tier, key)

    @pytest.mark.parametrize("failing", [0, 1])
    @pytest.mark.parametrize(
        ("wrong", "error"),
        [
            (lambda size: memoryview(bytearray(size + 1)), ValueError),
            (lambda size: memoryview(bytearray(size - 1)), ValueError),
            (lambda size: memoryview(bytes(size)), ValueError),
            (lambda size: memoryview(bytearray(2 * size))[::2], TypeError),
        ],
        ids=["too long", "too short", "read-only", "not contiguous"],
    )
    def test_memory_that_is_not_what_was_asked_for_is_refused(
        self, tier: Tier, key: str, wrong: Callable[[int], Any], error: type[Exception], failing: int
    ) -> None:
        values = values_of([300, 400])
        tier.publish(key, views(values))
        calls = []

        def into(size: int) -> Any:
            calls.append(size)
            return wrong(size) if len(calls) > failing else memoryview(bytearray(size))

        with pytest.raises(error):
            tier.fetch(key, into)
        assert values == fetch(tier, key)

    @pytest.mark.parametrize(
        "sizes", [[300, 2 * MIB], [10, 5], [2 * MIB, 300], [300], [1, 2, 3, 4], [0]], ids=lambda sizes: str(sizes)
    )
    def test_a_publish_replaces_the_value_of_its_key(self, tier: Tier, key: str, sizes: list[int]) -> None:
        tier.publish(key, views(values_of([300, 1 * MIB], seed=1)))
        values = values_of(sizes, seed=2)
        tier.publish(key, views(values))
        assert values == fetch(tier, key)
        tier.remove([key])
        assert fetch(tier, key) is None, "nothing of the older value comes back"

    def test_has_tells_what_is_there_and_remove_removes_only_its_keys(self, tier: Tier, key: str) -> None:
        keys = [f"{key}-{n}" for n in range(5)]
        for n in (0, 2, 3):
            tier.publish(keys[n], views(values_of([100, 1000], seed=n)))
        assert [True, False, True, True, False] == tier.has(keys)
        assert [True, True, False] == tier.has([keys[3], keys[3], keys[4]])
        tier.remove([keys[0], keys[1], keys[3], keys[3]])
        assert [False, False, True, False, False] == tier.has(keys)
        assert [None, values_of([100, 1000], seed=2), None] == [fetch(tier, keys[n]) for n in (0, 2, 3)]

    def test_keys_may_be_long_and_have_any_printable_character(self, tier: Tier, key: str) -> None:
        odd = [
            (key + "x" * 200)[:200],
            (key + "x" * 200)[:199] + "y",
            f"{key}/../../etc/passwd",
            f"{key}:*?[a-z]%00%n\\r\\n{{a}}",
            f"{key} {{a}} {{b}} '\"`$(id)",
            f" {key} ",
            f"{key}.",
            key.upper(),
            key,
        ]
        for n, one in enumerate(odd):
            tier.publish(one, views(values_of([10, 20], seed=10 * n)))
        assert [True] * len(odd) == tier.has(odd)
        assert [values_of([10, 20], seed=10 * n) for n in range(len(odd))] == [fetch(tier, one) for one in odd]
        tier.remove(odd[:4])
        assert [False] * 4 + [True] * (len(odd) - 4) == tier.has(odd)

    def test_many_threads_share_a_tier(self, tier: Tier, key: str) -> None:
        def work(worker: int) -> None:
            for n in range(12):
                own = f"{key}-{worker}-{n % 3}"
                values = values_of([100 + worker, [0, 50_000, 1 * MIB][n % 3] + worker], seed=100 * worker + n)
                tier.publish(own, views(values))
                assert [True, False] == tier.has([own, own + "-absent"])
                assert tier.fetch(own, lambda size: None) is False
                assert values == fetch(tier, own)
                tier.remove([own])
                assert fetch(tier, own) is None

        with ThreadPoolExecutor(12) as pool:
            for done in [pool.submit(work, worker) for worker in range(12)]:
                done.result()

    def test_a_fetch_beside_a_publish_finds_the_old_or_the_new_value_or_misses(self, tier: Tier, key: str) -> None:
        payloads = [random_bytes(n, 200_000 + 70_001 * (n % 3)) for n in range(30)]
        numbers = {payload: n for n, payload in enumerate(payloads)}
        started = finished = 0
        hits: list[int] = []
        over = threading.Event()
        tier.publish(key, views(checked(payloads[0])))

        def read() -> None:
            last = False
            while not last:
                last = over.is_set()  # a last time when the publishes are over, so that there are hits
                oldest = finished
                value = fetch(tier, key)
                newest = started
                if value is not None and verifies(value):
                    assert oldest <= numbers[value[1]] <= newest
                    hits.append(numbers[value[1]])
                else:
                    assert not self.whole
                    assert not last

        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read) for _ in range(3)]
            try:
                for n in range(1, len(payloads)):
                    started = n
                    tier.publish(key, views(checked(payloads[n])))
                    finished = n
            finally:
                over.set()
            for reader in readers:
                reader.result()
        assert 3 <= hits.count(len(payloads) - 1)

    @pytest.mark.parametrize(
        "spans",
        [[], [memoryview(b"a")] * 65, [memoryview(b"a"), memoryview(b"abcd")[::2]]],
        ids=["no spans", "too many", "not contiguous"],
    )
    def test_what_is_not_1_to_64_contiguous_spans_is_refused_and_changes_nothing(
        self, tier: Tier, key: str, spans: Any
    ) -> None:
        tier.publish(key, views(values_of([5, 6])))
        with pytest.raises(ValueError, match="1 to 64"):
            tier.publish(key, spans)
        assert values_of([5, 6]) == fetch(tier, key)

    def test_a_closed_tier_refuses_every_call_but_close(self, tier: Tier, key: str) -> None:
        tier.publish(key, views(values_of([5, 6])))
        tier.close()
        tier.close()
        for call in (
            lambda: tier.publish(key, [memoryview(b"a")]),
            lambda: tier.fetch(key, lambda size: pytest.fail("the tier is closed")),
            lambda: tier.has([key]),
            lambda: tier.remove([key]),
        ):
            with pytest.raises(TierError, match="closed"):
                call()
