"""The worker's side of a relay, and what the two sides say to each other.

They talk over a Unix socket that keeps messages apart (SOCK_SEQPACKET). The worker asks, and the relay answers:

    worker:  b"?" | seconds to wait (8) | bytes of the namespace (2) | namespace | key
    relay:   b"+" | a reference of this host (40)    or    b"-" | why there is none
    worker:  b"."    it has read all that it has asked for; no answer

The object of an answer stays until the worker sends b"." or its connection ends. So a dead worker leaves no lease.
"""

import errno
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shmstore.errors import CacheMissError, cut, kind_of, listed
from shmstore.refs import REF_SIZE, ObjectRef
from shmstore.store.arguments import MAX_KEY, packed_key, seconds_of, stored_key

__all__ = ["Conversation", "RelayClient", "relay_path"]

FOUND, MISSING, DONE = b"+", b"-", b"."
_ASK = struct.Struct("<cdH")
MAX_REQUEST = _ASK.size + 255 + MAX_KEY
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
    prefix = (namespace or "").encode()
    return _ASK.pack(b"?", seconds, len(prefix)) + prefix + stored_key(key).encode()


def parsed(message: bytes) -> tuple[str, str | None, float]:
    """Return key, namespace and seconds of a request; ValueError for anything else."""
    if not _ASK.size < len(message) <= MAX_REQUEST:
        raise ValueError(f"a request has {_ASK.size + 1} to {MAX_REQUEST} bytes")
    mark, seconds, size = _ASK.unpack_from(message)
    if mark != b"?":
        raise ValueError("a request begins with a question mark")
    seconds_of("seconds to wait", seconds)
    rest = message[_ASK.size :]
    key, namespace = rest[size:].decode(), rest[:size].decode() if size else None
    packed_key(key, namespace)
    return key, namespace, seconds


def own_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end is this user's."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(packed)[1] == os.geteuid())


def has_news(connection: socket.socket, seconds: float) -> bool:
    """Wait so long for a message or the end of the connection, and return whether there is one; read nothing."""
    connection.settimeout(seconds)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, TimeoutError):
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(None)
    return True


class RelayClient:
    """Asks the relay that listens at `path` for objects of other hosts; for a worker.

    Other hosts publish their objects some time after they have sent a reference, so one that is not there counts as
    missing only after `wait` seconds. Thread-safe. It connects when it is first asked, and again after the relay has
    been restarted. Do not use it in a forked process.
    """

    def __init__(self, path: str | os.PathLike[str], *, wait: float = 2.0) -> None:
        self.path = checked_path(path)
        self._wait = seconds_of("wait", wait)
        self._idle: list[socket.socket] = []
        self._open = True

    def __repr__(self) -> str:
        return f"RelayClient({self.path!r})"

    @contextmanager
    def fetching(self) -> Iterator["Conversation"]:
        """Yield an object with `fetch(key)`; what it has fetched stays until the block ends.

        The `wait` is for all keys of the block together.
        """
        conversation = Conversation(self, self._wait)
        try:
            yield conversation
        finally:
            conversation._end()

    def close(self) -> None:
        """End the connections; idempotent."""
        self._open = False
        while self._idle:
            self._idle.pop().close()

    def _take(self, until: float) -> socket.socket:
        """Return a connection that nobody uses, or a new one; OSError if the relay does not answer."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread has taken the last one
                break
            if not has_news(connection, 0):
                return connection
            connection.close()  # the relay has ended it
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.setblocking(False)
            while (error := connection.connect_ex(self.path)) == errno.EAGAIN and time.monotonic() < until:
                time.sleep(_PAUSE)  # too many wait to be accepted, and the kernel does not say when that ends
            if error:
                raise OSError(error, os.strerror(error))
            if not own_user(connection):
                raise PermissionError("it is another user's")
            return connection
        except BaseException:
            connection.close()
            raise

    def _give_back(self, connection: socket.socket) -> None:
        if self._open:
            self._idle.append(connection)
        else:
            connection.close()


class Conversation:
    """One block of `RelayClient.fetching`; for one thread."""

    def __init__(self, client: RelayClient, wait: float) -> None:
        self._client = client
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
            raise CacheMissError(
                [key],
                f"{listed([key])} is of another host, and the relay at {self._client.path} does not answer: "
                f"{self._failed}",
                hint="see that `shmstore relay` runs on this host for this store, and what it logs; "
                "or process the item again here",
            ) from self._failed
        if answer[:1] == FOUND and len(answer) == 1 + REF_SIZE:
            return ObjectRef(answer[1:])
        why = cut(answer[1:].decode(errors="replace"))
        raise CacheMissError(
            [key],
            f"{listed([key])} is of another host, and the relay has not fetched it: {why}",
            hint="see that the other host publishes its items to the same tier and namespace; "
            + CacheMissError.default_hint,
        )

    def _ask(self, key: str, namespace: str | None) -> bytes:
        connection, self._connection = self._connection or self._client._take(self._until), None
        try:
            left = max(0.0, self._until - time.monotonic())
            connection.settimeout(left + _LATE)
            connection.send(request(key, namespace, left))
            answer = connection.recv(_MAX_ANSWER)
            if not answer:
                raise ConnectionResetError("it has ended the connection")
        except BaseException:  # also an interrupt: an answer that is on its way must not be the next one's
            connection.close()
            raise
        self._connection = connection
        return answer

    def _end(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.send(DONE)
            except OSError:
                connection.close()
            else:
                self._client._give_back(connection)
