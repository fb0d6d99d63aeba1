"""Where stores are; no other module knows the folder.

A store's place is what the C core takes for it: its name if it is in /dev/shm, else the path of its file.
"""

import os
import re
from contextlib import suppress
from typing import Final, TypeAlias

from shmstore.errors import kind_of, shown

DIRECTORY: Final = "/dev/shm"
VARIABLE: Final = "SHMSTORE_DIR"
Folder: TypeAlias = str | os.PathLike[str]
_LONGEST = 3800
"""Bytes of a folder; with a name it is a path that the kernel takes."""


def folder_of(dir: Folder | None = None) -> str:
    """Return the folder that the argument `dir` says: by default that of SHMSTORE_DIR, without it /dev/shm.

    TypeError or ValueError if there can be no such folder.
    """
    chosen = (os.environ.get(VARIABLE) or DIRECTORY) if dir is None else dir
    folder = os.fspath(chosen) if isinstance(chosen, (str, os.PathLike)) else None
    if not isinstance(folder, str):
        raise TypeError(f"dir must be a str or a Path, not {kind_of(dir)}")
    if not folder or "\0" in folder or len(os.fsencode(folder)) > _LONGEST:
        raise ValueError(f"dir must be the path of a folder, of up to {_LONGEST} bytes, not {shown(folder)}")
    return "/" + os.path.abspath(folder).lstrip("/")  # abspath keeps two slashes at the start


def place_of(name: str, dir: Folder | None = None) -> str:
    """Return the place of a store in a folder; `name` may be the path of its file."""
    if name.startswith("/"):
        dir, name = os.path.split(name)
    folder = folder_of(dir)
    return name if folder == DIRECTORY else os.path.join(folder, name)


def place_of_descriptor(fd: int) -> str:
    """Return the place of the store that a descriptor of this process is open for; ValueError if it is not open."""
    try:
        os.fstat(fd)
    except OSError:
        raise ValueError(f"fd must be an open descriptor of a store, and {fd} is not open") from None
    return f"/proc/self/fd/{fd}"


def descriptors_of(pid: str) -> str:
    """Return the folder of a process's descriptors."""
    return f"/proc/{pid}/fd"


def seen_by_others(folder: str) -> str:
    """Return the folder as other processes see it: that of this process's descriptors has its number."""
    if folder == descriptors_of("self"):
        with suppress(OSError):
            return descriptors_of(os.readlink("/proc/self"))  # as /proc numbers it, which may be of a namespace outside
    return folder


def path_of(place: str) -> str:
    """Return the path of a store's file."""
    return os.path.join(DIRECTORY, place)


def stat_of(place: str) -> os.stat_result:
    """Return what the system says of a store's file; a link is followed only if it is that of a descriptor."""
    path = path_of(place)
    return os.stat(path, follow_symlinks=re.fullmatch(r"/proc/(self|\d+)/fd/\d+", path) is not None)


def parts_of(place: str) -> tuple[str, str]:
    """Return the folder and the name."""
    return os.path.split(path_of(place))


def file_system(folder: str) -> str:
    """Return the kind of a folder's file system, such as "tmpfs"; "" if the system does not say."""
    real, found = os.path.join(os.path.realpath(folder), ""), ("", "")
    with suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:  # a later mount lies over an earlier one
            point, kind = line.split(" ")[1:3]
            at = os.path.join(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), point), "")
            if real.startswith(at) and len(at) >= len(found[0]):
                found = at, kind
    return found[1]
