"""A serializer of the user's own that breaks its contract: an error, and nothing is stored."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shmstore import MsgpackSerde, ObjectStoreReader, ObjectStoreWriter, ObjectTooLargeError
from shmstore.serde.protocol import Encoded, Layout
from tests.support import Stores

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
WRONG: dict[str, tuple[Any, type[Exception]]] = {
    "nothing": (None, AttributeError),
    "meta of text": (PAIR._replace(meta="m"), TypeError),
    "negative nbytes": (PAIR._replace(nbytes=-1), OverflowError),
    "a span past the end": (PAIR._replace(spans=((60, 5, 1),)), ValueError),
    "a span that begins past the end": (PAIR._replace(spans=((65, 0, 1),)), ValueError),
    "a span before the start": (PAIR._replace(spans=((-1, 5, 1),)), OverflowError),
    "a span from nowhere": (PAIR._replace(spans=((0, 5, 0),)), ValueError),
    "a span past the end, and a fill": (PAIR._replace(spans=((60, 5, 1),), fills=((0, 5, None),)), ValueError),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_encoding_outside_of_its_bytes_is_refused_and_nothing_is_stored(
    broken: tuple[ObjectStoreWriter, Broken], case: str
) -> None:
    writer, serde = broken
    serde.made, error = WRONG[case]
    before = state_but_ids(writer)
    with pytest.raises(error):
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
    ("made", "error"),
    [
        (None, AttributeError),
        (Layout(b"m", -1, bytes), OverflowError),
        (Layout(b"m", 2**63, bytes), ObjectTooLargeError),
    ],
)
def test_an_invalid_layout_is_an_error_and_takes_no_space(
    broken: tuple[ObjectStoreWriter, Broken], made: Any, error: type[Exception]
) -> None:
    writer, serde = broken
    serde.made = made
    before = state_but_ids(writer)
    with pytest.raises(error):
        writer.begin("new", 1)
    assert before == state_but_ids(writer)
