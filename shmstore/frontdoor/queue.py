"""`Queue`: many producers, many consumers, each value to one consumer, in place; a killed process harms no other.

A queue is a folder in /dev/shm, and its processes share only what the kernel keeps there:

    values       the store: an arena for each process that puts, a rank for each that gets
    waiting/KEY  a value that nobody has taken; KEY is its key in the store
    taken/KEY    a value taken with `ack` and not done; its consumer has a claim on KEY
    bell         a FIFO with a byte for each put, which wakes consumers. Each KEY is a hard link to it, and so counted
    room         a FIFO with a byte for each value taken, which wakes producers

Each step is one call of the kernel, so a death comes before it or after it:

    put   store the value under a lease · link waiting/KEY: it is put · ring the bell
    get   pin the value · unlink waiting/KEY, which succeeds once: it is this consumer's · ring for room · view it
    ack   claim KEY · pin · rename waiting/KEY to taken/KEY · view it; done: unlink taken/KEY · end the claim
    free  a producer that finds KEY in neither folder, in this order, ends the lease; no KEY moves back

docs/guides/queue.md says what each death costs. A process waits for another one's lock only while a queue is made or
removed.
"""

import asyncio
import errno
import fcntl
import glob
import os
import queue
import secrets
import select
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from multiprocessing import context, reduction, util
from typing import Any, Self

from shmstore.errors import (
    CorruptStoreError,
    ObjectTooLargeError,
    RankInUseError,
    StoreClosedError,
    StoreFullError,
    StoreNotFoundError,
    WriterActiveError,
    check_flags,
)
from shmstore.places import Folder, folder_of
from shmstore.refs import ObjectRef
from shmstore.serde import Encoded, ObjectSerde
from shmstore.store import ObjectStoreReader, ObjectStoreWriter
from shmstore.store.arguments import checked_name, int_of, seconds_of, serde_of, size_of
from shmstore.store.diagnostics import unusable
from shmstore.store.options import MAX_CAPACITY, MAX_WRITERS

__all__ = ["Delivery", "Queue"]

_PREFIX, _NAMED, _FIFOS = "shmstore-queue-", ".queue", ("bell", "room")
_AGAIN, _LOOK = 0.001, 0.1
"""Seconds between two looks for room, and between two for what nobody has rung for."""
_STAMP = 16
"""Digits of the time with which a key starts, so that keys sort by it; the rest is its lane."""
_PART = 512
"""Keys that the kernel surely lists in one part: each takes 48 bytes of the 32 KiB that glibc asks for."""
_GONE = 16
"""After how many puts a producer looks what is gone; it also looks when its arena is full."""
_queues: "weakref.WeakSet[Queue]" = weakref.WeakSet()


def _locked(folder: str) -> int:
    """Return a descriptor whose lock says that the folder is in use; FileNotFoundError if it was removed."""
    fd = os.open(folder, os.O_DIRECTORY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(fd), os.stat(folder)):
            return fd
    os.close(fd)
    raise FileNotFoundError(folder)


