"""Fields: how a processor's output for one key is cut into a piece for each item, and how the pieces are joined.

A piece and its field are a `MultiModalFieldElem`; which key has which field is said by a `MultiModalFieldConfig`. All
are frozen: threads and caches share them.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
import torch

from shmstore.errors import shown
from shmstore.multimodal.values.nested import NestedTensors, nested_equal, page_locked, to_device

__all__ = [
    "MultiModalBatchedField",
    "MultiModalField",
    "MultiModalFieldConfig",
    "MultiModalFieldElem",
    "MultiModalFlatField",
    "MultiModalSharedField",
]


class MultiModalField(ABC):
    """How the data of one key is cut into one piece per item, and how the pieces are joined for the model."""

    __slots__ = ("_line",)

    _line: str  # of `wire`, which writes a field's text once for all items that share it; no part of the value

    def build_elems(self, modality: str, key: str, data: NestedTensors) -> list[MultiModalFieldElem]:
        """One element for each item, in order; views of `data` wherever it is a tensor.

        ValueError that names the key, for data that cannot be cut so.
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
        """The data of `elems` joined as this kind of field does it, on `device`, through page-locked memory if asked.

        ValueError where the elements' fields are not all of this kind, or there are none.
        """
        if not elems:
            raise ValueError("no elements to reduce")
        for elem in elems:
            if not self._joins_with(elem.field):
                kinds = sorted({type(e.field).__name__ for e in elems} | {type(self).__name__})
                raise ValueError(f"cannot reduce mixed fields of key {shown(elem.key)} together: {', '.join(kinds)}")
        joined = self._join([elem.data for elem in elems], pin_memory)
        # What was not joined would be copied from a view, which may go before the copy has been made.
        return to_device(page_locked(joined) if pin_memory else joined, device)

    def _joins_with(self, other: MultiModalField) -> bool:
        return type(other) is type(self)

    @abstractmethod
    def _cut(self, data: NestedTensors) -> Iterable[NestedTensors]: ...

    @abstractmethod
    def _join(self, pieces: list[NestedTensors], pin_memory: bool) -> NestedTensors: ...


def _all_tensors(pieces: list[NestedTensors]) -> bool:
    first = pieces[0]
    return isinstance(first, torch.Tensor) and all(
        isinstance(piece, torch.Tensor) and piece.dtype == first.dtype and piece.device == first.device
        for piece in pieces
    )


def _room(first: torch.Tensor, shape: Sequence[int], pin_memory: bool) -> torch.Tensor | None:
    # Only host memory can be page-locked, and only where there is an accelerator to lock it for.
    if not pin_memory or first.device.type != "cpu":
        return None
    return torch.empty(tuple(shape), dtype=first.dtype, pin_memory=True)


@dataclasses.dataclass(frozen=True, slots=True)
class MultiModalBatchedField(MultiModalField):
    """One element per index of the first dimension; joined by stacking equal shapes, else a list."""

    def _cut(self, data: NestedTensors) -> Iterable[NestedTensors]:
        if isinstance(data, (torch.Tensor, np.ndarray)) and data.ndim == 0:
            raise ValueError("batched data: expected a first dimension of the items, got a tensor or array of none")
        if not isinstance(data, Iterable) or isinstance(data, (str, bytes, Mapping)):  # whose parts are no items
            raise ValueError(f"batched data: expected a tensor or a sequence of items, got {type(data).__name__}")
        return list(data)

    def _join(self, pieces: list[NestedTensors], pin_memory: bool) -> NestedTensors:
        if not _all_tensors(pieces) or any(piece.shape != pieces[0].shape for piece in pieces):
            return pieces
        if len(pieces) == 1 and not pin_memory:
            return pieces[0].unsqueeze(0)  # the common case, one image: a view and no copy
        room = _room(pieces[0], (len(pieces), *pieces[0].shape), pin_memory)
        return torch.stack(pieces, out=room)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MultiModalFlatField(MultiModalField):
    """Each item owns a slice of one tensor; joined by concatenation along `dim`, else a flat list.

    `slices` has one entry per item: a slice, taken along `dim`, or a tuple of slices, one for each dimension from the
    first. Cutting data by a slice that ends behind it is a ValueError.
    """

    slices: Sequence[slice | Sequence[slice]]
    dim: int = 0

    def __post_init__(self) -> None:
        cuts: list[slice | Sequence[slice]] = []
        for cut in self.slices:
            parts = (cut,) if isinstance(cut, slice) else tuple(cut) if isinstance(cut, (list, tuple)) else ()
            if not parts or not all(isinstance(part, slice) for part in parts):
                raise TypeError(f"slices: expected a slice or a tuple of slices for each item, got {shown(cut)}")
            cuts.append(cut if isinstance(cut, slice) else parts)
        object.__setattr__(self, "slices", tuple(cuts))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MultiModalFlatField):
            return NotImplemented
        return self.dim == other.dim and self.slices == other.slices

    def __hash__(self) -> int:
        return hash((self.dim, len(self.slices)))  # slices are hashable from Python 3.12 on only

    def _joins_with(self, other: MultiModalField) -> bool:
        return isinstance(other, MultiModalFlatField) and other.dim == self.dim

    def _cut(self, data: NestedTensors) -> Iterable[NestedTensors]:
        if not isinstance(data, torch.Tensor):
            cuts = [cut for cut in self.slices if isinstance(cut, slice)]
            if self.dim != 0 or len(cuts) != len(self.slices):
                raise ValueError("slices of anything but the first dimension need one tensor")
            if isinstance(data, (str, bytes)) or not isinstance(data, (Sequence, np.ndarray)):
                raise ValueError(f"flat data: expected a tensor or a sequence, got {type(data).__name__}")
            if isinstance(data, np.ndarray) and data.ndim == 0:
                raise ValueError("dim: 0 is none of an array of 0 dimensions")
            self._check_ends((len(data),), 0)
            return [data[cut] for cut in cuts]
        if not -data.ndim <= self.dim < data.ndim:
            raise ValueError(f"dim: {self.dim} is none of a tensor of {data.ndim} dimensions")
        dim = self.dim % data.ndim
        self._check_ends(data.shape, dim)
        before = (slice(None),) * dim
        return [data[(*before, cut)] if isinstance(cut, slice) else data[tuple(cut)] for cut in self.slices]

    def _check_ends(self, shape: Sequence[int], dim: int) -> None:
        # Slicing would give what there is of it, and the model an item of less data than its grid says.
        for index, cut in enumerate(self.slices):
            parts = ((dim, cut),) if isinstance(cut, slice) else enumerate(cut)
            for along, part in parts:
                if along == len(shape):
                    raise ValueError(f"more slices of item {index} than the data has dimensions, {along}")
                if part.stop is not None and part.stop > shape[along]:
                    raise ValueError(
                        f"slice {part.start}:{part.stop} of item {index} ends behind the data, "
                        f"which has {shape[along]} along dimension {along}"
                    )

    def _join(self, pieces: list[NestedTensors], pin_memory: bool) -> NestedTensors:
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
        if len(pieces) == 1 and not pin_memory:
            return first
        shape = list(first.shape)
        shape[dim] = sum(piece.shape[dim] for piece in pieces)
        return torch.cat(pieces, dim=dim, out=_room(first, shape, pin_memory))


