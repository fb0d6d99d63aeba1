"""Every error that shmstore raises on purpose: a type to catch, and a hint to act on.

Each class is a `ShmStoreError` and also the built-in that a caller would catch anyway. ``str(error)`` is one
line: what happened, then what to do about it. All of them pickle with their attributes, since errors of a
worker are read by the process that started it.
"""

import errno as _errno
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

__all__ = [
    "CacheMissError",
    "CorruptStoreError",
    "ForeignStoreError",
    "LayoutMismatchError",
    "NestingError",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "ObjectTooLargeError",
    "RankInUseError",
    "SerdeError",
    "SharedMemoryError",
    "ShmStoreError",
    "SparseStoreError",
    "StaleRefError",
    "StoreClosedError",
    "StoreExistsError",
    "StoreFullError",
    "StoreNotFoundError",
    "StoreSpaceError",
    "UnknownTypeError",
    "UnsupportedValueError",
    "WriterActiveError",
]


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxdict = self.maxlist = self.maxtuple = 8
        self.maxstring = self.maxlong = self.maxother = 80

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # more digits than Python writes
            return f"<an int of {x.bit_length()} bits>"


_short = _Short()


def cut(text: object, room: int = 300) -> str:
    """Return a text, such as another error's or a path, as part of a message: not without end."""
    said = str(text)
    return said if len(said) <= room else f"{said[: room // 2]}...{said[-(room // 2) :]}"


def shown(value: object) -> str:
    """Return a caller's value as a message shows it: its repr, a text quoted, and not without end."""
    if type(value) is str and len(value) <= 80:
        return repr(value)
    return cut(_short.repr(value))


def listed(names: Iterable[object]) -> str:
    """Return names as a message lists them: the first of them, and how many more there are."""
    first: list[str] = []
    more = 0
    for name in names:
        if len(first) < 8:
            first.append(cut(name, 80))
        else:
            more += 1
    return ", ".join(first) + (f" and {more} more" if more else "")


class ShmStoreError(Exception):
    """The base of all errors of shmstore; `message` says what happened, `hint` what to do, each in one line."""

    default_message: ClassVar[str] = "the shared-memory store failed"
    default_hint: ClassVar[str] = "see the message"

    message: str
    hint: str
    _code: int | None = None
    """What the bindings raised it for, of the codes of C; None when Python has raised it."""

    def __init__(self, message: str | None = None, *, hint: str | None = None) -> None:
        self.message = self.default_message if message is None else message
        self.hint = self.default_hint if hint is None else hint
        super().__init__(self.message)

    # Not the built-in's: KeyError would quote the message, OSError would put the number in front.
    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})"

    # Not the built-in's: it would call the class with `args`, which are not the arguments of every class here,
    # and MemoryError and OSError keep state of their own.
    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy(), getattr(self, "errno", None))


def _rebuild(
    cls: type[ShmStoreError], args: tuple[Any, ...], state: dict[str, Any], number: int | None = None
) -> ShmStoreError:
    error = cls()  # every argument has a default
    error.args = args
    error.__dict__.update(state)
    if isinstance(error, OSError):  # these two lie outside __dict__
        error.errno, error.strerror = number, error.message
    return error


def held_by(held_bytes_by_rank: Mapping[int, int] | None) -> str:
    """Return who holds how much, as the end of a message."""
    held = sorted((held_bytes_by_rank or {}).items())
    return "; held by " + listed(f"rank {rank}: {size} bytes" for rank, size in held) if held else ""


