"""The codes of ``kv/errors.h`` as exceptions."""

from typing import Final

from shmstore.bindings._shmstore import lib

FULL: Final[int] = lib.SHMS_KV_EFULL
MEANINGS: Final[dict[int, str]] = {
    lib.SHMS_KV_EFULL: "fewer blocks are free than were asked for",
    lib.SHMS_KV_ERANGE: "a block id is outside the pool, or names the null block",
    lib.SHMS_KV_EUNUSED: "a block is given back that no request holds",
    lib.SHMS_KV_EKEYED: "a block that is to be cached has a key already",
    lib.SHMS_KV_EWIDTH: "block hashes have 1 to 32 bytes, all of one request the same number",
    lib.SHMS_KV_ENOHASH: "the request has fewer block hashes than blocks to be cached",
    lib.SHMS_KV_ECOMPUTED: "computed blocks need caching and a request that has no blocks yet",
    lib.SHMS_KV_EBUSY: "blocks are in use",
    lib.SHMS_KV_EARGUMENT: "a number is out of range",
    lib.SHMS_KV_EMEMORY: "the host is out of memory",
    lib.SHMS_KV_ENOLIB: "no usable libcrypto was found",
    lib.SHMS_KV_ESHORT: "the request's table has fewer blocks than are to be cached",
    lib.SHMS_KV_ECORRUPT: "the free queue, the keys or the tables of requests contradict each other",
}


def refusal(code: int, wanted: int = 0, there: int = 0) -> Exception:
    """Return the exception for a negative `code`; with `wanted`, it says how many were needed and there."""
    missing = f": {wanted} are needed and {there} there" if wanted else ""
    return (MemoryError if code == lib.SHMS_KV_EMEMORY else ValueError)(MEANINGS[code] + missing)


def check(code: int) -> int:
    """Return `code`, or raise its error if it is negative."""
    if code < 0:
        raise refusal(code)
    return code


def check_valid(code: int) -> None:
    """Raise RuntimeError if a ``*_valid`` function has found a broken invariant."""
    if code:
        raise RuntimeError(MEANINGS[code])
