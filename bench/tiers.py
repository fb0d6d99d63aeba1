"""Time publishes and fetches of 6 MiB over each back end of a tier, against what it is built on: `make tiers`.

All bytes come from one warm mapping in /dev/shm and go into it, as a store's do. The servers are other processes of
this machine, which this program starts. The ways take turns, and the result is the median. What is not installed is
left out, and said. The table goes into docs/guides/beyond-one-host.md.
"""

import mmap
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench import tier_hits
from bench.peers.harness import machine
from shmstore.tiers import Tier

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guides" / "beyond-one-host.md"
SIZE, ROUNDS, WARM_UP, PATIENCE = 6 << 20, 100, 3, 10.0
KEY = "shmstore-bench"
HEAD = memoryview(bytes(300))  # as large as the metadata of an image
PACKAGES = ("redis", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")


class Memory(NamedTuple):
    """A mapping in /dev/shm, the half to publish, and the half to fetch into."""

    path: str
    whole: memoryview
    source: memoryview
    target: memoryview


@dataclass
class Way:
    """One way to move the bytes, the way that it is built on, and the seconds of each round."""

    name: str
    publish: Callable[[], object]
    fetch: Callable[[], object]
    raw: str | None = None
    publishes: list[float] = field(default_factory=list)
    fetches: list[float] = field(default_factory=list)


def tier_way(name: str, tier: Tier, memory: Memory, raw: str | None = None) -> Way:
    head = memoryview(bytearray(len(HEAD)))
    return Way(
        name,
        lambda: tier.publish(KEY, [HEAD, memory.source.toreadonly()]),
        lambda: tier.fetch(KEY, lambda size: head if size == len(head) else memory.target),
        raw,
    )


def receive(sock: socket.socket, view: memoryview) -> None:
    while len(view):
        view = view[sock.recv_into(view) :]


def skip(sock: socket.socket, answer: bytes) -> None:
    receive(sock, memoryview(bytearray(len(answer))))


def serve(listener: socket.socket) -> None:
    """Keep what "o" is followed by, and answer "f" with it."""
    kept = memoryview(bytearray(SIZE))
    sock, _ = listener.accept()
    while order := sock.recv(1):
        if order == b"o":
            receive(sock, kept)
            sock.sendall(b"k")
        else:
            sock.sendall(kept)


def socket_way(name: str, sock: socket.socket, memory: Memory, publish: list[bytes], fetch: list[bytes]) -> Way:
    """Return a way over a socket: what to send before and after the bytes, and what the server says around them."""

    def publish_() -> None:
        sock.sendall(publish[0])
        sock.sendall(memory.source)
        sock.sendall(publish[1])
        skip(sock, publish[2])

    def fetch_() -> None:
        sock.sendall(fetch[0])
        skip(sock, fetch[1])
        receive(sock, memory.target)
        skip(sock, fetch[2])

    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Way(name, publish_, fetch_)


def plain_tcp(memory: Memory, end: ExitStack) -> Iterator[Way]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        get_context("fork").Process(target=serve, args=(listener,), daemon=True).start()
        sock = end.enter_context(socket.create_connection(listener.getsockname()))
    yield socket_way("loopback TCP, a plain socket", sock, memory, [b"o", b"", b"k"], [b"f", b"", b""])


def resp(memory: Memory, end: ExitStack) -> Iterator[Way]:
    import redis

    from shmstore.tiers.resp import RespTier
    from tests.tiers.redis_server import RedisServer

    if shutil.which("redis-server") is None:
        raise ImportError("redis-server")
    server = end.enter_context(closing(RedisServer()))
    client = end.enter_context(closing(redis.Redis.from_url(server.url)))
    tier = end.enter_context(closing(RespTier(server.url, timeout=PATIENCE)))
    raw, size = "Redis, raw RESP into a buffer", b"$%d\r\n" % SIZE
    publish = [b"*3\r\n$3\r\nSET\r\n$3\r\nraw\r\n" + size, b"\r\n", b"+OK\r\n"]
    sock = end.enter_context(socket.create_connection(("127.0.0.1", server.port)))
    yield socket_way(raw, sock, memory, publish, [b"*2\r\n$3\r\nGET\r\n$3\r\nraw\r\n", size, b"\r\n"])
    yield Way(
        "Redis, redis-py",
        lambda: client.set("library", memory.source),
        lambda: memory.target.__setitem__(slice(None), client.get("library")),
    )
    yield tier_way("`RespTier`", tier, memory, raw)


def mooncake(memory: Memory, end: ExitStack) -> Iterator[Way]:
    from mooncake.store import MooncakeDistributedStore

    from shmstore.tiers.mooncake import MooncakeTier
    from tests.tiers.servers import LOOPBACK, MooncakeServers, missing_for_mooncake

    if reason := missing_for_mooncake():
        raise ImportError(reason)
    servers = end.enter_context(closing(MooncakeServers(LOOPBACK, 256 << 20)))
    store = MooncakeDistributedStore()
    end.callback(store.close)
    if store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", servers.address):
        raise ImportError("Mooncake's client does not reach its master")
    start = int(np.frombuffer(memory.whole, np.uint8).ctypes.data)
    store.register_buffer(start, len(memory.whole))
    tier = end.enter_context(closing(MooncakeTier(servers.address, timeout=PATIENCE)))
    tier.register(memory.whole, memory.path)
    raw = "Mooncake's client"
    yield Way(raw, lambda: store.upsert_from("raw", start, SIZE), lambda: store.get_into("raw", start + SIZE, SIZE))
    yield tier_way("`MooncakeTier`", tier, memory, raw)


def folders(memory: Memory, end: ExitStack) -> Iterator[Way]:
    from shmstore.tiers.directory import DirectoryTier

    for where, words in (("/dev/shm", "in /dev/shm"), (str(ROOT), "on a disk, in its page cache")):
        folder = end.enter_context(tempfile.TemporaryDirectory(prefix="shmstore-bench-", dir=where))
        tier = end.enter_context(closing(DirectoryTier(folder, timeout=PATIENCE)))
        yield tier_way(f"`DirectoryTier`, {words}", tier, memory)


def measured(memory: Memory, end: ExitStack) -> list[Way]:
    ways = []
    for make in (plain_tcp, resp, mooncake, folders):
        try:
            ways += list(make(memory, end))
        except ImportError as error:
            print(f"left out: {error}", file=sys.stderr)
    for number in range(ROUNDS):
        for way in ways:
            for call, times in ((way.publish, way.publishes), (way.fetch, way.fetches)):
                begin = time.perf_counter()
                call()
                times.append(time.perf_counter() - begin)
            if number < WARM_UP:  # of no weight in a median of so many
                if memory.source != memory.target:
                    raise ValueError(f"{way.name} gave other bytes than it got")
                memory.target[:] = bytes(SIZE)
    return ways


def table(ways: list[Way]) -> Iterator[str]:
    yield "| way | publish, ms | fetch, ms | fetch, relative to what it is built on |\n|---|---|---|---|"
    fetches = {way.name: statistics.median(way.fetches) * 1e3 for way in ways}
    for way in ways:
        beside = f"{fetches[way.name] / fetches[way.raw]:.2f} times" if way.raw else ""
        yield f"| {way.name} | {statistics.median(way.publishes) * 1e3:.2f} | {fetches[way.name]:.2f} | {beside} |"


def described() -> str:
    found = machine() | {one.name: one.version for one in metadata.distributions() if one.name in PACKAGES}
    if server := shutil.which("redis-server"):
        found["redis-server"] = subprocess.run([server, "--version"], capture_output=True, text=True).stdout.split()[2]
    return ", ".join(f"{name} {value}" for name, value in found.items())


def main() -> None:
    """Measure, print the table, and write it into the page."""
    with ExitStack() as end:
        file = end.enter_context(tempfile.NamedTemporaryFile(prefix="shmstore-bench-", dir="/dev/shm"))
        file.write(os.urandom(2 * SIZE))
        file.flush()
        whole = memoryview(mmap.mmap(file.fileno(), 2 * SIZE))
        ways = measured(Memory(file.name, whole, whole[:SIZE], whole[SIZE:]), end)
    note = f"Medians of {ROUNDS} rounds, in which all ways took turns; {described()}."
    write("tiers", "\n".join([*table(ways), "", note, ""]))
    try:
        write("hits", "\n".join([*tier_hits.table(), ""]))
    except ImportError as error:
        print(f"left out: {error}", file=sys.stderr)


def write(name: str, said: str) -> None:
    """Print a table, and write it between its marks in the page."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(f"<!-- {name}: begin -->\n")
    PAGE.write_text(before + begin + said + "".join(rest.partition(f"<!-- {name}: end -->")[1:]), encoding="utf-8")
    print(said)


if __name__ == "__main__":
    main()
