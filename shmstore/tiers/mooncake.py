"""A tier on Mooncake Store: `MooncakeTier`.

Mooncake's client runs in a process of its own (`mooncake_client.py`), which maps the same memory as this process.
There are three reasons. A call of Mooncake has no time-out, and may use its memory as long as it runs. Only the end of
its process ends it for sure: the memory of a late call is free again when we return. The connection to a master that
does not answer holds the interpreter's lock, up to 90 s. And a fault in Mooncake's client ends that process alone.

A value is one key of Mooncake, and another one for each large span:

    KEY/head    a table (`table.py`), and the bytes of the small spans in order
    KEY/i       span i, if it is larger than INLINE

The head is written last and removed first.
"""

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from mmap import mmap
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any, Final

import numpy as np

from shmstore.errors import MissingExtraError, TierError, TierFullError, cut, unless_interrupted
from shmstore.store.arguments import seconds_of
from shmstore.tiers import table
from shmstore.tiers.protocol import Into

INLINE: Final = 64 << 10
"""Bytes of the largest span that travels in the value's first key, which saves a round trip to the master."""
LANES: Final = 4
"""Calls of one tier that run at a time; others wait."""
STAGING: Final = 16 << 20
"""Bytes of the largest span outside of registered memory."""

_LONGEST: Final = 1 << 20
"""Bytes of the longest answer of the process."""
_PROGRAM: Final = str(Path(__file__).with_name("mooncake_client.py"))

# Results of Mooncake's calls.
_FULL = (-200, -1700)  # no room; more than the tenant's quota
_REPLACED = -601  # another client has published the same key meanwhile, and its value stands
_ABSENT = (-703, -704)  # is being written; is not there
_LONGER = -600  # than the memory for it: replaced since its size was read


