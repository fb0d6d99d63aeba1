"""Turns error codes of C into errors that say what the caller wants to know; runs only after a failure."""

import errno
import os
import stat
from contextlib import suppress
from typing import Any, Final, Literal

from shmstore.bindings import store as native
from shmstore.errors import (
    ForeignStoreError,
    LayoutMismatchError,
    RankInUseError,
    SerdeError,
    SharedMemoryError,
    ShmStoreError,
    StaleRefError,
    StoreExistsError,
    StoreFullError,
    StoreNotFoundError,
    held_by,
    listed,
    shown,
)
from shmstore.files import DIRECTORY, SegmentFile, classify
from shmstore.refs import ObjectRef

__all__ = [
    "another_layout",
    "cannot_open",
    "exists",
    "foreign",
    "full",
    "in_use",
    "not_found",
    "shown",
    "stale",
    "unusable",
    "wrong_encoding",
    "wrong_layout",
]


def stale(error: StaleRefError, ref: ObjectRef, store_id: int) -> StaleRefError:
    """Return the same error with its reference, and whether that is of another store."""
    hint = None
    if ref.store_id != store_id:
        hint = (
            f"it is of store {ref.store_id:08x}, and this is {store_id:08x}; a later store of the same name is another"
        )
    return StaleRefError(f"{error.message}: {ref!r}", hint=hint)


def not_found(error: StoreNotFoundError, name: str, by_handle: bool) -> ShmStoreError:
    """Return the same error with the store's name, and a hint at what the caller may have mistaken."""
    if not os.path.isdir(DIRECTORY):
        return unusable(OSError(errno.ENOENT, ""), name)
    hint = error.hint
    if name.startswith("{"):
        hint = "this looks like a handle's JSON: StoreHandle.from_json reads it"
    elif by_handle and error._code == native.NO_STORE:
        hint = "its writer has closed it, or runs where /dev/shm is another (containers: --ipc)"
    return StoreNotFoundError(f"store {shown(name)}: {error.message}", hint=hint)


_UNUSABLE: Final = {
    errno.ENOENT: (f"there is no {DIRECTORY}", "mount a tmpfs there; shared memory is made of its files"),
    errno.EROFS: (f"{DIRECTORY} is mounted read-only", "mount it read-write; stores are files there"),
    errno.EACCES: ("this process may not open {path}", f"look at the permissions of that file and of {DIRECTORY}"),
    errno.EFBIG: (
        "the segment is larger than this process may make a file (RLIMIT_FSIZE)",
        "raise the limit (ulimit -f), or ask for less capacity",
    ),
    errno.EMFILE: (
        "this process has no file descriptor left",
        "close what is not needed, or raise the limit (ulimit -n, RLIMIT_NOFILE)",
    ),
    errno.ENFILE: ("the system has no file descriptor left", "raise fs.file-max, or close files"),
    errno.ENOSPC: (f"{DIRECTORY} takes no more files", "remove files there, or mount it with more nr_inodes"),
    errno.ENOMEM: (
        "this process may not map that much memory",
        "raise its limit (ulimit -v, RLIMIT_AS), or ask for less capacity",
    ),
}


def unusable(error: OSError, name: str) -> ShmStoreError:
    """Return the error for a system call that failed; the same error if it is one of the store's own."""
    if isinstance(error, ShmStoreError):
        return error
    path = f"{DIRECTORY}/{name if len(name) <= 80 else name[:77] + '...'}"
    message, hint = _UNUSABLE.get(error.errno or 0, (f"{{path}}: {error.strerror}", None))
    return SharedMemoryError(message.format(path=path), number=error.errno, hint=hint)


def foreign(name: str, allow_uid: int) -> ShmStoreError:
    """Return the error for a store of another owner or with an open mode, and say whose it is."""
    try:
        seen = os.lstat(f"{DIRECTORY}/{name}")
    except OSError:
        return ForeignStoreError(f"store {shown(name)}: {ForeignStoreError.default_message}")
    me = os.geteuid()
    if seen.st_uid == allow_uid:  # the owner is right, but this process may not open it
        return unusable(OSError(errno.EACCES, ""), name)
    if allow_uid != native.OWN_UID:
        whose = f"belongs to user {seen.st_uid}, not to user {allow_uid}"
    elif seen.st_uid != me:
        whose = f"belongs to user {seen.st_uid}, and this process is user {me}'s"
    else:
        return ForeignStoreError(
            f"store {shown(name)} has mode {stat.S_IMODE(seen.st_mode):04o}: users other than its owner may open it",
            hint=f"chmod 600 {DIRECTORY}/{name} if nobody else needs it, or pass allow_uid={me}",
        )
    return ForeignStoreError(f"store {shown(name)} {whose}")


def exists(name: str) -> StoreExistsError:
    """Return the error for a name that is taken, and say if the file is not a store."""
    with suppress(OSError):  # gone since
        file = classify(name)
        if file.state == "unreadable":
            return StoreExistsError(
                f"{DIRECTORY}/{name} exists and {file.problem}; this process may not read it",
                hint="choose another name or none",
            )
        if file.state in ("foreign", "blank"):
            return StoreExistsError(
                f"{DIRECTORY}/{name} exists and {file.problem}",
                hint="choose another name or none; if nobody needs that file, remove it yourself: "
                "shmstore gc leaves it alone",
            )
    return StoreExistsError(f"a store named {shown(name)} exists already")


