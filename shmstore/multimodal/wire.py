"""How the multi-modal types lie in the store: as the trees that its own serializer takes, tensors in place.

No second serializer: `register` tells the store's one (`shmstore.serde`) what tree each type is. An item is one
flat list,  [modality, key, field, data, key, field, data, ...],  and a field one small value, so that an item of
three tensors costs about as much as the three tensors:

    batched          0
    shared by n      n (at least 1)
    flat             [dim, start, stop, step, start, stop, step, ...], an item of several slices being a list:
                     [dim, [start, stop, step, start, stop, step], ...]

What comes back is built without the checks of the constructors, which it has passed on the way in; that the shapes of
these trees are right is checked, since a store can be written by a process of another version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shmstore.multimodal.items import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    MultiModalSharedField,
    PlaceholderRange,
    ResolvedPromptUpdate,
)

__all__ = ["register"]

T = TypeVar("T")

_BATCHED = MultiModalBatchedField()


def _field_to_tree(field: MultiModalField) -> Any:
    kind = type(field)
    if kind is MultiModalBatchedField:
        return 0
    if isinstance(field, MultiModalSharedField):
        return field.batch_size
    if isinstance(field, MultiModalFlatField):
        tree: list[Any] = [field.dim]
        for cut in field.slices:
            if isinstance(cut, slice):
                tree += (cut.start, cut.stop, cut.step)
            else:
                tree.append([bound for part in cut for bound in (part.start, part.stop, part.step)])
        return tree
    raise TypeError(f"no serializer for a field of {kind.__name__}")


def _flat_from_tree(dim: Any, bounds: list[Any]) -> MultiModalFlatField:
    cuts: list[Any] = []
    at = 0
    while at < len(bounds):
        if isinstance(bounds[at], list):
            part = bounds[at]
            cuts.append(tuple(slice(*part[i : i + 3]) for i in range(0, len(part), 3)))
            at += 1
        else:
            start, stop, step = bounds[at : at + 3]
            cuts.append(slice(start, stop, step))
            at += 3
    field = _new(MultiModalFlatField)
    _set_slices(field, tuple(cuts))
    _set_dim(field, dim)
    return field


def _field_from_tree(tree: Any) -> MultiModalField:
    if type(tree) is list and tree:
        return _flat_from_tree(tree[0], tree[1:])
    if type(tree) is not int:
        raise ValueError(f"not the tree of a field: {tree!r}")
    return MultiModalSharedField(tree) if tree else _BATCHED


# `object.__setattr__` four times for each element would take most of the time that a worker has for an item; the
# slots' own setters take a third of it.
_new: Callable[[type[T]], T] = object.__new__
_set_slices = MultiModalFlatField.__dict__["slices"].__set__
_set_dim = MultiModalFlatField.__dict__["dim"].__set__
_set_modality = MultiModalFieldElem.__dict__["modality"].__set__
_set_key = MultiModalFieldElem.__dict__["key"].__set__
_set_data = MultiModalFieldElem.__dict__["data"].__set__
_set_field = MultiModalFieldElem.__dict__["field"].__set__


def _item_to_tree(item: MultiModalKwargsItem) -> list[Any]:
    tree: list[Any] = [item.modality]
    for key, elem in item._elems.items():
        field = elem.field
        tree += (key, 0 if type(field) is MultiModalBatchedField else _field_to_tree(field), elem.data)
    return tree


def _item_from_tree(tree: Any) -> MultiModalKwargsItem:
    if type(tree) is not list or len(tree) < 4 or len(tree) % 3 != 1:
        raise ValueError("not the tree of an item")
    parts = iter(tree)
    modality = next(parts)
    elems: dict[str, MultiModalFieldElem] = {}
    for key, field, data in zip(parts, parts, parts, strict=True):
        elem = _new(MultiModalFieldElem)
        _set_modality(elem, modality)
        _set_key(elem, key)
        _set_data(elem, data)
        _set_field(elem, _BATCHED if field == 0 else _field_from_tree(field))
        elems[key] = elem
    item = _new(MultiModalKwargsItem)
    item._elems = elems
    item._modality = modality
    return item


def _elem_to_tree(elem: MultiModalFieldElem) -> list[Any]:
    return [elem.modality, elem.key, _field_to_tree(elem.field), elem.data]


def _elem_from_tree(tree: Any) -> MultiModalFieldElem:
    modality, key, field, data = tree
    return MultiModalFieldElem(modality, key, data, _field_from_tree(field))


def _items_to_tree(items: MultiModalKwargsItems) -> dict[str, Any]:
    return {
        modality: [None if item is None else _item_to_tree(item) for item in row] for modality, row in items.items()
    }


def _items_from_tree(tree: Any) -> MultiModalKwargsItems:
    rows = {m: [None if item is None else _item_from_tree(item) for item in row] for m, row in tree.items()}
    return MultiModalKwargsItems(rows)


def _feature_to_tree(feature: MultiModalFeatureSpec) -> list[Any]:
    data = feature.data
    if not (data is None or isinstance(data, MultiModalKwargsItem)):
        raise TypeError(f"no serializer for a feature whose data is a {type(data).__name__}")
    item = None if data is None else _item_to_tree(data)
    return [item, feature.modality, feature.identifier, *_range_to_tree(feature.mm_position)]


def _feature_from_tree(tree: Any) -> MultiModalFeatureSpec:
    item, modality, identifier, *position = tree
    data = None if item is None else _item_from_tree(item)
    return MultiModalFeatureSpec(data, modality, identifier, _range_from_tree(position))


def _range_to_tree(position: PlaceholderRange) -> list[Any]:
    return [position.offset, position.length, position.is_embed]


def _range_from_tree(tree: Any) -> PlaceholderRange:
    offset, length, is_embed = tree
    return PlaceholderRange(offset, length, is_embed)


def _update_to_tree(update: ResolvedPromptUpdate) -> list[Any]:
    return [update.modality, update.item_idx, update.mode, update.target, update.content]


def _update_from_tree(tree: Any) -> ResolvedPromptUpdate:
    modality, item_idx, mode, target, content = tree
    return ResolvedPromptUpdate(modality, item_idx, mode, target, content)


_TYPES: tuple[tuple[str, type[Any], Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    ("shmstore.mm.Item", MultiModalKwargsItem, _item_to_tree, _item_from_tree),
    ("shmstore.mm.Items", MultiModalKwargsItems, _items_to_tree, _items_from_tree),
    ("shmstore.mm.Elem", MultiModalFieldElem, _elem_to_tree, _elem_from_tree),
    ("shmstore.mm.Batched", MultiModalBatchedField, _field_to_tree, _field_from_tree),
    ("shmstore.mm.Flat", MultiModalFlatField, _field_to_tree, _field_from_tree),
    ("shmstore.mm.Shared", MultiModalSharedField, _field_to_tree, _field_from_tree),
    ("shmstore.mm.Feature", MultiModalFeatureSpec, _feature_to_tree, _feature_from_tree),
    ("shmstore.mm.Range", PlaceholderRange, _range_to_tree, _range_from_tree),
    ("shmstore.mm.Update", ResolvedPromptUpdate, _update_to_tree, _update_from_tree),
)


def register(register_type: Callable[[str, type[Any], Callable[[Any], Any], Callable[[Any], Any]], None]) -> None:
    """Tell the store's serializer every multi-modal type, by its `register_type`."""
    for name, cls, to_tree, from_tree in _TYPES:
        register_type(name, cls, to_tree, from_tree)
