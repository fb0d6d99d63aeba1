"""What to store instead of a value that is refused: asked once a walk has failed, never on its way."""

import dataclasses
import enum
import os
from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch

from shmstore.serde.dtypes import MAX_NDIM, TORCH_KINDS
from shmstore.serde.protocol import TensorSpec

__all__ = ["advice_for", "advice_for_key"]

_REGISTER = "or register its type (shmstore.serde.register_type)"


def _for_tensor(tensor: torch.Tensor) -> str | None:
    if tensor.is_nested:
        return "store the list of its tensors, tensor.unbind(), or torch.nested.to_padded_tensor(tensor, ...)"
    if tensor.layout is not torch.strided:
        return "store tensor.to_dense(), or its indices and values as tensors of their own"
    if tensor.dtype not in TORCH_KINDS:
        return "store tensor.dequantize(), or tensor.int_repr() with its scale and zero point"
    if tensor.is_meta:
        return "it has a shape only: give it bytes (torch.empty_like(..., device='cpu')), or use it in reserve()"
    if tensor.dim() > MAX_NDIM:
        return "store it in another shape (tensor.flatten()) and its own beside it"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"store tensor.as_subclass(torch.Tensor), {_REGISTER}"
    return "store a copy: tensor.clone(), made outside of any transform, while its storage is there"


def _for_array(array: "np.ndarray[Any, Any]") -> str | None:
    if isinstance(array, np.ma.MaskedArray):
        return "store array.data and array.mask as arrays of their own"
    if type(array.dtype).__name__ == "StringDType":
        return "store numpy.array(array.tolist()), whose strings are of fixed width"
    if array.dtype.hasobject:
        return "store array.tolist(), or convert it to a dtype of fixed size: array.astype(...)"
    if type(array) is not np.ndarray:
        return f"store numpy.asarray(array), {_REGISTER}"
    return "store its bits, array.view of an integer dtype of that size, or a torch tensor of such a dtype"


def advice_for(value: Any) -> str | None:
    """Return the hint for a value that cannot be stored; None where there is no better one than the error's own."""
    if isinstance(value, torch.Tensor):
        return _for_tensor(value)
    if isinstance(value, np.ndarray):
        return _for_array(value)
    if isinstance(value, TensorSpec):
        return "a TensorSpec stands for a leaf in the template of reserve(); put a tensor or an array"
    if isinstance(value, type):
        return "that is a class: store its name, or an instance of it"
    if isinstance(value, enum.Enum):
        return f"store its .value or its .name, {_REGISTER}"
    if isinstance(value, Mapping):  # UserDict (as of BatchFeature), OrderedDict, defaultdict, Counter, ...
        return f"store dict(value): types are taken exactly; {_REGISTER}"
    if dataclasses.is_dataclass(value):
        return f"store dataclasses.asdict(value), {_REGISTER}"
    if isinstance(value, tuple):
        named = "value._asdict() or " if hasattr(value, "_asdict") else ""
        return f"store {named}tuple(value): types are taken exactly; {_REGISTER}"
    for base in (str, bytes, int, float, list):
        if isinstance(value, base):
            return f"store {base.__name__}(value): types are taken exactly; {_REGISTER}"
    if isinstance(value, complex):
        return "store numpy.complex128(value)"
    if isinstance(value, (bytearray, memoryview)):
        return "store bytes(value), or numpy.frombuffer(value, ...)"
    if isinstance(value, (Set, deque, range, Iterator)):
        return f"store list(value), {_REGISTER}"
    if isinstance(value, np.generic):
        return "store numpy.asarray(value)"  # .item() is no plain number for a longdouble or a datetime64
    if isinstance(value, os.PathLike):
        return "store str(value)"
    if hasattr(type(value), "__array_interface__") or hasattr(type(value), "__array__"):  # PIL's images, ...
        return f"store numpy.asarray(value), {_REGISTER}"
    return None


def advice_for_key(key: Any) -> str:
    """Return the hint for a dict key that cannot be stored."""
    if isinstance(key, (np.generic, torch.Tensor, np.ndarray)):
        return "use key.item() for the key, if it is a number"
    if isinstance(key, enum.Enum):
        return "use its .value or its .name for the key"
    return "dict keys are str, bytes, int, float, bool, None or tuples of them; store a list of pairs otherwise"
