"""The worker's side of a relay, and what the two sides say to each other.

They talk over a Unix socket that keeps messages apart (SOCK_SEQPACKET). The worker asks, and the relay answers:

    worker:  msgpack of [key, namespace or nil, seconds to wait]
    relay:   b"+" | a reference of this host (40)    or    b"-" | why there is none

The object of an answer stays until the connection ends. So a dead worker leaves no lease.
"""

import errno
import os
import socket
import struct
import time
from contextlib import closing

import msgpack

from shmstore.errors import CacheMissError, cut, kind_of, listed
from shmstore.refs import REF_SIZE, ObjectRef
from shmstore.store.arguments import MAX_KEY, packed_key, seconds_of, stored_key

FOUND, MISSING = b"+", b"-"
MAX_REQUEST = MAX_KEY + 300
_MAX_ANSWER = 1024
_MAX_PATH = 107
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_LATE = 2.0
"""Seconds that an answer may take beyond the time that the relay was told to wait: the last fetch may begin then."""

_PAUSE = 0.01


def relay_path(store: str) -> str:
    """Return the path of the socket at which the relay of a store listens unless it was told another one."""
    return checked_path(os.path.join(os.environ.get("XDG_RUNTIME_DIR") or "/tmp", f"shmstore-relay-{store}.sock"))


def checked_path(path: str | os.PathLike[str]) -> str:
    """Return the path as a str; TypeError or ValueError if no socket can have it."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"the path of a relay's socket must be a str or a Path, not {kind_of(path)}")
    if not 0 < len(os.fsencode(path)) <= _MAX_PATH:
        raise ValueError(f"the path of a relay's socket must have 1 to {_MAX_PATH} bytes, not be {os.fspath(path)!r}")
    return os.fspath(path)


def request(key: str, namespace: str | None, seconds: float) -> bytes:
    """Return the message that asks for an object; TypeError or ValueError if no store can have it."""
    packed_key(key, namespace)
    packed: bytes = msgpack.packb([stored_key(key), namespace, seconds])
    return packed


def parsed(message: bytes) -> tuple[str, str | None, float]:
    """Return key, namespace and seconds of a request; TypeError or ValueError for anything else."""
    key, namespace, seconds = msgpack.unpackb(message)
    packed_key(key, namespace)
    return key, namespace, seconds_of("seconds to wait", seconds)


class RelayClient:
    """Asks the relay that listens at `path` for objects of other hosts; for a worker.

    Other hosts publish their objects some time after they have sent a reference, so one that is not there counts as
    missing only after `wait` seconds. Thread-safe.
    """

    def __init__(self, path: str | os.PathLike[str], *, wait: float = 2.0) -> None:
        self.path = checked_path(path)
        self._wait = seconds_of("wait", wait)

    def __repr__(self) -> str:
        return f"RelayClient({self.path!r})"

    def fetching(self) -> closing["Conversation"]:
        """Return a context manager of an object with `fetch(key)`; what it has fetched stays until the block ends.

        The `wait` is for all keys of the block together.
        """
        return closing(Conversation(self.path, self._wait))


class Conversation:
    """One block of `RelayClient.fetching`; for one thread."""

    def __init__(self, path: str, wait: float) -> None:
        self._path = path
        self._until = time.monotonic() + wait
        self._connection: socket.socket | None = None
        self._failed: OSError | None = None

    def fetch(self, key: str, *, namespace: str | None = None) -> ObjectRef:
        """Return a reference of this host to the object, which stays until the block ends.

        Raises CacheMissError if the object is in no tier, or the relay does not answer; after the latter at once.
        """
        if self._failed is None:
            try:
                answer = self._ask(key, namespace)
            except OSError as error:
                self._failed = error
        if self._failed is not None:
            why = f"the relay at {self._path} does not answer: {self._failed}"
        elif answer[:1] == FOUND and len(answer) == 1 + REF_SIZE:
            return ObjectRef(answer[1:])
        else:
            why = f"the relay has not fetched it: {cut(answer[1:].decode(errors='replace'))}"
        raise CacheMissError(
            [key],
            f"{listed([key])} is of another host, and {why}",
            hint="see that `shmstore relay` runs on this host for this store, what it logs, and that the other host "
            f"publishes its items to the same tier and namespace; {CacheMissError.default_hint}",
        ) from self._failed

    def close(self) -> None:
        """End the connection, and with it the leases; idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, key: str, namespace: str | None) -> bytes:
        try:
            if self._connection is None:
                self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._connect(self._connection)
            left = max(0.0, self._until - time.monotonic())
            self._connection.settimeout(left + _LATE)
            self._connection.send(request(key, namespace, left))
            answer = self._connection.recv(_MAX_ANSWER)
            if not answer:
                raise ConnectionResetError("it has ended the connection")
            return answer
        except BaseException:  # also an interrupt: an answer that is on its way must not be the next one's
            self.close()
            raise

    def _connect(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        while (error := connection.connect_ex(self._path)) == errno.EAGAIN and time.monotonic() < self._until:
            time.sleep(_PAUSE)  # too many wait to be accepted, and the kernel does not say when that ends
        if error:
            raise OSError(error, os.strerror(error))
        of_peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(of_peer)[1] != os.geteuid():
            raise PermissionError("it is another user's")
