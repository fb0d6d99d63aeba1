"""Every error that shmstore raises on purpose: a type to catch, and a hint to act on.

Each class is a `ShmStoreError` and also the built-in that a caller would catch anyway. ``str(error)`` is one
line that says what happened and what to do. Errors pickle with their attributes, because the parent process
reads the errors of its workers.
"""

import errno as _errno
import reprlib
import sys
from collections.abc import Iterable
from types import FunctionType
from typing import Any, ClassVar, Literal, TypeVar

_E = TypeVar("_E", bound=Exception)
_C = TypeVar("_C", bound=type)

__all__ = [
    "CacheMissError",
    "CorruptStoreError",
    "DeviceError",
    "ForeignStoreError",
    "LayoutMismatchError",
    "MissingExtraError",
    "NestingError",
    "NoArenaError",
    "ObjectBusyError",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "ObjectTooLargeError",
    "RankInUseError",
    "ReservationEndedError",
    "SharedMemoryError",
    "ShmStoreError",
    "SparseStoreError",
    "StaleRefError",
    "StoreClosedError",
    "StoreExistsError",
    "StoreFullError",
    "StoreNotFoundError",
    "StoreSpaceError",
    "TierError",
    "TierFullError",
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
    """Return `text` for use in a message: what is not printable escaped, so that it stays one line; a long one is cut.

    A text that is longer than `room` loses its middle.
    """
    said = str(text)
    said = said if len(said) <= room else f"{said[: room // 2]}...{said[-(room // 2) :]}"
    return said if said.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in said)


def kind_of(value: object) -> str:
    """Return the name of a value's type, for a message."""
    return "None" if value is None else type(value).__name__


def shown(value: object) -> str:
    """Return the repr of a caller's value for use in a message, shortened if it is long."""
    if type(value) is str and len(value) <= 80:
        return repr(value)
    return cut(_short.repr(value))


def check_flags(**flags: Any) -> None:
    """Raise TypeError, which names the argument, for one that is not a bool: the text "false" would be true."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {shown(value)}")


def listed(names: Iterable[object]) -> str:
    """Return names for use in a message: the first eight, and the number of the others."""
    first: list[str] = []
    more = 0
    for name in names:
        if len(first) < 8:
            first.append(cut(name, 80))
        else:
            more += 1
    return ", ".join(first) + (f" and {more} more" if more else "")


def unnamed(inner: _C) -> _C:
    """Let Python's own errors about arguments name the methods of a base class without it, as nobody calls it."""
    for name, value in vars(inner).items():
        if isinstance(function := getattr(value, "__func__", value), FunctionType):
            function.__qualname__ = name
    return inner


def unless_interrupted(kind: type[_E]) -> tuple[type[_E], ...]:
    """Return what an `except` around foreign code takes: errors of this kind, but none that a signal handler raised.

    Foreign code may raise anything. So may a handler while that code runs, for example a deadline of the caller's: that
    is not a failure of the code. Python passes a handler the frame that it interrupts, which is the one below its own.
    Other functions hardly ever have that frame as an argument.
    """
    error = sys.exception()
    trace = error.__traceback__ and error.__traceback__.tb_next if error else None  # not the frame of the `except`
    while trace is not None:
        code, back, local = trace.tb_frame.f_code, trace.tb_frame.f_back, trace.tb_frame.f_locals
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 1]:  # one more, for *args
            given = local.get(name)
            if back and any(each is back for each in (given if type(given) is tuple else (given,))):
                return ()
        trace = trace.tb_next
    return (kind,)


