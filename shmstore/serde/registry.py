"""Types that applications add to the trees of `MsgpackSerde`.

A registered type travels as its name and the tree that `to_tree` returns; tensors in that tree stay out of band.
The reading side never imports or calls anything by name; a process reads only the types that it has registered.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from shmstore.errors import shown
from shmstore.serde.protocol import TensorSpec

T = TypeVar("T")


class Registration(NamedTuple):
    """One registered type."""

    name: str
    cls: type
    to_tree: Callable[[Any], Any]
    from_tree: Callable[[Any], Any]


BY_CLASS: dict[type, Registration] = {}
BY_NAME: dict[str, Registration] = {}

BUILT_IN: set[type] = {
    *(str, bytes, bytearray, int, float, bool, complex, type(None), dict, list, tuple, set, frozenset, object, type),
    *(np.ndarray, TensorSpec),
}


def register_type(name: str, cls: type[T], to_tree: Callable[[T], Any], from_tree: Callable[[Any], T]) -> None:
    """Let this process store instances of exactly `cls` in a tree, and read them, under `name`.

    `to_tree` returns a value that can be stored; it may contain other registered types. `from_tree` makes an equal
    object of that value. Both must be pure. Bytes may be damaged or forged. Before `from_tree` unpacks a tree or loops
    over it, it must check the tree's type and length, and raise if they are wrong. Names are part of the stored bytes:
    choose names like ``package.Type``, and never change the meaning of one.

    Repeating a registration does nothing. Raises ValueError if the name or the class is taken, or if the class is part
    of the format itself. Raises TypeError for an argument of the wrong type.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a non-empty str, not {shown(name)}")
    if not isinstance(cls, type):
        raise TypeError(f"cls must be a class, not {shown(cls)}")
    if not callable(to_tree) or not callable(from_tree):
        raise TypeError(f"to_tree and from_tree must be callable, not {shown(to_tree)} and {shown(from_tree)}")
    if cls.__module__.partition(".")[0] == "torch":
        from shmstore.serde.tensors import load_torch  # not at the top: it needs the tables of this module

        load_torch()
    if cls in BUILT_IN:
        raise ValueError(f"cls must not be {cls.__name__}, which is part of the format itself")
    new = Registration(str(name), cls, to_tree, from_tree)
    for old in (BY_NAME.get(name), BY_CLASS.get(cls)):
        if old is not None and old != new:
            raise ValueError(f"{old.cls.__qualname__} is already registered as {shown(old.name)}")
    BY_NAME[new.name] = new
    BY_CLASS[cls] = new
