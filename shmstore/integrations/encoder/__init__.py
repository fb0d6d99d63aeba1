"""What plug-ins share about encoder outputs: a store in which every engine of a host keeps them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from shmstore.store import ObjectStoreWriter

KIND = "encoder"
"""The kind of the objects that are encoder outputs."""


def file_of(writer: ObjectStoreWriter) -> int | None:
    """Return which file the store's name names; None if there is none."""
    with suppress(OSError):  # also of a folder that cannot be looked into
        return Path(writer.handle.dir, writer.name).stat().st_ino
    return None
