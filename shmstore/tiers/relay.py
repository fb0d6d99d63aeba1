"""The relay of a host: it fetches objects of other hosts into the host's store and hands them out to its workers.

A worker that gets a reference of another host's store asks for its key (`relay_client`). The relay fetches the object
from the tier once, and all workers of the host read it in place. Each connection has a thread, because a host has few
workers and each asks for one object at a time. A thread does all that its worker needs: it asks the tier, waits, hands
out, and at the end of the connection it ends the leases. So there are no timers, and no thread cares for another's.
"""

import errno
import logging
import os
import select
import socket
import stat
import threading
import time
from contextlib import suppress

from shmstore.errors import ObjectNotFoundError, ShmStoreError, StoreClosedError, StoreFullError
from shmstore.refs import ObjectRef
from shmstore.store import ObjectStoreWriter
from shmstore.tiers.relay_client import FOUND, MAX_REQUEST, MISSING, checked_path, parsed
from shmstore.tiers.store_tier import StoreTier

_log = logging.getLogger(__name__)
_FIRST_PAUSE, _LONGEST_PAUSE, _NO_FILES_PAUSE = 0.01, 0.25, 0.1
_CLOSING = 5.0
_Found = dict[tuple[str, str | None], ObjectRef]
"""What a worker has got: a reference for each key, so that a worker that repeats itself takes one lease."""


class Relay:
    """Listens at `path` for the workers of a host, which wait until `serve` answers them.

    The socket is for processes of this user alone. Raises FileExistsError if the path is taken, and OSError if the
    socket cannot be made.
    """

    _writer: ObjectStoreWriter
    _tier: StoreTier

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._connections: dict[threading.Thread, socket.socket] = {}
        self.path = checked_path(path)
        self._stopped = False
        self._listener = _listen(self.path)

    def serve(self, writer: ObjectStoreWriter, tier: StoreTier) -> None:
        """Answer from `tier`, which is that of `writer`, until `stop`; then end all connections and their leases.

        Owns neither of them; close them after it.
        """
        self._writer, self._tier = writer, tier
        try:
            while not self._stopped:
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:
                    if not self._stopped:  # no file descriptor is free: others wait until a worker goes
                        _log.warning("a worker must wait: %s", error)
                        time.sleep(_NO_FILES_PAUSE)
                    continue
                thread = threading.Thread(target=self._converse, args=(connection,), name="relay", daemon=True)
                self._connections[thread] = connection
                try:
                    thread.start()
                except RuntimeError as error:
                    _log.warning("a worker is refused: %s", error)
                    del self._connections[thread]
                    connection.close()
        finally:
            self.close()

    def stop(self) -> None:
        """Let `serve` end soon; safe in signal handlers."""
        self._stopped = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes its accept

    def close(self) -> None:
        """Stop listening and end all connections; idempotent. A fetch may go on until the tier's time-out."""
        self.stop()
        if self._listener.fileno() >= 0:
            with suppress(FileNotFoundError):
                os.unlink(self.path)
            self._listener.close()
        ending = list(self._connections.items())
        for _, connection in ending:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes its thread
        end = time.monotonic() + _CLOSING
        for thread, _ in ending:
            thread.join(max(0.0, end - time.monotonic()))

    def _converse(self, connection: socket.socket) -> None:
        found: _Found = {}
        try:
            while message := connection.recv(MAX_REQUEST + 1):
                try:
                    key, namespace, seconds = parsed(message)
                except (TypeError, ValueError) as error:
                    connection.send(MISSING + str(error).encode())
                    return
                connection.send(self._answer(connection, found, key, namespace, seconds))
        except OSError:
            pass  # the worker has gone
        except ShmStoreError as error:
            _log.warning("a worker gets no answer: %s", error)
        finally:
            with suppress(StoreClosedError):
                while found:
                    self._writer.cancel(found.popitem()[1])
            connection.close()
            del self._connections[threading.current_thread()]

    def _answer(
        self, connection: socket.socket, found: _Found, key: str, namespace: str | None, seconds: float
    ) -> bytes:
        """Return the answer to a request; `found` gets the reference. Give up if the worker goes."""
        end = time.monotonic() + seconds
        pause = _FIRST_PAUSE
        while True:
            with suppress(ObjectNotFoundError, StoreFullError):  # evicted just now; no lease is free
                if (key, namespace) not in found and self._tier.fetch(key, namespace=namespace):
                    found[key, namespace] = self._writer.get_cached(key, hold=True, namespace=namespace)
            if (key, namespace) in found:
                return FOUND + found[key, namespace].to_bytes()
            left = end - time.monotonic()
            if self._tier.stats().open:
                return MISSING + b"the tier does not answer"
            if left <= 0 or _has_gone(connection, min(pause, left)):
                return MISSING + b"the tier does not have it, has it damaged, or the store has no room for it"
            pause = min(2 * pause, _LONGEST_PAUSE)


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        os.fchmod(listener.fileno(), 0o600)  # which the file gets, so nobody else can ever connect
        try:
            listener.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise OSError(error.errno, error.strerror, path) from None
            if not _is_dead(path):
                taken = "another relay or file is here; end or remove it, or pass another path (--socket)"
                raise FileExistsError(errno.EEXIST, taken, path) from None
            os.unlink(path)
            listener.bind(path)
        listener.listen(128)
        return listener
    except BaseException:
        listener.close()
        raise


def _has_gone(connection: socket.socket, seconds: float) -> bool:
    """Wait so long for the end of the connection, and return whether it has come; a worker that waits sends nothing."""
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    return bool(waiting.poll(1000 * seconds))


def _is_dead(path: str) -> bool:
    """Return whether a killed relay has left its socket here."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        return stat.S_ISSOCK(os.lstat(path).st_mode) and probe.connect_ex(path) == errno.ECONNREFUSED
