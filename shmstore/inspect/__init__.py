"""Stores seen from outside: what is in them, who holds it, and whether it is sound. Nothing is changed, nobody waits.

`find_segments` lists the stores of this host, `StoreInspector` looks into one, alive or dead; both return frozen
records. `verify` checks one. What the `shmstore` command prints comes from here.
"""

from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.records import LeaseInfo, ReaderInfo, SegmentInfo, SlotInfo, StoreFacts, StoreSnapshot
from shmstore.inspect.ring import RingMap, ring_map
from shmstore.inspect.segments import Holders, find_segments, holders, look_at, remove_segment
from shmstore.inspect.tree import TreeNode, load_tensor, parse_tree
from shmstore.inspect.verify import Finding, VerifyReport, verify

__all__ = [
    "Finding",
    "Holders",
    "LeaseInfo",
    "ReaderInfo",
    "RingMap",
    "SegmentInfo",
    "SlotInfo",
    "StoreFacts",
    "StoreInspector",
    "StoreSnapshot",
    "TreeNode",
    "VerifyReport",
    "find_segments",
    "holders",
    "load_tensor",
    "look_at",
    "parse_tree",
    "remove_segment",
    "ring_map",
    "verify",
]
