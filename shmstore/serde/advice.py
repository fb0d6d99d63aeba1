"""Hints that say what to store instead of a refused value; computed only after a walk has failed."""

import dataclasses
import enum
import os
from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np

from shmstore.serde import tensors
from shmstore.serde.dtypes import MAX_NDIM
from shmstore.serde.protocol import TensorSpec

_REGISTER = "or register its type (shmstore.serde.register_type)"


def _for_tensor(tensor: Any) -> str | None:
    if tensor.is_nested:
        return "store the list of its tensors, tensor.unbind(), or torch.nested.to_padded_tensor(tensor, ...)"
    if tensor.layout is not tensors.strided:
        return "store tensor.to_dense(), or its indices and values as separate tensors"
    if tensor.dtype not in tensors.KINDS:
        return "store tensor.dequantize(), or tensor.int_repr() with its scale and zero point"
    if tensor.is_meta:
        return "give it bytes (torch.empty_like(..., device='cpu')), or use it as a template of reserve()"
    if tensor.dim() > MAX_NDIM:
        return "store tensor.flatten() and its shape"
    if type(tensor) not in (tensors.Tensor, tensors.Parameter):
        return f"store tensor.as_subclass(torch.Tensor), {_REGISTER}"
    return "store tensor.clone(), made outside of any transform and before its storage is freed"


def _for_array(array: "np.ndarray[Any, Any]") -> str | None:
    if isinstance(array, np.ma.MaskedArray):
        return "store array.data and array.mask as separate arrays"
    if type(array.dtype).__name__ == "StringDType":
        return "store numpy.array(array.tolist()), whose strings have a fixed width"
    if array.dtype.hasobject:
        return "store array.tolist(), or array.astype(...) with a dtype of fixed size"
    if array.dtype.type is np.record:
        return f"store numpy.asarray(array).view((numpy.void, array.dtype)), {_REGISTER}"
    if type(array) is not np.ndarray:
        return f"store numpy.asarray(array), {_REGISTER}"
    return "store its bits, as array.view(...) of an integer dtype of that size, or a torch tensor"


_EXACT = f"because types must match exactly; {_REGISTER}"
_ADVICE: tuple[tuple[Any, str], ...] = (  # the first one counts
    (TensorSpec, "store a tensor or an array; a TensorSpec is for templates of reserve()"),
    (type, "store the name of the class, or an instance of it"),
    (enum.Enum, f"store its .value or its .name, {_REGISTER}"),
    (Mapping, f"store dict(value), {_EXACT}"),  # UserDict (as of BatchFeature), OrderedDict, defaultdict, Counter, ...
    (tuple, f"store tuple(value), or value._asdict() of a named one, {_EXACT}"),
    *((base, f"store {base.__name__}(value), {_EXACT}") for base in (str, bytes, int, float, list)),
    (complex, "store numpy.complex128(value)"),
    ((bytearray, memoryview), "store bytes(value), or numpy.frombuffer(value, ...)"),
    ((Set, deque, range, Iterator), f"store list(value), {_REGISTER}"),
    (np.record, "store numpy.asarray(value).view((numpy.void, value.dtype))"),
    (np.generic, "store numpy.asarray(value)"),  # .item() of a longdouble or a datetime64 is not a plain number
    (os.PathLike, "store str(value)"),
)


def advice_for(value: Any) -> str | None:
    """Return the hint for a value that cannot be stored; None if the error's default hint is the best."""
    if isinstance(value, tensors.Tensor):
        return _for_tensor(value)
    if isinstance(value, np.ndarray):
        return _for_array(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, TensorSpec)):
        return f"store dataclasses.asdict(value), {_REGISTER}"
    for types, words in _ADVICE:
        if isinstance(value, types):
            return words
    if hasattr(type(value), "__array_interface__") or hasattr(type(value), "__array__"):  # PIL's images, ...
        return f"store numpy.asarray(value), {_REGISTER}"
    return None


def advice_for_key(key: Any) -> str:
    """Return the hint for a dict key that cannot be stored."""
    if isinstance(key, (np.generic, tensors.Tensor, np.ndarray)):
        return "use key.item() as the key, if it is a number"
    if isinstance(key, enum.Enum):
        return "use its .value or its .name as the key"
    return "use dict keys of type str, bytes, int, float, bool, None or tuples of them, or store a list of pairs"
