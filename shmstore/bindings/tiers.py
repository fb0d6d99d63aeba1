"""The figures of a tier in a segment: the fields of shms_tier_figures, which has all the names.

Two differ: Python has `saved_seconds` for `saved_ns`, and no figures at all for `there`.
"""

from typing import Any

from shmstore.bindings._shmstore import ffi

_FIGURES = ffi.typeof("shms_tier_figures *")
_COUNTS = [name for name, _ in ffi.typeof("shms_tier_figures").fields if name not in ("there", "open", "saved_ns")]


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
