"""Trees of tensors, the data of one key of an item: how to compare, move and copy them.

Equality compares dtype, shape and bits of every leaf, so -0.0 differs from 0.0, and a NaN equals itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import is_
from typing import Any, TypeAlias

import numpy as np
import torch

from shmstore.device import upload

NestedTensors: TypeAlias = Any
"""A tensor, or nested lists and tuples of tensors; numbers and arrays are allowed. (Recursive, so `Any`.)"""


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a is b or a.numel() == 0 or _same_bits(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return np.from_dlpack(plain.reshape(-1).view(torch.uint8))  # `numpy()` would make the storage not resizable


def _same_array(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a is b or a.nbytes == 0 or a.dtype.hasobject:
        return a is b or bool(np.array_equal(a, b))
    return _same_bits(*(np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (a, b)))


def _same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Compare bytes, most of them as words: about as fast as memcmp, and 8 times as fast as `torch.equal` of bytes."""
    words = len(a) & -8
    return np.array_equal(a[:words].view(np.int64), b[:words].view(np.int64)) and np.array_equal(a[words:], b[words:])


def nested_equal(a: object, b: object) -> bool:
    """Return whether both are the same tree: kinds of container, keys, dtypes, shapes and bits."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and _same_tensor(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and _same_array(a, b)
    if isinstance(a, (list, tuple)):
        if isinstance(a, list) is not isinstance(b, list) or not isinstance(b, (list, tuple)):
            return False
        return len(a) == len(b) and all(map(nested_equal, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(nested_equal(a[k], b[k]) for k in a)
    if isinstance(a, float) and isinstance(b, float):
        return type(a) is type(b) and a.hex() == b.hex()
    return type(a) is type(b) and bool(a == b)


def alone(data: NestedTensors) -> NestedTensors:
    """Return the data with a copy of each tensor and array that may keep alive more memory than its own bytes."""
    return _changed(data, _alone)


def _alone(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is torch.strided and _kept_by(leaf) > leaf.nbytes:
            return leaf.detach().clone(memory_format=torch.contiguous_format)
    elif isinstance(leaf, np.ndarray) and _kept_by(leaf) > leaf.nbytes:
        return leaf.copy(order="C")
    return leaf


def _kept_by(leaf: Any) -> float:
    """Return the number of bytes that a tensor or an array keeps alive; infinity if nobody can say."""
    owner = leaf
    while True:
        if isinstance(owner, torch.Tensor):
            storage = owner.untyped_storage()
            return storage.nbytes() if storage.resizable() else math.inf  # not resizable: another library's memory
        if isinstance(owner, (bytes, bytearray)):
            return len(owner)
        if isinstance(owner, np.ndarray) and owner.base is None:
            return owner.nbytes
        if not isinstance(owner, (np.ndarray, memoryview)):
            return math.inf
        owner = owner.obj if isinstance(owner, memoryview) else owner.base


def to_device(data: NestedTensors, device: torch.device | str | None) -> NestedTensors:
    """Return the data with its tensors moved to `device`; None leaves them in place."""
    if device is None:
        return data
    where = torch.device(device)

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # A leaf of the host may be a view of a store, which must live until the copy is done.
        return upload(leaf, where) if where.type == "cuda" and leaf.device.type == "cpu" else leaf.to(where)

    return _changed(data, move)


def page_locked(data: NestedTensors) -> NestedTensors:
    """Return the data with its host tensors in page-locked memory; it copies only those that are not."""

    def lock(leaf: Any) -> Any:
        on_host = isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"
        return leaf.pin_memory() if on_host and not leaf.is_pinned() else leaf

    return _changed(data, lock)


def _changed(data: NestedTensors, change: Callable[[Any], Any]) -> NestedTensors:
    """Return the data with `change` of each leaf, or the same object if that changes nothing."""
    if isinstance(data, (list, tuple)):
        parts = [_changed(part, change) for part in data]
        if all(map(is_, parts, data)):
            return data
        return data._make(parts) if hasattr(data, "_make") else type(data)(parts)
    if isinstance(data, dict):
        by_key = {key: _changed(part, change) for key, part in data.items()}
        return data if all(map(is_, by_key.values(), data.values())) else by_key
    return change(data)
