"""Checks of callers' arguments, converted for the bindings; and what the two roles share."""

import operator
import os
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256
from types import TracebackType
from typing import Any, Self

from shmstore.bindings import store as native
from shmstore.errors import StoreClosedError, shown
from shmstore.namespaces import packed_text, prefix_of
from shmstore.places import Folder, folder_of, place_of, place_of_descriptor
from shmstore.refs import ObjectRef, StoreHandle
from shmstore.serde import MsgpackSerde, ObjectSerde

DEFAULT_SERDE = MsgpackSerde()
MAX_EXTRA = native.MAX_EXTRA
MAX_KEY = native.MAX_KEY
_MAX_UID = 2**32 - 2
MODES = (0o600, 0o606, 0o660, 0o666)
"""The permissions that a store can have: who may only read its file could lock bytes of it against the others."""
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?)(?P<suffix>i?b?)")
LOOK_AGAIN = 0.005
"""Seconds between two looks for a store that is not there yet."""


def int_of(name: str, value: Any, low: int, high: int, what: str = "an int") -> int:
    """Return `value` as an int; TypeError or ValueError, which name the argument, if it is not one in range."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be {what}, not {type(value).__name__}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} must be {low if low == high else f'from {low} to {high}'}, not {shown(number)}")
    return number


def size_of(name: str, value: Any, high: int = 1 << 62) -> int:
    """Return a size in bytes: an int, or a text such as "64M", "64 MiB" (powers of 1024) or "64 MB" (powers of 1000).

    TypeError or ValueError, which name the argument, if it is neither, or not from 1 to `high`.
    """
    if isinstance(value, str):
        if (found := _SIZE.fullmatch(value.strip().lower())) is None:
            raise ValueError(f'{name} must be bytes, or a text such as "64M" or "1 GiB", not {shown(value)}')
        base = 1000 if found["unit"] and found["suffix"] == "b" else 1024
        value = int(float(found["number"]) * base ** " kmgt".index(found["unit"] or " "))
    return int_of(name, value, 1, high, 'bytes, or a text such as "64M" or "1 GiB"')


def several_of(name: str, value: Any, what: str) -> Iterable[Any]:
    """Return `value`; TypeError, which names the argument, if it is not an iterable, or a text."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of {what}, not {shown(value)}")
    return value


def serde_of(value: Any) -> ObjectSerde:
    """Return the serializer, by default that of msgpack; TypeError if it is none."""
    if value is None or type(value) is MsgpackSerde:
        return DEFAULT_SERDE if value is None else value
    if isinstance(value, type) or not isinstance(value, ObjectSerde):
        raise TypeError(f"serde must be a serializer, such as MsgpackSerde(), not {shown(value)}")
    return value


def seconds_of(name: str, value: Any) -> float:
    """Return `value` as seconds; TypeError or ValueError, which name the argument, if it is not a number from 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        hint = "hint: 0 does not wait, and float('inf') has no end"
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__} ({hint})")
    if not value >= 0:  # also true for a NaN
        raise ValueError(f"{name} must be at least 0 seconds, not {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} has too many digits: {shown(value)} (hint: float('inf') has no end)") from None


def checked_name(name: Any) -> str:
    """Return the name; TypeError or ValueError if no store can have it."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, not {type(name).__name__}")
    try:
        possible = 0 < len(os.fsencode(name)) <= native.MAX_NAME and name not in (".", "..")
    except UnicodeEncodeError:
        possible = False
    if not possible or "/" in name or "\0" in name or name.startswith("{"):
        hint = "StoreHandle.from_json reads a handle's JSON" if name.startswith("{") else "pass another folder as dir"
        raise ValueError(
            f"not a name of 1 to {native.MAX_NAME} bytes without slash or NUL: {shown(name)} (hint: {hint})"
        )
    return name


def checked_id(value: Any) -> int:
    """Return the number of a user or group; TypeError or ValueError if no store can have it."""
    return int_of("the number of a user or group", value, 0, _MAX_UID)


def checked_access(mode: Any, gid: Any) -> tuple[int, int | None]:
    """Return permissions and group of a store; TypeError or ValueError if no store can have them."""
    mode = int_of("mode", mode, 0, _MAX_UID, "an int, such as 0o660")
    if mode not in MODES:
        raise ValueError(
            f"mode must be 0o600, 0o660, 0o606 or 0o666, not {mode:#o}: whoever shares a store must read and write it"
        )
    return mode, None if gid is None else int_of("gid", gid, 0, _MAX_UID)


