"""Claims on keys that are not stored yet; csrc/store/claims.h says what they are."""

import threading
from collections.abc import Callable
from typing import Any

from shmstore.bindings._shmstore import ffi, lib
from shmstore.bindings.handles import require

_end = lib.shms_claim_drop
_CLAIM = ffi.typeof("shms_claim *")


class Claims:
    """The claims of this process in one store, by a writer's or a reader's calls."""

    __slots__ = ("_claimed", "_handle", "_take", "_threads")

    def __init__(self, take: Callable[..., int], claimed: Callable[..., int], handle: Any) -> None:
        self._take, self._claimed, self._handle = take, claimed, handle
        self._threads = threading.local()

    def _this_thread(self) -> int:
        """Return the number of this thread; those of the system and of Python are given again to a new thread."""
        try:
            number: int = self._threads.number
        except AttributeError:
            number = self._threads.number = lib.shms_claims_number()
        return number

    def take(self, key: bytes) -> Any:
        """Return a claim for `end`, or None if a living process or another thread has one on that key."""
        claim = ffi.gc(ffi.new(_CLAIM), _end)  # the owner exists before the claim
        return claim if require(self._take(self._handle, self._this_thread(), key, len(key), claim)) else None

    def claimed(self, key: bytes) -> bool:
        """Say whether a claim on the key is held."""
        return require(self._claimed(self._handle, key, len(key))) == 1

    def of_this_thread(self) -> int:
        """Return how many claims this thread has taken and not ended."""
        return int(lib.shms_claims_of(self._this_thread()))


def is_held(claim: Any) -> bool:
    """Return whether a claim has a byte, has not ended, and is not of the process that forked this one."""
    return bool(lib.shms_claim_held(claim))


def end(claim: Any) -> None:
    """End a claim; idempotent."""
    _end(claim)
