"""Parts of a value that hold no tensor: msgpack's own decoder makes them, within the limits of all others."""

import time
from functools import partial
from math import inf
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shmstore.bindings.fold import fold
from shmstore.errors import CorruptStoreError
from shmstore.serde import wire
from shmstore.serde.decode import make_plan
from tests.serde.values import SERDE, exact, store
from tests.support import raises

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(), st.binary())
KEYS = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
TREES = st.recursive(
    SCALARS | st.just(np.arange(3)),
    lambda part: (
        st.lists(part, max_size=30) | st.lists(part, max_size=20).map(tuple) | st.dictionaries(KEYS, part, max_size=30)
    ),
    max_leaves=60,
)
ANNOTATIONS = [{"id": i, "box": (1.0, i), "tags": ["a", b"b", None, True], "\ud800": {i: -i}} for i in range(40)]


@given(value=TREES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_value_is_the_same_at_each_get(value: Any) -> None:
    encoded = SERDE.encode(value)
    (plan, _), payload = make_plan(encoded.meta, "view"), store(encoded)
    assert [exact(value)] * 3 == [exact(plan.build(payload)) for _ in range(3)]


def test_each_get_makes_containers_of_its_own() -> None:
    encoded = SERDE.encode([np.arange(3), ANNOTATIONS])
    (plan, _), payload = make_plan(encoded.meta, "view"), store(encoded)
    for _ in range(3):
        _, annotations = plan.build(payload)
        assert exact(ANNOTATIONS) == exact(annotations)
        annotations[0]["tags"].clear()
        annotations.clear()


@pytest.mark.parametrize("leaf", [1, (TUPLE := [wire.TUPLE, 1])])
@pytest.mark.parametrize("around", [0, 40])
def test_a_part_is_nested_as_deep_as_any_other_value(leaf: Any, around: int) -> None:
    depth = wire.MAX_DEPTH - around - isinstance(leaf, list)
    for more, refused in ((0, False), (1, True)):
        node: Any = [leaf]
        for _ in range(depth + more - 1):
            node = [node, *[0] * 20]
        for _ in range(around):
            node = [wire.OBJECT, "tests.Nested", node]
        if refused:
            with raises(CorruptStoreError, ["too deep"]):
                make_plan(msgpack.packb(node), "describe")
        else:
            make_plan(msgpack.packb(node), "describe")


@pytest.mark.parametrize("code", [32, 33])
def test_the_ext_codes_of_parts_are_refused_in_what_is_stored(code: int) -> None:
    part = msgpack.ExtType(code, msgpack.packb([1]))
    for meta in (msgpack.packb(part), msgpack.packb([part, [[0]] * 30]), msgpack.packb([0, part])):
        with pytest.raises(CorruptStoreError):
            SERDE.decode(meta, b"")


SAME_HASH = [float(2.0 ** (61 * n)) for n in range(17)] + [float(2.0 ** (-61 * n)) for n in range(1, 17)]


def test_keys_of_one_hash_are_refused_in_a_part_too() -> None:
    keys = [*SAME_HASH, *((2.0**30 + 1) * key for key in SAME_HASH), *range(10)]
    assert len(set(map(hash, SAME_HASH))) == 1
    meta = msgpack.packb({**dict.fromkeys(keys, 0), "more": [[]] * 20})
    assert fold(meta)  # the list, but not the dict around it, whose keys are counted in Python
    assert SERDE.decode(meta, b"")["more"] == [[]] * 20


@pytest.mark.parametrize(
    "spoiled",
    {
        "text that is not UTF-8": msgpack.packb([[[]] * 20, "text"]).replace(b"text", b"te\xfft"),
        "a mark in the middle": msgpack.packb([[[]] * 20, [1, wire.TUPLE]]),
        "a mark with data": msgpack.packb([[msgpack.ExtType(1, b"x")], [[]] * 20]),
        "a mark as a key": msgpack.packb({wire.TUPLE: [[]] * 20}),
        "a list as a key": msgpack.packb([{(1, 2): 3}, [[]] * 20]),
        "a map as a key": b"\x92\x81\x80\x01" + msgpack.packb([[]] * 20),
        "more after the value": msgpack.packb([[]] * 20) + b"\0",
        "a reserved byte": msgpack.packb([[]] * 20)[:-1] + b"\xc1",
        "a timestamp": msgpack.packb([[[]] * 20, msgpack.Timestamp(1)]),
        "fewer items than it says": msgpack.packb([[]] * 20)[:-1],
    }.items(),
    ids=lambda pair: pair[0],
)
def test_a_spoiled_part_is_refused(spoiled: tuple[str, bytes]) -> None:
    with pytest.raises(CorruptStoreError) as refused:
        SERDE.decode(spoiled[1], b"")
    assert str(refused.value).count("hint") == 1  # one error, not one in another


def test_annotations_take_little_longer_than_in_the_decoder_of_msgpack() -> None:
    """That one is in C: a search of the metadata for tensors, in Python, added half of its time."""
    meta = SERDE.encode([{"id": i, "box": [1.5, i, 2.5, 3.5], "area": i * 1.5, "name": "a"} for i in range(1000)]).meta
    calls = (partial(SERDE.decode, meta, b""), partial(msgpack.unpackb, meta))
    least = [inf, inf]
    for _ in range(60):
        for n, call in enumerate(calls):
            start = time.thread_time()
            call()
            least[n] = min(least[n], time.thread_time() - start)
    assert least[0] <= 1.4 * least[1]
