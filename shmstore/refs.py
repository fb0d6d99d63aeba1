"""Values that travel between processes: `ObjectRef` names one hand-out of one object, `StoreHandle` a store."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Final

from shmstore.errors import StaleRefError, listed, shown

__all__ = ["ObjectRef", "StoreHandle"]

REF_SIZE: Final = 40
"""Bytes of a packed reference; csrc/store/ref.h draws them."""


class ObjectRef:
    """One hand-out of one stored object, in 40 bytes: what travels instead of the tensors.

    A frozen, hashable value that compares by its bytes. Nothing in it is trusted by a reader: each bit is covered by
    `tag`, whose key is in the store.
    """

    __slots__ = ("_packed",)
    _packed: bytes

    def __init__(self, packed: bytes) -> None:
        """Wrap packed bytes; raises StaleRefError where they are not 40."""
        if not isinstance(packed, bytes):
            raise TypeError(f"a packed reference is bytes, not {type(packed).__name__}")
        if len(packed) != REF_SIZE:
            raise StaleRefError(
                f"a packed reference has {REF_SIZE} bytes, not {len(packed)}; this one is invalid",
                hint="send the whole of ref.to_bytes()",
            )
        set_packed(self, packed)

    @classmethod
    def from_bytes(cls, packed: bytes) -> "ObjectRef":
        """Return the reference that `to_bytes` packed; StaleRefError where it is not 40 bytes long."""
        return cls(bytes(packed) if isinstance(packed, (bytearray, memoryview)) else packed)

    def to_bytes(self) -> bytes:
        """Return the 40 bytes."""
        return self._packed

    @property
    def store_id(self) -> int:
        """Number of the store that handed it out: which of several readers to ask."""
        return int.from_bytes(self._packed[0:4], "little")

    @property
    def address(self) -> int:
        """Offset of the object in its store's data region, in bytes."""
        return int.from_bytes(self._packed[10:16], "little")

    @property
    def monotonic_id(self) -> int:
        """Number of the object; never used twice in a store's life."""
        return int.from_bytes(self._packed[16:24], "little")

    @property
    def lease(self) -> int:
        """Number of this hand-out; never used twice either."""
        return int.from_bytes(self._packed[24:32], "little")

    @property
    def tag(self) -> int:
        """Keyed hash over everything above."""
        return int.from_bytes(self._packed[32:40], "little")

    def __eq__(self, other: object) -> bool:
        return self._packed == other._packed if isinstance(other, ObjectRef) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._packed)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("an ObjectRef is frozen")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("an ObjectRef is frozen")

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectRef, (self._packed,)

    def __repr__(self) -> str:
        return f"ObjectRef(id={self.monotonic_id}, lease={self.lease}, address={self.address:#x})"


set_packed = ObjectRef.__dict__["_packed"].__set__  # the slot's own setter, since __setattr__ refuses
new_ref = ObjectRef.__new__


def trusted_ref(packed: bytes) -> ObjectRef:
    """Wrap 40 bytes that the C core has just packed, unchecked."""
    ref: ObjectRef = new_ref(ObjectRef)
    set_packed(ref, packed)
    return ref


@dataclass(frozen=True, slots=True)
class StoreHandle:
    """What a worker needs to attach to a store; small, picklable, and JSON for an environment variable."""

    name: str
    """The POSIX name, without a slash."""
    store_id: int
    """The store's random number: a later store of the same name has another one."""
    n_readers: int
    """Ranks 0 to n_readers - 1 may attach."""

    def to_json(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "StoreHandle":
        """Return the handle that `to_json` wrote; ValueError where the text is another."""
        try:
            fields = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"not a store handle: {shown(text)} is no JSON") from error
        if not isinstance(fields, dict):
            raise ValueError(f"not a store handle: {shown(text)} is no JSON object")
        kinds = {"name": str, "store_id": int, "n_readers": int}
        if missing := [name for name in kinds if name not in fields]:
            raise ValueError(f"not a store handle: {shown(text)}; it has no {listed(missing)}")
        if more := [name for name in fields if name not in kinds]:
            raise ValueError(f"not a store handle: {shown(text)}; {listed(more)} is none of a handle's fields")
        for name, kind in kinds.items():
            if type(fields[name]) is not kind:
                raise ValueError(f"not a store handle: {shown(text)}; {name} must be of type {kind.__name__}")
        return cls(**fields)
