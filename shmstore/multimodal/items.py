"""The values of the multi-modal path: field elements, the fields that batch them, items, features, positions.

A processor's output (one batched tensor per key) is cut into one `MultiModalKwargsItem` per image, clip or
recording; items are what the caches keep; `MultiModalKwargsItems.get_data` puts a batch together again. How a key
is cut and joined is the business of its field. Nothing here knows a cache or a store.

All values but `MultiModalFeatureSpec` are frozen: threads and caches share them. Equality compares dtype, shape and
bits of every leaf, so that -0.0 differs from 0.0 and a NaN equals itself.
"""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from shmstore.refs import ObjectRef

__all__ = [
    "MultiModalBatchedField",
    "MultiModalFeatureSpec",
    "MultiModalField",
    "MultiModalFieldConfig",
    "MultiModalFieldElem",
    "MultiModalFlatField",
    "MultiModalKwargsItem",
    "MultiModalKwargsItems",
    "MultiModalSharedField",
    "NestedTensors",
    "PlaceholderRange",
    "ResolvedPromptUpdate",
    "nested_equal",
    "own_memory",
]

_log = logging.getLogger(__name__)

NestedTensors: TypeAlias = Any
"""A tensor, or lists and tuples of them to any depth; numbers and arrays are let through. (Recursive: so `Any`.)"""


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a is b or a.numel() == 0:
        return True
    if a.is_floating_point() or a.is_complex():
        # torch.equal says that NaN differs from NaN; bits do not. A contiguous copy of a view has its values.
        return torch.equal(_bits(a), _bits(b))
    return torch.equal(a, b.to(a.device))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _same_array(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a is b or (bool(np.array_equal(a, b)) if a.dtype.hasobject else a.tobytes() == b.tobytes())


def nested_equal(a: object, b: object) -> bool:
    """True where both are the same tree: kinds of container, keys, dtypes, shapes and bits."""
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


def own_memory(item: MultiModalKwargsItem) -> MultiModalKwargsItem:
    """The item with a copy of each tensor and array that is a view into more memory than its own bytes.

    Such a view keeps the whole alive (one image of a batch, the batch), and is pickled with the whole storage. The same
    object where there is none.
    """
    changed = False
    elems: dict[str, MultiModalFieldElem] = {}
    for key, elem in item.items():
        data = _alone(elem.data)
        if data is not elem.data:
            elem, changed = dataclasses.replace(elem, data=data), True
        elems[key] = elem
    return type(item)(elems) if changed else item


def _alone(data: NestedTensors) -> NestedTensors:
    if isinstance(data, torch.Tensor):
        if data.layout is torch.strided and data.untyped_storage().nbytes() > data.nbytes:
            return data.detach().clone(memory_format=torch.contiguous_format)
    elif isinstance(data, np.ndarray):
        if _whole_of(data) > data.nbytes:
            return data.copy(order="C")
    elif isinstance(data, (list, tuple)):
        parts = [_alone(part) for part in data]
        if any(new is not old for new, old in zip(parts, data, strict=True)):
            return data._make(parts) if hasattr(data, "_make") else type(data)(parts)
    elif isinstance(data, dict):
        by_key = {key: _alone(part) for key, part in data.items()}
        if any(part is not data[key] for key, part in by_key.items()):
            return by_key
    return data


def _whole_of(array: np.ndarray[Any, Any]) -> int:
    """Bytes that the array keeps alive."""
    whole: Any = array
    while isinstance(whole, np.ndarray) and whole.base is not None:
        whole = whole.base
    if isinstance(whole, np.ndarray):
        return whole.nbytes
    if isinstance(whole, torch.Tensor):
        return whole.untyped_storage().nbytes()
    try:
        return memoryview(whole).nbytes
    except TypeError:  # an owner that does not tell
        return array.nbytes


def _to_device(data: NestedTensors, device: torch.device | str | None) -> NestedTensors:
    if device is None:
        return data
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, (list, tuple)):
        parts = [_to_device(part, device) for part in data]
        return data._make(parts) if hasattr(data, "_make") else type(data)(parts)
    if isinstance(data, dict):
        return {key: _to_device(part, device) for key, part in data.items()}
    return data


