"""What a process has resident. Pages that several processes map are divided by their number, so that sums are right."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(?P<path>.*)")
_FIELD = re.compile(r"(?P<name>\w+): +(?P<kib>\d+) kB")
_SHARED_MEMORY = "/dev/shm/"


@dataclass(frozen=True)
class Memory:
    """Bytes that one process has resident."""

    own: int
    """Its heap and stacks: what no other process sees."""
    segments: int
    """Its part of the segments in shared memory that it has mapped."""
    total: int
    """Own, segments, and its part of what else is shared, such as libraries (PSS)."""


def resident_memory(smaps: Iterable[str] | None = None) -> Memory:
    """Return the memory of this process now, or that of which `smaps` gives the lines, as the kernel writes them."""
    own = segments = total = 0
    in_segment = False
    for line in Path("/proc/self/smaps").read_text().splitlines() if smaps is None else smaps:
        field = _FIELD.match(line)
        if field is None:
            mapping = _MAPPING.match(line)
            if mapping is not None:
                in_segment = mapping["path"].startswith(_SHARED_MEMORY)
        elif field["name"] == "Pss":
            total += int(field["kib"]) * 1024
            segments += in_segment * int(field["kib"]) * 1024
        elif field["name"] == "Anonymous":
            own += int(field["kib"]) * 1024
    return Memory(own, segments, total)
