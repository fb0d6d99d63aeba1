"""Where the words of a segment are, read off the C header; for tests that damage them."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

from shmstore.bindings._shmstore import lib

from shmstore.store import ObjectStoreWriter

HEADER = (Path(__file__).resolve().parents[1] / "csrc" / "store" / "layout.h").read_text()
SIZES: dict[str, int] = {"uint8_t": 1, "uint64_t": 8}
SIZES |= {of: int(n) for of, n in re.findall(r"sizeof\((shms_\w+)\) == (\d+)", HEADER)}


def fields(table: str, at: int = 0) -> dict[str, int]:
    """Return where the words of a table are, if it starts there."""
    body = HEADER.partition(f"typedef struct {table} {{")[2].partition("}")[0]
    offsets = {}
    for line in body.splitlines():
        match = re.match(r"\s*(\w+) (\w+)(?:\[(\w+)\])?;", line)
        if match:
            offsets[match[2]] = at
            length = match[3] or "1"
            at += SIZES[match[1]] * (int(length) if length.isdigit() else getattr(lib, length))
    return offsets


SUPERBLOCK = fields("shms_superblock", 0)
FIELDS = SUPERBLOCK | fields("shms_layout", SUPERBLOCK.pop("layout")) | fields("shms_writer_table", mmap.PAGESIZE)
"""Offsets in the file of the words of the superblock and of the first writer's table."""


def make_of_another_version(path: Path) -> None:
    """Make a store in /dev/shm, as a version with another layout would have made it."""
    ObjectStoreWriter.open(path.name, capacity=1 << 16, n_readers=1).close()
    with path.open("r+b") as file:
        file.seek(FIELDS["stamp"])
        file.write(b"\xff" * 8)