class MultiModalField(ABC):
    """How the data of one key is cut into one piece per item, and how the pieces are joined for the model."""

    __slots__ = (
        "_line",
    )  # of `wire`, which writes a field's text once for all items that share it; no part of the value

    _line: str

    def build_elems(self, modality: str, key: str, data: NestedTensors) -> list[MultiModalFieldElem]:
        """One element for each item, in order; views of `data` wherever it is a tensor.

        ValueError that names the key, for data that cannot be cut so.
        """
        try:
            pieces = self._cut(data)
        except ValueError as error:
            raise ValueError(f"key {key!r}: {error}") from None
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
                raise ValueError(f"cannot reduce mixed fields of key {elem.key!r} together: {', '.join(kinds)}")
        return _to_device(self._join([elem.data for elem in elems], pin_memory), device)

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
                raise TypeError(f"slices: expected a slice or a tuple of slices for each item, got {cut!r}")
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
            if not isinstance(data, (Sequence, np.ndarray)):
                raise ValueError(f"flat data: expected a tensor or a sequence, got {type(data).__name__}")
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


class MultiModalKwargsItem(Mapping[str, MultiModalFieldElem]):
    """One preprocessed item (one image, one clip): its elements by key, all of one modality; immutable.

    ValueError where there is no element, where modalities differ, or where a key is not its element's; TypeError for
    bare data.
    """

    __slots__ = ("_elems", "_modality")

    _elems: dict[str, MultiModalFieldElem]
    _modality: str

    def __init__(self, elems: Mapping[str, MultiModalFieldElem]) -> None:
        if not isinstance(elems, Mapping):
            raise TypeError(
                f"elems: expected a mapping of keys to MultiModalFieldElem, got {type(elems).__name__} "
                "(hint: MultiModalKwargsItem.from_elems takes a sequence of them)"
            )
        for key, elem in elems.items():
            if not isinstance(elem, MultiModalFieldElem):
                raise TypeError(
                    f"element of key {key!r}: expected a MultiModalFieldElem, got {type(elem).__name__} "
                    "(hint: MultiModalKwargsItems.from_hf_inputs makes them of bare data)"
                )
        modalities = {elem.modality for elem in elems.values()}
        if len(modalities) != 1:
            found = ", ".join(sorted(map(repr, modalities))) or "none"
            raise ValueError(f"the elements of an item must have one modality, found {found}")
        for key, elem in elems.items():
            if key != elem.key:
                raise ValueError(f"element of key {elem.key!r} given as {key!r}")
        self._elems = dict(elems)
        self._modality = next(iter(modalities))

    @classmethod
    def from_elems(cls, elems: Iterable[MultiModalFieldElem]) -> MultiModalKwargsItem:
        """The item made of these elements; ValueError where two have the same key."""
        by_key: dict[str, MultiModalFieldElem] = {}
        for elem in elems:
            if not isinstance(elem, MultiModalFieldElem):
                raise TypeError(f"expected elements (MultiModalFieldElem), got {type(elem).__name__}")
            if elem.key in by_key:
                raise ValueError(f"two elements of key {elem.key!r}")
            by_key[elem.key] = elem
        return cls(by_key)

    @classmethod
    def dummy(cls, modality: str, nbytes: int = 1) -> MultiModalKwargsItem:
        """An item of `nbytes` zero bytes under the key "dummy": for profiling runs and tests."""
        if nbytes < 0:
            raise ValueError(f"nbytes: {nbytes} is negative")
        data = torch.zeros(nbytes, dtype=torch.uint8)
        return cls.from_elems([MultiModalFieldElem(modality, "dummy", data, MultiModalSharedField(1))])

    @property
    def modality(self) -> str:
        """The modality of every element."""
        return self._modality

    def get_data(self) -> dict[str, NestedTensors]:
        """The bare data by key."""
        return {key: elem.data for key, elem in self._elems.items()}

    def __getitem__(self, key: str) -> MultiModalFieldElem:
        return self._elems[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._elems)

    def __len__(self) -> int:
        return len(self._elems)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MultiModalKwargsItem):
            return NotImplemented
        return self._elems == other._elems

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(modality={self._modality!r}, keys={list(self._elems)})"


def _check_spelling(inputs: Mapping[str, Any], configured: Mapping[str, Any]) -> None:
    """Look for what is given under one name and configured under nearly the same."""
    given = tuple(key for key in inputs if key not in configured)
    spare = tuple(key for key in configured if key not in inputs)
    if given and spare:
        _warn_of_spelling(given, spare)


@lru_cache(maxsize=256)
def _warn_of_spelling(given: tuple[Any, ...], spare: tuple[str, ...]) -> None:
    # No error: models have keys that differ in a letter or two (image_size, image_sizes). Cached: once for each case.
    for key in given:
        if isinstance(key, str) and (near := get_close_matches(key, spare, n=1, cutoff=0.9)):
            _log.warning(
                "input %r has no configuration and is left out, and %r is configured but not among the inputs: "
                "is one of them misspelt?",
                key,
                near[0],
            )


