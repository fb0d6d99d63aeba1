"""The values of the multi-modal path: items, features, positions, prompt updates.

A processor's output, one batched tensor per key, is cut into one `MultiModalKwargsItem` per image, clip or recording.
Caches keep items, and `MultiModalKwargsItems.get_data` joins items to a batch. The field of a key says how to cut and
join it. This module does not know caches or stores.

All values except `MultiModalFeatureSpec` are frozen, because threads and caches share them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, Literal

import torch

from shmstore.errors import check_flags, kind_of, listed, shown
from shmstore.multimodal.values.fields import MultiModalFieldConfig, MultiModalFieldElem, MultiModalSharedField
from shmstore.multimodal.values.nested import NestedTensors, alone, nested_equal

if TYPE_CHECKING:
    from shmstore.refs import ObjectRef


def own_memory(item: MultiModalKwargsItem) -> MultiModalKwargsItem:
    """Return the item with a copy of each tensor and array that may keep alive more memory than its own bytes.

    One image would keep its batch, for example, and a view is pickled with its whole storage. Of memory that another
    library has allocated (`torch.from_numpy`) nobody can say how much is kept. Returns `item` itself if nothing is
    copied.
    """
    elems: dict[str, MultiModalFieldElem] = {}
    for key, elem in item._elems.items():
        data = alone(elem.data)
        elems[key] = elem if data is elem.data else dataclasses.replace(elem, data=data)
    return item if all(map(is_, elems.values(), item._elems.values())) else type(item)(elems)


class MultiModalKwargsItem(Mapping[str, MultiModalFieldElem]):
    """One preprocessed item (one image, one clip): its elements by key, all of one modality; immutable.

    The constructor raises ValueError if there is no element, if modalities differ, or if an element's key is another.
    """

    __slots__ = ("_elems", "_modality")

    _elems: dict[str, MultiModalFieldElem]
    _modality: str

    def __init__(self, elems: Mapping[str, MultiModalFieldElem]) -> None:
        modalities = {elem.modality for elem in elems.values()}
        if len(modalities) != 1:
            found = listed(sorted(map(shown, modalities))) or "none"
            raise ValueError(f"elems must have one modality, not {found}")
        for key, elem in elems.items():
            if key != elem.key:  # it would come back from a store as `elem.key`
                raise ValueError(f"elems[{shown(key)}] must have its own key, not {shown(elem.key)}")
        self._elems = dict(elems)
        self._modality = next(iter(modalities))

    @classmethod
    def from_elems(cls, elems: Iterable[MultiModalFieldElem]) -> MultiModalKwargsItem:
        """Return the item with these elements, or raise ValueError if two have the same key."""
        by_key: dict[str, MultiModalFieldElem] = {}
        for elem in elems:
            if elem.key in by_key:
                raise ValueError(f"elems must have different keys, not {shown(elem.key)} twice")
            by_key[elem.key] = elem
        return cls(by_key)

    @classmethod
    def dummy(cls, modality: str, nbytes: int = 1) -> MultiModalKwargsItem:
        """Return an item of `nbytes` zero bytes under the key "dummy", for profiling runs and tests."""
        if nbytes < 0:
            raise ValueError(f"nbytes must not be negative: {nbytes}")
        data = torch.zeros(nbytes, dtype=torch.uint8)
        return cls.from_elems([MultiModalFieldElem(modality, "dummy", data, MultiModalSharedField(1))])

    @property
    def modality(self) -> str:
        """The modality of every element."""
        return self._modality

    def get_data(self) -> dict[str, NestedTensors]:
        """Return the data of each key, without fields."""
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}(modality={self._modality!r}, keys={list(self._elems)})"


class MultiModalKwargsItems(Mapping[str, Sequence["MultiModalKwargsItem | None"]]):
    """The items of one request by modality, in the order in which they appear; immutable.

    An item is None if only its hash travels, because the other side already has it.
    """

    __slots__ = ("_items",)

    _items: dict[str, list[MultiModalKwargsItem | None]]

    def __init__(self, items: Mapping[str, Sequence[MultiModalKwargsItem | None]] | None = None) -> None:
        self._items = {modality: list(row) for modality, row in (items or {}).items()}

    @classmethod
    def from_seq(cls, items: Iterable[MultiModalKwargsItem]) -> MultiModalKwargsItems:
        """Return the items grouped by modality, each group in the given order."""
        rows: dict[str, list[MultiModalKwargsItem | None]] = {}
        for item in items:
            rows.setdefault(item.modality, []).append(item)
        return cls(rows)

    @classmethod
    def from_hf_inputs(
        cls, inputs: Mapping[str, NestedTensors], config_by_key: Mapping[str, MultiModalFieldConfig]
    ) -> MultiModalKwargsItems:
        """Cut a processor's output into items and return them.

        Inputs without a configuration, such as `input_ids`, are left out. So are configurations without an input, such
        as those of other modalities. Raises ValueError if keys of one modality give different numbers of items.
        """
        elems_by_modality: dict[str, dict[str, list[MultiModalFieldElem]]] = {}
        for key, config in config_by_key.items():
            if not isinstance(config, MultiModalFieldConfig):
                raise TypeError(f"config_by_key[{shown(key)}] must be a MultiModalFieldConfig, not {kind_of(config)}")
            if (data := inputs.get(key)) is not None:
                elems = config.field.build_elems(config.modality, key, data)
                elems_by_modality.setdefault(config.modality, {})[key] = elems
        rows: dict[str, list[MultiModalKwargsItem | None]] = {}
        for modality, by_key in elems_by_modality.items():
            counts = {key: len(elems) for key, elems in by_key.items()}
            if len(set(counts.values())) > 1:
                raise ValueError(
                    f"the keys of modality {shown(modality)} must give the same number of items, not {shown(counts)}"
                )
            rows[modality] = [MultiModalKwargsItem.from_elems(elems) for elems in zip(*by_key.values(), strict=True)]
        return cls(rows)

    def require_data(self) -> MultiModalKwargsItems:
        """Return this object, or raise ValueError with the index of the first item that is None."""
        for modality, row in self._items.items():
            if None in row:
                where = f"item {row.index(None)} of modality {shown(modality)}"
                raise ValueError(f"{where} must not be None; fill it from a cache first")
        return self

    def get_data(self, device: torch.device | str | None = None, pin_memory: bool = False) -> dict[str, NestedTensors]:
        """Return the model's keyword arguments: for each key the data of all items, joined by its field.

        Raises ValueError if an item is None, or if the elements of a key have fields that do not match.
        """
        if pin_memory is not False:
            check_flags(pin_memory=pin_memory)
        elems_by_key: dict[str, list[MultiModalFieldElem]] = {}
        for item in chain.from_iterable(self.require_data().values()):
            for key, elem in (item or {}).items():
                elems_by_key.setdefault(key, []).append(elem)
        return {
            key: elems[0].field.reduce_data(elems, device=device, pin_memory=pin_memory)
            for key, elems in elems_by_key.items()
        }

    def __getitem__(self, modality: str) -> Sequence[MultiModalKwargsItem | None]:
        return list(self._items[modality])  # a copy, because the caller may change it

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MultiModalKwargsItems):
            return NotImplemented
        return self._items == other._items

    def __repr__(self) -> str:
        return f"{type(self).__name__}({ {modality: len(row) for modality, row in self._items.items()} })"


@dataclasses.dataclass(frozen=True, eq=False)
class PlaceholderRange:
    """The `length` tokens of the prompt from `offset` on, which stand for one item.

    `is_embed` is a bool tensor of `length` elements, true where an embedding replaces the token. None means everywhere.
    """

    offset: int
    length: int
    is_embed: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("offset", "length"):
            number = getattr(self, name)
            if isinstance(number, bool) or not hasattr(number, "__index__"):
                raise TypeError(f"{name} must be an int, not {shown(number)}")
            if number < 0:
                raise ValueError(f"{name} must not be negative: {number}")
        if self.is_embed is None:
            return
        if not isinstance(self.is_embed, torch.Tensor):
            raise TypeError(f"is_embed must be a tensor or None, not {shown(self.is_embed)}")
        if tuple(self.is_embed.shape) != (self.length,):
            raise ValueError(f"is_embed must have shape ({self.length},), not {tuple(self.is_embed.shape)}")

    @cached_property
    def embeds_cumsum(self) -> list[int] | None:
        """For each placeholder, the number of embeddings up to and including it; None without `is_embed`."""
        return None if self.is_embed is None else self.is_embed.cumsum(0).tolist()

    def get_num_embeds(self) -> int:
        """Return the number of the item's embeddings."""
        return self.length if self.is_embed is None else self._count_embeds(self.length)

    def _count_embeds(self, end: int) -> int:
        counts = self.embeds_cumsum
        return counts[end - 1] if counts and end else 0

    def get_embeds_indices_in_range(self, start_idx: int, end_idx: int) -> tuple[int, int]:
        """Return the range [first, last) of the item's embeddings on its placeholders [start_idx, end_idx)."""
        if not 0 <= start_idx <= end_idx <= self.length:
            raise ValueError(
                f"start_idx and end_idx must be in order from 0 to {self.length}, not {start_idx} and {end_idx}"
            )
        if self.is_embed is None:
            return start_idx, end_idx
        return self._count_embeds(start_idx), self._count_embeds(end_idx)

    def extract_embeds_range(self) -> list[tuple[int, int]]:
        """Return each run of embeddings as (first, last) position in the prompt, both inclusive."""
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

    def __reduce__(self) -> tuple[Any, ...]:  # without `embeds_cumsum`, which can be counted again
        return type(self), (self.offset, self.length, self.is_embed)


