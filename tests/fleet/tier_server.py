"""The tier of two hosts: a folder, servers that are started, or one that is there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from examples.demo.supervisor import DemoError
from shmstore.errors import TierError
from shmstore.tiers import open_tier
from tests.fleet.network import Network, two_hosts
from tests.fleet.servers import MooncakeServers, end, free_port, redis_server

TIMEOUT_S = 10
_MOONCAKE_SIZE = 4 << 30


def _redis(address: str) -> tuple[str, Callable[[], None]]:
    port = free_port(address)
    server = redis_server(address, port)
    return f"redis://{address}:{port}", lambda: end(server)


def _mooncake(address: str) -> tuple[str, Callable[[], None]]:
    servers = MooncakeServers(address, _MOONCAKE_SIZE)
    return f"mooncake://{servers.address}", servers.close


SERVERS = {"redis": _redis, "mooncake": _mooncake}
"""What starts the servers of a tier at an address, and returns its URL and what kills them."""


@dataclass(frozen=True)
class FleetTier:
    """A tier that both hosts reach."""

    url: str
    network: Network
    kill: Callable[[], None] | None = None
    """Ends its servers at once; None if this has not started them."""


@contextmanager
def fleet_tier(asked: str | None) -> Iterator[FleetTier]:
    """Yield the tier that was asked for, which answers, or a temporary folder. DemoError if it does not."""
    if asked is None:
        with tempfile.TemporaryDirectory(prefix="shmstore-fleet-") as folder:
            yield _tried(FleetTier(f"file://{folder}", Network("The tier is a folder: nothing goes over a network.")))
    elif asked in SERVERS:
        with two_hosts() as network:
            try:
                with network.entered(0):
                    url, kill = SERVERS[asked](network.address(0))
            except DemoError as error:
                raise DemoError(f"tier {asked}: {error}") from error
            try:
                yield _tried(FleetTier(url, network, kill))
            finally:
                kill()
    else:
        yield _tried(FleetTier(asked, Network("Both hosts reach the tier over the network of this machine.")))


def _tried(tier: FleetTier) -> FleetTier:
    """Return the tier with a long time-out, because tests share their machine; DemoError if it does not answer."""
    if "timeout=" not in tier.url:
        tier = replace(tier, url=f"{tier.url}{'&' if '?' in tier.url else '?'}timeout={TIMEOUT_S}")
    try:
        with tier.network.entered(1), closing(open_tier(tier.url)) as opened:
            opened.has(["shmstore:fleet"])
    except (ImportError, TierError, TypeError, ValueError) as error:
        raise DemoError(f"tier: {error}") from error
    return tier
