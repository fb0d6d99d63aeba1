"""The codes of ``kv/errors.h`` as exceptions."""

from typing import Final

from shmstore.bindings._shmstore import ffi, lib

FULL: Final[int] = lib.SHMS_KV_EFULL


def meaning(code: int) -> str:
    """Return the line that ``kv/errors.h`` has for `code`."""
    text: bytes = ffi.string(lib.shms_kv_meaning(code))
    return text.decode()


def refusal(code: int, wanted: int = 0, there: int = 0) -> Exception:
    """Return the exception for a negative `code`; with `wanted`, it says how many were needed and there."""
    missing = f": {wanted} are needed and {there} there" if wanted else ""
    return (MemoryError if code == lib.SHMS_KV_EMEMORY else ValueError)(meaning(code) + missing)


def check(code: int) -> int:
    """Return `code`, or raise its error if it is negative."""
    if code < 0:
        raise refusal(code)
    return code


def check_valid(code: int) -> None:
    """Raise RuntimeError if a ``*_valid`` function has found a broken invariant."""
    if code:
        raise RuntimeError(meaning(code))