def another_layout(error: LayoutMismatchError, name: str) -> LayoutMismatchError:
    """Return the error for a file that cannot be opened, with what it is instead."""
    if error._code == native.OTHER_RANKS:  # it is a store, and the error says what is wrong
        return LayoutMismatchError(f"store {shown(name)}: {error.message}", hint=error.hint)
    return cannot_open(classify(name))


def cannot_open(file: SegmentFile) -> LayoutMismatchError:
    """Return the error for a file that does not have the layout of a store of this version."""
    store = f"store {shown(file.name)}"
    if file.state in ("foreign", "blank", "unreadable"):
        return LayoutMismatchError(
            f"{DIRECTORY}/{file.name} {file.problem}", hint="shmstore ls shows the stores of this host"
        )
    if file.state in ("being created", "unfinished"):
        hint = "its writer died in it; shmstore gc removes what is left"
        return LayoutMismatchError(
            f"the creation of {store} was not completed", hint="wait for its writer" if file.writer_alive else hint
        )
    if file.state == "other version":
        return LayoutMismatchError(f"{store} was {file.problem}")
    return LayoutMismatchError(
        f"{store}: {file.problem}", hint="it cannot be opened; shmstore gc --yes --force NAME removes it"
    )


def in_use(name: str, rank: int) -> RankInUseError:
    """Return the error for a rank that is taken, with the process that has it."""
    pid = native.rank_pid(name, rank)
    hint = None
    if pid == os.getpid():  # or a process of the same number in another PID namespace
        hint = "if that is this process, close the reader that has it and drop its views; else attach as another rank"
    holder = f"process {pid}" if pid else "a live reader"
    return RankInUseError(f"rank {rank} of store {shown(name)} is taken by {holder}", hint=hint)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // native.ALIGN) * native.ALIGN


def full(
    refusal: dict[str, Any],
    resource: Literal["bytes", "slots", "leases"] | None,
    nbytes: int | None = None,
    extra: int = 0,
) -> StoreFullError:
    """Return the error for a store that has run out of `resource`, with who holds how much and what is left.

    `extra` are the bytes of key and metadata, which lie in front of the other `nbytes`.
    """
    held = refusal["held"]
    hint = None
    if resource == "leases":
        what = f"all {refusal['max_leases']} lease entries are taken by unread references (and unfinished puts)"
    elif resource == "slots":
        what = f"all {refusal['max_objects']} slots are taken by objects that are held"
    else:
        free = refusal["capacity"] - refusal["used_bytes"]
        span = _aligned(extra) + _aligned(nbytes or 0)
        what = (
            f"{nbytes} bytes ({span} with key and metadata) needed in one piece, {free} of {refusal['capacity']} free, "
            f"{refusal['reclaimable']} reclaimable, {refusal['longest']} of both in the longest piece"
        )
        if free + refusal["reclaimable"] >= span:
            hint = f"what is held splits the space: {StoreFullError.default_hint}"
    if refusal["kept"]:
        what += f"; {refusal['kept']} bytes protected, held by the writer or in unfinished puts"
    message = f"{StoreFullError.default_message}: {what}{held_by(held)}"
    full = StoreFullError(message, needed=nbytes, held_bytes_by_rank=held, resource=resource, hint=hint)
    absent = [rank for rank in refusal["awaited"] if rank in held]
    if absent:
        one = len(absent) == 1
        who = f"rank {absent[0]} has" if one else f"ranks {listed(absent)} have"
        full.hint = f"{who} never attached: start {'it' if one else 'them'}, or retire(rank); or {full.hint}"
    return full


def _wrong_sizes(made: Any) -> str | None:
    if not isinstance(made.meta, bytes):
        return f"meta must be bytes, not {type(made.meta).__name__}"
    if not isinstance(made.nbytes, int) or not 0 <= made.nbytes <= native.MAX_CAPACITY:
        return f"nbytes must be an int from 0 to {native.MAX_CAPACITY}, not {shown(made.nbytes)}"
    return None


def _wrong_places(made: Any, name: Literal["spans", "fills"]) -> str | None:
    places = getattr(made, name)
    try:
        for offset, size, source in places if len(places) else ():
            if not (0 <= offset <= offset + size <= made.nbytes):
                return f"{name}: {size} bytes at {offset} do not lie within the {made.nbytes} bytes of the payload"
            if name == "spans" and size and not 0 < source < 1 << 64:
                return f"spans: {size} bytes at {offset} come from no address, but {shown(source)}"
    except (TypeError, ValueError):
        source_is = "an address" if name == "spans" else "what fill() takes"
        return f"{name} must be a sequence of triples: an offset, a size and {source_is}"
    return None


def wrong_encoding(made: Any) -> SerdeError | None:
    """Return what is wrong with the result of a serializer's `encode`; None if it is an `Encoded`."""
    if not all(hasattr(made, name) for name in ("meta", "nbytes", "spans", "fills")):
        wrong: str | None = f"not {type(made).__name__} but an Encoded is expected"
    else:
        wrong = _wrong_sizes(made) or _wrong_places(made, "spans") or _wrong_places(made, "fills")
    return SerdeError(f"{SerdeError.default_message}: {wrong}") if wrong else None


def wrong_layout(made: Any) -> SerdeError | None:
    """Return what is wrong with the result of a serializer's `layout`; None if it is a `Layout`."""
    if not all(hasattr(made, name) for name in ("meta", "nbytes", "build")):
        wrong: str | None = f"not {type(made).__name__} but a Layout is expected"
    else:
        wrong = _wrong_sizes(made)
    return SerdeError(f"{SerdeError.default_message}: {wrong}") if wrong else None
