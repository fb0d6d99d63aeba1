"""The files of a `DirectoryTier`: their names, and `Housekeeper`, which keeps them below a capacity."""

import math
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b

from shmstore.errors import TierFullError

_FILE = re.compile(r"[0-9a-f]{32}\.shmstore(?P<temporary>\.[0-9a-f]+\.tmp)?")
_LEFT_OVER = 3600.0
"""Nobody writes to a temporary file that has not changed for so many seconds."""


def name_of(path: str, key: str) -> str:
    """Return the name of the file of a key: its hash, in one of 256 folders."""
    digest = blake2b(key.encode(), digest_size=16).hexdigest()
    return os.path.join(path, digest[:2], f"{digest}.shmstore")


def remove(name: str) -> None:
    """Remove a file, if it is still there."""
    with suppress(FileNotFoundError):
        os.unlink(name)


class Housekeeper:
    """Makes room in a directory; thread-safe.

    It looks at all files after this process has written a tenth of the capacity, or less if there was less room.
    """

    def __init__(self, path: str, capacity: int | None) -> None:
        self._path = path
        self._capacity = math.inf if capacity is None else capacity
        self._lock = threading.Lock()
        self._room = -1.0
        """Bytes to write until the next look; negative before the first, which finds what dead processes left."""

    def make_room(self, size: int) -> None:
        """Count `size` bytes that are to be written; if they do not fit, remove the values used longest ago.

        Raises TierFullError for more bytes than the capacity.
        """
        if size > self._capacity:
            message = f"{self._path}: {size} bytes are more than the capacity of {self._capacity}"
            raise TierFullError(message, hint="pass a larger capacity")
        with self._lock:
            self._room -= size
            if self._room >= 0:
                return
            values = sorted(self._values())
            used = sum(nbytes for _, nbytes, _ in values)
            if used + size > self._capacity:
                for _, nbytes, name in values:
                    if used + size <= 0.9 * self._capacity:
                        break
                    remove(name)
                    used -= nbytes
            self._room = min(self._capacity - used - size, 0.1 * self._capacity)  # others write here, too

    def _values(self) -> Iterator[tuple[float, int, str]]:
        """Return last use, size and name of each value; remove temporary files that were left, and nothing else."""
        for number in range(256):
            with suppress(FileNotFoundError), os.scandir(os.path.join(self._path, f"{number:02x}")) as entries:
                for entry in entries:
                    if match := _FILE.fullmatch(entry.name):
                        with suppress(FileNotFoundError):  # another process makes room, too
                            found = entry.stat(follow_symlinks=False)
                            if match["temporary"] is None:
                                yield found.st_mtime, found.st_size, entry.path
                            elif time.time() - found.st_mtime > _LEFT_OVER:
                                remove(entry.path)