class StoreFullError(ShmStoreError, MemoryError):
    """No gap is large enough, and nothing that may be reclaimed would make one.

    `needed` is the size asked for in bytes, `held_bytes_by_rank` what each rank still holds or is promised,
    `resource` what has run out: "bytes", "slots" (one an object) or "leases" (one a reference handed out and not yet
    read by every rank). Each is None where it is not known.
    """

    default_message = "the store is full"
    default_hint = "release references, cancel the leases of aborted requests, or create the store with more capacity"
    _hints: ClassVar[dict[str, str]] = {
        "slots": "release references, cancel the leases of aborted requests, or create the store with more max_objects",
        "leases": "have every rank get or release what it is sent, cancel what is not sent, or create the store with "
        "more max_objects",
    }

    needed: int | None
    held_bytes_by_rank: dict[int, int] | None
    resource: Literal["bytes", "slots", "leases"] | None

    def __init__(
        self,
        message: str | None = None,
        *,
        needed: int | None = None,
        held_bytes_by_rank: Mapping[int, int] | None = None,
        resource: Literal["bytes", "slots", "leases"] | None = None,
        hint: str | None = None,
    ) -> None:
        self.needed = needed
        self.resource = resource
        self.held_bytes_by_rank = None if held_bytes_by_rank is None else dict(held_bytes_by_rank)
        if message is None:
            message = self.default_message
            if needed is not None:
                message += f": {needed} bytes needed"
            message += held_by(self.held_bytes_by_rank)
        super().__init__(message, hint=hint or self._hints.get(resource or ""))


class StoreSpaceError(ShmStoreError, OSError):
    """The file system of shared memory cannot hold a store of that size (`errno` is ENOSPC); none was made.

    `needed` and `free` are in bytes.
    """

    default_message = "the file system of shared memory is too small"
    default_hint = "ask for less capacity, or enlarge /dev/shm (containers: --shm-size)"

    needed: int | None
    free: int | None

    def __init__(
        self,
        message: str | None = None,
        *,
        needed: int | None = None,
        free: int | None = None,
        hint: str | None = None,
    ) -> None:
        self.needed = needed
        self.free = free
        if message is None:
            message = self.default_message
            if needed is not None:
                message += f": {needed} bytes needed, {free} free"
        super().__init__(message, hint=hint)
        self.errno = _errno.ENOSPC
        self.strerror = self.message


