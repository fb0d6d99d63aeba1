"""The prompt updates of the items in a store.

They are stored after their item, as bytes of the codec in `CacheTypes`. Without a codec, and for updates that it
cannot write, they stay in this process. An item whose updates are lost counts as not cached: its next input brings
them again.
"""

from __future__ import annotations

import logging
from typing import Any, Generic

from shmstore.errors import StaleRefError, kind_of, shown, unless_interrupted
from shmstore.multimodal.values.types import CacheTypes, ItemT, UpdatesT
from shmstore.refs import ObjectRef
from shmstore.store import ObjectStoreWriter
from shmstore.store.arguments import MAX_EXTRA, packed_key
from shmstore.store.batch import internals_of

_log = logging.getLogger(__name__)
UNKNOWN: Any = object()
_MAX_DECODED = 16384
_ID = slice(16, 24)
"""Where a packed reference has the object's id."""
_WITH_UPDATES = 2
"""Answer of the store for an object that has extra bytes."""


class StoredUpdates(Generic[ItemT, UpdatesT]):
    """Finds the updates of a stored object; only one thread at a time may call `keep_beside`."""

    def __init__(self, types: CacheTypes[ItemT, UpdatesT], writer: ObjectStoreWriter) -> None:
        self._types = types
        self._encode = types.encode_updates
        self._decode = types.decode_updates
        self._give = types.give_updates
        self._writer = writer
        self._native = internals_of(writer).native
        self._decoded: dict[bytes, Any] = {}
        """By object id. Ids are never reused, so an entry may stay when its object is evicted."""
        self._beside: dict[str, tuple[int, Any]] = {}
        """By key, with the object's id: what is not stored."""
        self._drop_at = 1024

    def is_cached(self, mm_hash: str) -> bool:
        """Return whether the item is stored and its updates are known."""
        found = self._native.has(packed_key(mm_hash))
        return (found == _WITH_UPDATES and self._decode is not None) or (found > 0 and mm_hash in self._beside)

    def of(self, ref: ObjectRef, mm_hash: str) -> UpdatesT:
        """Return the updates of an object that has just been handed out, or UNKNOWN."""
        try:
            kept = self._decoded[ref._packed[_ID]]
        except KeyError:
            kept = self._find(ref, mm_hash)
            if kept is UNKNOWN:
                return kept  # type: ignore[no-any-return]
        return self._give(kept)

    def _find(self, ref: ObjectRef, mm_hash: str) -> Any:
        object_id, kept = self._beside.get(mm_hash, (0, UNKNOWN))
        if object_id == ref.monotonic_id:
            return kept
        self._beside.pop(mm_hash, None)  # an earlier object's
        if self._decode is None:
            return UNKNOWN
        try:
            packed = self._native.extra(ref.to_bytes())
        except StaleRefError:  # no rank is expected, and it is evicted already
            return UNKNOWN
        if not packed:
            return UNKNOWN
        if (kept := self.unpacked(packed, mm_hash)) is UNKNOWN:
            self._writer.delete(mm_hash)
        else:
            self.keep_decoded(ref, kept)
        return kept

    def unpacked(self, packed: bytes, mm_hash: str) -> Any:
        """Return the updates in the extra bytes of an object, or UNKNOWN."""
        try:
            return UNKNOWN if self._decode is None else self._types.keep_updates(self._decode(packed))
        except unless_interrupted(Exception) as error:  # of another version, or another engine's
            _log.warning(
                "item %s is stored again, because its prompt updates cannot be decoded: %s", shown(mm_hash), error
            )
            return UNKNOWN

    def keep_decoded(self, ref: ObjectRef, kept: Any) -> None:
        """Keep the updates of an object that has them as bytes, too."""
        if len(self._decoded) >= _MAX_DECODED:
            self._decoded.clear()
        self._decoded[ref._packed[_ID]] = kept

    def written(self, mm_item: tuple[ItemT, UpdatesT], mm_hash: str) -> tuple[Any, bytes]:
        """Return the updates of an input as they are kept, and as bytes, which are empty if they are not data.

        Raises TypeError if they are wrong.
        """
        updates = mm_item[1]
        packed = None if self._encode is None else self._encode(updates)
        if not packed:
            self._types.check_input(mm_item, mm_hash)
        elif not isinstance(packed, bytes):
            raise TypeError(
                f"item of {shown(mm_hash)}: encode_updates must return bytes or None, not {kind_of(packed)}"
            )
        if not packed or len(packed) > MAX_EXTRA:
            packed = b""
        return self._types.keep_updates(updates), packed

    def keep_beside(self, ref: ObjectRef, mm_hash: str, kept: Any) -> None:
        """Keep the updates of an object that has just been stored without them."""
        self._beside[mm_hash] = ref.monotonic_id, kept
        if len(self._beside) > self._drop_at:
            for old in list(self._beside):
                if not self._native.has(packed_key(old)):
                    self._beside.pop(old, None)
            self._drop_at = 2 * len(self._beside) + 1024
