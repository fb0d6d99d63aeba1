"""The namespace of encoder outputs: whatever changes them, and is not in an item's key."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any

import torch

_FORMAT = 1
"""The way in which outputs are stored."""
_NAME = 200
"""How much of the model's name is kept, in bytes; a namespace has at most 255."""


def digest(about: Any) -> str:
    """Return a digest that is the same for equal values, in every process."""
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def namespace_of(model: str, dtype: torch.dtype, about: dict[str, Any]) -> str:
    """Return the namespace of a model, which may be a folder, and of what else is known about its outputs."""
    name, kind = model.encode()[-_NAME:].decode(errors="ignore"), str(dtype).removeprefix("torch.")
    common = {"format": _FORMAT, "torch": torch.__version__, "files": _files(Path(model)), "dtype": str(dtype)}
    return f"{name} {kind} {digest(about | common)}"


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of each file of a model that is a folder: weights, code, and what processors do."""
    found = []
    for path in sorted(folder.iterdir()) if os.path.isdir(folder) else ():
        with suppress(FileNotFoundError):  # renamed meanwhile, as downloads do
            about = path.stat()
            if S_ISREG(about.st_mode):
                found.append((path.name, about.st_size, about.st_mtime_ns))
    return found
