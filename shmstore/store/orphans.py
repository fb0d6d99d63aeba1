"""What earlier processes have left: stores with generated names, which nobody will ask for, and files in the way."""

import atexit
import logging
import os
import weakref
from contextlib import closing, suppress
from multiprocessing import util
from typing import Any

from shmstore.bindings import inspect as native
from shmstore.bindings.store import Options, no_space
from shmstore.errors import (
    CorruptStoreError,
    LayoutMismatchError,
    ShmStoreError,
    StoreNotFoundError,
    WriterActiveError,
)
from shmstore.files import PREFIX, classify, holders
from shmstore.places import parts_of, place_of, stat_of
from shmstore.store import diagnostics

_log = logging.getLogger(__name__)


_SIZES = ("capacity", "max_object_size", "max_objects")
_open: "weakref.WeakSet[Any]" = weakref.WeakSet()  # writers
_creator = 0  # the process that created such stores
_folders: set[str] = set()  # where it has


def close_at_exit(store: Any) -> None:
    """Close `store` when this process exits; if it is unclosed garbage by then, remove it."""
    global _creator
    if _creator != os.getpid():
        _creator = os.getpid()
        atexit.register(_at_exit)
        util.Finalize(None, _at_exit, exitpriority=1)  # a forked child of multiprocessing runs no atexit functions
    _open.add(store)
    _folders.add(store.handle.dir)


def is_ephemeral(place: str) -> bool:
    """Say whether the store ends with its processes."""
    return bool(native.probe(place)["ephemeral"])


def _at_exit() -> None:
    if _creator != os.getpid():
        return
    for store in list(_open):
        with suppress(ShmStoreError, OSError):  # one of the parent's, which stays open there
            store.close()
    for folder in _folders:
        remove_dead(folder)


def remove_dead(folder: str) -> None:
    """Remove and log each store of this user in a folder that has a generated name, a dead writer and no live rank.

    So is one whose creator died before it was complete. A store that was closed with `unlink=False`, or recovered,
    stays: somebody may ask for it.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(ShmStoreError, OSError, ValueError):  # not a store, or gone since
                if entry.name.startswith(PREFIX) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    _remove_if_dead(place_of(entry.name, folder))


def _remove_if_dead(place: str) -> None:
    file = classify(place)
    if (file.ephemeral or file.state == "unfinished") and file.owner_uid == os.geteuid():
        native.remove(place, file.device, file.inode, file.file_bytes, False)  # probes again, under the writer's lock
        _log.warning("removed store %s of %d bytes, whose process ended without closing it", place, file.file_bytes)


def look(place: str) -> os.stat_result | None:
    """Return which file is there now, for `make_room`; None if there is none."""
    with suppress(OSError):
        return stat_of(place)
    return None


def unlink(place: str) -> None:
    """Do `ObjectStoreWriter.unlink`."""
    file = classify(place)
    if file.state in ("foreign", "unreadable") or (file.state == "blank" and not file.writer_alive):
        raise diagnostics.cannot_open(file)
    if file.owner_uid != os.geteuid():
        raise diagnostics.foreign(place, may_allow=False)
    try:
        native.remove(place, file.device, file.inode, file.file_bytes, True)
    except WriterActiveError:
        if file.state in ("blank", "being created"):
            raise diagnostics.creating(place) from None
        raise diagnostics.active(place, hint="close it there, or end that process, then unlink it") from None


def _in_its_place(place: str, old: os.stat_result, ranks_alive: int, asked: Options, sound: bool) -> Options | None:
    """Return None if the store fits where the old one was; readers keep the pages of one that they map.

    If it would fit without them, return the options of the old one if that is `sound` and differs only in size. Else
    raises StoreSpaceError.
    """
    folder, size = parts_of(place)[0], old.st_blocks * 512
    error = no_space(asked, folder, 0 if ranks_alive else size)
    lacking = (error.needed or 0) - (error.free or 0)
    if not error.total or lacking <= 0:  # no size: a tmpfs without a limit
        return None
    if ranks_alive and lacking <= size:
        if sound:
            with closing(native.Inspector(place)) as inspector:
                facts = inspector.facts()
            old_options = asked._replace(**{name: facts[name] for name in _SIZES})
            if not diagnostics.differences(facts, old_options):
                return old_options
        who = diagnostics.who_holds(place, holders(old.st_dev, old.st_ino)) or "its readers"
        error.hint = f"end {who}, which keep the old store"
    raise error


def make_room(
    place: str,
    seen: os.stat_result | None,
    error: LayoutMismatchError | CorruptStoreError,
    keep: bool,
    asked: Options,
) -> Options | None:
    """Remove and log the store that was refused with `error`, if it is still the file that was `seen` before.

    Does nothing if it is another one by now, or is being created; and returns its options if it must be taken as it is:
    only its size differs, its readers keep it, and there is no room for both. While a writer lives, raises
    WriterActiveError; or LayoutMismatchError if a store of several writers was `asked` for, or is there, and the
    options differ. Raises ForeignStoreError; StoreSpaceError if there is no room for its successor; and `error` if the
    file must stay: with `keep`, if a writer lives and the other arenas are damaged, and a file that has contents and
    is not a store.
    """
    turns = native.Turns()
    with suppress(StoreNotFoundError):
        while (file := classify(place)).writer_alive and turns.again():
            pass
        if seen is None or (file.device, file.inode) != (seen.st_dev, seen.st_ino):
            return None  # another writer of the store was faster
        if file.owner_uid != os.geteuid():
            raise diagnostics.foreign(place, may_allow=False)
        if file.state in ("foreign", "unreadable") or (file.state == "blank" and file.file_bytes):
            raise error
        if file.writer_alive:
            if seen.st_size == 0:
                return None  # its creator had not locked it yet
            if isinstance(error, CorruptStoreError) and file.state == "ok":
                raise error  # of the arenas without a living writer; the superblock is sound
            raise diagnostics.active(place, asked=asked)
        if keep:
            raise error
        sound = file.state == "ok" and isinstance(error, LayoutMismatchError)
        if old := _in_its_place(place, seen, file.ranks_alive, asked, sound):
            return old
        try:
            native.remove(place, seen.st_dev, seen.st_ino, seen.st_size, True)
        except WriterActiveError:
            return None  # it came in the meantime
        _log.warning("removed store %s, to create it again: %s", place, error.message)
    return None
