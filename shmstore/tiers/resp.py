"""`RespTier`: a tier on Redis, Valkey, or another server that speaks RESP.

The spans of `key` lie under "{key}:0", "{key}:1" and so on. The braces are a hash tag: one node has all of them. The
value of the first span starts with a *table*: the number of the spans, then the size of each. The first span is
written last, so it never announces spans that the server has refused.

    fetch      ->  STRLEN {key}:1    GET {key}:0
               <-  :6291456          $132 | table | first span
               ->                    GET {key}:1
               <-                    $6291456 | second span

A server evicts each key alone. STRLEN goes first, so that a payload which is gone is a miss before `into` is asked.

redis-py reads the URL and connects (TCP, TLS or Unix socket). All that follows is here, because redis-py copies what
it reads, and because its time-outs are for each `recv` and not for a call.
"""

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from redis.connection import Connection, parse_url
from redis.exceptions import RedisError

from shmstore.errors import TierError, TierFullError, cut, listed, shown
from shmstore.store.arguments import seconds_of
from shmstore.tiers.arguments import check_key, check_keys, check_spans, take
from shmstore.tiers.protocol import Into
from shmstore.tiers.resp_connection import NUMBER, SIZE, RespConnection
from shmstore.tiers.urls import TLS

__all__ = ["RespTier"]

_OPTIONS = {"host", "port", "path", "db", "username", "password", *TLS}
_MAX_VALUE = 512 << 20
"""The bytes that a server takes in one value: `proto-max-bulk-len`, if its operator has not changed it."""


class _InTime:
    """Makes a connection of redis-py wait until `deadline`: for all addresses of a name and for TLS together."""

    deadline = math.inf
    _left = property(lambda self: max(self.deadline - time.monotonic(), 0.001), lambda self, value: None)
    socket_timeout = socket_connect_timeout = _left