def _is_unused(folder: str, remove: bool = False) -> bool:
    """Say whether no process has the folder locked; with `remove`, remove it then, before one can."""
    fd = os.open(folder, os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if remove and os.path.samestat(os.fstat(fd), os.stat(folder)):
            gone = os.path.join(os.path.dirname(folder), _PREFIX + secrets.token_hex(8))
            os.rename(folder, gone)  # a name leads to a whole queue, or to none
            shutil.rmtree(gone)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def _remove_unused(folder: str) -> None:
    with suppress(OSError):  # another process is faster
        _is_unused(folder, remove=True)


def dead_queues(dir: Folder | None = None, remove: bool = False) -> list[str]:
    """Return the folders of the queues without a name whose processes have all died; with `remove`, remove them."""
    found = []
    for path in sorted(glob.glob(f"{glob.escape(folder_of(dir))}/{_PREFIX}*")):
        if path.endswith(_NAMED):
            continue
        with suppress(OSError):  # another process is faster, or another user's
            if _is_unused(path, remove):
                found.append(path)
    return found


def _drop(puts: list[int], bell: int) -> None:
    """Say that this process puts no more, and wake who iterates."""
    if puts:
        os.close(puts.pop())
        _ring(bell)


def _ring(bell: int) -> None:
    with suppress(BlockingIOError):  # a full pipe has bytes enough
        os.write(bell, b".")


def _wait(fifo: int, seconds: float) -> None:
    """Wait until somebody rings."""
    rung = select.poll()
    rung.register(fifo, select.POLLIN)
    rung.poll(seconds * 1000)


def _made(parent: str, capacity: int, processes: int) -> tuple[str, int]:
    """Make a queue without a name; return its folder and its lock. First remove those whose processes have died."""
    dead_queues(parent, remove=True)
    while True:
        try:
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        except OSError as error:
            raise unusable(error, os.path.join(parent, _PREFIX)) from None
        with suppress(FileNotFoundError):  # another process has taken it for a dead one's
            lock = _locked(folder)
            break
    try:
        for fifo in _FIFOS:
            os.mkfifo(f"{folder}/{fifo}", 0o600)
        os.mkdir(f"{folder}/waiting")
        os.mkdir(f"{folder}/taken")
        store = ObjectStoreWriter.create(
            "values",
            writes=False,
            capacity=capacity,
            n_readers=processes,
            n_writers=processes,
            max_objects=min(max(capacity >> 16, 256), 4096),
            prefault=True,
            dir=folder,
        )
        store.close(unlink=False)
        return folder, lock
    except BaseException:
        shutil.rmtree(folder)
        os.close(lock)
        raise


def _opened(path: str, capacity: int, processes: int) -> int:
    """Open the queue at this path, or make it; return its lock."""
    while True:
        with suppress(FileNotFoundError):
            return _locked(path)
        folder, lock = _made(os.path.dirname(path), capacity, processes)
        try:
            os.rename(folder, path)
            return lock
        except OSError as error:
            shutil.rmtree(folder)
            os.close(lock)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process was faster
                raise


def _pauses(timeout: float | None, longest: float, error: type[Exception]) -> Iterator[float]:
    """Yield how long to wait after each try that fails; raise the error when the time is over."""
    if isinstance(timeout, bool):  # as `multiprocessing.Queue` has `block` there
        raise TypeError("timeout must be a number of seconds, not a bool (hint: put_nowait and get_nowait do not wait)")
    end = float("inf") if timeout is None else time.monotonic() + seconds_of("timeout", timeout)
    while True:
        yield max(0.0, min(longest, left := end - time.monotonic()))
        if left <= 0:
            raise error


class _Hints:
    """Gives errors a hint about the queue, whose user knows no writers or ranks. A generator would be slower."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: object) -> None:
        if kind is ObjectTooLargeError:  # the hint may also say how to put it
            error.hint = error.hint.replace(error.default_hint, "make the queue with a larger capacity")
        elif kind is WriterActiveError or kind is RankInUseError:
            error.hint = "make the queue for more `processes`, or close it, and drop its views, in one of them"


_hints = _Hints()


class _Once:
    """A serializer of lists of one value, which it takes apart once, however often it is put."""

    def __init__(self, serde: ObjectSerde) -> None:
        self._encode, self.fill, self.decode, self.layout = serde.encode, serde.fill, serde.decode, serde.layout

    def encode(self, value: Any) -> Encoded:
        if len(value) == 1:
            value.append(self._encode(value[0]))
        encoded: Encoded = value[1]
        return encoded


class Delivery:
    """A value taken with `ack`, which comes again if its process dies, or if this is garbage, before `done`.

    As a context manager it yields the value, and is done at a clean exit. A forked child's does nothing.
    """

    def __init__(self, value: Any, entry: str, claim: Any) -> None:
        self.value = value
        self._entry, self._claim, self._pid = entry, claim, os.getpid()

    def done(self) -> None:
        """Let the value never come again; idempotent, and without effect once it may come to another consumer."""
        if (claim := self._claim) is not None and self._pid == os.getpid():
            with suppress(FileNotFoundError):
                os.unlink(self._entry)
            self._claim = None
            claim.end()

    def __enter__(self) -> Any:
        return self.value

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.done()
        elif (claim := self._claim) is not None:
            self._claim = None
            claim.end()

    def __reduce__(self) -> Any:
        raise TypeError("a Delivery cannot be pickled (hint: send its value, and call done() here)")


class Queue:
    """`multiprocessing.Queue` for arrays: values are read in place, and no killed process blocks it.

    Pass it to processes as an argument, or open it everywhere by its `name`. Each value goes to one consumer, and those
    of a producer come in order. `capacity`, bytes or a text such as "1 GiB", is the room of each process that puts, for
    what waits and what consumers hold of it. It is reserved at the process's first put, at some 0.7 seconds a GiB.
    `maxsize` limits the values in the queue. Up to `processes` processes may put, and as many get.

    A queue without a name ends with its processes. One with a name stays, with what is in it, until `unlink`; its first
    capacity counts. `serde` is that of a store: with `PickleSerde` it takes any object, and copies. Thread-safe.
    """

    def __init__(
        self,
        capacity: int | str,
        *,
        maxsize: int = 0,
        name: str | None = None,
        processes: int = 8,
        serde: ObjectSerde | None = None,
        dir: Folder | None = None,
    ) -> None:
        self._maxsize = int_of("maxsize", maxsize, 0, 1 << 62)
        self._serde, self._named = serde_of(serde), name is not None
        if (capacity := size_of("capacity", capacity, MAX_CAPACITY)) < 4096:
            hint = 'it is bytes, or a text such as "64 MiB"; maxsize limits the number of values'
            raise ValueError(f"capacity must be at least 4096 bytes, not {capacity} (hint: {hint})")
        processes = int_of("processes", processes, 1, MAX_WRITERS)
        self._folder = folder_of(dir)
        if name is None:
            self._folder, lock = _made(self._folder, capacity, processes)
        else:
            self._folder = os.path.join(self._folder, f"{checked_name(name)}{_NAMED}")
            lock = _opened(self._folder, capacity, processes)
        self._start(lock, _locked(f"{self._folder}/waiting"))

    def _start(self, lock: int, *puts: int) -> None:
        self._lock, self._puts = lock, [*puts]  # the latter says that this process may put
        self._waiting, self._taken = f"{self._folder}/waiting/", f"{self._folder}/taken/"
        self._bell, self._room = (os.open(f"{self._folder}/{fifo}", os.O_RDWR | os.O_NONBLOCK) for fifo in _FIFOS)
        self._closing: ExitStack | None = ExitStack()
        self._start_process()
        self._close_at_exit()
        _queues.add(self)

    def _start_process(self) -> None:
        """Start in a process; in a forked child, too, which keeps the descriptors that it has inherited."""
        if self._closing is None:
            return
        self._closing.pop_all()  # what only the parent may close
        if not self._named:
            self._closing.callback(_remove_unused, self._folder)
        for fd in (self._lock, self._bell, self._room):
            self._closing.callback(os.close, fd)
        self._closing.callback(_drop, self._puts, self._bell)
        self._putting, self._getting = threading.RLock(), threading.RLock()  # an RLock knows its owner, for `_turn`
        self._writer: ObjectStoreWriter | None = None
        self._reader: ObjectStoreReader | None = None
        self._lane, self._stamp, self._look_at = secrets.token_hex(4), 0, 0.0
        self._held: dict[str, ObjectRef] = {}  # what this process has put and not found gone
        self._seen: list[str] = []  # what is left of a listing, the next key last

    def _close_at_exit(self) -> None:
        """Close as garbage or at exit, also of a forked child of multiprocessing, which forgets this at its start."""
        util.Finalize(self, self._open().close, exitpriority=1)

    def __getstate__(self) -> dict[str, Any]:
        """Return what travels: to a process that is being started the locks do, so that they never lapse."""
        self._open()
        state = {name: vars(self)[name] for name in ("_folder", "_maxsize", "_named", "_serde")}
        if context.get_spawning_popen() is not None:
            state["locks"] = [reduction.DupFd(fd) for fd in (self._lock, *self._puts)]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        locks = state.pop("locks", None)
        vars(self).update(state)
        try:
            lock, *puts = [_locked(self._folder)] if locks is None else [lock.detach() for lock in locks]
            self._start(lock, *puts or [_locked(f"{self._folder}/waiting")])
        except FileNotFoundError:
            raise StoreNotFoundError(f"the queue in {self._folder} has ended with its processes") from None

    def _open(self) -> ExitStack:
        if self._closing is None:
            raise StoreClosedError(f"{self!r} is closed", hint="use it before close(), or make another Queue")
        return self._closing

    def _turn(self, lock: Any) -> Any:
        """Return the lock to wait for; RuntimeError if this thread has it, which would wait for ever."""
        if lock._is_owned():
            raise RuntimeError(
                f"this thread is in a call of {self!r} already (hint: a signal handler or a finalizer must not "
                "make this call; let it set a flag instead)"
            )
        return lock

    def __repr__(self) -> str:
        return f"<Queue {self._folder!r}>"

    # ---- putting

    def put(self, value: Any, timeout: float | None = None) -> None:
        """Copy the value into the queue; wait up to `timeout` seconds for room, by default as long as it takes.

        Raises `queue.Full`, and as `ObjectStoreWriter.put` does for a value that the serializer refuses or that is too
        large. A value of several processes' `capacity` in all has room if that of this process has.
        """
        again, one = False, [value]
        for pause in _pauses(timeout, _AGAIN, queue.Full):
            if self._put(one, again):
                return
            _wait(self._room, pause)
            again = True

    async def aput(self, value: Any, timeout: float | None = None) -> None:
        """Put, and let other tasks run while there is no room, and while the first put reserves it."""
        if self._writer is None:
            await asyncio.to_thread(self._begin)
        one = [value]
        for pause in _pauses(timeout, _AGAIN, queue.Full):
            if self._put(one):
                return
            await asyncio.sleep(pause)

    def _put(self, one: list[Any], again: bool = False) -> bool:
        """Put the value, or return False if there is no room; `again` after a wait for it."""
        with self._turn(self._putting), _hints:
            self._open()
            if again:
                with suppress(BlockingIOError):
                    os.read(self._room, 1 << 16)  # before it looks: what rings later wakes it
            writer = self._writer or self._join()
            if self.full():
                return False  # before the copy
            if len(self._held) % _GONE == 0 and len(self._held) > self.qsize():
                self._free(writer)
            self._stamp = max(self._stamp + 1, time.monotonic_ns())
            key = f"{self._stamp:0{_STAMP}x}{self._lane}"
            if not (self._store(writer, key, one) or (self._free(writer) and self._store(writer, key, one))):
                return False
            os.link(f"{self._folder}/bell", self._waiting + key)
            if 0 < self._maxsize < self.qsize():  # another producer was faster
                with suppress(FileNotFoundError):
                    os.unlink(self._waiting + key)
                    return False
            _ring(self._bell)
            if again:
                _ring(self._room)  # for another one, whose byte this one may have read
            return True

    def _store(self, writer: ObjectStoreWriter, key: str, one: list[Any]) -> bool:
        """Store the value, or return False if there is no room."""
        try:
            self._held[key] = writer.put(key, one, hold=True)  # no interrupt comes between: `_free` knows of all
        except StoreFullError:
            return False
        return True

    def _begin(self) -> None:
        with self._turn(self._putting), _hints:
            self._open()
            if self._writer is None:
                self._join()

    def _join(self) -> ObjectStoreWriter:
        """Become a producer, and take on what waits in an arena that a dead one has left."""
        if not self._puts:
            self._puts.append(_locked(self._waiting))
        with ExitStack() as end:  # if this fails, the arena is free for the next try
            writer = ObjectStoreWriter.join("values", dir=self._folder, serde=_Once(self._serde))
            end.callback(writer.close, unlink=False)
            there, held = self._there(), {}
            for key in writer.keys():
                if key in there:
                    held[key] = writer.get_cached(key, hold=True)
                else:
                    writer.delete(key)
            with suppress(FileExistsError):
                os.mknod(f"{self._folder}/begun")
            self._close_at_exit()
            self._open().push(end.pop_all())
        self._writer, self._held = writer, held
        return writer

    def _stop_putting(self) -> None:
        """Say that this process puts no more, unless a call of it is putting, which may be its first."""
        lock: Any = self._putting
        if not lock._is_owned() and lock.acquire(blocking=False):
            try:
                _drop(self._puts, self._bell)
            finally:
                lock.release()

    def _there(self) -> set[str]:
        """Return the keys in both folders: waiting first, since keys move from there."""
        there = {*os.listdir(self._waiting)}
        return there.union(os.listdir(self._taken))

    def _free(self, writer: ObjectStoreWriter) -> bool:
        """End the leases of what is gone, and say if anything was."""
        there = self._there()
        gone = [key for key in self._held if key not in there]
        for key in gone:
            writer.cancel(self._held[key])
            writer.delete(key)
            del self._held[key]
        return bool(gone)

    # ---- getting

    def get(self, timeout: float | None = None, ack: bool = False) -> Any:
        """Take the next value, as read-only views; wait up to `timeout` seconds, by default as long as it takes.

        With `ack` return a `Delivery`, whose value comes again until it is done; a process may have some 60. Raises
        `queue.Empty`.
        """
        check_flags(ack=ack)
        for pause in _pauses(timeout, _LOOK, queue.Empty):
            if (found := self._get(ack)) is not None:
                return found[0]
            _wait(self._bell, pause)

    async def aget(self, timeout: float | None = None, ack: bool = False) -> Any:
        """Get, and let other tasks run meanwhile; a task that is cancelled has taken nothing."""
        loop = asyncio.get_running_loop()
        check_flags(ack=ack)
        for pause in _pauses(timeout, _LOOK, queue.Empty):
            if (found := self._get(ack)) is not None:
                return found[0]
            rung, bell = asyncio.Event(), os.dup(self._bell)  # a loop has one task for each descriptor
            loop.add_reader(bell, rung.set)
            try:
                with suppress(TimeoutError):
                    await asyncio.wait_for(rung.wait(), pause)
            finally:
                loop.remove_reader(bell)
                os.close(bell)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next value; end once the queue is empty and no process may put any more.

        Each process that has the queue may put until it closes the queue, gets, iterates or dies. With a name, the end
        comes only after a first put.
        """
        while True:
            self._open()
            self._stop_putting()
            over = _is_unused(self._waiting) and (not self._named or os.path.exists(f"{self._folder}/begun"))
            if (found := self._get()) is not None:
                return found[0]
            if over and self.empty():
                raise StopIteration
            _wait(self._bell, _LOOK)

    def _get(self, ack: bool = False) -> tuple[Any] | None:
        """Take the first value that can be had, or return None."""
        with self._turn(self._getting), _hints:
            closing = self._open()
            if self._writer is None:
                self._stop_putting()
            if self._reader is None:
                self._reader = ObjectStoreReader.attach(
                    "values", None, finds_only=True, dir=self._folder, serde=self._serde
                )
                closing.callback(self._reader.close)
                self._close_at_exit()
            with suppress(BlockingIOError):  # one byte, so that others who wait find theirs
                os.read(self._bell, 1)
            if (now := time.monotonic()) >= self._look_at:
                self._look_at = now + _LOOK
                for key in sorted(os.listdir(self._taken)):
                    if (found := self._take(self._reader, self._taken, key, ack)) is not None:
                        return found
            for _ in range(2):
                while self._seen:
                    if (found := self._take(self._reader, self._waiting, self._seen.pop(), ack)) is not None:
                        return found
                self._seen = [] if self.empty() else self._listed()
            return None

    def _listed(self) -> list[str]:
        """Return the keys that wait, the last one first, and of each lane none without those before it.

        The kernel lists a part at a time, of some 600 keys, each under the folder's lock. A listing of several parts
        may miss a key that is linked while it runs, and have a later one. So a second one follows, and counts up to the
        last key that the first has of a lane: what was linked before that, the second has, or it is gone.
        """
        keys = sorted(os.listdir(self._waiting))
        if len(keys) <= _PART:
            return keys[::-1]
        last = {key[_STAMP:]: key for key in keys}
        return sorted((key for key in os.listdir(self._waiting) if key <= last.get(key[_STAMP:], "")), reverse=True)

    def _take(self, reader: ObjectStoreReader, folder: str, key: str, ack: bool) -> tuple[Any] | None:
        """Take the value, or return None if another consumer has it."""
        claim = None
        try:
            if ack or folder == self._taken:
                claim = reader.find_or_claim(key, namespace="taken")  # where nothing is stored
                if claim is None:
                    return None
                if not reader.claimed(key, namespace="taken"):  # it keeps nobody out
                    raise RuntimeError("this process has 64 deliveries (hint: end some first, by done())")
            if (pin := reader.find(key)) is None:
                return None
            with pin:
                try:
                    os.rename(folder + key, self._taken + key) if ack else os.unlink(folder + key)
                except FileNotFoundError:
                    return None
                _ring(self._room)
                try:
                    value = reader.get(pin.ref)
                except CorruptStoreError as error:
                    if ack and not isinstance(error.__cause__, ImportError | MemoryError):  # it would come for ever
                        os.unlink(self._taken + key)
                    raise
            if ack:
                value, claim = Delivery(value, self._taken + key, claim), None
            return (value,)
        finally:
            if claim is not None:
                claim.end()

    # ---- asking, and the end

    def put_nowait(self, value: Any) -> None:
        """Put without waiting for room."""
        self.put(value, timeout=0)

    def get_nowait(self) -> Any:
        """Get without waiting."""
        return self.get(timeout=0)

    def qsize(self) -> int:
        """Return how many values are in the queue, and taken with `ack` but not done."""
        self._open()
        return os.fstat(self._bell).st_nlink - 1

    def empty(self) -> bool:
        """Return whether `qsize` is 0."""
        return self.qsize() == 0

    def full(self) -> bool:
        """Return whether there are `maxsize` values; a put may also have to wait for room in its arena."""
        return 0 < self._maxsize <= self.qsize()

    def close(self) -> None:
        """End the calls of this process; what it has put stays for the others, and views stay valid. Idempotent."""
        with self._turn(self._putting), self._turn(self._getting):
            closing, self._closing = self._closing, None
            if closing is not None:
                closing.close()

    def join_thread(self) -> None:
        """Do nothing: the value is in the queue when `put` returns."""

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def unlink(cls, name: str, *, dir: Folder | None = None) -> None:
        """Remove the queue of a name; StoreNotFoundError, or WriterActiveError if a process has it open."""
        path = os.path.join(folder_of(dir), f"{checked_name(name)}{_NAMED}")
        try:
            if not _is_unused(path, remove=True):
                raise WriterActiveError(f"a process has the queue in {path} open", hint="close it there, or end it")
        except FileNotFoundError:
            raise StoreNotFoundError(f"there is no queue in {path}", hint="check its name and dir") from None


def _after_fork() -> None:
    for one in list(_queues):
        one._start_process()


os.register_at_fork(after_in_child=_after_fork)
