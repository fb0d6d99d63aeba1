"""A serializer of the user's own that breaks its contract: a typed error, and nothing is stored."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shmstore import MsgpackSerde, ObjectStoreReader, ObjectStoreWriter, SerdeError
from shmstore.serde.protocol import Encoded, Layout
from tests.support import Stores, raises

WELL = object()


def state_but_ids(writer: ObjectStoreWriter) -> Any:
    """A number once given to a put that failed is not given again."""
    return writer.keys(), replace(writer.stats(), next_id=0, next_lease=0)


class Broken(MsgpackSerde):
    """Returns what it was told to, and notes how large the buffers are that it is to fill."""

    __slots__ = ("filled", "made")

    def __init__(self) -> None:
        self.made: Any = WELL
        self.filled: list[int] = []

    def encode(self, value: Any) -> Encoded:
        return super().encode(value) if self.made is WELL else self.made

    def layout(self, template: Any) -> Layout:
        return self.made  # type: ignore[no-any-return]

    def fill(self, dst: Any, source: Any) -> None:
        self.filled.append(len(dst))
        if isinstance(source, Exception):
            raise source


@pytest.fixture
def broken(stores: Stores) -> Iterator[tuple[ObjectStoreWriter, Broken]]:
    serde = Broken()
    writer = stores.create(8192, serde=serde)
    writer.put("old", np.zeros(100, np.uint8))
    yield writer, serde
    serde.made = WELL
    ref = writer.put("new", np.arange(3))
    with ObjectStoreReader.attach(writer.handle) as reader:
        assert [0, 1, 2] == reader.get(ref).tolist()


NONE: tuple[Any, ...] = ()
PAIR: Any = Encoded(b"m", 64, NONE, NONE, None)
WRONG: dict[str, tuple[Any, tuple[str, ...]]] = {
    "nothing": (None, ("None", "Encoded")),
    "a pair": ((b"m", 64), ("tuple", "Encoded")),
    "meta of text": (PAIR._replace(meta="m"), ("meta", "bytes", "str")),
    "negative nbytes": (PAIR._replace(nbytes=-1), ("nbytes", "-1")),
    "nbytes of 70 bits": (PAIR._replace(nbytes=2**70), ("nbytes", str(2**70))),
    "nbytes a float": (PAIR._replace(nbytes=64.0), ("nbytes", "int", "64.0")),
    "a span behind the end": (PAIR._replace(spans=((60, 5, 0),)), ("spans", "64 bytes", "(60, 5, 0)")),
    "a span before the start": (PAIR._replace(spans=((-1, 5, 0),)), ("spans", "(-1, 5, 0)")),
    "a span of two": (PAIR._replace(spans=((0, 5),)), ("spans", "triples")),
    "a span from nowhere": (PAIR._replace(spans=((0, 5, 0),)), ("spans", "(0, 5, 0)")),
    "a span from nothing": (PAIR._replace(spans=((0, 5, None),)), ("spans", "triples")),
    "spans to go through once": (PAIR._replace(spans=iter(NONE)), ("spans", "triples")),
    "a fill behind the end": (PAIR._replace(fills=((60, 5, None),)), ("fills", "(60, 5, None)")),
    "a fill of less than nothing": (PAIR._replace(fills=((4, -4, None),)), ("fills", "(4, -4, None)")),
    "fills of pairs": (PAIR._replace(fills=((0, 5),)), ("fills", "triples")),
    "a fill, and nbytes a float": (PAIR._replace(fills=((0, 5, None),), nbytes=64.0), ("nbytes", "64.0")),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_invalid_encoding_is_a_typed_error_and_nothing_is_stored(
    broken: tuple[ObjectStoreWriter, Broken], case: str
) -> None:
    writer, serde = broken
    serde.made, names = WRONG[case]
    before = state_but_ids(writer)
    with raises(SerdeError, names):
        writer.put("new", 1)
    assert before == state_but_ids(writer)
    assert [] == serde.filled
    writer.check_valid()


def test_what_a_fill_itself_raises_is_left_alone(broken: tuple[ObjectStoreWriter, Broken]) -> None:
    writer, serde = broken
    before = state_but_ids(writer)
    for error in (TypeError("mine"), ValueError("mine"), AttributeError("mine"), KeyError("mine")):
        serde.made = PAIR._replace(fills=((0, 60, error), (0, 5, error)))
        with pytest.raises(type(error)) as caught:
            writer.put("new", 1)
        assert caught.value is error
        assert before == state_but_ids(writer)
    assert [60] * 4 == serde.filled


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (None, ("None", "Layout")),
        (Layout("m", 64, bytes), ("meta", "bytes", "str")),  # type: ignore[arg-type]
        (Layout(b"m", -1, bytes), ("nbytes", "-1")),
        (Layout(b"m", 2**70, bytes), ("nbytes", str(2**70))),
    ],
)
def test_an_invalid_layout_is_a_typed_error_and_takes_no_space(
    broken: tuple[ObjectStoreWriter, Broken], made: Any, names: tuple[str, ...]
) -> None:
    writer, serde = broken
    serde.made = made
    before = state_but_ids(writer)
    with raises(SerdeError, names), writer.reserve("new", 1):
        pass
    assert before == state_but_ids(writer)
