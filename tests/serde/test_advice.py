"""What cannot be stored is refused with what to store instead, and that can be stored."""

import dataclasses
import enum
import warnings
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from shmstore import MsgpackSerde, TensorSpec, UnsupportedValueError
from tests.support import raises

SERDE = MsgpackSerde()
Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Record:
    x: Any


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


class Picture:
    def __array__(self, dtype: Any = None, copy: Any = None) -> "np.ndarray[Any, Any]":
        return np.zeros((2, 2), np.uint8)


class Named(torch.Tensor):
    pass


def _sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


def _nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def _quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


RECORD = [("a", "i4"), ("b", "f8")]


def _unrecorded(value: Any) -> Any:
    return np.asarray(value).view((np.void, value.dtype))


STRINGS: Any = getattr(np.dtypes, "StringDType", None)

# A refused value, words of its hint, and what they amount to.
CASES: dict[str, tuple[Callable[[], Any], str, Callable[[Any], Any]]] = {
    "UserDict": (lambda: UserDict(a=1), "dict(value)", dict),
    "OrderedDict": (lambda: OrderedDict(a=1), "dict(value)", dict),
    "namedtuple": (lambda: Point(1, 2), "value._asdict()", lambda value: value._asdict()),
    "dataclass": (lambda: Record(torch.ones(2)), "dataclasses.asdict(value)", dataclasses.asdict),
    "enum": (lambda: Colour.RED, "its .value", lambda value: value.value),
    "str's subclass": (lambda: Text("a"), "str(value)", str),
    "bytearray": (lambda: bytearray(b"a"), "bytes(value)", bytes),
    "set": (lambda: {1, 2}, "list(value)", list),
    "complex": (lambda: 1j, "numpy.complex128(value)", np.complex128),
    "time": (lambda: np.datetime64("2020-01-01"), "numpy.asarray(value)", np.asarray),
    "long number": (lambda: np.longdouble(1), "numpy.asarray(value)", np.asarray),
    "path": (lambda: Path("a"), "str(value)", str),
    "picture": (Picture, "numpy.asarray(value)", np.asarray),
    "tensor's subclass": (
        lambda: torch.ones(2).as_subclass(Named),
        "as_subclass(torch.Tensor)",
        lambda value: value.as_subclass(torch.Tensor),
    ),
    "sparse": (_sparse, "tensor.to_dense()", lambda value: value.to_dense()),
    "quantised": (_quantised, "tensor.dequantize()", lambda value: value.dequantize()),
    "nested": (_nested, "tensor.unbind()", lambda value: list(value.unbind())),
    "meta": (
        lambda: torch.ones(2, device="meta"),
        "torch.empty_like(..., device='cpu')",
        lambda value: torch.empty_like(value, device="cpu"),
    ),
    "object array": (lambda: np.array([1, "a"], object), "array.tolist()", lambda value: value.tolist()),
    "masked array": (
        lambda: np.ma.array([1, 2], mask=[False, True]),
        "array.data",
        lambda value: [value.data, value.mask],
    ),
    "matrix": (lambda: np.ones((2, 2)).view(np.recarray), "numpy.asarray(array)", np.asarray),
    "recarray": (lambda: np.rec.array([(1, 2.0)], RECORD), ".view((numpy.void, array.dtype))", _unrecorded),
    "record": (lambda: np.rec.array([(1, 2.0)], RECORD)[0], ".view((numpy.void, value.dtype))", _unrecorded),
}
if STRINGS is not None:
    CASES["array of strings"] = (
        lambda: np.array(["a", "bcd"], STRINGS()),
        "numpy.array(array.tolist())",
        lambda value: np.array(value.tolist()),
    )


WRAPS: dict[str, Callable[[Any], Any]] = {
    "value": lambda v: v,
    "value['a'][2][3][1]": lambda v: {"a": [1, torch.zeros(2), {3: (None, v)}]},
    "value[(1, 'x')][b'k']": lambda v: {(1, "x"): {b"k": v}},
}


def refuse(value: Any, words: str) -> None:
    for path, wrap in WRAPS.items():
        with raises(UnsupportedValueError, names=[f"{path}: no serializer for"], hint=[words]) as caught:
            SERDE.encode(wrap(value))
        assert isinstance(caught.value, TypeError)
        assert path == caught.value.path


@pytest.mark.parametrize("name", CASES)
def test_a_refused_value_is_named_by_its_path_and_what_to_store_instead_can_be_stored(name: str) -> None:
    make, words, instead = CASES[name]
    refuse(make(), words)
    for wrap in WRAPS.values():
        SERDE.encode(wrap(instead(make())))


def _freed() -> torch.Tensor:
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(0)
    return tensor


# Refused values for which no conversion is right for all.
OTHERS: dict[str, tuple[Any, str]] = {
    "spec": (TensorSpec((1,), np.dtype("f4")), "reserve()"),
    "class": (Record, "class"),
    "object": (object(), "register_type"),
    "ext value": (msgpack.ExtType(3, b""), "tuple(value)"),
    "record": (np.zeros(2, np.dtype((np.record, [("a", "f4")]))), "numpy.void"),
    "freed storage": (_freed(), "clone()"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_value_is_refused_with_fitting_words(name: str) -> None:
    refuse(*OTHERS[name])


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (np.int64(1), "key.item()"),
        (Colour.RED, "its .value"),
        (frozenset((1,)), "dict keys"),
        ((1, 1j), "dict keys"),
    ],
)
def test_a_dict_key_that_is_refused_has_a_hint_of_its_own(key: Any, words: str) -> None:
    with raises(UnsupportedValueError, hint=[words]):
        SERDE.encode({key: torch.ones(1)})
