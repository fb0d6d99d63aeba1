"""The table of kinds in a segment, as a writer or an inspector reads it."""

from collections.abc import Callable
from typing import Any, TypeAlias

from shmstore.bindings._shmstore import ffi, lib
from shmstore.bindings.handles import require

KindFigures: TypeAlias = tuple[int, int, int | None]
"""Bytes, objects and quota; None for no quota."""
MAX_KINDS: int = lib.SHMS_KINDS - 1
MAX_NAME: int = ffi.sizeof("shms_kind_info") - 3 * 8 - 1


def read_kinds(call: Callable[..., int], handle: Any) -> dict[int, tuple[str, KindFigures]]:
    """Return the name and the figures of each kind, by its number; 0 is not among them."""
    records = ffi.new("shms_kind_info[]", MAX_KINDS + 1)
    require(call(handle, records))
    return {
        number: (
            bytes(ffi.buffer(kind.name)).rstrip(b"\0").decode(errors="backslashreplace"),
            (kind.bytes, kind.objects, kind.quota or None),
        )
        for number, kind in enumerate(records)
        if number and kind.name[0]
    }
