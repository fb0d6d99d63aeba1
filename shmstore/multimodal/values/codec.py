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

from collections.abc import Callable
from functools import lru_cache
from operator import index
from typing import Any, TypeVar

from shmstore.errors import shown
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


def _line_of(field: Any) -> str:
    """Return the line of a field, and keep it in the field for the other items of the batch."""
    line = _field_to_text(field) + "\n"
    object.__setattr__(field, "_line", line)
    return line


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


def _parse_head(text: str, n_keys: int) -> tuple[str, tuple[MultiModalField, ...]]:
    lines = text.split("\n", n_keys)
    if len(lines) != n_keys + 1 or n_keys == 0:
        raise ValueError("not the tree of an item")
    return lines[n_keys], tuple(map(_field_from_text, lines[:n_keys]))


# A parsed text takes about ten times its bytes, and the slices of a large batch make a long text. The caches of longer
# texts are therefore smaller: short texts take up to 10 MB, middle ones 5 MB, and long ones 4 MB for batches of 1000.
# A miss costs 200 us for 256 slices and 800 us for 1000; a hit costs 1 us.
_SHORT, _MIDDLE = 256, 2048
_head_from_short_text = lru_cache(maxsize=4096)(_parse_head)
_head_from_middle_text = lru_cache(maxsize=256)(_parse_head)
_head_from_long_text = lru_cache(maxsize=32)(_parse_head)


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
        except AttributeError:
            text += _line_of(elem.field)
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
    if len(text) <= _SHORT:
        head_from_text = _head_from_short_text
    else:
        head_from_text = _head_from_middle_text if len(text) <= _MIDDLE else _head_from_long_text
    modality, fields = head_from_text(text, len(tree))
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


def _elem_to_tree(elem: MultiModalFieldElem) -> list[Any]:
    return [elem.modality, elem.key, _field_to_text(elem.field), elem.data]


def _list_of(length: int, tree: Any) -> list[Any]:
    # Unpacking a forged tensor would make as many tensors as its shape claims.
    if type(tree) is not list or len(tree) != length:
        raise ValueError(f"the tree must be a list of {length}, not {type(tree).__name__}")
    return tree


def _elem_from_tree(tree: Any) -> MultiModalFieldElem:
    modality, key, field, data = _list_of(4, tree)
    return MultiModalFieldElem(modality, key, data, _field_from_text(field))


def _items_to_tree(items: MultiModalKwargsItems) -> dict[str, Any]:
    return {
        modality: [None if item is None else _item_to_tree(item) for item in row] for modality, row in items.items()
    }


def _items_from_tree(tree: Any) -> MultiModalKwargsItems:
    if type(tree) is not dict or not {list}.issuperset(map(type, tree.values())):
        raise ValueError("not the tree of items by modality")
    rows = {m: [None if item is None else _item_from_tree(item) for item in row] for m, row in tree.items()}
    return MultiModalKwargsItems(rows)


def _feature_to_tree(feature: MultiModalFeatureSpec) -> list[Any]:
    data = feature.data
    if not (data is None or isinstance(data, MultiModalKwargsItem)):
        raise TypeError(f"no serializer for a feature with data of type {type(data).__name__}")
    item = None if data is None else _item_to_tree(data)
    return [item, feature.modality, feature.identifier, *_range_to_tree(feature.mm_position)]


def _feature_from_tree(tree: Any) -> MultiModalFeatureSpec:
    item, modality, identifier, *position = _list_of(6, tree)
    data = None if item is None else _item_from_tree(item)
    return MultiModalFeatureSpec(data, modality, identifier, _range_from_tree(position))


def _range_to_tree(position: PlaceholderRange) -> list[Any]:
    return [position.offset, position.length, position.is_embed]


def _range_from_tree(tree: Any) -> PlaceholderRange:
    return PlaceholderRange(*_list_of(3, tree))


def _update_to_tree(update: ResolvedPromptUpdate) -> list[Any]:
    return [update.modality, update.item_idx, update.mode, update.target, update.content]


def _update_from_tree(tree: Any) -> ResolvedPromptUpdate:
    return ResolvedPromptUpdate(*_list_of(5, tree))


_TYPES: tuple[tuple[str, type[Any], Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    ("shmstore.mm.Item", MultiModalKwargsItem, _item_to_tree, _item_from_tree),
    ("shmstore.mm.Items", MultiModalKwargsItems, _items_to_tree, _items_from_tree),
    ("shmstore.mm.Elem", MultiModalFieldElem, _elem_to_tree, _elem_from_tree),
    ("shmstore.mm.Batched", MultiModalBatchedField, _field_to_text, _field_from_text),
    ("shmstore.mm.Flat", MultiModalFlatField, _field_to_text, _field_from_text),
    ("shmstore.mm.Shared", MultiModalSharedField, _field_to_text, _field_from_text),
    ("shmstore.mm.Feature", MultiModalFeatureSpec, _feature_to_tree, _feature_from_tree),
    ("shmstore.mm.Range", PlaceholderRange, _range_to_tree, _range_from_tree),
    ("shmstore.mm.Update", ResolvedPromptUpdate, _update_to_tree, _update_from_tree),
)


for _name, _cls, _to_tree, _from_tree in _TYPES:
    register_type(_name, _cls, _to_tree, _from_tree)