class ShmStoreError(Exception):
    """The base class of all errors of shmstore.

    `message` says what happened and `hint` says what to do, each in one line.
    """

    default_message: ClassVar[str] = "the shared-memory store failed"
    default_hint: ClassVar[str] = "see the message"

    message: str
    hint: str
    _number: ClassVar[int | None] = None
    """`errno` of a class that is also an OSError."""
    _code: int | None = None
    """What the bindings raised it for, of the codes of C; None when Python has raised it."""

    def __init__(self, message: str | None = None, *, hint: str | None = None, **facts: Any) -> None:
        """Take what the class has as attributes by their names; without a message they make one."""
        for name, value in facts.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no attribute {name!r}")
            setattr(self, name, value)
        self.message = self._usual_message() if message is None else message
        self.hint = self._usual_hint() if hint is None else hint
        super().__init__(self.message)
        error: object = self
        if isinstance(error, OSError):  # its constructor takes these from two arguments
            error.errno, error.strerror = self._number, self.message

    def _usual_message(self) -> str:
        return self.default_message

    def _usual_hint(self) -> str:
        return self.default_hint

    # KeyError would quote the message, and OSError would put the number in front.
    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})"

    # The built-in method calls the class with `args`, which are not the arguments of every class here.
    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__.copy(), getattr(self, "errno", None))


def _rebuild(
    cls: type[ShmStoreError], args: tuple[Any, ...], state: dict[str, Any], number: int | None = None
) -> ShmStoreError:
    error = cls()  # every argument has a default
    error.args = args
    error.__dict__.update(state)
    if isinstance(error, OSError):  # these two attributes lie outside __dict__
        error.errno, error.strerror = number, error.message
    return error


class StoreFullError(ShmStoreError, MemoryError):
    """The store has no room, even if it evicts every object that it may evict.

    `needed` is the requested size in bytes. `held_bytes_by_rank` says how many bytes each rank holds or has been
    promised. `held_bytes_by_writer` says how many bytes each other writer of the store keeps by its leases; they may be
    the same bytes. `resource` says what has run out: "bytes", "slots" (one per object), "leases" or "quota". A lease
    is needed for each reference that not every rank has read. If a kind has filled its quota, the bytes by rank and
    writer are of that kind. What a rank reads again after its last lease is counted when the store looks at that object
    the next time. Each attribute is None if it is not known.
    """

    default_message = "the store is full"
    default_hint = (
        "release references, cancel the leases of aborted requests and those that are held, put with lease=False what "
        "readers find by key, or create the store with more capacity"
    )

    needed: int | None = None
    held_bytes_by_rank: dict[int, int] | None = None
    held_bytes_by_writer: dict[int, int] | None = None
    resource: Literal["bytes", "slots", "leases", "quota"] | None = None

    def _usual_hint(self) -> str:
        if self.resource == "quota":
            return self.default_hint.replace("create the store with more capacity", "raise the quota of this kind")
        return self.default_hint.replace("capacity", "capacity" if self.resource in (None, "bytes") else "max_objects")


class StoreSpaceError(ShmStoreError, OSError):
    """There is no room in the folder for a store, or for the arena that a writer takes; none was created or taken.

    `needed`, `free` and `total`, which is the size of the file system, are in bytes. `errno` is ENOSPC.
    """

    _number = _errno.ENOSPC
    default_message = "there is no room in /dev/shm"
    default_hint = "use less capacity, or enlarge /dev/shm (containers: --shm-size)"

    needed: int | None = None
    free: int | None = None
    total: int | None = None
    folder: str = "/dev/shm"

    def _usual_message(self) -> str:
        if self.needed is None or self.free is None:
            return self.default_message
        return f"there is no room in {self.folder}: {-(-self.needed >> 20)} MiB needed, {self.free >> 20} MiB free"

    def _usual_hint(self) -> str:
        if (self.needed or 0) > (self.total or 0):
            return self.default_hint.replace("/dev/shm", self.folder)
        return f"see what fills it (ls -ls {self.folder}), remove useless stores (shmstore gc), or use less capacity"


