"""The segments of this host, who maps them, and the removal of dead ones."""

import os
from dataclasses import dataclass, fields

from shmstore.bindings import inspect as native
from shmstore.errors import ShmStoreError
from shmstore.files import DIRECTORY, PREFIX, classify
from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.records import SegmentInfo
from shmstore.store.refusals import cannot_open

__all__ = ["Holders", "find_segments", "holders", "look_at", "remove_segment"]

_PF_KTHREAD = 0x00200000
"""Of the flags in /proc/PID/stat."""


def find_segments() -> list[SegmentInfo]:
    """Return the segments of this host, known by their first bytes, sorted by name."""
    found = []
    with os.scandir(DIRECTORY) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
    for name in names:
        try:
            info = look_at(name)
        except (ShmStoreError, OSError, ValueError):  # gone since, or no store
            continue
        found.append(info)
    return found


def look_at(name: str) -> SegmentInfo:
    """Return what can be said about one file of /dev/shm; it never raises for a damaged segment.

    Raises StoreNotFoundError if there is no such file, LayoutMismatchError if it is not a store.
    """
    file = classify(name)
    if file.state in ("foreign", "blank") or (file.state == "unreadable" and not name.startswith(PREFIX)):
        raise cannot_open(file)
    facts = None
    if file.state == "ok":
        with StoreInspector.open(name) as inspector:
            facts = inspector.facts()
    return SegmentInfo(**{field.name: getattr(file, field.name) for field in fields(file)}, facts=facts)


@dataclass(frozen=True, slots=True)
class Holders:
    """Which processes have a file open or mapped."""

    pids: tuple[int, ...]
    """Those that do, this one left out."""
    unreadable: tuple[int, ...]
    """Those of which it cannot be told: they have memory or files, and this user may not look at them."""


def holders(device: int, inode: int) -> Holders:
    """Return the processes that map a file, or have it open, as far as /proc tells."""
    pids, unreadable = [], []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            if _maps(entry, device, inode) or _has_open(entry, device, inode):
                pids.append(int(entry))
        except PermissionError:
            if not _holds_nothing(entry):
                unreadable.append(int(entry))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return Holders(tuple(sorted(pids)), tuple(sorted(unreadable)))


def _holds_nothing(pid: str) -> bool:
    """Return whether a process is a thread of the kernel, or has ended: such a one maps nothing and has no files."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            words = stat.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except PermissionError:  # of a /proc mounted with hidepid=1
        return False
    state, flags = words[0], int(words[6])
    return state in "ZX" or bool(flags & _PF_KTHREAD)


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
        except (FileNotFoundError, PermissionError):
            continue
        if stat.st_dev == device and stat.st_ino == inode:
            return True
    return False


def remove_segment(info: SegmentInfo, *, force: bool = False) -> None:
    """Remove the name of a segment whose writer is dead; processes that map its pages keep them.

    Holds the writer's lock meanwhile, so that no process recovers it. Raises WriterActiveError; RankInUseError if a
    reader is attached, unless `force`; StoreNotFoundError if it is no longer that file.
    """
    native.remove(info.name, info.device, info.inode, info.file_bytes, force)
