"""What a process has open of a cache: a reader, which finds in all arenas, and the arenas that it fills.

There are more arenas than processes, and each takes space only once it is taken. A process whose arenas are full takes
another one, as long as enough stay free for those that come later; only then does it evict.
"""

import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from shmstore import errors
from shmstore.inspect.inspector import StoreInspector
from shmstore.store import ObjectStoreReader, ObjectStoreWriter
from shmstore.store.options import MAX_OBJECTS, MAX_WRITERS
from shmstore.store.warming import touch_pages

_log = logging.getLogger(__name__)
_ARENAS = 4  # for each process; a value takes one of them at most
_READERS = 128  # processes that read at a time; each costs four bytes an object
_OBJECT = 64 << 10  # bytes of capacity for each object that an arena may hold
_TURN = 0.02  # seconds at most between two turns of processes that joined at once and left
_REST = 1.0  # seconds between two looks for a free rank or arena: each takes longer than a hit or a put
PATIENCE = 5.0  # seconds to wait for another process, which takes as long as a copy unless it was stopped


def _close(held: list[ObjectStoreWriter | ObjectStoreReader]) -> None:
    while held:
        held.pop().close()


@contextmanager
def _hints_for_caches() -> Iterator[None]:
    """Say what to do with a cache: it is not opened with the arguments of its arenas."""
    try:
        yield
    except errors.ForeignStoreError as error:
        error.hint = "run this as that user, or choose another name for the cache"
        raise
    except errors.LayoutMismatchError as error:
        error.hint = "pass one capacity and one number of processes everywhere, or choose another name for the cache"
        raise