def group_of(writer: native.Writer, group: Any) -> int:
    """Return the group as C takes it, 1 + its number, since 0 is all ranks; TypeError or ValueError."""
    number = int_of("group", group, 0, native.MAX_GROUPS - 1)
    if number >= len(writer.groups):
        there = f"groups 0 to {len(writer.groups) - 1}" if len(writer.groups) > 1 else "one group, 0"
        raise ValueError(f"this store has {there}, and no group {number}; pass groups=[...] where it is created")
    return number + 1


def _checked_handle(handle: StoreHandle) -> tuple[str, int, int]:
    """Return the place, the store's number and the number of ranks, all checked: a handle comes from elsewhere."""
    return (
        place_of(checked_name(handle.name), handle.dir),
        int_of("store_id", handle.store_id, 0, 0xFFFFFFFF),
        int_of("n_readers", handle.n_readers, 1, native.MAX_READERS),
    )


def expected_store(
    store: str | StoreHandle | None,
    allow_uid: int | None,
    argument: str,
    dir: Folder | None,
    fd: int | None = None,
) -> tuple[str, int, int, int]:
    """Return the place, store number (or any), number of ranks (or 0) and owner that the store must have.

    `dir` comes before the folder of a handle, and that before SHMSTORE_DIR; with `fd` there is no folder. TypeError,
    with the name of the `argument`, if it is neither a name nor a handle.
    """
    uid = native.OWN_UID if allow_uid is None else int_of("allow_uid", allow_uid, 0, _MAX_UID)
    if fd is not None:
        place = place_of_descriptor(int_of("fd", fd, 0, 2**31 - 1))
        if isinstance(store, str) or dir is not None:
            raise TypeError(f"fd says which store it is, so pass no {'name' if dir is None else 'dir'} with it")
        return (place, native.ANY_STORE, 0, uid) if store is None else (place, *_checked_handle(store)[1:], uid)
    if isinstance(store, StoreHandle):
        return *_checked_handle(store if dir is None else replace(store, dir=folder_of(dir))), uid
    if not isinstance(store, str):
        more = "; pass its handle" if hasattr(store, "handle") else ""
        raise TypeError(f"{argument} must be a str or a StoreHandle, not {type(store).__name__}{more}")
    return place_of(checked_name(store), dir), native.ANY_STORE, 0, uid


def hides_payload(serde: ObjectSerde) -> bool:
    """Return whether its views are arrays and tensors, which hide the payload from the cycle collector."""
    return type(serde) is MsgpackSerde


def packed_key(key: str, namespace: str | None = None) -> bytes:
    """Return the key in UTF-8, or its hash if it is too long; TypeError or ValueError if no store can have it.

    With a namespace, its prefix comes first.
    """
    try:
        packed = key.encode()
    except (AttributeError, UnicodeEncodeError):
        packed = packed_text("a key", key)  # which says what is wrong
    if not packed:
        raise ValueError("a key must not be empty")
    if namespace is not None:
        prefix = prefix_of(namespace)
        return prefix + _fitting(packed, MAX_KEY - len(prefix))
    return packed if len(packed) <= MAX_KEY else _fitting(packed, MAX_KEY)


def _fitting(packed: bytes, room: int) -> bytes:
    return packed if len(packed) <= room else b"sha256:" + sha256(packed).hexdigest().encode()


def stored_key(key: str) -> str:
    """Return the key as `ObjectStoreWriter.keys` has it: itself, or its hash if it is too long."""
    return key if len(key) <= MAX_KEY // 4 else packed_key(key).decode()


def packed_ref(ref: ObjectRef) -> bytes:
    """Return the reference's 40 bytes; TypeError if it is not a reference."""
    try:
        return ref._packed
    except AttributeError:
        raise TypeError(
            f"expected an ObjectRef, not {type(ref).__name__}; pass what put, get_cached or ObjectRef.from_bytes "
            "returns, or the `ref` of what find or hold returns"
        ) from None


class Closable(ABC):
    """Context manager; warns if a store was not closed."""

    _open = False
    _pid = 0

    @abstractmethod
    def close(self) -> None:
        """Close the store."""

    def __enter__(self) -> Self:
        if not self._open:
            raise StoreClosedError(f"{self!r} cannot be entered again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_inherited(self) -> bool:
        """Return whether it was opened by the process that this one was forked from, whose store it is."""
        return self._pid != os.getpid()

    def __del__(self) -> None:
        if self._open and not self._is_inherited():
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)

    def __reduce__(self) -> Any:
        raise TypeError(f"an {type(self).__name__} cannot be pickled; send the writer's `handle` and attach there")
