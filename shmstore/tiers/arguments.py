"""Checks of what callers pass to a tier; each raises TypeError or ValueError, and says what was expected."""

import re
from collections.abc import Sequence

from shmstore.errors import kind_of, shown
from shmstore.tiers.protocol import Into

MAX_SPANS = 64
"""Of a value; a back end takes what says that it has more for something else's."""
_KEY = re.compile(r"[ -~]{1,200}")


def check_key(key: str) -> None:
    """Refuse a key that is not printable ASCII of 1 to 200 characters."""
    if not isinstance(key, str):
        raise TypeError(f"key must be a str, not {kind_of(key)}")
    if _KEY.fullmatch(key) is None:
        raise ValueError(f"key must be printable ASCII of 1 to 200 characters, not {shown(key)}")


def check_keys(keys: Sequence[str]) -> None:
    """Refuse a str, because it is a sequence of keys by mistake, and each key that `check_key` refuses."""
    if isinstance(keys, str):
        raise TypeError("keys must be a sequence of keys, not a str")
    for key in keys:
        check_key(key)


def check_spans(spans: Sequence[memoryview]) -> None:
    """Refuse a sequence that is empty or too long, and each span that is not a flat memoryview of bytes."""
    if not 0 < len(spans) <= MAX_SPANS:
        raise ValueError(f"spans must have 1 to {MAX_SPANS} spans, not {len(spans)}")
    for span in spans:
        _check_span(span)


def take(into: Into, size: int) -> memoryview | None:
    """Return the memory that `into` gives for a span, or None; refuse memory of another size or read-only."""
    span = into(size)
    if span is None:
        return None
    _check_span(span)
    if span.readonly or span.nbytes != size:
        what = "read-only memory" if span.readonly else f"{span.nbytes} bytes"
        raise ValueError(f"into must return {size} writable bytes or None, not {what}")
    return span.cast("B")


def _check_span(span: memoryview) -> None:
    if not isinstance(span, memoryview):
        raise TypeError(f"a span must be a memoryview, not {kind_of(span)}")
    if span.ndim != 1 or span.itemsize != 1 or not span.contiguous:
        raise ValueError("a span must be flat and of bytes: use memoryview(...).cast('B')")
