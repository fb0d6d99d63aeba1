"""What a host does to its stores: systemd removes names, a folder is full, and a core dump keeps a process alive."""

from __future__ import annotations

import os
import pwd
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shmstore.places import DIRECTORY, folder_of

_FULL = 0.05
"""The share of free room below which a folder is nearly full."""
_SYSTEM = 999
"""The last user id whose names systemd leaves alone, unless it was built with another."""


@dataclass(frozen=True, slots=True)
class HostReport:
    """What was seen."""

    dir: str
    """The folder of the stores."""
    folder_bytes: int
    free_bytes: int
    removes_ipc: bool
    """Whether systemd removes this user's names in the folder when the user's last session ends."""
    core_pattern: str
    problems: list[str]
    notes: list[str]


def look_at_host(folder: str | None = None, root: str = "/") -> HostReport:
    """Look at this host for stores of this user in a folder; `root` is where its system's files are."""
    at = folder_of(folder)
    room = os.statvfs(at)
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    system, pattern, problems, notes = Path(root), "", list[str](), list[str]()
    removes = os.path.realpath(at) == DIRECTORY and _removes_ipc(system)
    if removes:
        text = (
            "systemd removes this user's stores when the user's last session ends: set RemoveIPC=no in logind.conf, "
            "run `loginctl enable-linger`, or start engines as services of a system user"
        )
        problems.append(text)
    if free < _FULL * size:
        problems.append(f"{at} is nearly full: {free} of {size} bytes are free")
    with suppress(OSError):
        pattern = (system / "proc/sys/kernel/core_pattern").read_text().strip()
    if pattern.startswith("|") or (pattern and resource.getrlimit(resource.RLIMIT_CORE)[0]):
        text = (
            f"a crashed process stays alive until its core is written (kernel.core_pattern: {pattern}), and keeps its "
            "part of a store and what it holds so long"
        )
        notes.append(text)
    return HostReport(at, size, free, removes, pattern, problems, notes)


def _removes_ipc(root: Path) -> bool:
    """Return whether logind runs, has RemoveIPC on, and is not told that this user lingers."""
    user = os.geteuid()
    if user <= _SYSTEM or not (root / "run/systemd/seats").is_dir():
        return False
    with suppress(KeyError):
        if (root / "var/lib/systemd/linger" / pwd.getpwuid(user).pw_name).exists():
            return False
    found: dict[str, Path] = {}
    value = "yes"  # as systemd is built
    for folder in ("usr/lib/systemd", "usr/local/lib/systemd", "run/systemd", "etc/systemd"):  # the last one wins
        found |= {path.name: path for path in (root / folder / "logind.conf.d").glob("*.conf")}
    mains = [root / folder / "systemd/logind.conf" for folder in ("etc", "run", "usr/lib")]
    for path in [*[path for path in mains if path.exists()][:1], *(found[name] for name in sorted(found))]:
        with suppress(OSError):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                name, _, given = line.partition("=")
                if name.strip() == "RemoveIPC":
                    value = given.strip().lower() or "yes"
    return value in ("yes", "true", "on", "1", "y", "t")
