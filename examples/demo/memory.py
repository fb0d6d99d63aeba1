"""The memory that a process has resident. Each page is divided by the number of its processes, so sums are right."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(?P<path>.*)")
_FIELD = re.compile(r"(?P<name>\w+): +(?P<kib>\d+) kB")
_SHARED_MEMORY = "/dev/shm/"


@dataclass(frozen=True)
class Memory:
    """Bytes that one process has resident."""

    own: int
    """Its heap and stacks, which no other process sees."""
    segment: int
    """Its share of the segments in shared memory that it maps."""
    growth: int = 0
    """Growth of `own` since before the first request, when libraries and pictures were already loaded."""


def resident_memory() -> Memory:
    """Return the memory of this process, after its allocator has returned what is free."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only in GNU's C library
    if trim is not None:
        trim(ctypes.c_size_t(0))
    own = segment = 0
    in_segment = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        field = _FIELD.match(line)
        if field is None:
            mapping = _MAPPING.match(line)
            if mapping is not None:
                in_segment = mapping["path"].startswith(_SHARED_MEMORY)
        elif field["name"] == "Pss":
            segment += in_segment * int(field["kib"]) * 1024
        elif field["name"] == "Anonymous":
            own += int(field["kib"]) * 1024
    return Memory(own, segment)
