"""Stores with generated names, which nobody will ask for: they end with their process, or at the next `create`."""

import atexit
import logging
import os
import weakref
from contextlib import suppress
from multiprocessing import util
from typing import Protocol

from shmstore.bindings import inspect as native
from shmstore.errors import ShmStoreError
from shmstore.files import DIRECTORY, PREFIX, classify

__all__ = ["close_at_exit", "remove_dead"]

_log = logging.getLogger(__name__)


class _Store(Protocol):
    _pid: int

    def close(self) -> None: ...


_open: "weakref.WeakSet[_Store]" = weakref.WeakSet()
_creator = 0  # the process that created such stores


def close_at_exit(store: _Store) -> None:
    """Close `store` when this process exits; if it is unclosed garbage by then, remove it."""
    global _creator
    if _creator != os.getpid():
        _creator = os.getpid()
        atexit.register(_at_exit)
        util.Finalize(None, _at_exit, exitpriority=1)  # a forked child of multiprocessing runs no atexit functions
    _open.add(store)


def _at_exit() -> None:
    if _creator != os.getpid():
        return
    for store in list(_open):
        if store._pid == os.getpid():
            with suppress(ShmStoreError, OSError):
                store.close()
    remove_dead()


def remove_dead() -> None:
    """Remove and log each store of this user that has a generated name, a dead writer and no live rank.

    A store that was closed with `unlink=False`, or recovered, stays: somebody may ask for it.
    """
    with suppress(OSError):
        for name in os.listdir(DIRECTORY):
            if name.startswith(PREFIX):
                with suppress(ShmStoreError, OSError, ValueError):  # not a store, or gone since
                    _remove_if_dead(name)


def _remove_if_dead(name: str) -> None:
    file = classify(name)
    if file.nameless and file.owner_uid == os.geteuid():
        native.remove(name, file.device, file.inode, False)  # probes the locks again, and holds the writer's
        _log.warning("removed store %s of %d bytes, whose process ended without closing it", name, file.file_bytes)
