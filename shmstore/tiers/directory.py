"""`DirectoryTier`: a tier in a directory, for one host with a disk or for several with a network file system.

A value is a file, ``ab/ab12...ef.shmstore``, named for the hash of its key: a line of text, a table (`table.py`), and
the spans without a gap. A writer fills a temporary file next to it and renames that, so a reader sees the old file or
the new one. A file that was cut short, forged or written by another version is a miss.
"""

import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from io import BufferedReader, FileIO

from shmstore.errors import TierError, TierFullError, unless_interrupted
from shmstore.store.arguments import seconds_of
from shmstore.tiers import table
from shmstore.tiers.protocol import Into

_log = logging.getLogger(__name__)

_MAGIC = b"shmstore tier 2\n"
_PIECE = 8 << 20
"""The time-out is looked at after so many bytes."""
_USED_AGAIN = 60.0
"""A fetch notes its time in a file if the noted time is older than this, in seconds."""
_SHARED = 0o2770
"""The permissions of the directory that its folders and files get; what others may do is not among them."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_A_FILE = (errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""What somebody else put there: a folder, a link or a socket."""
_GONE = (errno.ENOENT, errno.ESTALE)
"""No file, or one that another host has replaced."""


class DirectoryTier:
    """Keep values as files in the directory `path`, which exists; several processes and hosts may share it.

    It removes nothing by itself. The time of change of a file is that of its last use, to the minute, so a job of the
    operator can remove those that were used longest ago, at any time.

    `timeout`, in seconds, is looked at between pieces of 8 MiB. A kernel call cannot be given up: if a network file
    system hangs, so does the call, unless it is mounted with ``soft``.

    Files are as readable as `path` is, but never by other users than the owner and the group. Users who can write to
    `path` can forge values.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 1.0) -> None:
        """Warn if the directory is not there yet; each call looks again."""
        self._path = os.path.abspath(path)
        if not os.path.isdir(self._path):
            _log.warning("there is no directory %s: until it is created or mounted, its tier has nothing", self._path)
        self._timeout = seconds_of("timeout", timeout)
        self._closed = False

    def __repr__(self) -> str:
        return f"DirectoryTier({self._path!r})"

    def publish(self, key: str, spans: Sequence[memoryview]) -> None:
        """Write a file for `key`, in the place of an earlier one, as `Tier.publish` says; nothing is synced."""
        name = name_of(self._path, key)
        with self._call() as end:
            mode = os.stat(self._path).st_mode & _SHARED
            with suppress(FileExistsError):
                os.mkdir(os.path.dirname(name), 0o700)
                os.chmod(os.path.dirname(name), mode)
            temporary = f"{name}.{secrets.token_hex(8)}.tmp"
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode & 0o660)
            try:
                try:
                    for piece in (memoryview(_MAGIC + table.packed(spans)), *spans):
                        self._write(file, piece, end)
                finally:
                    os.close(file)  # NFS may first say here that there is no room
                os.replace(temporary, name)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise

    def fetch(self, key: str, into: Into) -> bool | None:
        """Read the file of `key` into the memory that `into` gives, as `Tier.fetch` says, and note that it was used."""
        with self._call() as end:
            try:
                with _opened(name_of(self._path, key)) as file:
                    sizes = _sizes(file)
                    for size in sizes:
                        span = table.take(into, size)
                        if span is None:
                            return False
                        if not self._read(file, span, end):
                            return None
                    return True if sizes else None
            except OSError as error:
                if error.errno not in _GONE + _NOT_A_FILE:
                    raise
                os.stat(self._path)  # raises if the directory itself is not there
                return None if error.errno in _NOT_A_FILE else False

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether it has a file; files are not read."""
        with self._call():
            os.stat(f"{self._path}/.")  # which needs the permission to look for files in it
            return [os.path.isfile(name_of(self._path, key)) for key in keys]

    def remove(self, keys: Sequence[str]) -> None:
        """Remove the files of these keys."""
        with self._call():
            for key in keys:
                with suppress(FileNotFoundError):
                    os.unlink(name_of(self._path, key))

    def close(self) -> None:
        """Refuse further calls; the files stay."""
        self._closed = True

    @contextmanager
    def _call(self) -> Iterator[float]:
        """Give the time at which this call is late; what the file system refuses is an error of the tier."""
        if self._closed:
            raise TierError(f"{self} is closed", hint="open another one")
        try:
            yield time.monotonic() + self._timeout
        except TierError:  # which is an OSError, too
            raise
        except unless_interrupted(OSError) as error:
            message = f"{self._path}: {error.strerror}"
            if error.errno in _FULL:
                hint = "free space in its file system: remove the files that were used longest ago"
                raise TierFullError(message, hint=hint) from error
            hint = "create or mount the directory, and let this user read and write it"
            raise TierError(message, hint=hint) from error

    def _check(self, end: float) -> None:
        if time.monotonic() > end:
            hint = "use a faster file system, or pass a larger timeout"
            raise TierError(f"{self._path}: it took more than {self._timeout} s", hint=hint)

    def _write(self, file: int, piece: memoryview, end: float) -> None:
        done = 0
        while done < piece.nbytes:
            self._check(end)
            done += os.write(file, piece[done : done + _PIECE])

    def _read(self, file: BufferedReader, span: memoryview, end: float) -> bool:
        """Fill the span and return whether there were as many bytes."""
        done = 0
        while done < span.nbytes:
            self._check(end)
            read = file.readinto(span[done : done + _PIECE])
            if not read:
                return False
            done += read
        return True


def _sizes(file: BufferedReader) -> list[int]:
    """Return the sizes of the spans that follow; [] if this is not a whole file. Also note that it was used."""
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or file.read(len(_MAGIC)) != _MAGIC:
        return []
    sizes = table.sizes_in(file.peek(table.LONGEST))
    start = len(_MAGIC) + table.length_of(len(sizes))
    if start + sum(sizes) != found.st_size:
        return []
    file.seek(start)
    if time.time() - found.st_mtime > _USED_AGAIN:
        with suppress(OSError):  # perhaps it is another user's, or the file system is read-only
            os.utime(file.fileno())
    return sizes


def name_of(path: str, key: str) -> str:
    """Return the name of the file of a key: its hash, in one of 256 folders."""
    digest = blake2b(key.encode(), digest_size=16).hexdigest()
    return os.path.join(path, digest[:2], f"{digest}.shmstore")


def _opened(name: str) -> BufferedReader:
    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe of that name must not block

    # The small buffer is for the header. Large spans are read past it, straight into their memory.
    return BufferedReader(FileIO(name, opener=opener), 4096)