@dataclasses.dataclass(frozen=True, slots=True)
class MultiModalSharedField(MultiModalField):
    """The same data for each of `batch_size` items; joined to the first."""

    batch_size: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size: {self.batch_size} is not at least 1")

    def _joins_with(self, other: MultiModalField) -> bool:
        return isinstance(other, MultiModalSharedField)

    def _cut(self, data: NestedTensors) -> Iterable[NestedTensors]:
        return [data] * self.batch_size

    def _join(self, pieces: list[NestedTensors], pin_memory: bool) -> NestedTensors:
        return pieces[0]


def _check_field(field: object) -> None:
    if not isinstance(field, MultiModalField):
        got = f"the class {field.__name__}" if isinstance(field, type) else type(field).__name__
        raise TypeError(f"field: expected a field such as MultiModalBatchedField(), got {got}")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class MultiModalFieldElem:
    """One key of one item: its data, and the field that joins it with the same key of other items."""

    modality: str
    key: str
    data: NestedTensors
    field: MultiModalField

    def __post_init__(self) -> None:
        _check_field(self.field)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MultiModalFieldElem):
            return NotImplemented
        return (
            self.modality == other.modality
            and self.key == other.key
            and self.field == other.field
            and nested_equal(self.data, other.data)
        )

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True, slots=True)
class MultiModalFieldConfig:
    """Of which modality a processor's output key is, and by which field it is cut."""

    modality: str
    field: MultiModalField

    def __post_init__(self) -> None:
        if not isinstance(self.modality, str):
            raise TypeError(f"modality: expected a str, got {type(self.modality).__name__}")
        _check_field(self.field)

    @classmethod
    def batched(cls, modality: str) -> MultiModalFieldConfig:
        """One item per index of the first dimension."""
        return cls(modality, MultiModalBatchedField())

    @classmethod
    def flat(cls, modality: str, slices: Sequence[slice | Sequence[slice]], dim: int = 0) -> MultiModalFieldConfig:
        """One item per slice along `dim`."""
        return cls(modality, MultiModalFlatField(slices, dim))

    @classmethod
    def flat_from_sizes(cls, modality: str, sizes: Iterable[int], dim: int = 0) -> MultiModalFieldConfig:
        """One item per size: consecutive slices along `dim` of these lengths; ValueError for a negative one."""
        slices, start = [], 0
        for size in sizes:
            if size < 0:
                raise ValueError(f"sizes: {size} is negative")
            slices.append(slice(start, start + int(size)))
            start += int(size)
        return cls.flat(modality, slices, dim)

    @classmethod
    def shared(cls, modality: str, batch_size: int) -> MultiModalFieldConfig:
        """The same data for each of `batch_size` items."""
        return cls(modality, MultiModalSharedField(batch_size))