class RespTier:
    """Keeps values in Redis or Valkey; a `Tier`.

    `url` is redis://, rediss:// or unix://, with user, password, database and options of TLS. `timeout` is
    in seconds, for each call from its start to its end; only looking up the host's name is not in it. `expire` is the
    time in seconds after which the server removes a value; without it, the server's eviction policy decides.
    At most `connections` calls run at the same time; others wait, within their `timeout`.

    A span has nearly 512 MiB at most. Tags are ignored. Do not use one object on both sides of a fork.
    """

    def __init__(self, url: str, *, timeout: float = 1.0, expire: int | None = None, connections: int = 4) -> None:
        if not 0 < seconds_of("timeout", timeout) < math.inf:
            raise ValueError(f"timeout must be a positive number of seconds, not {shown(timeout)}")
        if expire is not None and expire < 1:
            raise ValueError(f"expire must be at least 1 second or None, not {shown(expire)}")
        if connections < 1:
            raise ValueError(f"connections must be at least 1, not {shown(connections)}")
        self._timeout = timeout
        self._expire = () if expire is None else (b"EX", b"%d" % expire)
        self._options: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
        kind = self._options.pop("connection_class", Connection)
        unknown = self._options.keys() - _OPTIONS
        if isinstance(kind, str):  # of the URL's query; redis-py's own is a class
            unknown.add("connection_class")
        if unknown:
            known = ", ".join(sorted(_OPTIONS))
            raise ValueError(f"option {listed(sorted(unknown))} of the URL is not known; its options are {known}")
        self._kind = type("_Connection", (_InTime, kind), {})
        try:
            redis = self._kind(**self._options)
        except (TypeError, RedisError) as error:  # redis-py makes each option of the URL an argument
            raise ValueError(f"an option of the URL is wrong: {error}") from None
        self._name = self._options.get("path") or f"{redis.host}:{redis.port}"
        self._connections = connections
        self._free = threading.Semaphore(connections)
        self._lock = threading.Lock()
        self._idle: list[RespConnection] = []
        self._closed = False

    def publish(self, key: str, spans: Sequence[memoryview], tags: Mapping[str, str]) -> None:
        """Keep these spans under `key`; see `Tier.publish`."""
        check_key(key)
        check_spans(spans)
        table = memoryview(NUMBER.pack(len(spans)) + b"".join(SIZE.pack(len(span)) for span in spans))
        values = [[table, spans[0]], *([span] for span in spans[1:])]
        largest = max(sum(map(len, value)) for value in values)
        if largest > _MAX_VALUE:
            raise TierFullError(
                f"a value has {largest} bytes, and Redis takes at most {_MAX_VALUE} in one",
                hint="such an item is processed on each host, or use a tier without this limit",
            )
        commands = [(b"SET", _key(key, i), value, *self._expire) for i, value in enumerate(values)]
        with self._connection() as connection:
            for batch in (commands[1:], commands[:1]):
                connection.send(batch)
                for _ in batch:
                    connection.ok()

    def fetch(self, key: str, into: Into) -> bool:
        """Read the spans of `key` into memory that `into` gives; see `Tier.fetch`.

        If `into` declines the first span, this connection is dropped and the next call makes another.
        """
        check_key(key)
        with self._connection() as connection:
            connection.send([(b"STRLEN", _key(key, 1)), (b"GET", _key(key, 0))])
            second, length = connection.number(), connection.size()
            sizes = [] if length is None else connection.table(length)
            if not sizes or (len(sizes) > 1 and sizes[1] != second):
                return False
            for i, size in enumerate(sizes):
                memory = take(into, size)
                if memory is None:
                    return False
                if i > 0:
                    connection.send([(b"GET", _key(key, i))])
                    if connection.size() != size:
                        return False
                connection.fill(memory.cast("B"))
                connection.end()
        return True

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether its first span is there; see `Tier.has`."""
        check_keys(keys)
        with self._connection() as connection:
            connection.send([(b"EXISTS", _key(key, 0)) for key in keys])
            return [connection.number() == 1 for _ in keys]

    def remove(self, keys: Sequence[str]) -> None:
        """Remove these keys; see `Tier.remove`."""
        check_keys(keys)
        with self._connection() as connection:
            connection.send([(b"GETRANGE", _key(key, 0), b"0", b"%d" % (NUMBER.size - 1)) for key in keys])
            removals = []
            for key in keys:
                number = connection.start()
                # The server may have evicted the first span of an object alone, and its number with it.
                removals.append((b"UNLINK", *(_key(key, i) for i in range(max(number, 2)))))
            connection.send(removals)
            for _ in removals:
                connection.number()

    def close(self) -> None:
        """End the connections; a call that runs ends by itself. Idempotent; calls after it raise TierError."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextmanager
    def _connection(self) -> Iterator[RespConnection]:
        """Lend a connection, which is kept afterwards if each of its commands has its whole answer."""
        deadline = time.monotonic() + self._timeout
        if not self._free.acquire(timeout=self._timeout):
            raise TierError(
                f"all {self._connections} connections to {self._name} are in use",
                hint="raise `connections`, or ask from fewer threads",
            )
        try:
            connection = self._take(deadline)
            try:
                yield connection
            finally:
                with self._lock:
                    keep = connection.unanswered == 0 and not self._closed
                    if keep:
                        self._idle.append(connection)
                if not keep:
                    connection.close()
        finally:
            self._free.release()

    def _take(self, deadline: float) -> RespConnection:
        while True:
            with self._lock:
                if self._closed:
                    raise TierError("the tier is closed", hint="open it again")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect(deadline)
            if connection.is_quiet():
                connection.deadline = deadline
                return connection
            connection.close()  # its server has ended or restarted

    def _connect(self, deadline: float) -> RespConnection:
        # redis-py's own greeting would set its own time-outs, so it is replaced by nothing.
        redis: Any = self._kind(**self._options, redis_connect_func=lambda _: None)
        redis.deadline = deadline
        try:
            redis.connect()
        except (RedisError, OSError) as error:
            raise TierError(f"{self._name} cannot be reached: {cut(error)}") from None
        connection = RespConnection(redis, self._name, deadline)
        greeting = []
        if redis.password:
            user = (redis.username.encode(),) if redis.username else ()
            greeting.append((b"AUTH", *user, redis.password.encode()))
        if redis.db:
            greeting.append((b"SELECT", b"%d" % redis.db))
        try:
            connection.send(greeting)
            for _ in greeting:
                connection.ok()
        except BaseException:
            connection.close()
            raise
        return connection


def _key(key: str, span: int) -> bytes:
    return b"{%b}:%d" % (key.encode(), span)