class SharedMemoryError(ShmStoreError, OSError):
    """The system does not let this process use shared memory; `errno` says which answer it gave."""

    default_message = "shared memory cannot be used here"
    default_hint = "look at /dev/shm, its mount options and permissions, and at this process's limits"

    def __init__(self, message: str | None = None, *, number: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.errno = number
        self.strerror = self.message


class ForeignStoreError(ShmStoreError, PermissionError):
    """The store is another user's, or other users may open it (`errno` is EACCES); it was left as it is."""

    default_message = "the store belongs to another user, or is open to others"
    default_hint = "pass allow_uid=UID if you trust its owner with everything that this process reads from it"

    def __init__(self, message: str | None = None, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.errno = _errno.EACCES
        self.strerror = self.message


class ObjectTooLargeError(ShmStoreError, ValueError):
    """The object is larger than `max_object_size`, so that no amount of eviction would help."""

    default_message = "the object is larger than the store takes"
    default_hint = "create the store with a larger max_object_size and capacity, or send this object inline"


class ObjectExistsError(ShmStoreError, ValueError):
    """An object of this key is stored already; keys are content hashes, so its bytes are the same."""

    default_message = "the object already exists in the storage"
    default_hint = "call get_cached(key) for another reference to it, or delete(key) first"


class ObjectNotFoundError(ShmStoreError, KeyError):
    """No object of this key is stored: it was never put, or it has been evicted or deleted."""

    default_message = "no object of this key is in the storage"
    default_hint = "put it (again); ask is_cached(key) first where a miss is expected"


class StaleRefError(ShmStoreError, ValueError):
    """The reference names no live object of this store: its lease has ended, or its bits are wrong."""

    default_message = "the object has gone, or has been modified or is invalid"
    default_hint = (
        "its lease was over (read, released, cancelled, or its rank retired) and it has been evicted or deleted, or "
        "these are not the bytes that were handed out; put it again, or ask the writer for a new reference"
    )


class StoreNotFoundError(ShmStoreError, FileNotFoundError):
    """There is no store of this name on this host (`errno` is ENOENT)."""

    default_message = "there is no store of this name"
    default_hint = "create the store first, and share /dev/shm between the containers that use it"

    def __init__(self, message: str | None = None, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.errno = _errno.ENOENT
        self.strerror = self.message


class StoreExistsError(ShmStoreError, FileExistsError):
    """A store of this name exists already (`errno` is EEXIST); it was left as it is."""

    default_message = "a store of this name exists already"
    default_hint = (
        "choose another name or none; if its writer is dead, take it over with recover(name), or remove it with "
        "shmstore gc --yes --force NAME"
    )

    def __init__(self, message: str | None = None, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.errno = _errno.EEXIST
        self.strerror = self.message


class WriterActiveError(ShmStoreError, RuntimeError):
    """Another process writes to this store, and a store has one writer."""

    default_message = "the store has a live writer"
    default_hint = "close that writer or wait until its process has ended, then recover"


class RankInUseError(ShmStoreError, RuntimeError):
    """A live reader holds this rank."""

    default_message = "the rank is taken by a live reader"
    default_hint = "give each worker a rank of its own, or close the reader that holds this one"


class LayoutMismatchError(ShmStoreError, ValueError):
    """The segment was laid out by another version of shmstore, or for another architecture."""

    default_message = "the segment has another layout"
    default_hint = "run the same version of shmstore in every process that shares the store"


class CorruptStoreError(ShmStoreError, ValueError):
    """The bytes found contradict each other; nothing was built from them."""

    default_message = "the stored bytes are not valid"
    default_hint = "use one serializer and one version on both sides; `shmstore verify NAME` checks a segment"


class SparseStoreError(CorruptStoreError):
    """Parts of the segment's file are holes, and to read them would allocate memory; it was not read."""

    default_message = "parts of the file are holes: it is a sparse copy, or was never a store"
    default_hint = "recover(name) reserves a copy's space again; shmstore gc --yes --force NAME removes it"


class UnknownTypeError(CorruptStoreError):
    """An object holds a value of a type that this process has not registered; `type_name` is its name."""

    default_message = "the object holds a value of an unregistered type"
    default_hint = "import the module that calls shmstore.serde.register_type for this name"

    type_name: str

    def __init__(self, message: str | None = None, *, type_name: str = "", hint: str | None = None) -> None:
        self.type_name = type_name
        if type_name:
            message = message or f"no type is registered under the name {shown(type_name)}"
            hint = hint or f"import the module that registers {shown(type_name)} before reading this object"
        super().__init__(message, hint=hint)


class StoreClosedError(ShmStoreError, ValueError):
    """The writer or reader was closed, or belongs to another process."""

    default_message = "the store is closed"
    default_hint = "use it before close(); after a fork, attach anew in the child"


class CacheMissError(ShmStoreError, LookupError):
    """Items that were announced as cached are not; `mm_hashes` names every one that is missing."""

    default_message = "items are missing from the cache"
    default_hint = "process these items again and send them with the request"

    mm_hashes: tuple[str, ...]

    def __init__(self, mm_hashes: Iterable[str] = (), message: str | None = None, *, hint: str | None = None) -> None:
        self.mm_hashes = (mm_hashes,) if isinstance(mm_hashes, str) else tuple(mm_hashes)
        if message is None and self.mm_hashes:
            message = f"{self.default_message}: {listed(self.mm_hashes)}"
        super().__init__(message, hint=hint)


class UnsupportedValueError(ShmStoreError, TypeError):
    """A value cannot be stored; `path` leads to it in the tree, as in ``value['a'][2]``."""

    default_message = "no serializer for this value"
    default_hint = "convert it to a tensor, an array or plain data, or register its type (shmstore.serde.register_type)"

    path: str

    def __init__(self, message: str | None = None, *, path: str = "", hint: str | None = None) -> None:
        self.path = path
        super().__init__(message, hint=hint)


class SerdeError(ShmStoreError, ValueError):
    """A serializer of the caller's own has broken its contract; nothing was stored."""

    default_message = "the serializer returned what is no encoding of a value"
    default_hint = (
        "see shmstore.serde.ObjectSerde for what encode() and layout() return; MsgpackSerde() is one that fits"
    )


class NestingError(ShmStoreError, ValueError):
    """A value is nested too deeply, which is also what one that contains itself looks like."""

    default_message = "the value is nested too deeply"
    default_hint = "look for a container that contains itself, or flatten the value"