class SharedMemoryError(ShmStoreError, OSError):
    """The system does not let this process use shared memory; `errno` is its error number, and the message says why.

    A folder may be missing, or on a file system that lacks what a store needs; a permission or a limit may forbid it;
    there may be no room to map a private value.
    """

    default_message = "shared memory cannot be used here"
    default_hint = (
        "stores are files in a writable tmpfs, by default /dev/shm (mount it, or chmod); check its free space and "
        "inodes, and the limits of this process: ulimit -f (RLIMIT_FSIZE), -n (RLIMIT_NOFILE), -v (RLIMIT_AS)"
    )

    def __init__(self, message: str | None = None, *, number: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.errno = number


class ForeignStoreError(ShmStoreError, PermissionError):
    """The store belongs to another user, or other users may open it; it was not changed. `errno` is EACCES.

    Its owner could choose what this process reads, and cut the file short under it. If that user is trusted, pass
    `allow_uid`.
    """

    _number = _errno.EACCES
    default_message = "the store belongs to another user, or other users may open it"
    default_hint = "run this as the user that owns the store"


class ObjectTooLargeError(ShmStoreError, ValueError):
    """The object is larger than `max_object_size`, so eviction cannot make room for it."""

    default_message = "the object is larger than the store allows"
    default_hint = "create the store or queue with a larger capacity (and max_object_size), or send this object inline"


class ObjectExistsError(ShmStoreError, ValueError):
    """An object with this key is stored, or a thread is putting it; keys are content hashes, so its bytes are the same.

    Threads wait for one another if each puts only after `find_or_claim(key, wait=seconds)` has given it the claim.
    """

    default_message = "the object already exists in the storage"
    default_hint = (
        "call get_cached(key) for another reference to it, or delete(key) first; while another thread still puts it, "
        "both find nothing: let each thread call find_or_claim(key, wait=seconds) before it puts"
    )


class ObjectNotFoundError(ShmStoreError, KeyError):
    """No object with this key is stored; it was never put, or it has been evicted or deleted."""

    default_message = "no object of this key is in the storage"
    default_hint = "put the object; call is_cached(key) first if you expect misses"


class ReservationEndedError(ShmStoreError, RuntimeError):
    """The reservation was committed or aborted before; it ends once."""

    default_message = "the reservation has ended"
    default_hint = "commit it once, and not after abort(); begin(key, ...) again for another object"


class StaleRefError(ShmStoreError, ValueError):
    """The reference names no object of this store: the object was evicted or deleted, or the bits are wrong.

    A writer's own calls also refuse a reference that another writer has handed out.
    """

    default_message = "the object was evicted or deleted, or the reference has been modified or is invalid"
    default_hint = (
        "put the object again, or ask the writer for a new reference; an object can be evicted once its lease has "
        "ended (read, released, cancelled, or its rank retired)"
    )


class StoreNotFoundError(ShmStoreError, FileNotFoundError):
    """This host has no store with this name, or its creation has not ended (`errno` is ENOENT).

    A reader of a removed store raises it for what is not in the memory that it still maps.
    """

    _number = _errno.ENOENT
    default_message = "there is no store with this name"
    default_hint = (
        "create the store first, or wait for it (attach(name, wait=seconds)), and share its folder between containers; "
        "a store from create is removed when its last writer closes it, and one from open stays"
    )


class StoreExistsError(ShmStoreError, FileExistsError):
    """A store with this name already exists (`errno` is EEXIST); it was not changed."""

    _number = _errno.EEXIST
    default_message = "a store with this name already exists"
    default_hint = (
        "choose another name, or omit it; if no writer has it, take it over by open(name, ...), or remove it by "
        "ObjectStoreWriter.unlink(name)"
    )


class WriterActiveError(ShmStoreError, RuntimeError):
    """Another process writes to this store, or to this arena of it; or all arenas have a living writer."""

    default_message = "the store has a live writer"
    default_hint = "close that writer, wait until its process has ended, or create the store with a larger n_writers"


class NoArenaError(ShmStoreError, RuntimeError):
    """The writer owns its store and has no arena to put into (`writes=False`)."""

    default_message = "this writer owns the store, and has no arena of it (writes=False)"
    default_hint = "make this call in a process that has joined the store, ObjectStoreWriter.join(handle); "
    default_hint += "a reader reads, and `shmstore top NAME` shows the figures of all"


class RankInUseError(ShmStoreError, RuntimeError):
    """A live reader holds this rank, or views of a closed one do."""

    default_message = "the rank is taken by a live reader"
    default_hint = (
        "give each worker its own rank (rank=None is the first free one), or close the reader that has this one, and "
        "drop its views"
    )


class ObjectBusyError(ShmStoreError, TimeoutError):
    """The object's writer was stopped while it asked who holds the object, and has not decided yet that it stays.

    What is promised to this rank, leased by this writer, or pinned by another rank, stays.
    """

    default_message = "the object's writer is evicting or was stopped, and has not decided yet that the object stays"
    default_hint = "try again; an object that is promised, leased or pinned stays, and its reference stays valid"


class TierError(ShmStoreError, ConnectionError):
    """A tier cannot be reached, was late, or did not answer as it must."""

    default_message = "the tier does not answer as it must"
    default_hint = "check its server with `shmstore tier check URL`; without it, items are processed on each host"


class TierFullError(TierError):
    """A tier has no room for what was published."""

    default_message = "the tier has no room"
    default_hint = "give its server more memory, or let it evict"


class LayoutMismatchError(ShmStoreError, ValueError):
    """The store has other options or ranks than the caller said, or the file is not a store of this version.

    The message says which.
    """

    default_message = "the segment has a different layout"
    default_hint = "run the same version of shmstore in every process that shares the store"


class CorruptStoreError(ShmStoreError, ValueError):
    """The stored bytes contradict each other; no value was made from them."""

    default_message = "the stored bytes are not valid"
    default_hint = "use the same serializer and version on both sides; check the segment with `shmstore verify NAME`"


class SparseStoreError(CorruptStoreError):
    """Parts of the segment's file are holes, and using them would allocate memory; the store was not opened."""

    default_message = "parts of the file are holes; it is a sparse copy, or was never a store"
    default_hint = (
        "make the copy with cp --sparse=never, or give it its space with fallocate -l BYTES FILE, where BYTES is its "
        "size; or remove it with shmstore gc --yes --force NAME"
    )


class UnknownTypeError(CorruptStoreError):
    """An object holds a value of a type that this process has not registered; `type_name` is its name."""

    default_message = "the object holds a value of an unregistered type"
    default_hint = "import the module that calls shmstore.serde.register_type for this name"

    type_name: str = ""


class StoreClosedError(ShmStoreError, ValueError):
    """The writer or reader was closed, or belongs to another process, or a new store has the name of a reader's."""

    default_message = "the store is closed"
    default_hint = "use it before close(); after a fork, attach again in the child"


class CacheMissError(ShmStoreError, LookupError):
    """Items that were announced as cached are missing; `mm_hashes` lists all of them."""

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
    default_hint = (
        "convert it to a dense tensor, an array or plain data (list, dict, bytes), or register its type "
        "(shmstore.serde.register_type)"
    )

    path: str = ""


class MissingExtraError(ShmStoreError, ImportError):
    """`what` needs a package that is not installed, and that the extra of the name `extra` brings."""

    default_message = "an optional package is not installed"
    default_hint = "pip install 'shmstore[EXTRA]'"

    what: str = ""
    extra: str = ""

    def _usual_message(self) -> str:
        return f"{self.what} needs the extra {self.extra}" if self.extra else self.default_message

    def _usual_hint(self) -> str:
        return self.default_hint.replace("EXTRA", self.extra or "EXTRA")


class DeviceError(ShmStoreError, RuntimeError):
    """This process cannot use a GPU, or the driver refuses the store's memory."""

    default_message = "CUDA is not available in this process"
    default_hint = "install torch with CUDA and check torch.cuda.is_available(), or read without `device`"


class NestingError(ShmStoreError, ValueError):
    """A value is nested too deeply; a value that contains itself is refused in the same way."""

    default_message = "the value is nested too deeply"
    default_hint = "look for a container that contains itself, or flatten the value"
