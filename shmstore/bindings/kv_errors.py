"""The codes of ``kv/errors.h`` as exceptions."""

from typing import Final

from shmstore.bindings._shmstore import ffi, lib

FULL: Final[int] = lib.SHMS_KV_EFULL
ARGUMENT: Final[int] = lib.SHMS_KV_EARGUMENT


def meaning(code: int) -> str:
    """Return the one line that ``kv/errors.h`` has for `code`."""
    text: bytes = ffi.string(lib.shms_kv_meaning(code))
    return text.decode()


def refusal(code: int, wanted: int = 0, there: int = 0) -> Exception:
    """Return the exception to raise for a negative `code`; it changed nothing. `wanted`, `there`: what was missing."""
    missing = f": {wanted} are needed and {there} there" if wanted else ""
    return (MemoryError if code == lib.SHMS_KV_EMEMORY else ValueError)(meaning(code) + missing)


def check(code: int) -> int:
    """Return `code`; raise what it stands for if it is negative."""
    if code < 0:
        raise refusal(code)
    return code


def check_valid(code: int) -> None:
    """Raise RuntimeError for what a ``*_valid`` function found."""
    if code:
        raise RuntimeError(meaning(code))
