"""What the store and a serializer say to each other: `ObjectSerde`, and the records that pass between them.

A stored object is two byte strings: `meta`, small and read once, and a payload area that the store places at a
multiple of `ALIGNMENT`. A serializer sizes both before anything is allocated, so that a value which cannot be
stored is refused while nothing has changed. It never copies a leaf itself: it names spans of host memory, which
the store copies by one C call with the GIL released, and `fill` writes what no plain copy can.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from shmstore.errors import shown

__all__ = ["ALIGNMENT", "Encoded", "Layout", "ObjectSerde", "TensorSpec"]

ALIGNMENT = 64
"""Every leaf starts at a multiple of this many bytes from the start of the payload area: one cache line."""


class Encoded(NamedTuple):
    """A value taken apart: everything the store needs to size, allocate and copy it."""

    meta: bytes
    """What `decode` needs besides the payload; at most a few hundred bytes for a usual item."""
    nbytes: int
    """The size of the payload area."""
    spans: Sequence[tuple[int, int, int]]
    """(offset in the payload area, bytes, address) of each leaf that lies in host memory as one piece."""
    fills: Sequence[tuple[int, int, Any]]
    """(offset, bytes, source) of each other leaf; ``serde.fill(that part of the payload area, source)`` writes it."""
    keepalive: Any
    """Owns the memory behind `spans`; to be held until the copies are done."""


class Layout(NamedTuple):
    """Where the leaves of a template go, for a producer that writes in place."""

    meta: bytes
    """As in `Encoded`."""
    nbytes: int
    """The size of the payload area."""
    build: Callable[[Any], Any]
    """Takes a writable buffer of at least `nbytes` bytes and returns the tree of writable views into it."""


@runtime_checkable
class ObjectSerde(Protocol):
    """Turns values into bytes and back; implement it to store what `MsgpackSerde` refuses.

    Implementations must be thread-safe. `payload` and `dst` are flat buffers of bytes.
    """

    def encode(self, value: Any) -> Encoded:
        """Take `value` apart without copying a leaf; raises TypeError, naming the path, for what it cannot store."""
        ...

    def fill(self, dst: Any, source: Any) -> None:
        """Write one source of `Encoded.fills` into `dst`, a writable buffer of exactly its size, in one pass."""
        ...

    def decode(self, meta: bytes, payload: Any, *, copy: bool = False) -> Any:
        """Put a value together from `meta` and the payload area.

        Without `copy` its leaves are read-only by contract and each of them keeps a reference to `payload`, whose
        lifetime pins the object; with `copy` they are private and writable. Raises CorruptStoreError for bytes
        that do not fit together, whatever they are.
        """
        ...

    def layout(self, template: Any) -> Layout:
        """Lay out a value of the shapes and dtypes of `template`; raises TypeError where that cannot be done."""
        ...


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Return `shape` as a tuple of ints; raises TypeError or ValueError where it is none."""
    try:
        dims = tuple(operator.index(dim) for dim in shape)
    except TypeError:
        raise TypeError(f"shape must be a sequence of ints, not {shown(shape)}") from None
    if any(dim < 0 for dim in dims):
        raise ValueError(f"negative dimension in shape {dims}")
    return dims


def _numpy_dtype(dtype: Any) -> "np.dtype[Any]":
    if dtype is not None:  # which numpy takes for float64
        try:
            found: np.dtype[Any] = np.dtype(dtype)
            return found
        except (TypeError, ValueError, SyntaxError, AttributeError, KeyError):
            pass
    raise TypeError(
        "dtype must be a torch.dtype (for a tensor) or what numpy takes for one (for an array), such as torch.float16 "
        f"or 'float16', not {shown(dtype)}"
    )


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape and dtype of a leaf that is still to be written, for `ObjectStoreWriter.reserve`.

    A torch dtype asks for a `torch.Tensor`, anything that numpy takes for a dtype for a `numpy.ndarray`.
    """

    shape: tuple[int, ...]
    """Dimensions, none of them negative."""
    dtype: "torch.dtype | np.dtype[Any]"
    """What decides the kind of leaf that comes back."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape))
        if not isinstance(self.dtype, torch.dtype):
            object.__setattr__(self, "dtype", _numpy_dtype(self.dtype))
