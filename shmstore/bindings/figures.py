"""What a segment shows of kinds and of a tier, as a writer or an inspector reads it.

The figures of a tier are the fields of shms_tier_figures. Two differ: Python has `saved_seconds` for `saved_ns`, and no
figures at all for `there`.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from shmstore.bindings._shmstore import ffi, lib
from shmstore.bindings.handles import require

KindFigures: TypeAlias = tuple[int, int, int | None]
"""Bytes, objects and quota; None for no quota."""
MAX_KINDS: int = lib.SHMS_KINDS - 1
MAX_NAME: int = ffi.sizeof("shms_kind_info") - 3 * 8 - 1

_FIGURES = ffi.typeof("shms_tier_figures *")
_COUNTS = [name for name, _ in ffi.typeof("shms_tier_figures").fields if name not in ("there", "open", "saved_ns")]


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


def figures_of(record: Any) -> dict[str, Any] | None:
    """Return the figures of a C record as a dict; None without a tier."""
    if not record.there:
        return None
    counts = {name: getattr(record, name) for name in _COUNTS}
    return {**counts, "saved_seconds": record.saved_ns / 1e9, "open": bool(record.open)}


def record_of(figures: Any) -> Any:
    """Return the C record of an object that has such figures as attributes."""
    counts = {name: getattr(figures, name) for name in _COUNTS}
    saved = int(figures.saved_seconds * 1e9)
    return ffi.new(_FIGURES, {**counts, "there": 1, "saved_ns": saved, "open": figures.open})
