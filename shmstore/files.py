"""Tells what a file in a folder of stores is: for listings, for `gc`, for leftovers and for error messages."""

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from stat import S_ISREG
from typing import Final, Literal

from shmstore.bindings import inspect as native
from shmstore.errors import (
    ForeignStoreError,
    LayoutMismatchError,
    SharedMemoryError,
    SparseStoreError,
    StoreNotFoundError,
    cut,
    shown,
)
from shmstore.places import parts_of, path_of, place_of, stat_of

PREFIX: Final = "shmstore-"
"""The start of generated names."""
NO_STORE_HINT: Final = "choose another name; shmstore ls lists the stores; if this was one, rm removes its file"

FileState = Literal[
    "ok",  # a store, alive or dead
    "being created",
    "unfinished",  # its creator died
    "other version",
    "sparse",  # a store with holes in its file, such as a copy
    "damaged",
    "unreadable",  # to this user; perhaps a store
    "blank",  # empty or zeros; perhaps an unfinished store
    "foreign",  # not a store
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFile:
    """A file in a folder of stores, and what it is."""

    name: str
    """The store's name: the file's, without the folder."""
    dir: str
    """The folder."""
    state: FileState
    problem: str | None
    """What is wrong with it, in words; None if nothing is."""
    file_bytes: int
    allocated_bytes: int
    """Of the file, those that take memory: the data of an arena does from the first writer on."""
    device: int
    """Number of the file system."""
    inode: int
    """Number of the file in it; a later store of the same name has another one."""
    modified_at: float
    """When the file's size was set; the age of a file whose superblock says none."""
    owner_uid: int
    writer_alive: bool = True
    """Whether a process holds the lock of a writer; True if that cannot be known."""
    writers: int | None = None
    """How many writers it is for; None if it is not "ok"."""
    writers_alive: int | None = None
    ranks_alive: int = 0
    ephemeral: bool = False
    """Whether its name was generated and its processes are dead: the next `create` of its user removes it."""

    @property
    def place(self) -> str:
        """Its place, as in `shmstore.places`."""
        return place_of(self.name, self.dir)

    @property
    def recoverable(self) -> bool:
        """Whether `recover`, of this or another version, may find everything in it, and somebody may ask for it."""
        return self.state in ("ok", "other version", "sparse") and not self.ephemeral


def classify(place: str) -> SegmentFile:
    """Return what the file at a place is; it may be any file.

    Raises StoreNotFoundError if there is none, and SharedMemoryError if the folder cannot be looked into.
    """
    try:
        seen = native.probe(place)
    except PermissionError:
        return _not_opened(place, "unreadable")
    except LayoutMismatchError:  # not a regular file
        return _not_opened(place, "foreign")
    except (StoreNotFoundError, ValueError):
        raise no_store(place) from None
    except OSError as error:
        if error.errno != errno.ENXIO:  # a socket, which cannot be opened
            raise _no_file(place, error) from None
        return _not_opened(place, "foreign")
    folder, name = parts_of(place)
    state, problem = _judge(name, seen)
    alive = bool(seen["writer_alive"])
    return SegmentFile(
        name=name,
        dir=folder,
        state=state,
        problem=problem,
        file_bytes=seen["size"],
        allocated_bytes=seen["allocated"],
        device=seen["device"],
        inode=seen["inode"],
        modified_at=seen["modified_ns"] / 1e9,
        owner_uid=seen["uid"],
        writer_alive=alive,
        writers=seen["n_writers"] or None,
        writers_alive=seen["writers_alive"] if seen["n_writers"] else None,
        ranks_alive=seen["ranks_alive"],
        ephemeral=bool(seen["ephemeral"]) and not alive and not seen["ranks_alive"],
    )


def no_store(place: str) -> StoreNotFoundError:
    """Return the error for a place where there is no file."""
    hint = "list the stores with shmstore ls"
    if not set("*?[").isdisjoint(place):
        hint = f"name one store; only ls takes a pattern: shmstore ls {shown(parts_of(place)[1])}"
    return StoreNotFoundError(f"there is no store named {shown(place)}", hint=hint)


def another_user(place: str) -> ForeignStoreError:
    """Return the error for a store of another user, which this process may not open or change."""
    with suppress(OSError):  # it has gone meanwhile
        uid = stat_of(place).st_uid
        return ForeignStoreError(f"store {shown(place)} belongs to user {uid}", hint=f"run this as user {uid}")
    return ForeignStoreError(f"store {shown(place)}: {ForeignStoreError.default_message}")


def _judge(name: str, seen: dict[str, int]) -> tuple[FileState, str | None]:
    """Return its state, and what is wrong."""
    if not seen["ours"] and not (seen["blank"] and name.startswith(PREFIX)):
        return ("blank", "empty: its creation was not completed, or it is not a store") if seen["blank"] else _FOREIGN
    if not seen["published"]:
        return ("being created", None) if seen["writer_alive"] else ("unfinished", "its creation was not completed")
    if not seen["same_version"]:
        return "other version", "laid out by another version of shmstore"
    match seen["fault"]:
        case native.SPARSE:
            return "sparse", SparseStoreError.default_message
        case native.CORRUPT:
            return "damaged", "its superblock contradicts itself"
        case native.LAYOUT:
            return "damaged", f"its file of {seen['size']} bytes is truncated, extended, or of another page size"
    return "ok", None


_FOREIGN: Final[tuple[FileState, str]] = "foreign", "not a store, or its first page was overwritten"


def _no_file(place: str, error: OSError) -> SharedMemoryError:
    return SharedMemoryError(f"{cut(path_of(place))} cannot be looked at: {error.strerror}", number=error.errno)


def _not_opened(place: str, state: FileState) -> SegmentFile:
    folder, name = parts_of(place)
    try:
        stat = stat_of(place)
    except FileNotFoundError:
        raise no_store(place) from None
    except OSError as error:
        raise _no_file(place, error) from None
    problem = f"belongs to user {stat.st_uid}" if state == "unreadable" else _FOREIGN[1]
    if not S_ISREG(stat.st_mode):
        problem = "not a store, since not a regular file: pass the file itself, not a link or a folder"
    return SegmentFile(
        name=name,
        dir=folder,
        state=state,
        problem=problem,
        file_bytes=stat.st_size,
        allocated_bytes=stat.st_blocks * 512,
        device=stat.st_dev,
        inode=stat.st_ino,
        modified_at=stat.st_mtime,
        owner_uid=stat.st_uid,
    )


def holders(device: int, inode: int) -> tuple[int, ...]:
    """Return the other processes that map a file, or have it open, as far as /proc lets this user see."""
    pids = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if _maps(entry, device, inode) or _has_open(entry, device, inode):
                    pids.append(int(entry))
    return tuple(sorted(pids))


def of_other_namespaces(place: str, pids: Iterable[int]) -> list[int]:
    """Return which of these living processes of a store have their numbers in another PID namespace."""
    with suppress(OSError):  # it has gone meanwhile
        file = os.stat(path_of(place))
        return [pid for pid in pids if not is_here(pid, file.st_dev, file.st_ino)]
    return []


def is_here(pid: int, device: int, inode: int) -> bool:
    """Return whether the process of that number maps the file, as far as this user may see.

    A subvolume of btrfs has another device in stat(2) than in /proc/PID/maps, so there nobody does.
    """
    try:
        return _maps(str(pid), device, inode)
    except PermissionError:
        return True
    except (FileNotFoundError, ProcessLookupError):
        return False


def _maps(pid: str, device: int, inode: int) -> bool:
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}"
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            words = line.split(maxsplit=5)
            if words[3] == wanted and words[4] == str(inode):
                return True
    return False


def _has_open(pid: str, device: int, inode: int) -> bool:
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            stat = os.stat(f"/proc/{pid}/fd/{number}")
        except OSError:  # closed since, another user's, or of a mount whose server is lost
            continue
        if stat.st_dev == device and stat.st_ino == inode:
            return True
    return False
