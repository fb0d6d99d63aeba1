"""What a process has resident. Pages that several processes map are divided by their number, so that sums are right."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
    slack: int = 0
    """What its allocator had kept free besides, and gave back when it was asked to."""


def resident_memory() -> Memory:
    """Return what this process has now in use; what its allocator keeps free is given back first, and is `slack`."""
    with_slack = parse_smaps(_smaps())
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries than GNU's have none
    if trim is not None:
        trim(ctypes.c_size_t(0))
    memory = parse_smaps(_smaps())
    return replace(memory, slack=max(0, with_slack.own - memory.own))


def _smaps() -> list[str]:
    return Path("/proc/self/smaps").read_text().splitlines()


def parse_smaps(lines: Iterable[str]) -> Memory:
    """Return the sums over the mappings of a process, from the lines that the kernel writes of them."""
    own = segments = total = 0
    in_segment = False
    for line in lines:
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