@dataclasses.dataclass(slots=True)
class MultiModalFeatureSpec:
    """One item of a request on its way: its identifier, its position, and its data.

    `data` is an item, a reference into the store, or None if the receiver has the item. A receiver cache replaces it by
    the item (`get_and_update_features`), so this type is mutable.
    """

    data: MultiModalKwargsItem | ObjectRef | None
    modality: str
    identifier: str
    mm_position: PlaceholderRange


@dataclasses.dataclass(frozen=True, slots=True)
class ResolvedPromptUpdate:
    """What to do with the prompt for one item: insert `content` at `target`, or replace `target` by it.

    It depends on the text and not on tensors, so it stays in the API server. `target` and `content` are text or token
    ids. A cache returns an update as it was stored, and the caller sets its own index with `with_item_idx`.
    """

    modality: str
    item_idx: int
    mode: Literal["insert", "replace"]
    target: Any
    content: Any

    def __post_init__(self) -> None:
        if self.mode not in ("insert", "replace"):
            raise ValueError(f"mode must be 'insert' or 'replace', not {shown(self.mode)}")

    def with_item_idx(self, item_idx: int) -> ResolvedPromptUpdate:
        """Return this update for the item at `item_idx` of another request."""
        return dataclasses.replace(self, item_idx=item_idx)
