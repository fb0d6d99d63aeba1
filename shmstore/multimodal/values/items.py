"""The values of the multi-modal path: items, features, positions, prompt updates.

A processor's output (one batched tensor per key) is cut into one `MultiModalKwargsItem` per image, clip or
recording; items are what the caches keep; `MultiModalKwargsItems.get_data` puts a batch together again. How a key
is cut and joined is the business of its field. Nothing here knows a cache or a store.

All values but `MultiModalFeatureSpec` are frozen: threads and caches share them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch

from shmstore.errors import listed, shown
from shmstore.multimodal.values.fields import MultiModalFieldConfig, MultiModalFieldElem, MultiModalSharedField
from shmstore.multimodal.values.nested import NestedTensors, alone, nested_equal

if TYPE_CHECKING:
    from shmstore.refs import ObjectRef

__all__ = [
    "MultiModalFeatureSpec",
    "MultiModalKwargsItem",
    "MultiModalKwargsItems",
    "PlaceholderRange",
    "ResolvedPromptUpdate",
    "own_memory",
]

_log = logging.getLogger(__name__)


def own_memory(item: MultiModalKwargsItem) -> MultiModalKwargsItem:
    """The item with a copy of each tensor and array that is a view into more memory than its own bytes.

    Such a view keeps the whole alive (one image of a batch, the batch), and is pickled with the whole storage. The same
    object where there is none.
    """
    changed = False
    elems: dict[str, MultiModalFieldElem] = {}
    for key, elem in item.items():
        data = alone(elem.data)
        if data is not elem.data:
            elem, changed = dataclasses.replace(elem, data=data), True
        elems[key] = elem
    return type(item)(elems) if changed else item


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
                    f"element of key {shown(key)}: expected a MultiModalFieldElem, got {type(elem).__name__} "
                    "(hint: MultiModalKwargsItems.from_hf_inputs makes them of bare data)"
                )
        modalities = {elem.modality for elem in elems.values()}
        if len(modalities) != 1:
            found = listed(sorted(map(shown, modalities))) or "none"
            raise ValueError(f"the elements of an item must have one modality, found {found}")
        for key, elem in elems.items():
            if key != elem.key:
                raise ValueError(f"element of key {shown(elem.key)} given as {shown(key)}")
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
                raise ValueError(f"two elements of key {shown(elem.key)}")
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
                        f"row of modality {shown(modality)}: expected a sequence of MultiModalKwargsItem or None, "
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
                    f"config_by_key[{shown(key)}]: expected a MultiModalFieldConfig, got {type(config).__name__} "
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
                raise ValueError(
                    f"the keys of modality {shown(modality)} give different numbers of items: {shown(counts)}"
                )
            rows[modality] = [MultiModalKwargsItem.from_elems(elems) for elems in zip(*by_key.values(), strict=True)]
        return cls(rows)

    def require_data(self) -> MultiModalKwargsItems:
        """Itself; ValueError naming the first item that is None."""
        for modality, row in self._items.items():
            for index, item in enumerate(row):
                if item is None:
                    raise ValueError(
                        f"item {index} of modality {shown(modality)} is None: a cache has to fill it in first"
                    )
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
            raise ValueError(f"mode: {shown(self.mode)} is neither 'insert' nor 'replace'")

    def with_item_idx(self, item_idx: int) -> ResolvedPromptUpdate:
        """The same update for the item at `item_idx` of another request."""
        return dataclasses.replace(self, item_idx=item_idx)
