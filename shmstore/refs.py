"""Values that travel between processes: `ObjectRef` names one hand-out, `StoreHandle` names a store."""

import json
import os
import stat
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from shmstore.errors import ForeignStoreError, StaleRefError, StoreNotFoundError, kind_of, listed, shown
from shmstore.places import DIRECTORY

if TYPE_CHECKING:
    from socket import socket

__all__ = ["ObjectRef", "StoreHandle"]

_WORDS = struct.Struct("<5Q")

REF_SIZE: Final = 40
"""Bytes of a packed reference; csrc/store/ref.h has a picture of them."""


class ObjectRef:
    """A reference to one hand-out of one stored object; its 40 bytes travel instead of the tensors.

    The value is frozen and hashable, and compares by its bytes. A reader checks `tag` before it
    trusts a field: `tag` covers every bit, and its key is in the store.
    """

    __slots__ = ("_packed",)
    _packed: bytes

    def __init__(self, packed: bytes) -> None:
        """Wrap 40 packed bytes. Raises StaleRefError for any other length."""
        if not isinstance(packed, bytes):
            raise TypeError(f"a packed reference must be bytes, not {type(packed).__name__}")
        if len(packed) != REF_SIZE:
            raise StaleRefError(
                f"a packed reference must have {REF_SIZE} bytes, not {len(packed)}",
                hint="send all bytes of ref.to_bytes()",
            )
        set_packed(self, packed)

    @classmethod
    def from_bytes(cls, packed: bytes) -> "ObjectRef":
        """Return the reference that `to_bytes` packed, or raise StaleRefError if it does not have 40 bytes."""
        return cls(bytes(packed) if isinstance(packed, (bytearray, memoryview)) else packed)

    def to_bytes(self) -> bytes:
        """Return the reference as 40 bytes."""
        return self._packed

    @classmethod
    def from_words(cls, words: Iterable[int]) -> "ObjectRef":
        """Return the reference that `to_words` packed, or raise StaleRefError if it is not five words."""
        try:
            return cls(_WORDS.pack(*words))
        except struct.error as error:
            raise StaleRefError(
                f"a reference must be five ints of 64 bits, not {shown(words)}: {error}",
                hint="send all of ref.to_words()",
            ) from None

    def to_words(self) -> tuple[int, int, int, int, int]:
        """Return the reference as five unsigned ints of 64 bits, for transports that carry only numbers."""
        return _WORDS.unpack(self._packed)

    @property
    def store_id(self) -> int:
        """Number of the store that handed it out; it tells which reader can read it."""
        return int.from_bytes(self._packed[0:4], "little")

    @property
    def address(self) -> int:
        """Offset of the object in its store's data region, in bytes."""
        return int.from_bytes(self._packed[10:16], "little")

    @property
    def monotonic_id(self) -> int:
        """Number of the object; a store never uses a number twice."""
        return int.from_bytes(self._packed[16:24], "little")

    @property
    def lease(self) -> int:
        """Number of this hand-out, which a store never uses twice; 0 for what a rank has found."""
        return int.from_bytes(self._packed[24:32], "little")

    @property
    def tag(self) -> int:
        """Keyed hash over all other fields."""
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
    """Wrap 40 bytes that the C core has just packed, without a check."""
    ref: ObjectRef = new_ref(ObjectRef)
    set_packed(ref, packed)
    return ref


_FIELDS: Final = {"name": str, "store_id": int, "n_readers": int, "dir": str}


@dataclass(frozen=True, slots=True)
class StoreHandle:
    """The name, number, ranks and folder of a store, which a worker needs to attach.

    The handle pickles, and `to_json` makes it fit an environment variable.
    """

    name: str
    """The POSIX name, without a slash."""
    store_id: int
    """The store's random number; a later store with the same name has a different one."""
    n_readers: int
    """Ranks 0 to n_readers - 1 may attach."""
    dir: str = DIRECTORY
    """The folder as its writer sees it; a container may have mounted it elsewhere: attach(handle, dir=...)."""

    def __post_init__(self) -> None:
        for name, kind in _FIELDS.items():
            if type(value := getattr(self, name)) is not kind:
                raise TypeError(f"{name} must be of type {kind.__name__}, not {kind_of(value)}; see writer.handle")

    @property
    def path(self) -> str:
        """The path of the store's file."""
        return f"{self.dir}/{self.name}"

    def send(self, connection: "socket") -> None:
        """Send the handle and a descriptor of the store over a Unix socket, to a process that shares no folder.

        The other one gets both by `socket.recv_fds(connection, 65536, 1, socket.MSG_CMSG_CLOEXEC)`: the handle as
        `to_json` makes it, and the `fd` for `attach` and `join`. It needs the rights on the store that it would need in
        a folder. Raises StoreNotFoundError if it was removed, and ForeignStoreError if this process may not open it;
        ValueError for another kind of socket, or a `store_id` that no store has.
        """
        from socket import AF_UNIX, send_fds  # 2 ms, for few

        if connection.family != AF_UNIX:
            raise ValueError("connection must be a Unix socket, such as of socketpair(): no other passes descriptors")
        if not 0 <= self.store_id < 1 << 32:
            raise ValueError(f"store_id must be an int from 0 to {(1 << 32) - 1}, not {shown(self.store_id)}")
        link = 0 if self.dir.startswith("/proc/") else os.O_NOFOLLOW  # a descriptor is a link to the memory
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | link)
        except PermissionError:
            raise ForeignStoreError from None
        except (OSError, ValueError):  # or a path that no file can have
            raise StoreNotFoundError(f"the store was removed: there is no file {shown(self.path)}") from None
        try:
            if not self._is_of(fd):
                raise StoreNotFoundError(f"the store was removed: {shown(self.path)} is another file")
            send_fds(connection, [self.to_json().encode()], [fd])
        finally:
            os.close(fd)

    def _is_of(self, fd: int) -> bool:
        """Return whether the file begins as this store does, whose number is in its superblock."""
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        head = os.pread(fd, 4096, 0)
        return head.startswith(b"SHMSTOR1") and self.store_id.to_bytes(8, "little") in head

    def to_json(self) -> str:
        """Return the handle as one line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "StoreHandle":
        """Return the handle that `to_json` wrote, or raise ValueError for any other text."""
        try:
            fields = {"dir": DIRECTORY, **json.loads(text)}
            wrong = [name for name in {**_FIELDS, **fields} if type(fields.get(name)) is not _FIELDS.get(name)]
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"not a store handle: {shown(text)} is not what to_json writes") from error
        if wrong:
            raise ValueError(f"not a store handle: {shown(text)}; missing, unknown or of a wrong type: {listed(wrong)}")
        return cls(**fields)