class MultiModalKwargsItems(Mapping[str, Sequence["MultiModalKwargsItem | None"]]):
    """The items of one request by modality, in the order in which they appear; immutable.

    An item is None where only its hash travels, because the other side has it already. TypeError for rows of anything
    else, such as one item where a sequence of them is expected.
    """

    __slots__ = ("_items",)

    _items: dict[str, list[MultiModalKwargsItem | None]]

    def __init__(self, items: Mapping[str, Sequence[MultiModalKwargsItem | None]] | None = None) -> None:
        if items is not None and not isinstance(items, Mapping):
            raise TypeError(
                f"items: expected a mapping of modalities to rows of items, got {type(items).__name__} "
                "(hint: MultiModalKwargsItems.from_seq takes a sequence of items)"
            )
        self._items = {modality: list(row) for modality, row in (items or {}).items()}
        for modality, row in self._items.items():
            for item in row:
                if item is not None and not isinstance(item, MultiModalKwargsItem):
                    raise TypeError(
                        f"row of modality {modality!r}: expected a sequence of MultiModalKwargsItem or None, "
                        f"got {type((items or {})[modality]).__name__} of {type(item).__name__}"
                    )

    @classmethod
    def from_seq(cls, items: Iterable[MultiModalKwargsItem]) -> MultiModalKwargsItems:
        """The items grouped by their modality, otherwise in the order given."""
        rows: dict[str, list[MultiModalKwargsItem | None]] = {}
        for item in items:
            if not isinstance(item, MultiModalKwargsItem):
                raise TypeError(f"expected items (MultiModalKwargsItem), got {type(item).__name__}")
            rows.setdefault(item.modality, []).append(item)
        return cls(rows)

    @classmethod
    def from_hf_inputs(
        cls, inputs: Mapping[str, NestedTensors], config_by_key: Mapping[str, MultiModalFieldConfig]
    ) -> MultiModalKwargsItems:
        """A processor's output cut into items; keys without a configuration are left out, and the reverse too.

        For processors give keys that are no item's (`input_ids`), and configurations name keys of other modalities.
        Where one of the first is nearly one of the second, the log warns: it may be a slip of the pen, which loses that
        input. ValueError where the keys of one modality give different numbers of items.
        """
        for name, given in (("inputs", inputs), ("config_by_key", config_by_key)):
            if not isinstance(given, Mapping):
                raise TypeError(f"{name}: expected a mapping by key, got {type(given).__name__}")
        for key, config in config_by_key.items():
            if not isinstance(config, MultiModalFieldConfig):
                raise TypeError(
                    f"config_by_key[{key!r}]: expected a MultiModalFieldConfig, got {type(config).__name__} "
                    "(hint: MultiModalFieldConfig.batched(modality) and the like make them)"
                )
        _check_spelling(inputs, config_by_key)
        elems_by_modality: dict[str, dict[str, list[MultiModalFieldElem]]] = {}
        for key, config in config_by_key.items():
            if (data := inputs.get(key)) is not None:
                elems = config.field.build_elems(config.modality, key, data)
                elems_by_modality.setdefault(config.modality, {})[key] = elems
        rows: dict[str, list[MultiModalKwargsItem | None]] = {}
        for modality, by_key in elems_by_modality.items():
            counts = {key: len(elems) for key, elems in by_key.items()}
            if len(set(counts.values())) > 1:
                raise ValueError(f"the keys of modality {modality!r} give different numbers of items: {counts}")
            rows[modality] = [MultiModalKwargsItem.from_elems(elems) for elems in zip(*by_key.values(), strict=True)]
        return cls(rows)

    def require_data(self) -> MultiModalKwargsItems:
        """Itself; ValueError naming the first item that is None."""
        for modality, row in self._items.items():
            for index, item in enumerate(row):
                if item is None:
                    raise ValueError(f"item {index} of modality {modality!r} is None: a cache has to fill it in first")
        return self

    def get_data(self, device: torch.device | str | None = None, pin_memory: bool = False) -> dict[str, NestedTensors]:
        """The model's keyword arguments: for each key the data of all items, joined by its field.

        ValueError where an item is None, or a key's elements have fields of different kinds.
        """
        elems_by_key: dict[str, list[MultiModalFieldElem]] = {}
        for item in chain.from_iterable(self.require_data().values()):
            for key, elem in (item or {}).items():
                elems_by_key.setdefault(key, []).append(elem)
        return {
            key: elems[0].field.reduce_data(elems, device=device, pin_memory=pin_memory)
            for key, elems in elems_by_key.items()
        }

    def __getitem__(self, modality: str) -> Sequence[MultiModalKwargsItem | None]:
        return list(self._items[modality])  # a caller's own: what it does to it changes no shared value

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MultiModalKwargsItems):
            return NotImplemented
        return self._items == other._items

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({ {modality: len(row) for modality, row in self._items.items()} })"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PlaceholderRange:
    """The tokens of the prompt that stand for one item: `length` of them from `offset` on.

    `is_embed` is a bool tensor of `length`, true where an embedding replaces the token; None: everywhere.
    """

    offset: int
    length: int
    is_embed: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 0:
            raise ValueError(f"offset {self.offset} and length {self.length} must not be negative")
        if self.is_embed is not None and not isinstance(self.is_embed, torch.Tensor):
            raise TypeError(f"is_embed: expected a bool tensor or None, got {type(self.is_embed).__name__}")
        if self.is_embed is not None and tuple(self.is_embed.shape) != (self.length,):
            raise ValueError(f"is_embed has shape {tuple(self.is_embed.shape)}, expected ({self.length},)")

    def get_num_embeds(self) -> int:
        """How many embeddings the item has."""
        return self.length if self.is_embed is None else int(self.is_embed.sum())

    def get_embeds_indices_in_range(self, start_idx: int, end_idx: int) -> tuple[int, int]:
        """Which of the item's embeddings [first, last) fall on its placeholders [start_idx, end_idx)."""
        if not 0 <= start_idx <= end_idx <= self.length:
            raise ValueError(f"[{start_idx}, {end_idx}) does not lie in the {self.length} placeholders")
        if self.is_embed is None:
            return start_idx, end_idx
        first = int(self.is_embed[:start_idx].sum())
        return first, first + int(self.is_embed[start_idx:end_idx].sum())

    def extract_embeds_range(self) -> list[tuple[int, int]]:
        """The runs of embeddings as positions in the prompt, (first, last) with both inclusive, `offset` added."""
        if self.is_embed is None:
            return [(self.offset, self.offset + self.length - 1)] if self.length else []
        padded = torch.zeros(self.length + 2, dtype=torch.int8)
        padded[1:-1] = self.is_embed.to(torch.int8).ne(0)
        steps = padded.diff()
        starts = (steps == 1).nonzero().flatten().tolist()
        ends = (steps == -1).nonzero().flatten().tolist()
        return [(self.offset + start, self.offset + end - 1) for start, end in zip(starts, ends, strict=True)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlaceholderRange):
            return NotImplemented
        return (self.offset, self.length) == (other.offset, other.length) and nested_equal(
            self.is_embed, other.is_embed
        )

    def __hash__(self) -> int:
        return hash((self.offset, self.length))