class Arenas:
    """The part of a cache that a process has: what it opens, fills, and leaves."""

    def __init__(self, name: str, capacity: int, processes: int, dir: str, prefault: bool) -> None:
        self._name, self._dir, self._processes, self._prefault = name, dir, processes, prefault
        self.path = os.path.join(dir, name)
        self.count = min(MAX_WRITERS, _ARENAS * processes)
        self.nbytes = max(1, capacity // self.count)
        """Bytes of an arena."""
        self._n_objects = min(max(256, self.nbytes // _OBJECT), MAX_OBJECTS // MAX_WRITERS)
        self._slot_bytes = self.nbytes // self._n_objects
        self.closed = False
        self.held: list[ObjectStoreWriter | ObjectStoreReader] = []
        self.forget()
        weakref.finalize(self, _close, self.held)

    def forget(self) -> None:
        """Have nothing open, as after a fork: what the parent has open is the parent's."""
        self._lock = threading.RLock()
        self.held.clear()
        self.writers: list[ObjectStoreWriter] = []
        """The first one is being filled."""
        self._left = 0  # bytes to store there before looking again how full it is
        self._join_again = 0.0  # when to look again for an arena
        self.reader: ObjectStoreReader | None = None
        self._file = 0  # the inode of what it reads
        self._read_again = 0.0  # when to look again for a free rank
        self._said: set[str] = set()

    def close(self) -> None:
        """Let go of all; idempotent."""
        with self._lock:
            self.closed = True
            _close(self.held)
            self.writers.clear()
            self.reader = None

    def say_once(self, kind: str, error: Exception) -> None:
        """Log a warning, once for each kind."""
        if kind not in self._said:
            self._said.add(kind)
            _log.warning("cache %s: %s", self._name, error)

    def _is_current(self) -> bool:
        return self.reader is not None and (bool(self.writers) or self._file == self.file_now())

    def reading(self) -> ObjectStoreReader | None:
        """Return what this process reads with; None if there is no cache yet, or too many processes read."""
        if self._is_current():  # a cache that this process writes to cannot be removed
            return self.reader
        with self._lock, suppress(errors.StoreNotFoundError):
            self.check_open()
            if not self._is_current() and time.monotonic() >= self._read_again:
                self._drop_reader()
                self._file = self.file_now()  # before: if there is another one by then, the next look sees that
                try:
                    with _hints_for_caches():
                        self.reader = ObjectStoreReader.attach(self._name, None, finds_only=True, dir=self._dir)
                    self.held.append(self.reader)
                except errors.RankInUseError as error:
                    self._read_again = time.monotonic() + _REST
                    self.say_once("ranks", error)
        return self.reader

    def check_open(self) -> None:
        """Raise StoreClosedError after `close`."""
        if self.closed:
            raise errors.StoreClosedError(f"cache {self._name!r} was closed", hint="make another Cache of this name")

    def file_now(self) -> int:
        """Return the inode of the cache's file; 0 if there is none."""
        try:
            return os.stat(self.path).st_ino
        except OSError:
            return 0

    def _drop_reader(self) -> None:
        if (reader := self.reader) is not None:
            self.reader = None
            self.held.remove(reader)
            reader.close()  # views stay valid

    @_hints_for_caches()
    def _inspected(self, ask: Callable[[StoreInspector], Any]) -> Any:
        """Return what an inspector of the cache answers; () if there is no cache, or it is being made."""
        try:
            with StoreInspector.open(self._name, self._dir) as seen:
                return ask(seen)
        except (errors.StoreNotFoundError, errors.LayoutMismatchError):
            return ()

    def seen(self) -> Any:
        """Return what is seen of each arena."""
        return self._inspected(lambda seen: seen.facts().writers)

    def keys(self) -> Any:
        """Return the keys of all arenas; the key of a slot that has just been reused may be None."""
        return self._inspected(
            lambda seen: [slot.key for slot in seen.slots() if slot.state == "live" and not slot.deleted]
        )

    def _may_have(self, more: int) -> bool:
        """Say whether it may have so many more arenas: a first one, those of its share, or any while half stay free."""
        arenas, mine = self.seen(), len(self.writers) + more
        makers = {arena.pid for arena in arenas if arena.state == "alive"} | {os.getpid()}
        if mine == 1:
            return len(makers) <= self._processes
        left = sum(arena.state != "alive" for arena in arenas) - more
        in_share = mine <= len(arenas) // self._processes
        return left >= max(0, self._processes - len(makers)) and (in_share or left >= len(arenas) / 2)

    def _join(self) -> bool:
        """Take an arena to fill next; return False if this process may not, and then, if it has one, for a second."""
        self.check_open()
        if self.writers and time.monotonic() < self._join_again:
            return False
        joined = self._take()
        self._join_again = 0.0 if joined else time.monotonic() + _REST
        return joined

    @_hints_for_caches()
    def _take(self, turns: int = 3) -> bool:
        """Take a used arena rather than a new one; return False if this process may not."""
        if not turns or not self._may_have(1):
            return False
        try:
            writer = ObjectStoreWriter.open(
                self._name,
                capacity=self.nbytes,
                n_readers=_READERS,
                n_writers=self.count,
                max_objects=self._n_objects,
                prefault=self._prefault,
                dir=self._dir,
                wait=PATIENCE,
            )
        except (errors.WriterActiveError, errors.StoreSpaceError):
            if not self.writers:
                raise
            return False
        self.held.append(writer)
        self.writers.insert(0, writer)
        if not self._may_have(0):  # another one has joined since the first look, and may leave as well
            self.writers.remove(writer)
            self.held.remove(writer)
            writer.close()
            time.sleep(random.uniform(0, _TURN))
            return self._take(turns - 1)
        if self.reader is not None and self.reader.store_id != writer.handle.store_id:
            self._drop_reader()  # of a cache that was removed
        if not self._prefault:
            touch_pages(writer)
        return True

    def writing(self) -> ObjectStoreWriter:
        """Return the arena that is being filled; WriterActiveError if this process only reads."""
        with self._lock:
            if not self.writers and not self._join():
                raise errors.WriterActiveError(
                    f"as many processes as the cache is for ({self._processes}) make values: this one only reads",
                    hint="pass a larger number of processes, in all of them",
                )
            return self.writers[0]

    def room_for(self, nbytes: int) -> ObjectStoreWriter:
        """Return the arena for a value of so many bytes: one with room, else the next one to evict from for a lap."""
        with self._lock:
            self.writing()
            if nbytes > self.nbytes:
                raise errors.ObjectTooLargeError(
                    f"{nbytes} bytes are more than the {self.nbytes} that a value takes at most",
                    hint="this is capacity / (4 * processes): raise capacity, or lower processes",
                )
            nbytes = max(nbytes, self._slot_bytes)  # its part of the slots
            if nbytes > self._left:
                self._left = self._free()
                while nbytes > self._left and self._join():
                    self._left = self._free()
                if nbytes > self._left:
                    self._turn()
            self._left -= nbytes
            return self.writers[0]

    def _free(self) -> int:
        seen = self.writers[0].stats()
        slots = (seen.max_objects - seen.objects) * self._slot_bytes
        return min(seen.capacity - seen.used_bytes, slots)

    def _turn(self) -> None:
        self.writers.append(self.writers.pop(0))
        self._left = self.nbytes

    def pass_by(self, writer: ObjectStoreWriter) -> None:
        """Go on from an arena without a gap of the size that was asked for, whatever it has free, to the next one."""
        with self._lock:
            if self.writers[:1] == [writer] and not self._join():
                self._turn()

    def only_reads(self) -> bool:
        """Say whether there was no arena for this process a moment ago."""
        return not self.writers and time.monotonic() < self._join_again
