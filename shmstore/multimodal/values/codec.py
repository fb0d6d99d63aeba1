"""How the multi-modal types are stored: as trees of the store's own serializer, `shmstore.serde`.

This module registers them with that serializer. An item is a flat dict of its data. Under the key "" it has one text
with a line for each key's field, and then the modality:

    {"": "b\\ns2\\nf0 0:5:;5:9:\\nimage", "pixel_values": tensor, "image_grid_thw": tensor, "patches": tensor}

    b                   batched
    s2                  shared by 2
    f0 0:5:;5:9:        flat along dimension 0; one slice for each item of the batch, start:stop:step, empty for None
    f1 (0:2:,1:3:       flat along dimension 1; several slices for an item, after a parenthesis

The serializer is fastest with a flat dict of tensors, and a text that was parsed before is not parsed again. An item of
three tensors therefore costs about as much as the three tensors. An item with an element of key "" is [text, dict].

Decoding skips the checks of the constructors, which each value has passed on the way in. It checks the shape of the
tree, because a process of another version may have written it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from operator import index
from typing import Any, TypeVar

from shmstore.errors import kind_of, shown
from shmstore.multimodal.values.fields import (
    MultiModalBatchedField,
    MultiModalField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalSharedField,
)
from shmstore.multimodal.values.items import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
    ResolvedPromptUpdate,
)
from shmstore.serde import register_type

T = TypeVar("T")

_BATCHED = MultiModalBatchedField()


def _field_to_text(field: Any) -> str:
    kind = type(field)
    if kind is MultiModalBatchedField:
        return "b"
    if kind is MultiModalSharedField:
        return f"s{field.batch_size}"
    if kind is MultiModalFlatField:
        return f"f{field.dim} " + ";".join(
            _slice_to_text(cut) if isinstance(cut, slice) else "(" + ",".join(map(_slice_to_text, cut))
            for cut in field.slices
        )
    raise TypeError(f"no serializer for a field of type {kind.__name__}")


def _slice_to_text(cut: slice) -> str:
    start, stop, step = cut.start, cut.stop, cut.step
    if step is None and type(start) is int and type(stop) is int:
        return f"{start}:{stop}:"
    return ":".join("" if bound is None else str(index(bound)) for bound in (start, stop, step))


def _slice_from_text(text: str) -> slice:
    start, stop, step = (int(bound) if bound else None for bound in text.split(":"))
    return slice(start, stop, step)


def _field_from_text(text: Any) -> MultiModalField:
    if text == "b":
        return _BATCHED
    if type(text) is str and text[:1] == "s":
        return MultiModalSharedField(int(text[1:]))
    if type(text) is str and text[:1] == "f":
        dim, cuts = text[1:].split(" ", 1)
        return MultiModalFlatField(
            [
                tuple(map(_slice_from_text, cut[1:].split(","))) if cut[:1] == "(" else _slice_from_text(cut)
                for cut in cuts.split(";")
                if cut
            ],
            int(dim),
        )
    raise ValueError(f"not the text of a field: {shown(text)}")


@lru_cache(maxsize=256)  # a text of 1000 slices takes 140 KB when it is parsed
def _parse_head(text: str, n_keys: int) -> tuple[str, tuple[MultiModalField, ...]]:
    lines = text.split("\n", n_keys)
    if len(lines) != n_keys + 1 or n_keys == 0:
        raise ValueError("not the tree of an item")
    return lines[n_keys], tuple(map(_field_from_text, lines[:n_keys]))


# Four calls of `object.__setattr__` for each element would dominate a worker's time for an item. The setters of the
# slots take a third of it.
_new: Callable[[type[T]], T] = object.__new__
_set_modality = MultiModalFieldElem.__dict__["modality"].__set__
_set_key = MultiModalFieldElem.__dict__["key"].__set__
_set_data = MultiModalFieldElem.__dict__["data"].__set__
_set_field = MultiModalFieldElem.__dict__["field"].__set__


def _item_to_tree(item: MultiModalKwargsItem) -> Any:
    tree: dict[str, Any] = {"": ""}
    text = ""
    for key, elem in item._elems.items():
        try:
            text += elem.field._line
        except AttributeError:  # the first item of its batch
            object.__setattr__(elem.field, "_line", _field_to_text(elem.field) + "\n")
            text += elem.field._line
        tree[key] = elem.data
    text += item._modality
    if "" in item._elems:
        return [text, tree]
    tree[""] = text
    return tree


def _item_from_tree(tree: Any) -> MultiModalKwargsItem:
    if type(tree) is dict and tree:
        text = tree.pop("", None)
    elif type(tree) is list and len(tree) == 2 and type(tree[1]) is dict:
        text, tree = tree
    else:
        raise ValueError("not the tree of an item")
    if type(text) is not str:
        raise ValueError("not the tree of an item")
    modality, fields = _parse_head(text, len(tree))
    elems: dict[str, MultiModalFieldElem] = {}
    for (key, data), field in zip(tree.items(), fields, strict=True):
        elem = _new(MultiModalFieldElem)
        _set_modality(elem, modality)
        _set_key(elem, key)
        _set_data(elem, data)
        _set_field(elem, field)
        elems[key] = elem
    item = _new(MultiModalKwargsItem)
    item._elems = elems
    item._modality = modality
    return item


def _items_from_tree(tree: Any) -> MultiModalKwargsItems:
    if type(tree) is not dict or not {list}.issuperset(map(type, tree.values())):
        raise ValueError("not the tree of items by modality")
    return MultiModalKwargsItems(tree)


def _by_fields(cls: type[T], **kinds: Any) -> tuple[Callable[[T], Any], Callable[[Any], T]]:
    """Return what turns a dataclass into the list of its fields, and back; `kinds` has the types of some of them."""
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]

    def to_tree(value: T) -> list[Any]:
        for name, kind in kinds.items():
            if not isinstance(found := getattr(value, name), kind):
                wanted = getattr(kind, "__name__", kind)
                raise TypeError(f"{name} of a {cls.__name__} must be {wanted}, not {kind_of(found)}")
        return [getattr(value, name) for name in names]

    def from_tree(tree: Any) -> T:
        if type(tree) is not list or len(tree) != len(names):  # to unpack a forged tensor would make one for each row
            raise ValueError(f"the tree of a {cls.__name__} must be a list of {len(names)}, not {kind_of(tree)}")
        value = cls(*tree)
        if not all(isinstance(getattr(value, name), kind) for name, kind in kinds.items()):
            raise ValueError(f"not the tree of a {cls.__name__}")
        return value

    return to_tree, from_tree


_TYPES: tuple[tuple[str, type[Any], Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    ("shmstore.mm.Item", MultiModalKwargsItem, _item_to_tree, _item_from_tree),
    ("shmstore.mm.Items", MultiModalKwargsItems, dict, _items_from_tree),
    ("shmstore.mm.Batched", MultiModalBatchedField, _field_to_text, _field_from_text),
    ("shmstore.mm.Flat", MultiModalFlatField, _field_to_text, _field_from_text),
    ("shmstore.mm.Shared", MultiModalSharedField, _field_to_text, _field_from_text),
    ("shmstore.mm.Elem", MultiModalFieldElem, *_by_fields(MultiModalFieldElem)),
    (
        "shmstore.mm.Feature",
        MultiModalFeatureSpec,
        *_by_fields(MultiModalFeatureSpec, data=MultiModalKwargsItem | None, mm_position=PlaceholderRange),
    ),
    ("shmstore.mm.Range", PlaceholderRange, *_by_fields(PlaceholderRange)),
    ("shmstore.mm.Update", ResolvedPromptUpdate, *_by_fields(ResolvedPromptUpdate)),
)


for _name, _cls, _to_tree, _from_tree in _TYPES:
    register_type(_name, _cls, _to_tree, _from_tree)
