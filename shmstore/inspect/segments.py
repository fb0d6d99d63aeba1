"""The segments of this host, and the removal of dead ones."""

import os
from contextlib import suppress
from dataclasses import fields, replace

from shmstore.bindings import inspect as native
from shmstore.errors import ForeignStoreError, SharedMemoryError, ShmStoreError
from shmstore.files import PREFIX, SegmentFile, another_user, classify
from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.records import SegmentInfo
from shmstore.inspect.verify import damage
from shmstore.places import Folder, folder_of, place_of
from shmstore.store.diagnostics import cannot_open

_NO_STORE = ("foreign", "blank", "unreadable")


Verdicts = dict[int, dict[int, str]]
"""What `damage` has said of stores, by their numbers: on a busy store of 100,000 objects it takes a second."""


def find_segments(
    verdicts: Verdicts | None = None, dir: Folder | None = None, allow_uid: int | None = None
) -> list[SegmentInfo]:
    """Return the segments in a folder, known by their first bytes, sorted by name; `verdicts` are kept and taken.

    Of stores of other users than this one and `allow_uid` only the superblock is read, so they have no facts.
    In the folder of a process's descriptors these are the stores without a name, each once.
    """
    found: dict[tuple[int, int], SegmentInfo] = {}
    folder = folder_of(dir)
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False) or _is_memfd(entry))
    for name in names:
        with suppress(ShmStoreError, OSError, ValueError):  # gone since
            file = classify(place_of(name, folder))
            if file.state not in _NO_STORE or (file.state == "unreadable" and name.startswith(PREFIX)):
                found.setdefault((file.device, file.inode), _info(file, verdicts, allow_uid))
    return list(found.values())


def _is_memfd(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):  # closed since
        return entry.is_symlink() and os.readlink(entry.path).startswith("/memfd:")
    return False


def look_at(
    name: str, verdicts: Verdicts | None = None, dir: Folder | None = None, allow_uid: int | None = None
) -> SegmentInfo:
    """Return what can be said about one file; it never raises for a damaged segment.

    `name` may be the path of the file.

    Raises StoreNotFoundError if there is no such file, LayoutMismatchError if it is not a store, ForeignStoreError if
    it may not be read.
    """
    file = classify(place_of(name, dir))
    if file.state in _NO_STORE:
        raise cannot_open(file)
    return _info(file, verdicts, allow_uid)


def _info(file: SegmentFile, verdicts: Verdicts | None, allow_uid: int | None) -> SegmentInfo:
    facts, verdicts = None, {} if verdicts is None else verdicts
    if file.state == "ok":
        try:
            with StoreInspector.open(file.name, file.dir, allow_uid) as inspector:
                facts = inspector.facts()
                if facts.store_id not in verdicts:
                    verdicts[facts.store_id] = damage(inspector)
        except (ForeignStoreError, SharedMemoryError) as error:
            file = replace(file, problem=str(error))
        if facts and (damaged := verdicts[facts.store_id]):
            file = replace(file, state="damaged", problem=next(iter(damaged.values())))
            sound = any(w.state != "free" and w.index not in damaged for w in facts.writers)
            facts = facts if sound else None
    return SegmentInfo(**{field.name: getattr(file, field.name) for field in fields(file)}, facts=facts)


def settled(segments: list[SegmentInfo]) -> list[SegmentInfo]:
    """Return them as they are some milliseconds later: a process that was killed just now still has its locks."""
    turns = native.Turns()
    return [_settled(info, turns) for info in segments]


def _settled(info: SegmentInfo, turns: native.Turns) -> SegmentInfo:
    file: SegmentFile = info
    with suppress(ShmStoreError, OSError):  # it has gone meanwhile
        while (file.writer_alive or file.ranks_alive) and turns.again():
            file = classify(info.place)
        return info if file is info else look_at(info.name, dir=info.dir)
    return info


def remove_segment(info: SegmentInfo, *, force: bool = False) -> None:
    """Remove the name of a segment whose writer is dead; processes that map its pages keep them.

    No process takes it over meanwhile. Raises WriterActiveError; RankInUseError if a reader is attached, unless
    `force`; StoreNotFoundError if it is no longer that file; ForeignStoreError.
    """
    try:
        native.remove(info.place, info.device, info.inode, info.file_bytes, force)
    except PermissionError:
        raise another_user(info.place) from None
