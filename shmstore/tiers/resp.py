"""`RespTier`: a tier on Redis, Valkey, or another server that speaks RESP.

A value is one string under its key: a table (`table.py`), then its spans without a gap.

    fetch      ->  GETRANGE key 0 16383
               <-  table | first span | the start of the second
               ->  GETRANGE key 16384 6291967
               <-  the rest of the second span, straight into its memory

redis-py connects, greets, sends and parses. It copies what it reads, so large spans are read past its parser. Its
time-outs are for each `recv`, so it gets a socket whose waits all end with the call.
"""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis._parsers import _RESP2Parser
from redis.connection import Connection, ConnectionPool, parse_url
from redis.exceptions import (
    AuthenticationError,
    InvalidResponse,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shmstore.errors import TierError, TierFullError, cut, shown, unless_interrupted
from shmstore.store.arguments import int_of, seconds_of
from shmstore.tiers import table
from shmstore.tiers.protocol import Into

_AHEAD = 1 << 14
"""The bytes that come with the table."""
_MAX_ANSWER = 1 << 20
"""The bytes that redis-py may read in one call, whatever the server says."""
_MAX_VALUE = 512 << 20
"""The bytes that a server takes in one value: `proto-max-bulk-len`, if its operator has not changed it."""
_HINTS: dict[type[Exception], str] = {
    AuthenticationError: "correct user and password in the URL: redis://:PASSWORD@HOST:PORT or redis://USER:PASSWORD@HOST",
    NoPermissionError: "let this user (ACL) run AUTH, SELECT, SET, GETRANGE, EXISTS and UNLINK",
    MovedError: "name one server or a proxy: a tier does not follow a cluster from node to node",
    ReadOnlyError: "name the primary: this server is a replica",
}
_call = threading.local()
"""Of the call that a thread makes: its `deadline`, and how many bytes it has `read`."""


def _left() -> float:
    left: float = _call.deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _Socket:
    """A connected socket of which each wait ends when the call of its thread is late."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._waits = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def settimeout(self, seconds: float | None) -> None:
        self._waits = seconds != 0  # what else redis-py sets is for each wait

    def sendall(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            self._socket.settimeout(_left())
            rest = rest[self._socket.send(rest) :]

    def recv(self, size: int) -> bytes:
        self._socket.settimeout(_left() if self._waits else 0)
        received = self._socket.recv(size)
        _call.read += len(received)
        if not received or _call.read > _MAX_ANSWER:
            raise OSError("it says too much" if received else "it ended the connection")
        return received

    def recv_into(self, memory: Any, *size: int) -> int:
        self._socket.settimeout(_left() if self._waits else 0)
        received = self._socket.recv_into(memory, *size)
        if not received:
            raise OSError("it ended the connection")
        return received


class _InTime:
    """What makes a connection of redis-py end its waits with the call: for all addresses of a name and TLS together."""

    socket: _Socket
    _seconds = property(lambda self: max(_call.deadline - time.monotonic(), 0.001), lambda self, value: None)
    socket_timeout = socket_connect_timeout = _seconds

    def _connect(self) -> _Socket:
        self.socket = _Socket(super()._connect())  # type: ignore[misc]
        return self.socket


@contextmanager
def _telling(name: str) -> Iterator[None]:
    """Raise what redis-py or its socket raises as an error of the tier."""
    try:
        yield
    except unless_interrupted(Exception) as error:  # redis-py raises anything if a server talks nonsense
        hint = next((hint for kind, hint in _HINTS.items() if isinstance(error, kind)), None)
        if isinstance(error, (TimeoutError, RedisTimeoutError)):
            raise TierError(f"{name} did not answer in time") from None
        if hint is not None or isinstance(error, ResponseError):
            refused = TierFullError if isinstance(error, OutOfMemoryError) else TierError
            words = f"{getattr(error, 'status_code', None) or ''} {error}".strip()
            raise refused(f"{name} refused: {cut(words)}", hint=hint) from None
        if isinstance(error, (OSError, RedisConnectionError)):
            if "CERTIFICATE_VERIFY" in str(error):
                hint = "name the file of its authority in the URL: ?ssl_ca_certs=FILE"
            raise TierError(f"{name} cannot be reached: {cut(error)}", hint=hint) from None
        raise TierError(f"{name} does not speak RESP as it must: {cut(error)}") from None


class RespTier:
    """Keeps values in Redis or Valkey; a `Tier`.

    `url` is redis://, rediss:// or unix://, with user, password, database and options of TLS. `timeout` is
    in seconds, for each call from its start to its end; only looking up the host's name is not in it. `expire` is the
    time in seconds after which the server removes a value; without it, the server's eviction policy decides.
    At most `connections` calls run at the same time; others wait, within their `timeout`.

    A value has nearly 512 MiB at most. Do not use one object on both sides of a fork.
    """

    def __init__(self, url: str, *, timeout: float = 1.0, expire: int | None = None, connections: int = 4) -> None:
        self._connections = int_of("connections", connections, 1, 1 << 16)
        self._timeout = seconds_of("timeout", timeout)
        self._expire = [] if expire is None else [b"EX", b"%d" % int_of("expire", expire, 1, 1 << 32)]
        options: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
        kind = type("_Connection", (_InTime, options.pop("connection_class", Connection)), {})
        try:
            self._name = kind(**options)._host_error()
        except (TypeError, RedisError) as error:  # redis-py makes each option of the URL an argument
            raise ValueError(f"an option of the URL is wrong: {error}") from None
        # hiredis, where it is installed, would read past `_Socket.recv`, which counts.
        self._pool: Any = ConnectionPool(connection_class=kind, **options, protocol=2, parser_class=_RESP2Parser)
        self._free = threading.Semaphore(connections)
        self._closed = False

    def __repr__(self) -> str:
        return f"RespTier({self._name!r})"

    def publish(self, key: str, spans: Sequence[memoryview]) -> None:
        """Keep these spans under `key`; see `Tier.publish`."""
        start = b"".join([table.packed(spans), *spans[:-1]])  # in an object, only the last span is large
        size = len(start) + len(spans[-1])
        if size > _MAX_VALUE:
            raise TierFullError(
                f"a value has {size} bytes, and Redis takes at most {_MAX_VALUE} in one",
                hint="such an item is processed on each host, or use a tier without this limit",
            )
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + len(self._expire), len(key), key.encode(), size)
        end = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in self._expire)
        with self._connection() as connection:
            self._ask(connection, [head + start, spans[-1], end], bytes)

    def fetch(self, key: str, into: Into) -> bool | None:
        """Read the spans of `key` into memory that `into` gives; see `Tier.fetch`."""
        with self._connection() as connection:
            try:
                (ahead,) = self._ask(connection, connection.pack_command("GETRANGE", key, 0, _AHEAD - 1), bytes)
            except TierError as error:
                if "WRONGTYPE" not in str(error):
                    raise
                return None  # what somebody else keeps there
            sizes = table.sizes_in(ahead)
            at = table.length_of(len(sizes))
            end = at + sum(sizes)
            if not sizes or len(ahead) != min(end, _AHEAD):
                return None if ahead else False
            for size in sizes:
                memory = table.take(into, size)
                if memory is None:
                    return False
                known = ahead[at : at + size]
                memory[: len(known)] = known
                rest = memory[len(known) :]
                at += size
                more = at == end and at >= _AHEAD  # the value has no byte more than that
                has = self._fill(connection, key, at - len(rest), rest, more) if len(rest) or more else 0
                if has != len(rest):
                    return None if has else False  # evicted since
        return True

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether something is there; see `Tier.has`."""
        with self._connection() as connection:
            packed = connection.pack_commands([("EXISTS", key) for key in keys])
            return [number == 1 for number in self._ask(connection, packed, int, len(keys))]

    def remove(self, keys: Sequence[str]) -> None:
        """Remove these keys; see `Tier.remove`."""
        with self._connection() as connection:
            self._ask(connection, connection.pack_commands([("UNLINK", key) for key in keys]), int, len(keys))

    def close(self) -> None:
        """End the connections, also those of calls that run. Idempotent; calls after it raise TierError."""
        self._closed = True
        self._pool.disconnect()

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """Lend a connection until the call of this thread is late; it is dropped if the call raises."""
        _call.deadline, _call.read = time.monotonic() + self._timeout, 0
        if not self._free.acquire(timeout=self._timeout):
            raise TierError(
                f"all {self._connections} connections to {self._name} are in use",
                hint="raise `connections`, or ask from fewer threads",
            )
        try:
            if self._closed:
                raise TierError("the tier is closed", hint="open it again")
            with _telling(self._name):
                connection = self._pool.get_connection()
            try:
                yield connection
            except BaseException:
                connection.disconnect()
                raise
            finally:
                if self._closed:
                    connection.disconnect()
                self._pool.release(connection)
        finally:
            self._free.release()

    def _ask(self, connection: Any, packed: Sequence[bytes | memoryview], kind: type, count: int = 1) -> list[Any]:
        """Send packed commands in one go, and return their answers, which are of this kind."""
        with _telling(self._name):
            connection.send_packed_command(packed)
            answers = [connection.read_response() for _ in range(count)]
            for answer in answers:
                if type(answer) is not kind:
                    raise InvalidResponse(shown(answer))
            return answers

    def _fill(self, connection: Any, key: str, start: int, memory: memoryview, more: bool) -> int:
        """Fill `memory` with a value's bytes from `start` on; return how many there are: if not as many, nothing is.

        With `more` it asks for one byte more.
        """
        with _telling(self._name):
            connection.send_command("GETRANGE", key, start, start + len(memory) - 1 + more)
            line = b""
            while not line.endswith(b"\n"):
                line += connection.socket.recv(1)
            if line[:1] != b"$":
                raise InvalidResponse(shown(line))
            if (size := int(line[1:])) != len(memory):
                connection.disconnect()  # the rest of the answer is of no use
                return size
            while memory:
                memory = memory[connection.socket.recv_into(memory) :]
            if (end := connection.socket.recv(1) + connection.socket.recv(1)) != b"\r\n":
                raise InvalidResponse(shown(end))
        return size
