"""The process that runs Mooncake's client for a `MooncakeTier`, which starts it by this file's path.

It imports nothing of shmstore, so that it starts fast. It maps places in files that it inherits, registers them with
Mooncake, and sends their addresses first. Then it answers on each of its pipes, in JSON: `[method, argument, ...]` is
a call of Mooncake's client, and its result is the answer. It ends when the pipes are closed.
"""

import ctypes
import fcntl
import json
import mmap
import os
import select
import socket
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any


def main() -> None:
    """Connect, say so, and serve until the other end closes."""
    given = json.loads(sys.argv[1])
    threading.Thread(target=_end_with, args=(given["parent"],), daemon=True).start()
    lanes = [Connection(fd) for fd in given["pipes"]]
    files = [_mapped(*place) for place in given["places"]]
    try:
        store, addresses = _connected(given["settings"], files)
    except (ImportError, ConnectionError) as error:
        lanes[0].send_bytes(json.dumps({"error": str(error)}).encode())
        return
    lanes[0].send_bytes(json.dumps({"addresses": addresses}).encode())
    others = [threading.Thread(target=_serve, args=(store, lane)) for lane in lanes[1:]]
    for thread in others:
        thread.start()
    _serve(store, lanes[0])
    for thread in others:
        thread.join()
    store.close()


def _end_with(parent: int) -> None:
    """End at once when that process has died; a child that it has forked lives on, so no pipe would tell."""
    ended = select.poll()
    ended.register(os.pidfd_open(parent), select.POLLIN)
    if os.getppid() == parent:  # else it died before we looked
        ended.poll()
    os._exit(1)  # the other process is dead, and a successor waits for the lock


def _mapped(fd: int, offset: int, size: int) -> mmap.mmap:
    """Map a place in a file, and lock it: who takes a store over waits until this process has ended."""
    fcntl.lockf(fd, fcntl.LOCK_SH, size, offset)
    return mmap.mmap(fd, size, offset=offset)


def _connected(settings: dict[str, str], files: list[mmap.mmap]) -> tuple[Any, list[int]]:
    from mooncake.store import MooncakeDistributedStore

    if not settings["local_hostname"]:
        settings["local_hostname"] = _own_address(settings["master_server_addr"])
    store = MooncakeDistributedStore()
    # No segment: this client gives the store no memory. No buffer: all that it moves is in `files`.
    code = store.setup(settings | {"global_segment_size": "0", "local_buffer_size": "0"})
    if code != 0:
        raise ConnectionError(f"Mooncake's client cannot reach its master {settings['master_server_addr']} ({code})")
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(file)) for file in files]
    for file, address in zip(files, addresses, strict=True):
        code = store.register_buffer(address, len(file))
        if code != 0:
            raise ConnectionError(f"Mooncake does not register memory of {len(file)} bytes ({code})")
    return store, addresses


def _own_address(master: str) -> str:
    """Return the address of this host that its packets to the master have."""
    host, _, port = master.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # a datagram socket: this sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ConnectionError(f"no way to Mooncake's master {master}: {error}") from error


def _serve(store: Any, lane: "Connection[Any, Any]") -> None:
    try:
        while True:
            method, *arguments = json.loads(lane.recv_bytes())
            lane.send_bytes(json.dumps(getattr(store, method)(*arguments)).encode())
    except (OSError, EOFError):
        pass  # the other end is closed, perhaps with an answer under way
    except BaseException:
        os._exit(1)  # the other end reads the end of the stream and starts another client


if __name__ == "__main__":
    main()
    os._exit(0)  # not Mooncake's handlers at exit: the store is closed
