"""Who makes an object that several processes want: `find_or_claim` of writers and readers."""

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from shmstore.bindings import claims as native
from shmstore.errors import unnamed
from shmstore.store.arguments import packed_key, seconds_of
from shmstore.store.leases import Held

_AGAIN = 0.003
"""Seconds between two looks of a wait; such a lock has no wait of its own."""

Found = TypeVar("Found")
_TAKEN: ContextVar[tuple["weakref.ref[Claim]", ...]] = ContextVar("claims", default=())
"""The claims of a task, and of the tasks that started it; only `afind_or_claim` asks, since a thread has many tasks."""


class Claim(Held):
    """The right to make the object of a key, until `end`, the end of a `with` block, or garbage.

    Made by `find_or_claim`. It ends with its process, however that dies. Another process may put the object. It spares
    work and guards nothing: an object that two processes make is stored twice, and both are right. Beyond 64 claims
    of a process, and in a removed store, it keeps nobody out.
    """

    __slots__ = ("_claim", "key")

    def __init__(self, key: str, claim: Any) -> None:
        self.key = key
        self._claim = claim

    def end(self) -> None:
        """Let others make it; idempotent, in any thread."""
        native.end(self._claim)

    def __repr__(self) -> str:
        return f"<Claim on {self.key!r}>"


def _held_by_this_task() -> tuple["weakref.ref[Claim]", ...]:
    return tuple(taken for taken in _TAKEN.get() if (claim := taken()) is not None and native.is_held(claim._claim))


@unnamed
class Claiming(ABC, Generic[Found]):
    """What readers and writers have in common: `find` of either, and claims."""

    _claims: native.Claims | None = None

    @abstractmethod
    def find(self, key: str, *, namespace: str | None = None) -> Found | None:
        """Find the object of a key."""

    @abstractmethod
    def _has(self, packed: bytes) -> bool:
        """Say whether there is something to find; count nothing. Raises StoreClosedError."""

    @abstractmethod
    def _open_claims(self) -> native.Claims:
        """Open the claims of this process in the store."""

    def _the_claims(self) -> native.Claims:
        """Return the claims of this object, until it is closed: the same ones to threads that come first at once."""
        claims: native.Claims = self._claims or vars(self).setdefault("_claims", self._open_claims())
        return claims

    def find_or_claim(self, key: str, *, namespace: str | None = None, wait: float = 0.0) -> Found | Claim | None:
        """Find the object of `key`, or get the right to make it; None if a living process, or another thread, makes it.

        With `wait`, look again for so many seconds, until it is stored, or its maker has ended or died. A thread that
        holds a claim of this reader or writer must not wait (RuntimeError). Two keys may by chance delay each other.
        """
        packed, seconds = packed_key(key, namespace), seconds_of("wait", wait)
        self._has(packed)  # before its claims are opened, since it may be closed
        if seconds and self._the_claims().of_this_thread():
            raise RuntimeError(
                "this thread holds a claim and must not wait for another one, because two threads could wait for each "
                "other; end its claim first, or pass wait=0"
            )
        while (got := self._look_or_claim(key, packed, self._has, seconds)) is True:
            if (found := self.find(key, namespace=namespace)) is not None:
                return found
        if got:
            _TAKEN.set((*_held_by_this_task(), weakref.ref(got)))
        return got or None

    async def afind_or_claim(
        self, key: str, *, namespace: str | None = None, wait: float = 0.0
    ) -> Found | Claim | None:
        """Do `find_or_claim` in a task of asyncio: while it waits, the tasks of its loop go on.

        A task that holds a claim, or was started by one that does, must not wait (RuntimeError): tasks of one thread
        could wait for each other, too. What makes a task of its own of the call, such as `create_task`, or `wait_for`
        before Python 3.12, hides the claim from this check: pass `wait` instead.
        """
        from asyncio import sleep  # not at the top, because it loads slowly

        start = time.monotonic()
        end = start + (seconds := seconds_of("wait", wait))
        if seconds and _held_by_this_task():
            raise RuntimeError(
                "this task holds a claim and must not wait for another one, because two tasks could wait for each "
                "other; end its claim first, or pass wait=0"
            )
        while (got := self.find_or_claim(key, namespace=namespace)) is None and (left := end - time.monotonic()) > 0:
            await sleep(min(left, 0.1, max(_AGAIN, (time.monotonic() - start) / 10)))  # many may wait in one thread
        return got

    def _look_or_claim(self, key: str, packed: bytes, has: Callable[[bytes], bool], seconds: float) -> Claim | bool:
        """Return whether `has` finds the key, or a claim if nobody makes it; a thread that holds one does not wait."""
        claims, end = self._the_claims(), seconds and time.monotonic() + seconds
        while True:
            if has(packed):
                return True
            if (taken := claims.take(packed)) is not None:
                return has(packed) or Claim(key, taken)  # it may have come since the last look: then `taken` is garbage
            if (left := end - time.monotonic()) <= 0 or claims.of_this_thread():
                return False
            time.sleep(min(_AGAIN, left))

    def claimed(self, key: str, *, namespace: str | None = None) -> bool:
        """Return whether a living process, or a thread of this one, has the right to make the object of `key`."""
        packed = packed_key(key, namespace)
        self._has(packed)
        return self._the_claims().claimed(packed)
