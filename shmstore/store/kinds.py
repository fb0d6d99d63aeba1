"""Kinds of objects: their names, numbers and quotas, checked and converted for the bindings."""

from collections.abc import Mapping
from typing import Any

from shmstore.bindings.figures import MAX_KINDS, MAX_NAME
from shmstore.bindings.store import ALIGN, Writer
from shmstore.errors import listed, shown
from shmstore.namespaces import packed_text
from shmstore.store.arguments import int_of
from shmstore.store.stats import KindStats


def _packed(kind: Any) -> bytes:
    packed = packed_text("kind", kind)
    if not 0 < len(packed) <= MAX_NAME or b"\0" in packed:
        raise ValueError(f"kind must have 1 to {MAX_NAME} bytes in UTF-8 without a null byte, not {shown(kind)}")
    return packed


def number_of(writer: Writer, kind: str | None) -> int:
    """Return the number of a kind, which a new name gets now; TypeError or ValueError if it can have none."""
    try:
        return writer.kinds[kind]
    except (KeyError, TypeError):
        number = writer.kind(_packed(kind))
    if not number:
        known = listed(shown(name) for name in kind_stats(writer))
        raise ValueError(f"kind {shown(kind)} is one too many: a store has at most {MAX_KINDS} kinds, and has {known}")
    writer.kinds[kind] = number
    return number


def _quota_bytes(kind: str, quota: Any, capacity: int) -> int:
    name = f"quotas[{shown(kind)}]"
    if isinstance(quota, float):
        if not 0 < quota <= 1:
            raise ValueError(f"{name} must be a fraction above 0 and up to 1, not {quota}")
        return max(int(quota * capacity) // ALIGN, 1) * ALIGN
    try:
        return int_of(name, quota, ALIGN, capacity) // ALIGN * ALIGN
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}; an int is a number of bytes, a float a fraction of the capacity") from None


def checked_quotas(quotas: Mapping[str, float] | None, capacity: int) -> dict[str, int] | None:
    """Return the quotas in bytes, rounded down to what objects can fill; TypeError or ValueError for a wrong one."""
    if quotas is None:
        return None
    if not isinstance(quotas, Mapping):
        raise TypeError(f"quotas must be a mapping of kinds to fractions or bytes, not {type(quotas).__name__}")
    for kind in quotas:
        _packed(kind)
    if len(quotas) > MAX_KINDS:
        raise ValueError(f"quotas has {len(quotas)} kinds, and a store has at most {MAX_KINDS}")
    return {kind: _quota_bytes(kind, quota, capacity) for kind, quota in quotas.items()}


def set_quotas(writer: Writer, quotas: Mapping[str, int]) -> None:
    """Give the store these quotas and no others."""
    for number, (kind, (_, _, quota)) in writer.read_kinds().items():
        if quota is not None and kind not in quotas:
            writer.set_quota(number, 0)
    for kind, nbytes in quotas.items():
        writer.set_quota(number_of(writer, kind), nbytes)


def kind_stats(writer: Writer) -> dict[str, KindStats]:
    """Return the figures of each kind."""
    return {kind: KindStats(*figures) for kind, figures in writer.read_kinds().values()}
