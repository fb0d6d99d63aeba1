"""Claims on keys that are not stored yet; csrc/store/claims.h says what they are."""

import os
from threading import get_native_id  # get_ident is given again to a new thread
from typing import Any

from shmstore.bindings._shmstore import ffi, lib
from shmstore.bindings.handles import require

_end = lib.shms_claim_end
_CLAIM = ffi.typeof("shms_claim *")


class Claims:
    """The claims of this process in one store."""

    __slots__ = ("_box", "_c")

    def __init__(self, name: str, store_id: int) -> None:
        self._box = ffi.gc(ffi.new("shms_claims **"), lib.shms_claims_drop)
        require(lib.shms_claims_open(self._box, os.fsencode(name), store_id))
        self._c = self._box[0]

    def take(self, key: bytes) -> Any:
        """Return a claim for `end`, or None if a living process or another thread has one on that key."""
        claim = ffi.gc(ffi.new(_CLAIM), _end)  # the owner exists before the claim
        return claim if require(lib.shms_claim_take(self._c, get_native_id(), key, len(key), claim)) else None

    def claimed(self, key: bytes) -> bool:
        """Say whether a claim on the key is held."""
        return require(lib.shms_claimed(self._c, key, len(key))) == 1

    def of_this_thread(self) -> int:
        """Return how many claims this thread has taken and not ended."""
        return int(lib.shms_claims_of(self._c, get_native_id()))


def end(claim: Any) -> None:
    """End a claim; idempotent."""
    _end(claim)
