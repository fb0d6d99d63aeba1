"""The interface between the store and a serializer: `ObjectSerde`, and the records that it exchanges.

A stored object is two byte strings: `meta`, which is small, and the payload area. The store places that area at a
multiple of `ALIGNMENT`. A serializer computes both sizes before the store allocates anything, so a refused value
changes nothing. The serializer copies no leaf. It names spans of host memory, which one C call of the store copies
with the GIL released. `fill` writes leaves that need more than a plain copy.
"""

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, SupportsIndex, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike

from shmstore.errors import shown

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
"""Each leaf starts at a multiple of this many bytes from the start of the payload area; it is one cache line."""


class Encoded(NamedTuple):
    """A value taken apart: all that the store needs to allocate and copy it."""

    meta: bytes
    """What `decode` needs besides the payload; a usual item has a few hundred bytes of it."""
    nbytes: int
    """The size of the payload area."""
    spans: Sequence[tuple[int, int, int]]
    """(offset in the payload area, bytes, address) of each leaf that lies in host memory as one piece."""
    fills: Sequence[tuple[int, int, Any]]
    """(offset, bytes, source) of each other leaf; ``serde.fill(dst, source)`` writes it to that part of the payload."""
    keepalive: Any
    """Owner of the memory of `spans`; the store holds it until the copies are done."""


class Layout(NamedTuple):
    """The places of a template's leaves, for a producer that writes in place."""

    meta: bytes
    """As in `Encoded`."""
    nbytes: int
    """The size of the payload area."""
    build: Callable[[Any], Any]
    """A function from a writable buffer of at least `nbytes` bytes to the tree of writable views into it."""


@runtime_checkable
class ObjectSerde(Protocol):
    """Turns values into bytes and back; implement it to store values that `MsgpackSerde` refuses.

    Implementations must be thread-safe. `payload` and `dst` are flat buffers of bytes.
    """

    def encode(self, value: Any) -> Encoded:
        """Take `value` apart without copying a leaf, or raise TypeError with the path of the part it cannot store."""
        ...

    def fill(self, dst: Any, source: Any) -> None:
        """Write one source of `Encoded.fills` into `dst`, a writable buffer of its exact size, in one pass."""
        ...

    def decode(self, meta: bytes, payload: Any, *, copy: bool = False) -> Any:
        """Return the value that `meta` and the payload area describe.

        Without `copy`, the leaves are read-only by contract, and each keeps a reference to `payload`, whose lifetime
        pins the object. With `copy`, they are private and writable. Raises CorruptStoreError, and no other error, for
        bytes that do not fit together.
        """
        ...

    def layout(self, template: Any) -> Layout:
        """Lay out a value with the shapes and dtypes of `template`, or raise TypeError if that is impossible."""
        ...


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Return `shape` as a tuple of ints. Raises TypeError or ValueError if it is not a shape."""
    try:
        dims = tuple(operator.index(dim) for dim in shape)
    except TypeError:
        raise TypeError(f"shape must be a sequence of ints, not {shown(shape)}") from None
    if any(dim < 0 for dim in dims):
        raise ValueError(f"shape must not have negative dimensions: {dims}")
    return dims


def _numpy_dtype(dtype: Any) -> "np.dtype[Any]":
    if dtype is not None:  # numpy reads None as float64
        try:
            found: np.dtype[Any] = np.dtype(dtype)
            return found
        except (TypeError, ValueError, SyntaxError, AttributeError, KeyError):
            pass
    raise TypeError(
        "dtype must be a torch.dtype for a tensor, such as torch.float16, or a numpy dtype for an array, such as "
        f"'float16', not {shown(dtype)}"
    )


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape and dtype of a leaf that has no bytes yet, for `ObjectStoreWriter.reserve`.

    A torch dtype makes a `torch.Tensor`; any dtype that numpy accepts makes a `numpy.ndarray`.
    """

    shape: tuple[int, ...]
    """The dimensions; they must not be negative."""
    dtype: "torch.dtype | np.dtype[Any]"
    """The dtype, which also decides between a tensor and an array."""

    if TYPE_CHECKING:  # the constructor takes more types than the fields have

        def __init__(self, shape: Iterable[SupportsIndex], dtype: "torch.dtype | DTypeLike") -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", checked_shape(self.shape))
        torch = sys.modules.get("torch")  # only a process that has imported it has one of its dtypes
        if torch is None or not isinstance(self.dtype, torch.dtype):
            object.__setattr__(self, "dtype", _numpy_dtype(self.dtype))