@dataclasses.dataclass(slots=True, eq=False)
class MultiModalFeatureSpec:
    """One item of a request on its way: what identifies it, where it stands, and its data in whatever form.

    `data` is None where the receiver has it cached, an item, or a reference into the store; a receiver cache
    replaces it by the item (`get_and_update_features`), so this one type is mutable.
    """

    data: MultiModalKwargsItem | ObjectRef | None
    modality: str
    identifier: str
    mm_position: PlaceholderRange

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MultiModalFeatureSpec):
            return NotImplemented
        return (
            (self.modality, self.identifier, self.mm_position) == (other.modality, other.identifier, other.mm_position)
            and type(self.data) is type(other.data)
            and self.data == other.data
        )

    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True, slots=True)
class ResolvedPromptUpdate:
    """What to do with the prompt for one item: insert `content` at `target`, or replace `target` by it.

    It depends on the text, not on tensors, so it stays in the API server. `target` and `content` are text or
    token ids. A cache hands it out as it was stored: the caller sets its own index with `with_item_idx`.
    """

    modality: str
    item_idx: int
    mode: Literal["insert", "replace"]
    target: Any
    content: Any

    def __post_init__(self) -> None:
        if self.mode not in ("insert", "replace"):
            raise ValueError(f"mode: {self.mode!r} is neither 'insert' nor 'replace'")

    def with_item_idx(self, item_idx: int) -> ResolvedPromptUpdate:
        """The same update for the item at `item_idx` of another request."""
        return dataclasses.replace(self, item_idx=item_idx)
