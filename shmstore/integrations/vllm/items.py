"""vLLM's items: how they are stored, and the item that travels in the place of a stored one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
)

from shmstore.errors import shown
from shmstore.refs import ObjectRef
from shmstore.serde import register_type
from shmstore.store import LeasedRef

ADDRESS = "address"
"""The key of a reference. vLLM sends an item with this key to the workers even if the prefix cache covers it."""

_FIELDS = {cls.__name__: cls for cls in (MultiModalBatchedField, MultiModalFlatField, MultiModalSharedField)}


class ReferenceItem(MultiModalKwargsItem):  # type: ignore[misc]
    """What the API server sends of a stored item. Its lease ends with the last request that it was sent for.

    A lease that no request has had ends with this object. `lease_again` opens one for a later request, as in a beam
    search, whose steps are requests of their own.
    """

    def __init__(self, lease: LeasedRef, lease_again: Callable[[], LeasedRef]) -> None:
        self._lease_again = lease_again
        self.users = 0
        """Unfinished and aborted requests that have this item."""
        self._hold(lease)

    def _hold(self, lease: LeasedRef) -> None:
        self._lease: LeasedRef | None = lease
        words = list(lease.ref.to_words())
        super().__init__({ADDRESS: MultiModalFieldElem(data=words, field=MultiModalBatchedField())})

    def renew(self) -> None:
        """Open a lease if the last one has ended; ValueError if the item was evicted since."""
        if self._lease is None:
            self._hold(self._lease_again())

    def release_all(self) -> None:
        """End the lease with its last user: whatever keeps this object, such as a traceback, does not keep the item."""
        self.users -= 1
        if self.users == 0 and self._lease is not None:
            self._lease.end()
            self._lease = None

    @classmethod
    def adopt(cls, item: Any, lease: LeasedRef, lease_again: Callable[[], LeasedRef]) -> None:
        """Make a reference that came from outside one of this process's."""
        new = cls(lease, lease_again)
        item.__class__, item.__dict__ = cls, new.__dict__

    def __reduce__(self) -> tuple[Any, ...]:
        return MultiModalKwargsItem, (self.data,)  # without the lease, which is this process's


def ref_of(item: Any) -> ObjectRef | None:
    """Return the reference that an item carries, or None if it is the item itself; ValueError if it is broken."""
    elem = item.get(ADDRESS)
    if elem is None:
        return None
    try:
        return ObjectRef.from_words(elem.data)
    except TypeError:
        raise ValueError(f"not a reference to a stored item: {shown(elem.data)}") from None


def register_items() -> None:
    """Let this process store vLLM's items, and read them."""
    register_type("vllm.MultiModalKwargsItem", MultiModalKwargsItem, _to_tree, _from_tree)


def _to_tree(item: Any) -> list[Any]:
    head = json.dumps([_field_to_json(elem.field) for elem in item.values()])
    return [head, {key: elem.data for key, elem in item.items()}]


def _from_tree(tree: Any) -> Any:
    if type(tree) is not list or len(tree) != 2 or type(tree[0]) is not str or type(tree[1]) is not dict:
        raise ValueError("not the tree of an item")
    pairs = zip(tree[1].items(), _parse_head(tree[0]), strict=True)
    return MultiModalKwargsItem({key: MultiModalFieldElem(data=data, field=field) for (key, data), field in pairs})


def _field_to_json(field: Any) -> list[Any]:
    name = type(field).__name__
    if _FIELDS.get(name) is not type(field):
        raise TypeError(f"no serializer for a field of type {name}")
    return [name, {part.name: _slices_to_json(getattr(field, part.name)) for part in dataclasses.fields(field)}]


def _slices_to_json(value: Any) -> Any:
    if isinstance(value, slice):
        return [None if bound is None else int(bound) for bound in (value.start, value.stop, value.step)]
    return [_slices_to_json(part) for part in value] if isinstance(value, (list, tuple)) else value


def _slices_from_json(value: Any) -> Any:
    if value and not isinstance(value[0], list):
        return slice(*value)
    return [_slices_from_json(part) for part in value]


@lru_cache(maxsize=1024)
def _parse_head(text: str) -> list[Any]:
    fields = []
    for name, settings in json.loads(text):
        if "slices" in settings:
            settings["slices"] = _slices_from_json(settings["slices"])
        fields.append(_FIELDS[name](**settings))
    return fields
