"""Inspection of stores from outside: their objects, who holds them, and whether the tables are sound.

It changes nothing and makes no process wait. `find_segments` lists the stores of this host, and `StoreInspector` reads
one store, alive or dead; both return frozen records. `verify` checks a store. The `shmstore` command prints all of it.
"""

from shmstore.inspect.inspector import StoreInspector
from shmstore.inspect.records import LeaseInfo, ReaderInfo, SegmentInfo, SlotInfo, StoreFacts, StoreSnapshot, WriterInfo
from shmstore.inspect.ring import RingMap, ring_map
from shmstore.inspect.segments import Holders, find_segments, holders, look_at, remove_segment
from shmstore.inspect.tree import TreeNode, load_tensor, parse_tree
from shmstore.inspect.verify import Finding, VerifyReport, damage, verify

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
    "WriterInfo",
    "damage",
    "find_segments",
    "holders",
    "load_tensor",
    "look_at",
    "parse_tree",
    "remove_segment",
    "ring_map",
    "verify",
]
