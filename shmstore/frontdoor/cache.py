"""`Cache`: a mapping that processes share, on the calls of one store with several writers.

The right to make a value is a claim on its key, in a namespace where nothing is stored: so an expired value does not
hide it. Another claim, held for as long as a copy takes, lets one process at a time replace or remove a value. The
kernel ends both with their process.
"""

import functools
import inspect
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, ItemsView, Iterator, MutableMapping, ValuesView
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from shmstore import errors
from shmstore.frontdoor.arenas import PATIENCE, Arenas
from shmstore.places import Folder, folder_of
from shmstore.refs import ObjectRef
from shmstore.serde import MsgpackSerde
from shmstore.store import ObjectStoreWriter
from shmstore.store.arguments import checked_name, int_of, packed_key, seconds_of, size_of
from shmstore.store.options import MAX_CAPACITY, MAX_WRITERS

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

__all__ = ["Cache", "CacheStats"]

_HEAD = 256  # bytes of an object beside its key, metadata and arrays, at most
_AGAIN = 0.003  # seconds between two looks at another process's claim
_LOOKS = 3  # how often a value must be absent; each time a thread may lose the processor at the wrong moment
_MAKES, _PUTS = "make", "put"  # namespaces of claims
_THREAD = "shmstore-cache"  # how the names of a cache's own threads begin
_ABSENT: Final = object()
_NONE_GIVEN: Final = object()
_making: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("_making", default=())
"""What is being made by callers of this one: the path of the cache, and the key."""
_caches: "weakref.WeakSet[Cache]" = weakref.WeakSet()
_HINTS = dict.fromkeys(("maxsize", "max_size", "size_limit", "max_entries", "threshold"), "pass capacity, in bytes")
_HINTS |= dict.fromkeys(("ttl", "timeout", "default_timeout", "expire"), "pass expire with each value, or to memoize")
_WHY: dict[str, type[Exception] | tuple[type[Exception], ...]] = {
    "full": (errors.StoreFullError, errors.StoreSpaceError),
    "too large": errors.ObjectTooLargeError,
    "unsupported": errors.UnsupportedValueError,
    "reads only": errors.WriterActiveError,
    "failed": Exception,
}


def _refuse(options: dict[str, Any]) -> None:
    for name in options:
        raise TypeError(f"a cache has no option {name!r}" + (f" (hint: {_HINTS[name]})" if name in _HINTS else ""))


def _key_of(prefix: str, *args: Any, **kwargs: Any) -> str:
    for value in (*args, *kwargs.values()):
        if type(value) not in (str, bytes, int, float, bool, type(None)):
            raise TypeError(
                f"an argument of {prefix} is of type {type(value).__name__}, of which a cache makes no key (hint: pass "
                "key=..., a function from the arguments to a str)"
            )
    return f"{prefix}{args}{sorted(kwargs.items()) if kwargs else ''}"


def _plain(make: Callable[[], Any]) -> Any:
    """Return what `make` returns; TypeError if that is to be awaited."""
    if inspect.isawaitable(value := make()):
        if inspect.iscoroutine(value):
            value.close()
        raise TypeError("make returns a coroutine or another awaitable (hint: await aget_or_make with it)")
    return value