class MooncakeTier:
    """Keeps values in a Mooncake Store, which has a master and nodes that give it memory.

    `master` is "host:port". `metadata`, `protocol`, `devices` and `host` are Mooncake's `metadata_server`, `protocol`,
    `rdma_devices` and `local_hostname`; an empty `host` is the address of this host on the way to the master. Spans
    outside of registered memory are copied once, and have up to `STAGING` bytes.

    The first call starts a process, and so does the first call after a time-out. Calls raise TierError until it has
    connected, which takes about half a second. When a call returns or raises, nothing uses its memory any more.
    A replaced value keeps the place of the old one, so a failed publish may leave a mix of both.
    """

    def __init__(
        self,
        master: str,
        *,
        metadata: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        devices: str = "",
        host: str = "",
        timeout: float = 1.0,
    ) -> None:
        """Connect to nothing yet. MissingExtraError if Mooncake is not installed."""
        if not master.rpartition(":")[2].isdecimal():
            raise ValueError(f"master must be 'host:port', not {master!r}")
        if find_spec("mooncake") is None:
            raise MissingExtraError(what="mooncake://", extra="mooncake")
        self._settings = {
            "local_hostname": host,
            "metadata_server": metadata,
            "protocol": protocol,
            "rdma_devices": devices,
            "master_server_addr": master,
        }
        self._timeout = seconds_of("timeout", timeout)
        fd = os.memfd_create("shmstore-staging")
        os.ftruncate(fd, LANES * STAGING)
        self._regions = [_Region(memoryview(mmap(fd, 0)), fd, 0)]
        self._lock = threading.Lock()
        self._client: _Client | None = None
        self._closed = False

    def register(self, memory: memoryview, path: str | os.PathLike[str], offset: int = 0) -> None:
        """Move spans in `memory` without a copy from now on; it is this process's mapping of a file from `offset` on.

        `offset` is a multiple of the page size. The tier keeps `memory` until it is closed. Call it before the first
        publish or fetch, which it would interrupt.
        """
        fd = os.open(path, os.O_RDWR)
        if os.fstat(fd).st_size < offset + memory.nbytes:
            os.close(fd)
            raise ValueError(f"memory must be a mapping of {os.fspath(path)!r}, which is shorter")
        with self._lock:
            self._check_open()
            self._regions.append(_Region(memory, fd, offset))
            client, self._client = self._client, None
        if client is not None:
            client.kill()

    def publish(self, key: str, spans: Sequence[memoryview]) -> None:
        """Keep these spans under `key`; see `Tier.publish`."""
        head = _head_of(spans)
        with self._lane() as lane:
            for i, span in enumerate(spans):
                if span.nbytes > INLINE:
                    lane.put(f"{key}/{i}", span)
            lane.put(f"{key}/head", memoryview(head))

    def fetch(self, key: str, into: Into) -> bool | None:
        """Read the spans of `key` into memory that `into` gives; see `Tier.fetch`."""
        with self._lane() as lane:
            found = lane.head(key)
            if found is None:
                return False
            sizes, small = found
            if not sizes:
                return None
            for i, size in enumerate(sizes):
                view = table.take(into, size)
                if view is None:
                    return False
                if size <= INLINE:
                    view[:] = small[i]
                elif (has := lane.get(f"{key}/{i}", view)) != size:
                    return None if has else False
        return True

    def has(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether its first part is there."""
        with self._lane() as lane:
            codes = lane.ask("batch_is_exist", [f"{key}/head" for key in keys])
        for code in codes:
            if code < 0:
                raise _refusal("did not say what it has", code)
        return [code == 1 for code in codes]

    def remove(self, keys: Sequence[str]) -> None:
        """Remove these keys; ignore those that are absent."""
        with self._lane() as lane:
            for key in keys:
                found = lane.head(key)
                if found is not None:
                    lane.remove([f"{key}/head"])
                    lane.remove([f"{key}/{i}" for i, size in enumerate(found[0]) if size > INLINE])

    def close(self) -> None:
        """End the process with Mooncake's client; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.end(self._timeout)
        for region in self._regions:
            os.close(region.fd)
        self._regions.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise TierError("the tier is closed", hint="make another MooncakeTier")

    @contextmanager
    def _lane(self) -> "Iterator[_Lane]":
        """Take a lane of the client, which is started if none runs, until a deadline that all steps share."""
        deadline = time.monotonic() + self._timeout
        with self._lock:
            self._check_open()
            if self._client is None or self._client.dead:
                try:
                    self._client = _Client(self._settings, list(self._regions), self._timeout)
                except OSError as error:
                    raise TierError(f"Mooncake's client cannot be started: {error}") from error
            client = self._client
        lane = client.take(deadline)
        try:
            yield lane
        finally:
            client.give_back(lane)


def _address(view: memoryview) -> int:
    """Return where a flat view begins, also a read-only one."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


class _Region:
    """Memory that Mooncake's client maps too."""

    def __init__(self, memory: memoryview, fd: int, offset: int) -> None:
        self.memory = memory
        self.fd = fd
        self.offset = offset
        self.start = _address(memory)
        self.end = self.start + memory.nbytes


class _Client:
    """The process with Mooncake's client, and the lanes to it."""

    def __init__(self, settings: dict[str, str], regions: list[_Region], timeout: float) -> None:
        self.regions = regions
        self.addresses: list[int] = []  # where that process has the regions; empty until it is connected
        self.dead = False
        self._connecting = threading.Lock()
        pairs = [Pipe() for _ in range(LANES)]
        for ours, _ in pairs:
            with socket.socket(fileno=os.dup(ours.fileno())) as end:  # a message may come in parts, or fill the buffer
                for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                    end.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", *divmod(int(timeout * 1e6), 10**6)))
        self._first = pairs[0][0]
        self._idle: LifoQueue[_Lane | None] = LifoQueue()  # with None if it is dead
        for i, (ours, _) in enumerate(pairs):
            self._idle.put(_Lane(self, ours, regions[0].memory[i * STAGING :][:STAGING]))
        fds = [theirs.fileno() for _, theirs in pairs]
        files = [region.fd for region in regions]
        more = {"places": [(each.fd, each.offset, each.memory.nbytes) for each in regions], "settings": settings}
        # One attempt to connect, and no longer than a call of ours: this process sees the end of ours only after it.
        milliseconds = str(max(1, int(timeout * 1000)))
        limits = {
            "MC_STORE_CLIENT_SETUP_RETRIES": "1",
            "MC_RPC_TIMEOUT_MS": milliseconds,
            "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
        }
        try:
            self._process = subprocess.Popen(
                # -P: our folder has a `mooncake` that would be imported for Mooncake's.
                [sys.executable, "-P", _PROGRAM, json.dumps({"pipes": fds, "parent": os.getpid()} | more)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # Mooncake logs there; with MC_LOG_DIR it does so into files
                pass_fds=[*fds, *files],
                env=limits | os.environ,
                process_group=0,  # Ctrl-C is for our process, which may still want to publish something
            )
        finally:
            for _, theirs in pairs:
                theirs.close()

    def take(self, deadline: float) -> "_Lane":
        """Return a lane that no other thread has, once the process is connected."""
        self._connect(deadline)
        try:
            lane = self._idle.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            hint = "use fewer threads, or a longer timeout"
            raise TierError(f"{LANES} other calls of this tier run", hint=hint) from None
        if lane is None:
            self._idle.put(None)  # for the next one
            raise TierError("another call of this tier was late, and its end ended this one")
        lane.deadline = deadline
        return lane

    def give_back(self, lane: "_Lane") -> None:
        """Return a lane that was taken."""
        if self.dead:
            lane.pipe.close()
        else:
            self._idle.put(lane)

    def kill(self) -> None:
        """End the process at once; when this returns, nothing of it uses memory of ours."""
        self._drop_lanes()
        self._process.kill()
        self._process.wait()

    def end(self, timeout: float) -> None:
        """Let the process end its calls and take leave of the master; kill it if that takes longer than `timeout`."""
        self._drop_lanes()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def _drop_lanes(self) -> None:
        self.dead = True
        with suppress(Empty):
            while (lane := self._idle.get_nowait()) is not None:
                lane.pipe.close()
        self._idle.put(None)

    def _connect(self, deadline: float) -> None:
        if not self._connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TierError("Mooncake's client is still connecting")
        try:
            if self.addresses or self.dead:
                return
            if not self._first.poll(max(0.0, deadline - time.monotonic())):
                raise TierError("Mooncake's client is still connecting")
            try:
                reply = json.loads(self._first.recv_bytes(_LONGEST))
            except unless_interrupted(Exception) as error:
                reply = {"error": f"Mooncake's client has ended: {error}"}
            if "error" in reply:
                self.kill()
                raise TierError(cut(reply["error"]))
            self.addresses = reply["addresses"]
        finally:
            self._connecting.release()


@dataclass
class _Lane:
    """One call at a time to the process, and memory of its own for what is not in registered memory."""

    client: _Client
    pipe: "Connection[Any, Any]"
    staging: memoryview
    deadline: float = 0.0

    def put(self, key: str, span: memoryview) -> None:
        """Write a span under a key of Mooncake."""
        address = self._placed(span)
        if address is None:
            staged = self._staged(span.nbytes)
            staged[:] = span
            address = self._placed(staged)
        code = self.ask("upsert_from", key, address, span.nbytes)
        if code in _FULL:
            raise TierFullError(f"Mooncake has no room for {span.nbytes} bytes ({code})")
        if code not in (0, _REPLACED):
            raise _refusal("did not keep a span", code)

    def get(self, key: str, view: memoryview) -> int | None:
        """Fill `view` from a key of Mooncake; return how many bytes there are, None if there are none or too many."""
        address = self._placed(view)
        if address is not None:
            return self._get_into(key, address, view.nbytes)
        staged = self._staged(view.nbytes)
        has = self._get_into(key, self._placed(staged), view.nbytes)
        if has == view.nbytes:
            view[:] = staged
        return has

    def head(self, key: str) -> tuple[list[int], dict[int, bytes]] | None:
        """Return the sizes of the spans of a value, none for what is not one, and the bytes of the small ones.

        None if it is not there.
        """
        length = self._get_into(f"{key}/head", self._placed(self.staging), STAGING)
        return None if length is None else _parsed(bytes(self.staging[:length]))

    def remove(self, keys: list[str]) -> None:
        """Remove keys of Mooncake, also those that were read just now."""
        for code in self.ask("batch_remove", keys, True) if keys else []:
            if code != 0 and code not in _ABSENT:
                raise _refusal("did not remove a span", code)

    def ask(self, *call: Any) -> Any:
        """Call a method of Mooncake's client, and return its answer; end its process if that does not come in time."""
        try:
            self.pipe.send_bytes(json.dumps(call).encode())
            if not self.pipe.poll(max(0.0, self.deadline - time.monotonic())):
                raise TimeoutError
            return json.loads(self.pipe.recv_bytes(_LONGEST))
        except BaseException as error:
            self.client.kill()  # also after an interrupt: the call may still use its memory
            if isinstance(error, unless_interrupted(TimeoutError)):
                raise TierError("Mooncake did not answer in time") from error
            if isinstance(error, unless_interrupted(Exception)):
                raise TierError(f"Mooncake's client has ended: {error}") from error
            raise

    def _get_into(self, key: str, address: int | None, size: int) -> int | None:
        """Return how many bytes there were, None if there are none or too many."""
        code: int = self.ask("get_into", key, address, size)
        if code in _ABSENT or code == _LONGER:
            return None
        if code < 0:
            raise _refusal("did not give a span", code)
        return code

    def _placed(self, view: memoryview) -> int | None:
        """Return where the process has this memory, None if it does not."""
        start = _address(view)
        for region, theirs in zip(self.client.regions, self.client.addresses, strict=True):
            if region.start <= start and start + view.nbytes <= region.end:
                return theirs + start - region.start
        return None

    def _staged(self, nbytes: int) -> memoryview:
        if nbytes > STAGING:
            raise TierError(
                f"a span of {nbytes} bytes outside of registered memory is larger than {STAGING} bytes",
                hint="register its memory",
            )
        return self.staging[:nbytes]


def _refusal(what: str, code: int) -> TierError:
    return TierError(
        f"Mooncake {what}: error {cut(code)}", hint="look at its master and nodes; its types.h has the errors"
    )


def _head_of(spans: Sequence[memoryview]) -> bytes:
    return b"".join([table.packed(spans), *(span for span in spans if span.nbytes <= INLINE)])


def _parsed(head: bytes) -> tuple[list[int], dict[int, bytes]]:
    """Take a head apart; without a span if it is not one."""
    sizes = table.sizes_in(head)
    at = table.length_of(len(sizes))
    small = {}
    for i, size in enumerate(sizes):
        if size <= INLINE:
            small[i] = head[at : at + size]
            at += size
    return (sizes, small) if at == len(head) else ([], {})
