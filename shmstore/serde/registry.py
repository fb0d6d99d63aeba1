"""Types that applications add to the trees that `MsgpackSerde` stores.

A registered type travels as its name and the tree that `to_tree` returns; tensors in that tree stay out of band.
Nothing is imported or called by name on the reading side: a process reads only the types it has registered itself.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from shmstore.errors import shown
from shmstore.serde.protocol import TensorSpec

__all__ = ["BY_CLASS", "BY_NAME", "Registration", "register_type"]

T = TypeVar("T")


class Registration(NamedTuple):
    """One registered type."""

    name: str
    cls: type
    to_tree: Callable[[Any], Any]
    from_tree: Callable[[Any], Any]


BY_CLASS: dict[type, Registration] = {}
BY_NAME: dict[str, Registration] = {}

_BUILT_IN = {
    *(str, bytes, bytearray, int, float, bool, complex, type(None), dict, list, tuple, set, frozenset, object, type),
    *(torch.Tensor, torch.nn.Parameter, np.ndarray, TensorSpec),
}


def register_type(name: str, cls: type[T], to_tree: Callable[[T], Any], from_tree: Callable[[Any], T]) -> None:
    """Let instances of exactly `cls` be stored anywhere in a tree, under `name`, in this process.

    `to_tree` returns a value that can be stored (other registered types in it are fine), `from_tree` makes an equal
    object of it; both must be pure. Bytes may be damaged or forged: let `from_tree` check the type and the length of a
    tree before it unpacks it or loops over it, and raise for any other. Names are part of the stored bytes: choose them
    like ``package.Type``, and never give one a new meaning. Registering the same again does nothing; raises ValueError
    where the name or the class is taken, or the class is one that trees are made of, and TypeError for arguments of
    other types.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a non-empty str, not {shown(name)}")
    if not isinstance(cls, type):
        raise TypeError(f"cls must be a class, not {shown(cls)}")
    if not callable(to_tree) or not callable(from_tree):
        raise TypeError("to_tree and from_tree must be callable")
    if cls in _BUILT_IN:
        raise ValueError(f"{cls.__name__} is part of the format itself")
    new = Registration(str(name), cls, to_tree, from_tree)
    for old in (BY_NAME.get(name), BY_CLASS.get(cls)):
        if old is not None and old != new:
            raise ValueError(f"{old.cls.__qualname__} is registered as {shown(old.name)} already")
    BY_NAME[new.name] = new
    BY_CLASS[cls] = new
