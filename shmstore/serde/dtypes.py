"""Names of dtypes on the wire, and the numpy dtypes that they name.

torch dtypes travel by name (``bfloat16``), because their numbers differ between versions. numpy dtypes travel as
``dtype.str`` (``<f4``, ``|S5``, ``>M8[ns]``). Structured dtypes travel as a tree of field names, formats and offsets.
Neither form is evaluated: a torch name is looked up, and a numpy string must match `_NUMPY_STR`.
"""

import re
from typing import Any

import numpy as np

from shmstore.errors import cut

MAX_NDIM = 64 if int(np.__version__.split(".")[0]) >= 2 else 32
"""numpy's limit, which holds for tensors, too, because their views are made with it."""
_MAX_DTYPE_DEPTH = 16

SHARED = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
# The first number in any other name is the bits of an element. Quantised dtypes (qint8) do not match: they are useless
# without their scale, which is not part of the dtype.
_BITS = re.compile(r"(?:b?float|b?complex|u?int|bits)(\d{1,3})([a-z_]\w*)?")
_INTEGERS: "dict[int, np.dtype[Any]]" = {
    size: np.dtype(name) for size, name in ((1, "uint8"), (2, "int16"), (4, "int32"), (8, "int64"))
}


def carrier_of(name: str) -> "np.dtype[Any] | None":
    """Return the numpy dtype that carries the bits of a torch dtype: the same one or, if numpy lacks it, an integer.

    None for a name that no dtype has which can be stored.
    """
    if name in SHARED:
        return np.dtype(name)
    bits = _BITS.fullmatch(name)
    return _INTEGERS.get(-(-int(bits[1]) // 8)) if bits else None


# Strict, because numpy's parser is not safe for forged text: it divides by the 0 of "<M8[s/0]" (SIGFPE).
_NUMPY_STR = re.compile(
    r"[<>|]([biufcSUV](0|[1-9][0-9]{0,9})|[Mm]8(\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)


def numpy_dtype_to_wire(dtype: "np.dtype[Any]") -> Any:
    """Return `dtype` as strings, ints and lists, or None if it cannot be stored (objects, foreign dtypes)."""
    wire = _to_wire(dtype, 0)
    if wire is None:
        return None
    back = numpy_dtype_from_wire(wire)
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
    return None if None in formats else [list(dtype.names), formats, [field[1] for field in fields], dtype.itemsize]


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
    names, formats, offsets, itemsize = wire
    _require_ints([*offsets, itemsize])
    if not all(type(name) is str for name in names):
        raise ValueError("field names must be strings")
    description = {
        "names": list(names),
        "formats": [_from_wire(item, depth + 1) for item in formats],
        "offsets": list(offsets),
        "itemsize": itemsize,
    }
    return np.dtype(description)  # type: ignore[call-overload, no-any-return]


def _require_ints(values: Any) -> None:
    if not all(type(value) is int and 0 <= value < 2**31 for value in values):
        raise ValueError("sizes and offsets of a dtype must be ints from 0 to 2^31 - 1")