def _in_thread(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except StopIteration as error:  # no task can get it, and the one that waits for it would wait for ever
        raise RuntimeError("make raised StopIteration") from error


def _name_of(function: Callable[..., Any]) -> str:
    inner: Any = inspect.unwrap(function)
    method = any(not isinstance(getattr(each, "__self__", None), ModuleType | None) for each in (function, inner))
    if getattr(inner, "__name__", "<lambda>") == "<lambda>" or method or getattr(inner, "__closure__", None):
        raise TypeError(
            f"memoize makes keys of a function's name and arguments, and {errors.shown(function)} has none, is a "
            "method of an object, or uses variables of the function around it (hint: pass key=..., a function from the "
            "arguments to a str)"
        )
    module = function.__module__
    if module in ("__main__", "__mp_main__"):  # as other programs call theirs, and spawned processes this one
        module = os.path.abspath(inspect.getfile(inner))
    name = f"{module}.{function.__qualname__}"
    if "<locals>" in name:  # the function around it may make several, with defaults of their own
        name += repr((getattr(inner, "__defaults__", None), getattr(inner, "__kwdefaults__", None)))
    return name


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What this process has done with a cache, and what is in it."""

    hits: int
    """Values that were found."""
    misses: int
    """Values that were not, those that were made among them."""
    made: int
    """Values that this process has made."""
    not_stored: dict[str, int]
    """Values that were made and not stored, by reason.

    "full": all space is in use, or the host has no more; "too large" for an arena; "unsupported" by the serializer;
    "reads only": as many others make values as the cache is for; "failed": the log says once why.
    """
    objects: int
    """Values of all processes; expired ones count until they are replaced or evicted."""
    used_bytes: int
    """The space that they take."""
    reserved_bytes: int
    """The space that was taken from the host for them."""
    capacity: int
    """The space that may be taken."""


class _Items(ItemsView[str, Any]):
    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return self._mapping._pairs()  # type: ignore[attr-defined,no-any-return]


class _Values(ValuesView[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (value for _, value in self._mapping._pairs())  # type: ignore[attr-defined]


class Cache(MutableMapping[str, Any]):
    """A mapping that the processes of this user on this host share, of arrays, tensors and trees of them.

    What is read is views of shared memory, which are read-only and keep their value until the last of them is freed.
    `capacity` is bytes, or a text such as "4 GiB": what all values take at most. `processes` is how many make values at
    a time; more of them only read, and say so once in the log: they store and remove nothing. A value takes at most
    `capacity / (4 * processes)`. The first use opens the cache or makes it, also after a fork and where the cache was
    unpickled. A thread touches the pages of what it will fill, or, with `prefault`, this is done when an arena is
    taken. `dir` is as for a store.

    The cache outlives its processes, until `Cache.unlink(name)` or a restart of the host. Thread-safe. If it was made
    with another capacity or for another number of processes, it is made again, empty, or LayoutMismatchError while one
    stores.
    """

    def __init__(
        self,
        name: str,
        capacity: int | str,
        *,
        processes: int = 8,
        dir: Folder | None = None,
        prefault: bool = False,
        **options: Any,
    ) -> None:
        _refuse(options)
        errors.check_flags(prefault=prefault)
        self._name, self._capacity = checked_name(name), size_of("capacity", capacity, MAX_CAPACITY)
        self._options: dict[str, Any] = {
            "processes": int_of("processes", processes, 1, MAX_WRITERS // 2),
            "dir": folder_of(dir),
            "prefault": prefault,
        }
        self._arenas = Arenas(self._name, self._capacity, **self._options)
        self._counts: Counter[str] = Counter()
        self._threads: ThreadPoolExecutor | None = None
        _caches.add(self)

    def __reduce__(self) -> Any:
        return functools.partial(Cache, **self._options), (self._name, self._capacity)

    def __repr__(self) -> str:
        return f"<Cache {self._name!r} of {self._capacity} bytes{' (closed)' if self._arenas.closed else ''}>"

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    # ---- one value

    def _look(self, key: str, copy: bool = False, private: bool = False) -> Any:
        """Return the value, or _ABSENT; an expired one is absent."""
        if (reader := self._arenas.reading()) is None:
            packed_key(key)  # which says what is wrong with it
            return _ABSENT
        try:
            if (found := reader.find(key)) is not None:
                expires, value = reader.get(found.ref, copy, private=private)
                if expires is None or expires > time.monotonic():
                    return value
        except errors.ObjectBusyError:  # its process was stopped while it evicted it
            pass
        except errors.StoreClosedError:
            if reader is self._arenas.reader:
                raise
            return self._look(key, copy, private)  # another thread has dropped it: of a cache that was removed
        return _ABSENT

    def _is_replaced(self, key: str) -> bool:
        """Say whether another one replaces the value just now: what is missing then is not absent."""
        return (reader := self._arenas.reading()) is not None and reader.claimed(key, namespace=_PUTS)

    def _settled(self, key: str, copy: bool = False, private: bool = False) -> Any:
        """Look until the value is found, or was absent several times while nobody replaced it.

        Once is not enough: the look may fall into a replacement that is over when we ask for its claim. To take that
        claim here would be exact, but those who wait for a value would hold up who puts it.
        """
        end, absent = time.monotonic() + PATIENCE, 0
        while (value := self._look(key, copy, private)) is _ABSENT and absent < _LOOKS and time.monotonic() < end:
            absent += 1
            if self._is_replaced(key):
                absent = 0
                time.sleep(_AGAIN)
        return value

    @contextmanager
    def _alone_with(self, key: str) -> Iterator[ObjectStoreWriter]:
        """Keep other threads and processes from replacing or removing this key's value meanwhile."""
        writer, end = self._arenas.writing(), time.monotonic() + PATIENCE
        while (claim := writer.find_or_claim(key, namespace=_PUTS)) is None and time.monotonic() < end:
            time.sleep(_AGAIN)
        with claim or nullcontext():
            yield writer

    def _store(self, key: str, value: Any, expire: float | None, how: tuple[bool, bool] | None = None) -> Any:
        """Store the value in place of what is there; with `how`, only if there is none, and return what is there."""
        deadline = None if expire is None else np.array(time.monotonic() + expire)  # an array, so that metadata repeat
        try:
            encoded = MsgpackSerde().encode((deadline, value))
        except errors.UnsupportedValueError:
            MsgpackSerde().encode(value)  # which names the place as the caller sees it
            raise
        nbytes = encoded.nbytes + len(encoded.meta) + len(packed_key(key)) + _HEAD
        with self._alone_with(key) as writer:
            if how and (found := self._look(key, *how)) is not _ABSENT:
                return found
            if how and self._arenas.reading() is None and writer.is_cached(key):
                return value  # too many processes read for this one to look
            writer.delete(key)  # in all arenas
            writer, ref = self._put(key, (deadline, value), nbytes)
        try:
            reader = self._arenas.reading() if how else None
            return reader.get(ref, how[0], private=how[1])[1] if how and reader else value
        finally:
            writer.cancel(ref)

    def _put(self, key: str, value: Any, nbytes: int) -> tuple[ObjectStoreWriter, ObjectRef]:
        """Store it in one of this process's arenas, with a lease that only that writer ends."""
        tries = 1 + len(self._arenas.writers)
        while True:
            writer = self._arenas.room_for(nbytes)
            try:
                return writer, writer.put(key, value, hold=True)
            except errors.StoreFullError as error:
                self._arenas.pass_by(writer)
                if not (tries := tries - 1):
                    error.hint = "drop views of its values, or pass a larger capacity, in all processes"
                    raise

    def put(self, key: str, value: Any, *, expire: float | None = None) -> None:
        """Store a copy of `value` in place of the one that is there; it expires after so many seconds.

        Raises StoreFullError, ObjectTooLargeError, UnsupportedValueError (TypeError), WriterActiveError if this process
        only reads, and the errors of opening a store. Then there may be no value.
        """
        self._store(key, value, None if expire is None else seconds_of("expire", expire))

    def __setitem__(self, key: str, value: Any) -> None:
        self.put(key, value)

    def get(self, key: str, default: Any = None, *, copy: bool = False, private: bool = False) -> Any:
        """Return the value as read-only views, or the default if there is none or it has expired.

        `copy` and `private` are those of `ObjectStoreReader.get`: a writable copy, or a writable value in place.
        """
        if copy is not False or private is not False:
            errors.check_flags(copy=copy, private=private)
        value = self._settled(key, copy, private)
        self._counts["misses" if value is _ABSENT else "hits"] += 1
        return default if value is _ABSENT else value

    def __getitem__(self, key: str) -> Any:
        if (value := self.get(key, _ABSENT)) is _ABSENT:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        try:
            return isinstance(key, str) and self._settled(key) is not _ABSENT
        except ValueError:  # no value can have it
            return False

    def pop(self, key: str, default: Any = _NONE_GIVEN) -> Any:
        """Remove the value and return it: one of several processes that ask gets it.

        Raises KeyError if there is none, and no default; and WriterActiveError if this process only reads.
        """
        if (value := self._settled(key)) is not _ABSENT:
            with self._alone_with(key) as writer:
                value = self._look(key)
                writer.delete(key)
        if value is _ABSENT and default is _NONE_GIVEN:
            raise KeyError(key)
        return default if value is _ABSENT else value

    def __delitem__(self, key: str) -> None:
        self.pop(key)

    # ---- all values

    def __iter__(self) -> Iterator[str]:
        """Iterate over the keys; expired values count until they are replaced or evicted."""
        self._arenas.check_open()
        return iter(dict.fromkeys(key for key in self._arenas.keys() if key is not None))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _pairs(self) -> Iterator[tuple[str, Any]]:
        found = ((key, self._settled(key)) for key in self)
        return (pair for pair in found if pair[1] is not _ABSENT)  # others have gone meanwhile

    def items(self) -> ItemsView[str, Any]:
        """Return a view of keys and values."""
        return _Items(self)

    def values(self) -> ValuesView[Any]:
        """Return a view of the values."""
        return _Values(self)

    def popitem(self) -> tuple[str, Any]:
        """Remove a value and return it with its key; KeyError if there is none."""
        for key in self:
            if (value := self.pop(key, _ABSENT)) is not _ABSENT:
                return key, value
        raise KeyError("the cache is empty")

    def clear(self) -> None:
        """Remove all values, of all processes; WriterActiveError if this process only reads."""
        if self._arenas.file_now():
            self._arenas.writing().clear()

    # ---- making

    def _hit(self, key: str, copy: bool, private: bool) -> Any:
        """Return the value if it is there and can be had at once, or _ABSENT."""
        value = _ABSENT
        if self._arenas.reader is not None:
            with suppress(errors.ShmStoreError):  # which a turn meets again
                value = self._look(key, copy, private)
                self._counts["hits"] += value is not _ABSENT
        return value

    def _begin(self, key: str, make: Any, expire: Any, wait: Any, **flags: Any) -> tuple[float | None, float]:
        """Check what was passed; return the seconds until the value expires, and when to wait no longer."""
        errors.check_flags(**flags)
        if not callable(make):
            raise TypeError(f"make must be a function without arguments, not {errors.shown(make)}")
        if (self._arenas.path, key) in _making.get():
            raise RuntimeError(
                f"what makes {errors.shown(key)} asks the cache for it (hint: call what computes it instead)"
            )
        end = time.monotonic() + seconds_of("wait", wait)
        return None if expire is None else seconds_of("expire", expire), end

    def _turn(self, key: str, how: tuple[bool, bool], end: float) -> tuple[Any, ExitStack, bool]:
        """Return the value or _ABSENT, what holds a claim to make it, and whether to ask again in a moment."""
        value, held, busy, source = _ABSENT, ExitStack(), False, None
        try:
            source = self._arenas.reading() or self._arenas.writing()
            if (value := self._look(key, *how)) is _ABSENT:
                if self._is_replaced(key) or (claim := source.find_or_claim(key, namespace=_MAKES)) is None:
                    busy = True
                else:
                    held.callback(claim.end)
                    value = self._look(key, *how)  # again: it may have come meanwhile
        except errors.StoreClosedError:
            if source is None or source in self._arenas.held:
                raise
            return self._turn(key, how, end)  # as in `_look`
        except errors.ShmStoreError as error:
            self._arenas.say_once(type(error).__name__, error)
        # whoever makes something does not wait: two could wait for each other
        again = busy and not _making.get() and time.monotonic() < end
        if not again:
            self._counts["misses" if value is _ABSENT else "hits"] += 1
        return value, held, again

    def _finish(self, key: str, expire: Any, how: Any, held: ExitStack, make: Any, awaits: bool = False) -> Any:
        """Make the value, store it and end the claim, whatever the caller does meanwhile; return it, and None.

        With `awaits`, return an awaitable as it is, with what holds the claim then: if nobody gets it, the claim ends.
        """
        with held.pop_all() as mine:
            callers = _making.get()
            try:
                _making.set((*callers, (self._arenas.path, key)))
                value = make()
            finally:
                _making.set(callers)
            if awaits and inspect.isawaitable(value):
                return value, mine.pop_all()
            self._counts["made"] += 1
            return self._keep(key, value, expire, how), None

    def _keep(self, key: str, value: Any, expire: float | None, how: tuple[bool, bool]) -> Any:
        if self._arenas.only_reads():
            self._counts["reads only"] += 1
            return value
        try:
            return self._store(key, value, expire, how)
        except errors.unless_interrupted(Exception) as error:
            why = next(why for why, kinds in _WHY.items() if isinstance(error, kinds))
            self._counts[why] += 1
            if why in ("reads only", "failed"):
                self._arenas.say_once(why, error)
            return value

    def get_or_make(
        self,
        key: str,
        make: Callable[[], Any],
        *,
        expire: float | None = None,
        wait: float = 60.0,
        copy: bool = False,
        private: bool = False,
    ) -> Any:
        """Return the value; if there is none, one process and thread makes it by `make()`, and others wait.

        They wait while the maker lives, at most `wait` seconds; then, and within the `make` of another value, they make
        it themselves. An exception of `make` reaches the caller, and the next one makes it. `expire`, `copy` and
        `private` are those of `put` and `get`. What cannot be stored is returned as it was made, and `stats` counts it.
        Raises RuntimeError if `make` asks for the same key, and TypeError if it returns a coroutine.
        """
        if (value := self._hit(key, copy, private)) is not _ABSENT:
            return value
        expire, end = self._begin(key, make, expire, wait, copy=copy, private=private)
        how = copy, private
        value, held, again = self._turn(key, how, end)
        while again:
            time.sleep(_AGAIN)
            value, held, again = self._turn(key, how, end)
        with held:
            return self._finish(key, expire, how, held, lambda: _plain(make))[0] if value is _ABSENT else value

    async def _aside(self, call: Callable[[], Any]) -> Any:
        """Call it in a thread of this cache's own: all threads of the loop may wait for what it makes.

        A loop that runs in such a thread uses its own: all threads of the cache may wait for such loops.
        """
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        self._threads = self._threads or ThreadPoolExecutor(thread_name_prefix=_THREAD)
        threads = None if threading.current_thread().name.startswith(_THREAD) else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, copy_context().run, call)

    async def aget_or_make(
        self,
        key: str,
        make: Callable[[], Any],
        *,
        expire: float | None = None,
        wait: float = 60.0,
        copy: bool = False,
        private: bool = False,
    ) -> Any:
        """Do `get_or_make` without blocking the event loop: a function runs in a thread, a coroutine in the loop.

        A task that is cancelled ends its coroutine. A thread goes on, and stores what it makes for the next one. Up to
        `min(32, os.cpu_count() + 4)` of them run at a time.
        """
        import asyncio

        if (value := self._hit(key, copy, private)) is not _ABSENT:
            return value
        expire, end = self._begin(key, make, expire, wait, copy=copy, private=private)
        how, again = (copy, private), True
        turn = functools.partial(self._turn, key, how, end)
        while again:  # a turn takes microseconds, once this process reads
            value, held, again = turn() if self._arenas.reader else await self._aside(turn)
            if again:
                await asyncio.sleep(_AGAIN)
        with held:
            if value is not _ABSENT:
                return value
            finish = functools.partial(self._finish, key, expire, how)
            begin = functools.partial(finish, held, lambda: _in_thread(make), awaits=True)
            value, claimed = begin() if inspect.iscoroutinefunction(make) else await self._aside(begin)
        if claimed is None:
            return value
        with claimed:
            token = _making.set((*_making.get(), (self._arenas.path, key)))
            try:
                value = await value
            finally:
                with suppress(ValueError):  # a task that is thrown away ends in another context
                    _making.reset(token)
            return (await asyncio.shield(self._aside(lambda: finish(claimed, lambda: value))))[0]

    def memoize(
        self,
        function: Callable[..., Any] | None = None,
        *,
        key: Callable[..., str] | None = None,
        expire: float | None = None,
        **options: Any,
    ) -> Any:
        """Decorate a function, or a coroutine function, to have its results in the cache.

        `key(*args, **kwargs)` returns the key of a call. The default is its module, name and arguments, which
        must be str, bytes, int, float, bool or None. It knows nothing of the code: a function that has changed finds
        its old results. Raises TypeError for a lambda, a method of an object, and a function that uses variables of one
        around it, without `key`.
        """
        _refuse(options)
        if function is None:
            return functools.partial(self.memoize, key=key, expire=expire)
        if not callable(function):
            raise TypeError(f"memoize decorates a function, not {errors.shown(function)} (hint: options have names)")
        key_of = key or functools.partial(_key_of, _name_of(function))

        @functools.wraps(function)
        def remembered(*args: Any, **kwargs: Any) -> Any:
            make = functools.partial(function, *args, **kwargs)
            return self.get_or_make(key_of(*args, **kwargs), make, expire=expire)

        @functools.wraps(function)
        async def aremembered(*args: Any, **kwargs: Any) -> Any:
            make = functools.partial(function, *args, **kwargs)
            return await self.aget_or_make(key_of(*args, **kwargs), make, expire=expire)

        return aremembered if inspect.iscoroutinefunction(function) else remembered

    # ---- the cache as a whole

    def stats(self) -> CacheStats:
        """Return what this process has done since it opened the cache, and what all have in it."""
        arenas = self._arenas.seen()
        return CacheStats(
            **{name: self._counts[name] for name in ("hits", "misses", "made")},
            not_stored={why: self._counts[why] for why in _WHY},
            objects=sum(arena.objects for arena in arenas),
            used_bytes=sum(arena.used_bytes for arena in arenas),
            reserved_bytes=sum(arena.capacity for arena in arenas if arena.state != "free"),
            capacity=self._arenas.count * self._arenas.nbytes,
        )

    def close(self) -> None:
        """Let go of what this process has open; idempotent. The values stay, and so do views of them."""
        self._arenas.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def unlink(name: str, *, dir: Folder | None = None) -> None:
        """Remove the cache of this name; readers keep the views that they have.

        Raises StoreNotFoundError, and WriterActiveError while a process that makes values has it open.
        """
        try:
            ObjectStoreWriter.unlink(name, dir=dir)
        except errors.WriterActiveError as error:
            error.hint = "close the cache in those processes, or end them"
            raise


def _forget_all() -> None:
    for cache in _caches:
        cache._arenas.forget()
        cache._threads = None
        cache._counts.clear()


os.register_at_fork(after_in_child=_forget_all)
