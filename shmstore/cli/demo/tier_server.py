"""The tier of a demo with two hosts: a folder, a server that the demo starts, or one that is there."""

from __future__ import annotations

import ctypes
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from shmstore.cli.demo.network import Network, two_hosts
from shmstore.cli.demo.supervisor import DemoError, interrupts_held_back
from shmstore.errors import TierError
from shmstore.tiers import open_tier

REDIS = "redis"
"""A tier for which the demo starts a server."""
_PR_SET_PDEATHSIG = 1
_TIMEOUT_S = 10
_SERVERS = ("redis-server", "valkey-server")


@dataclass(frozen=True)
class DemoTier:
    """A tier that both hosts reach."""

    url: str
    network: Network
    kill: Callable[[], None] | None = None
    """Ends its server at once; None if the demo has not started it."""


@contextmanager
def demo_tier(asked: str | None) -> Iterator[DemoTier]:
    """Yield the tier of `--tier`, which answers; without one, a temporary folder. DemoError if it does not."""
    if asked is None:
        with tempfile.TemporaryDirectory(prefix="shmstore-demo-") as folder:
            yield _tried(DemoTier(f"file://{folder}", Network("The tier is a folder, so nothing goes over a network.")))
    elif asked == REDIS:
        with two_hosts() as network, _redis_server(network) as tier:
            yield _tried(tier)
    else:
        yield _tried(DemoTier(asked, Network("Both hosts reach the tier over the network of this machine.")))


def _tried(tier: DemoTier) -> DemoTier:
    """Return the tier with a long time-out, because a demo may share its machine; DemoError if it does not answer."""
    if "timeout=" not in tier.url:
        tier = replace(tier, url=f"{tier.url}{'&' if '?' in tier.url else '?'}timeout={_TIMEOUT_S}")
    try:
        with tier.network.entered(1), closing(open_tier(tier.url)) as opened:
            opened.has(["shmstore:demo"])
    except (ImportError, TierError, TypeError, ValueError) as error:
        raise DemoError(f"--tier: {error}") from error
    return tier


@contextmanager
def _redis_server(network: Network) -> Iterator[DemoTier]:
    """Start a server on the first host, wait until it is ready, and end it."""
    program = next((path for name in _SERVERS if (path := shutil.which(name))), None)
    if program is None:
        raise DemoError(f"--tier {REDIS} needs {' or '.join(_SERVERS)} in the PATH")
    address = network.address(0)
    with network.entered(0), socket.create_server((address, 0)) as free:
        port = free.getsockname()[1]
    command = [program, "--bind", address, "--port", str(port), "--save", "", "--protected-mode", "no"]
    server: subprocess.Popen[str] | None = None
    try:
        with interrupts_held_back(), network.entered(0):  # held back in the server, too, which inherits that
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=_end_with_the_demo,
            )
        last = ""
        for line in server.stdout or ():
            if "eady to accept connections" in line:
                break
            last = line
        else:
            raise DemoError(f"{program} has ended: {last.strip()}")
        yield DemoTier(f"redis://{address}:{port}", network, server.kill)
    finally:
        if server is not None:
            server.kill()
            server.communicate()


def _end_with_the_demo() -> None:
    """Have the kernel end this process if the demo is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
