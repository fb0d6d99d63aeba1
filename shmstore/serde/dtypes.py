"""Names of dtypes on the wire, and views of raw bytes with these dtypes.

torch dtypes travel by name (``bfloat16``), because their numbers differ between versions. numpy dtypes travel as
``dtype.str`` (``<f4``, ``|S5``, ``>M8[ns]``). Structured dtypes travel as a tree of field names, formats and offsets.
Neither form is evaluated: a torch name is looked up, and a numpy string must match `_NUMPY_STR`.

A torch view is made with numpy: an array over the payload, then `torch.from_numpy`. That is the fastest way found,
with 0.75 µs against 1.6 to 1.9 µs for `torch.frombuffer` and a reshape. A dtype that numpy lacks is carried by an
integer of its size and reinterpreted, which also copies its bits unchanged.
"""

import math
import operator
import re
from collections.abc import Callable
from itertools import accumulate, takewhile
from typing import Any, NamedTuple

import numpy as np
import torch

from shmstore.errors import cut

NUMPY_MAX_NDIM = 64 if int(np.__version__.split(".")[0]) >= 2 else 32
MAX_NDIM = 1024
"""torch has no limit; this one bounds the cost of a forged shape."""
_MAX_DTYPE_DEPTH = 16
_MAX_HOLLOW = 65536
"""How many elements of a leaf may have no bytes; a list of such elements still takes memory."""


class TorchKind(NamedTuple):
    """The name of a torch dtype, and the numpy and torch dtypes that carry its bits."""

    dtype: torch.dtype
    name: str
    itemsize: int
    carrier: "np.dtype[Any]"
    """The numpy dtype with the same meaning or, if numpy lacks it, an integer of the same size."""
    carrier_torch: torch.dtype
    """The torch dtype of `carrier`; it is `dtype` itself if numpy has it."""


SHARED = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_NATIVE = {getattr(torch, name): np.dtype(name) for name in SHARED}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# A quantised dtype is useless without its scale, which is not part of the dtype.
_QUANTISED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}


def _torch_kinds() -> dict[torch.dtype, TorchKind]:
    kinds = {}
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - _QUANTISED:
        carrier_torch = dtype if dtype in _NATIVE else _INTEGERS[dtype.itemsize]
        name = str(dtype).removeprefix("torch.")
        kinds[dtype] = TorchKind(dtype, name, dtype.itemsize, _NATIVE[carrier_torch], carrier_torch)
    return kinds


TORCH_KINDS = _torch_kinds()
"""Every dtype of this torch that can be stored."""
TORCH_BY_NAME = {kind.name: kind for kind in TORCH_KINDS.values()}


def torch_viewer(kind: TorchKind, shape: tuple[int, ...], offset: int) -> Callable[[Any], torch.Tensor]:
    """Return a function from a buffer to the contiguous tensor of `kind` and `shape` at `offset` in it.

    The tensor keeps the buffer alive. It must have at least one byte.
    """
    ndarray, from_numpy, carrier, dtype = np.ndarray, torch.from_numpy, kind.carrier, kind.dtype
    if len(shape) > 32:  # the limit of numpy 1; this is rare
        strides = tuple(accumulate(shape[:0:-1], operator.mul, initial=1))[::-1]
        count = (math.prod(shape),)
        return lambda buffer: from_numpy(ndarray(count, carrier, buffer, offset)).view(dtype).as_strided(shape, strides)
    if kind.carrier_torch is dtype:
        return lambda buffer: from_numpy(ndarray(shape, carrier, buffer, offset))
    return lambda buffer: from_numpy(ndarray(shape, carrier, buffer, offset)).view(dtype)


def torch_view(kind: TorchKind, shape: tuple[int, ...], buffer: Any) -> torch.Tensor:
    """Return the contiguous tensor of `kind` and `shape` at the start of `buffer`."""
    return torch_viewer(kind, shape, 0)(buffer)


def _elements(shape: tuple[int, ...], dtype: "np.dtype[Any] | None") -> int:
    count = math.prod(takewhile(bool, shape))  # no loop reaches the dimensions behind a 0
    if dtype is None or dtype.fields is None:
        return count
    parts = [1]
    for field in dtype.fields.values():
        base, inner = field[0].subdtype or (field[0], ())
        parts.append(_elements(() if field[0].itemsize else inner, base))
    return count * max(parts)


