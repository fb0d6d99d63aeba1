"""Fields: how a processor's output for one key is cut into one piece per item, and how the pieces are joined.

A `MultiModalFieldElem` is a piece with its field. A `MultiModalFieldConfig` assigns a field to a key. All of them are
frozen, because threads and caches share them.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import torch

from shmstore.errors import check_flags, kind_of, shown
from shmstore.multimodal.values.nested import NestedTensors, nested_equal, page_locked, to_device


class MultiModalField(ABC):
    """How the data of one key is cut into one piece per item, and how the pieces are joined for the model."""

    __slots__ = ("_line",)

    _line: str  # the text that `wire` writes once for all items of a batch; not a part of the value

    def build_elems(self, modality: str, key: str, data: NestedTensors) -> list[MultiModalFieldElem]:
        """Return one element for each item, in order; pieces of a tensor are views of it.

        Raises ValueError, with the key, if `data` cannot be cut this way.
        """
        try:
            pieces = self._cut(data)
        except ValueError as error:
            raise ValueError(f"key {shown(key)}: {error}") from None
        return [MultiModalFieldElem(modality, key, piece, self) for piece in pieces]

    def reduce_data(
        self,
        elems: Sequence[MultiModalFieldElem],
        *,
        device: torch.device | str | None = None,
        pin_memory: bool = False,
    ) -> NestedTensors:
        """Join the data of `elems` and return it on `device`, by way of page-locked memory if `pin_memory`.

        Raises ValueError if `elems` is empty, or if an element's field does not match this field.
        """
        if pin_memory is not False:
            check_flags(pin_memory=pin_memory)
        if not elems:
            raise ValueError("elems must not be empty")
        for elem in elems:
            if not self._joins_with(elem.field):
                kinds = sorted({type(e.field).__name__ for e in elems} | {type(self).__name__})
                raise ValueError(
                    f"the elements of key {shown(elem.key)} must have matching fields, not {', '.join(kinds)}"
                )
        joined = self._join([elem.data for elem in elems])
        # Data that was not joined is still a view, whose memory may be freed before an asynchronous copy is done.
        return to_device(page_locked(joined) if pin_memory else joined, device)

    def _joins_with(self, other: MultiModalField) -> bool:
        return type(other) is type(self)

    @abstractmethod
    def _cut(self, data: NestedTensors) -> Iterable[NestedTensors]: ...

    @abstractmethod
    def _join(self, pieces: list[NestedTensors]) -> NestedTensors: ...


def _all_tensors(pieces: list[NestedTensors]) -> bool:
    first = pieces[0]
    return isinstance(first, torch.Tensor) and all(
        isinstance(piece, torch.Tensor) and piece.dtype == first.dtype and piece.device == first.device
        for piece in pieces
    )


@dataclasses.dataclass(frozen=True, slots=True)
class MultiModalBatchedField(MultiModalField):
    """Makes one element per index of the first dimension; joins equal shapes by stacking, others to a list."""

    def _cut(self, data: NestedTensors) -> Iterable[NestedTensors]:
        parts = isinstance(data, Iterable) and not isinstance(data, (str, bytes, Mapping))  # whose parts are no items
        if not parts or getattr(data, "ndim", 1) == 0:
            raise ValueError(f"batched data must have a first dimension, as a tensor or sequence, not {kind_of(data)}")
        return list(data)

    def _join(self, pieces: list[NestedTensors]) -> NestedTensors:
        if not _all_tensors(pieces) or any(piece.shape != pieces[0].shape for piece in pieces):
            return pieces
        if len(pieces) == 1:
            return pieces[0].unsqueeze(0)  # the common case, one image, needs no copy
        return torch.stack(pieces)


@dataclasses.dataclass(frozen=True, slots=True)
class MultiModalFlatField(MultiModalField):
    """Gives each item a slice of one tensor; joins by concatenation along `dim`, else to a flat list.

    `slices` has one entry per item: a slice along `dim`, or a tuple of slices for the first dimensions. A slice that
    ends after the data is a ValueError.
    """

    slices: Sequence[slice | Sequence[slice]]
    dim: int = 0

    def __post_init__(self) -> None:
        cuts: list[slice | Sequence[slice]] = []
        for cut in self.slices:
            parts = (cut,) if isinstance(cut, slice) else tuple(cut) if isinstance(cut, (list, tuple)) else ()
            if not parts or not all(isinstance(part, slice) for part in parts):
                raise TypeError(f"slices must have a slice or a tuple of slices for each item, not {shown(cut)}")
            cuts.append(cut if isinstance(cut, slice) else parts)
        object.__setattr__(self, "slices", tuple(cuts))

    def __hash__(self) -> int:
        return hash((self.dim, len(self.slices)))  # before Python 3.12, slices are not hashable

    def _joins_with(self, other: MultiModalField) -> bool:
        return isinstance(other, MultiModalFlatField) and other.dim == self.dim

    def _cut(self, data: NestedTensors) -> Iterable[NestedTensors]:
        if not isinstance(data, torch.Tensor):
            cuts = [cut for cut in self.slices if isinstance(cut, slice)]
            plain = isinstance(data, Sequence) and not isinstance(data, (str, bytes))
            rows = plain or (isinstance(data, np.ndarray) and data.ndim > 0)
            if self.dim != 0 or len(cuts) != len(self.slices) or not rows:
                raise ValueError(
                    f"flat data must be one tensor, or a sequence to be sliced along its first dimension, not "
                    f"{type(data).__name__}"
                )
            self._check_ends((len(data),), 0)
            return [data[cut] for cut in cuts]
        if not -data.ndim <= self.dim < data.ndim:
            raise ValueError(f"dim must be one of the {data.ndim} dimensions of the data, not {self.dim}")
        dim = self.dim % data.ndim
        self._check_ends(data.shape, dim)
        before = (slice(None),) * dim
        return [data[(*before, cut)] if isinstance(cut, slice) else data[tuple(cut)] for cut in self.slices]

    def _check_ends(self, shape: Sequence[int], dim: int) -> None:
        # Slicing would cut the item short without an error, and the model would read less data than its grid says.
        for index, cut in enumerate(self.slices):
            parts = ((dim, cut),) if isinstance(cut, slice) else enumerate(cut)
            for along, part in parts:
                if along == len(shape):
                    raise ValueError(f"item {index} must not have more slices than the data has dimensions, {along}")
                if part.stop is not None and part.stop > shape[along]:
                    raise ValueError(
                        f"slice {part.start}:{part.stop} of item {index} ends after the data, "
                        f"which has {shape[along]} along dimension {along}"
                    )

    def _join(self, pieces: list[NestedTensors]) -> NestedTensors:
        if not _all_tensors(pieces):
            return list(chain.from_iterable([piece] if isinstance(piece, torch.Tensor) else piece for piece in pieces))
        first: torch.Tensor = pieces[0]
        if first.ndim == 0:
            return pieces
        dim = self.dim % first.ndim
        if any(piece.ndim != first.ndim for piece in pieces):
            return pieces
        around = first.shape[:dim] + first.shape[dim + 1 :]
        if any(piece.shape[:dim] + piece.shape[dim + 1 :] != around for piece in pieces):
            return pieces
        return first if len(pieces) == 1 else torch.cat(pieces, dim=dim)


@dataclasses.dataclass(frozen=True, slots=True)
class MultiModalSharedField(MultiModalField):
    """Gives the same data to each of `batch_size` items; joins them to the first."""

    batch_size: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {self.batch_size}")

    def _cut(self, data: NestedTensors) -> Iterable[NestedTensors]:
        return [data] * self.batch_size

    def _join(self, pieces: list[NestedTensors]) -> NestedTensors:
        return pieces[0]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MultiModalFieldElem:
    """One key of one item: its data, and the field that joins it with other items' data for this key."""

    modality: str
    key: str
    data: NestedTensors
    field: MultiModalField

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MultiModalFieldElem):
            return NotImplemented
        mine, theirs = (self.modality, self.key, self.field), (other.modality, other.key, other.field)
        return mine == theirs and nested_equal(self.data, other.data)


@dataclasses.dataclass(frozen=True, slots=True)
class MultiModalFieldConfig:
    """The modality of a processor's output key, and the field that cuts it."""

    modality: str
    field: MultiModalField

    @classmethod
    def batched(cls, modality: str) -> MultiModalFieldConfig:
        """Return a configuration with one item per index of the first dimension."""
        return cls(modality, MultiModalBatchedField())

    @classmethod
    def flat(cls, modality: str, slices: Sequence[slice | Sequence[slice]], dim: int = 0) -> MultiModalFieldConfig:
        """Return a configuration with one item per slice along `dim`."""
        return cls(modality, MultiModalFlatField(slices, dim))

    @classmethod
    def shared(cls, modality: str, batch_size: int) -> MultiModalFieldConfig:
        """Return a configuration with the same data for each of `batch_size` items."""
        return cls(modality, MultiModalSharedField(batch_size))
