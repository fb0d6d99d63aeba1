"""Two network namespaces with a cable between them, so that two hosts on one machine reach each other as hosts do.

Only open files and processes keep a namespace, so nothing is left of it when they have ended, whatever ends them.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

_CLONE_NEWNET = 0x40000000
_MINE = "/proc/thread-self/ns/net"
_LIBC = ctypes.CDLL(None, use_errno=True)


class Network:
    """Where the processes of each host run; without `namespaces` all share the network of this process."""

    def __init__(self, words: str, namespaces: Sequence[int] = ()) -> None:
        self.words = words
        """A sentence for the report."""
        self._namespaces = namespaces

    def address(self, host: int) -> str:
        """Return the address at which the other host reaches this one."""
        return f"192.0.2.{host + 1}" if self._namespaces else "127.0.0.1"

    @contextmanager
    def entered(self, host: int) -> Iterator[None]:
        """Have the processes that are started in the block run on this host."""
        if not self._namespaces:
            yield
            return
        home = os.open(_MINE, os.O_RDONLY)
        try:
            _checked(_LIBC.setns(self._namespaces[host], _CLONE_NEWNET))
            try:
                yield
            finally:
                _checked(_LIBC.setns(home, _CLONE_NEWNET))
        finally:
            os.close(home)


@contextmanager
def two_hosts() -> Iterator[Network]:
    """Yield a network with a namespace for each of two hosts, or the loopback where that is not allowed."""
    with ExitStack() as files:
        try:
            network = _joined(files)
        except OSError as error:
            network = Network(f"Both hosts use loopback: {error}.")
        yield network


def _joined(files: ExitStack) -> Network:
    home = os.open(_MINE, os.O_RDONLY)
    files.callback(os.close, home)
    namespaces = []
    for _ in range(2):
        _checked(_LIBC.unshare(_CLONE_NEWNET))
        try:
            namespaces.append(os.open(_MINE, os.O_RDONLY))
            files.callback(os.close, namespaces[-1])
        finally:
            _checked(_LIBC.setns(home, _CLONE_NEWNET))
    network = Network("Each host has a network namespace of its own, with a virtual cable between them.", namespaces)
    first, second = (f"/proc/{os.getpid()}/fd/{namespace}" for namespace in namespaces)
    _ip(f"link add cable0 netns {first} type veth peer name cable1 netns {second}")
    for host in range(2):
        with network.entered(host):
            _ip("link set lo up")
            _ip(f"address add {network.address(host)}/30 dev cable{host}")
            _ip(f"link set cable{host} up")
    return network


def _ip(command: str) -> None:
    """Run `ip` of iproute2; OSError if it is missing or refuses."""
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {command}: {done.stderr.strip()}")


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