def is_hollow(shape: tuple[int, ...], nbytes: int, dtype: "np.dtype[Any] | None" = None) -> bool:
    """Return whether a leaf has far more elements than bytes; pass the `dtype` of an array.

    A tensor of shape (2^31, 0) has no bytes, but a list of its elements takes hundreds of gigabytes.
    """
    return _elements(shape, dtype) > nbytes + _MAX_HOLLOW


# Strict, because numpy's parser is not safe for forged text: it divides by the 0 of "<M8[s/0]" (SIGFPE).
_NUMPY_STR = re.compile(
    r"[<>|]([biufcSUV](0|[1-9][0-9]{0,9})|[Mm]8(\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)


def numpy_dtype_to_wire(dtype: "np.dtype[Any]") -> Any:
    """Return `dtype` as strings, ints and lists, or None if it cannot be stored (objects, foreign dtypes)."""
    wire = _to_wire(dtype, 0)
    if wire is None:
        return None
    try:
        back = numpy_dtype_from_wire(wire)
    except ValueError:
        return None
    # Dtypes of other packages, and records, may have the name of a void (<V2), so types are compared too. Integers are
    # exempt: long and long long are one dtype to numpy, but have two types.
    return wire if back == dtype and (back.type is dtype.type or dtype.kind in "iu") else None


def _to_wire(dtype: "np.dtype[Any]", depth: int) -> Any:
    if dtype.hasobject or depth > _MAX_DTYPE_DEPTH:
        return None
    if dtype.subdtype is not None:
        base = _to_wire(dtype.subdtype[0], depth + 1)
        return None if base is None else [base, list(dtype.subdtype[1])]
    if dtype.names is None or dtype.fields is None:
        return dtype.str if _NUMPY_STR.fullmatch(dtype.str) else None
    fields = [dtype.fields[name] for name in dtype.names]
    formats = [_to_wire(field[0], depth + 1) for field in fields]
    titles = [field[2] if len(field) > 2 else None for field in fields]
    if None in formats or not all(title is None or type(title) is str for title in titles):
        return None
    offsets = [field[1] for field in fields]
    return [list(dtype.names), formats, offsets, titles, dtype.itemsize, dtype.isalignedstruct]


def numpy_dtype_from_wire(wire: Any) -> "np.dtype[Any]":
    """Return the dtype that `wire` describes, in lists or tuples. Raises ValueError if it describes no dtype."""
    try:
        return np.dtype(_from_wire(wire, 0))
    except (TypeError, OverflowError, MemoryError, KeyError, IndexError) as error:
        raise ValueError(f"not a dtype: {cut(error)}") from error


def _from_wire(wire: Any, depth: int) -> "np.dtype[Any]":
    if depth > _MAX_DTYPE_DEPTH:
        raise ValueError("dtype nested too deeply")
    if type(wire) is str:
        if not _NUMPY_STR.fullmatch(wire):
            raise ValueError("not the name of a plain dtype")
        return np.dtype(wire)
    if type(wire) not in (list, tuple):
        raise ValueError("not a dtype")
    if len(wire) == 2:
        base, shape = wire
        _require_ints(shape)
        return np.dtype((_from_wire(base, depth + 1), tuple(shape)))
    names, formats, offsets, titles, itemsize, aligned = wire
    _require_ints([*offsets, itemsize])
    if not all(type(name) is str for name in names) or not all(t is None or type(t) is str for t in titles):
        raise ValueError("field names and titles must be strings")
    description = {
        "names": list(names),
        "formats": [_from_wire(item, depth + 1) for item in formats],
        "offsets": list(offsets),
        "itemsize": itemsize,
        "aligned": aligned is True,
    }
    if any(title is not None for title in titles):
        description["titles"] = list(titles)
    return np.dtype(description)  # type: ignore[call-overload, no-any-return]


def _require_ints(values: Any) -> None:
    if not all(type(value) is int and 0 <= value < 2**31 for value in values):
        raise ValueError("sizes and offsets of a dtype must be ints from 0 to 2^31 - 1")
