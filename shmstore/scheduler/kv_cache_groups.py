"""Which layers share a block table, and how many blocks fit."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shmstore.errors import shown
from shmstore.scheduler.checks import INT64_LIMIT, check_range
from shmstore.scheduler.kv_cache_config import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

logger = logging.getLogger(__name__)


def _merged(specs: Sequence[KVCacheSpec]) -> KVCacheSpec | None:
    """Return the spec that stands for all `specs`: they are equal, or full attention but for a recorded window."""
    first = specs[0]
    if all(spec == first for spec in specs):
        return first
    full = [spec for spec in specs if isinstance(spec, FullAttentionSpec)]
    if len(full) < len(specs) or len({replace(spec, sliding_window=None) for spec in full}) > 1:
        return None
    windows = {spec.sliding_window for spec in full} - {None}
    if len(windows) > 1:
        raise ValueError(f"full attention layers record different windows, which do not merge: {shown(windows)}")
    return replace(full[0], sliding_window=windows.pop())


def _equal_pages(layers: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    target = max(spec.page_size_bytes for spec in layers.values())
    made = {}
    for name, spec in layers.items():
        page = spec.page_size_bytes
        made[name] = replace(spec, block_size=spec.block_size * (target // page))
        if made[name].page_size_bytes != target:
            raise ValueError(f"layer {shown(name)} has pages of {page} bytes: no block size makes them {target}")
    return made


def _groups(layers: Mapping[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for name, spec in layers.items():
        by_spec.setdefault(spec, []).append(name)
    smallest, largest = min(map(len, by_spec.values())), max(map(len, by_spec.values()))
    g = largest if largest < 1.25 * smallest else smallest
    groups = []
    for spec, names in by_spec.items():
        k = -(-len(names) // g)
        groups += [KVCacheGroupSpec(tuple(names[i::k]), spec) for i in range(k)]
    return groups


def make_kv_cache_config(layers: Mapping[str, KVCacheSpec], memory_bytes: int) -> KVCacheConfig:
    """Return the groups of a model's layers, and the blocks that fit into `memory_bytes`.

    `layers` has the spec of each layer, in the model's order.

    * If all specs are equal, or are full attention and differ only in a recorded window, there is one group.
    * Otherwise larger blocks make the pages equal. The layers of one spec are dealt out to as few groups as possible,
      with at most g layers in each. g is the smallest number of layers per spec, or the largest if that is below 1.25
      times the smallest.
    * Layers of different groups share memory: the first layers of all groups, then the second ones, and so on.
    * A model without layers has no groups, and the null block alone.

    Log a warning if there are fewer than two blocks. ValueError for pages that are empty or cannot be made equal, and
    for memory outside 0 … 2**63 - 1 bytes; TypeError for memory that is not an integer.
    """
    check_range(0, INT64_LIMIT, memory_bytes=memory_bytes)
    if not layers:
        return KVCacheConfig(1, [])
    for name, spec in layers.items():
        check_range(1, **{f"layer {shown(name)}: page_size_bytes": spec.page_size_bytes})
    merged = _merged(list(layers.values()))
    if merged is None:  # full attention with blocks of several sizes may become one group
        layers = _equal_pages(layers)
        merged = _merged(list(layers.values()))
    groups = _groups(layers) if merged is None else [KVCacheGroupSpec(tuple(layers), merged)]
    block = groups[0].kv_cache_spec.page_size_bytes * max(len(group.layer_names) for group in groups)
    num_blocks = int(memory_bytes) // block
    if num_blocks < 2:
        logger.warning(
            "The KV cache has room for %d blocks of %d bytes: %d bytes are available, and the null block with one more "
            "needs %d bytes", num_blocks, block, memory_bytes, 2 * block,
        )  # fmt: skip
    return KVCacheConfig(num_blocks, groups)
