"""Tiers: objects beyond the host, in a distributed store that is there already.

A tier is best effort. What it cannot give is a miss, and no hit of a store ever waits for it.
"""

from shmstore.tiers.protocol import Into, Tier
from shmstore.tiers.store_tier import StoreTier, TierStats
from shmstore.tiers.urls import open_tier

__all__ = ["Into", "StoreTier", "Tier", "TierStats", "open_tier"]
