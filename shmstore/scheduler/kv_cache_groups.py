"""Which layers share a block table and which share a buffer, for all workers, and how many blocks fit."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from shmstore.errors import KVCacheMemoryError, listed, shown
from shmstore.scheduler.checks import INT32_LIMIT, INT64_LIMIT, check_range
from shmstore.scheduler.kv_cache_config import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeSpec,
)

logger = logging.getLogger(__name__)

# ---- one spec for several layers ----


def _merged(specs: Sequence[KVCacheSpec]) -> KVCacheSpec | None:
    first = specs[0]
    if all(spec == first for spec in specs):
        return first
    full = [spec for spec in specs if isinstance(spec, FullAttentionSpec)]
    if len(full) < len(specs) or len({replace(s, sliding_window=None, attention_chunk_size=None) for s in full}) > 1:
        return None
    windows = {spec.sliding_window for spec in full} - {None}
    chunks = {spec.attention_chunk_size for spec in full} - {None}
    if len(windows) > 1 or len(chunks) > 1:
        raise ValueError(
            f"full attention layers record different windows or chunks, which do not merge: {shown(windows or chunks)}"
        )
    if windows and chunks:
        return None
    return replace(full[0], sliding_window=next(iter(windows), None), attention_chunk_size=next(iter(chunks), None))


def merge_specs(specs: Sequence[KVCacheSpec]) -> KVCacheSpec:
    """Return the spec that stands for all `specs`: they are equal, or full attention but for a recorded window.

    A recorded chunk size is like a window. ValueError for specs that do not merge, and for no specs.
    """
    merged = _merged(specs) if specs else None
    if merged is None:
        raise ValueError(f"specs must be equal, or full attention but for a recorded window, not {shown(specs)}")
    return merged


def _one_spec(layers: Mapping[str, KVCacheSpec]) -> KVCacheSpec | None:
    """Return the spec that one group of all layers has; None if the layers need several groups."""
    specs = list(layers.values())
    if (merged := _merged(specs)) is not None:
        return merged
    if len({spec.type_key for spec in specs}) == 1:
        return UniformTypeSpec(specs[0].block_size, layers)
    return None


def _as_full(spec: KVCacheSpec) -> KVCacheSpec:
    """Return full attention that records the window or chunk of `spec`; other specs stay."""
    if not isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return spec
    known: dict[str, Any] = {one.name: getattr(spec, one.name, None) for one in fields(FullAttentionSpec)}
    return FullAttentionSpec(**known)


# ---- groups ----


def _equal_pages(layers: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    pages = {name: spec.page_size_bytes for name, spec in layers.items()}
    grows = max((pages[name] for name, spec in layers.items() if not isinstance(spec, MambaSpec)), default=1)
    target = -(-max(pages.values()) // grows) * grows
    made = {}
    for name, spec in layers.items():
        if pages[name] == target:
            made[name] = spec
            continue
        if isinstance(spec, MambaSpec):  # its page does not grow with its block
            made[name] = replace(spec, page_size_padded=target)
            continue
        factor, rest = divmod(target, pages[name])
        grown = replace(spec, block_size=spec.block_size * factor)
        if rest or grown.page_size_bytes != target:
            raise ValueError(f"layer {shown(name)} has pages of {pages[name]} bytes: no block size makes them {target}")
        made[name] = grown
    return made


def _groups(layers: Mapping[str, KVCacheSpec], hybrid: bool) -> list[KVCacheGroupSpec]:
    for name, spec in layers.items():
        check_range(1, **{f"layer {shown(name)}: page_size_bytes": spec.page_size_bytes})
    if not layers:
        return []
    shared = _one_spec(layers)
    if shared is None and not hybrid:
        shared = _one_spec({name: _as_full(spec) for name, spec in layers.items()})
        if shared is None:
            types = sorted({type(spec).__name__ for spec in layers.values()})
            raise ValueError(f"with hybrid=False all layers must fit into one group, and these do not: {listed(types)}")
    if shared is None:
        layers = _equal_pages(layers)
        shared = _one_spec(layers)  # full attention that had blocks of several sizes
    if shared is not None:
        return [KVCacheGroupSpec(tuple(layers), shared)]
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


# ---- workers ----


def _on_worker(group: KVCacheGroupSpec, own: Mapping[str, KVCacheSpec]) -> KVCacheGroupSpec:
    names = tuple(name for name in group.layer_names if name in own)
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeSpec) and names:
        spec = replace(spec, layers={name: spec.layers[name] for name in names})
    return KVCacheGroupSpec(names, spec)


def _buffers(groups: Sequence[KVCacheGroupSpec]) -> list[tuple[int, tuple[str, ...]]]:
    """Return the page and the layers of each buffer: the first layers of all groups share one, then the second ones."""
    made = []
    for i in range(max((len(group.layer_names) for group in groups), default=0)):
        shared = [(group.layer_names[i], group.kv_cache_spec) for group in groups if i < len(group.layer_names)]
        name, spec = shared[0]  # pages of several groups are equal
        page = (spec.layers[name] if isinstance(spec, UniformTypeSpec) else spec).page_size_bytes
        made.append((page, tuple(name for name, _ in shared)))
    return made


def make_kv_cache_configs(
    workers: Sequence[Mapping[str, KVCacheSpec]],
    memory_bytes: Sequence[int],
    *,
    hybrid: bool = True,
    num_blocks: int | None = None,
    max_model_len: int | None = None,
    max_in_flight_tokens: int | None = None,
    max_encoder_tokens: int = 0,
) -> list[KVCacheConfig]:
    """Return the configuration of each worker: the same groups, each with the worker's own layers, and as many blocks.

    `workers` has the spec of each layer of each worker, in the model's order, and `memory_bytes` the memory of each
    worker. Workers may share layers (tensor parallel), have different ones (pipeline parallel) or none. The groups are
    made of the layers of all workers. The scheduler can use any of the configurations.

    * If all specs are equal, or are full attention and differ only in a recorded window, there is one group. So it is
      for layers of one type with blocks of one size: the group's `UniformTypeSpec` has their specs.
    * Otherwise larger blocks make the pages equal, and padding those of Mamba. The layers of one spec are dealt out to
      as few groups as possible, with at most g layers in each. g is the smallest number of layers per spec, or the
      largest if that is below 1.25 times the smallest.
    * `hybrid=False` makes one group of all layers: windows and chunks become full attention, which records them.
    * The buffers of a worker: the first layers of all groups share one, then the second ones, and so on.
    * `num_blocks` replaces the number of blocks that fit into the memory. Without it, the worker that can hold the
      fewest decides. A model without layers has no groups, and the null block alone.
    * With `max_model_len`, KVCacheMemoryError if a request of that length does not fit, besides the null block. The
      other two are as in `KVCacheConfig`. Without it, only log a warning if there are fewer than two blocks.

    ValueError for another number of memories than workers, for a layer whose workers disagree, for pages that are empty
    or cannot be made equal, and for memory outside 0 … 2**63 - 1 bytes; TypeError for memory that is not an integer.
    """
    if len(workers) != len(memory_bytes) or not workers:
        raise ValueError(f"memory_bytes must have one number for each worker: {len(memory_bytes)} for {len(workers)}")
    check_range(0, INT64_LIMIT, **{f"memory_bytes[{i}]": memory for i, memory in enumerate(memory_bytes)})
    if num_blocks is not None:
        check_range(1, INT32_LIMIT, num_blocks=num_blocks)
    layers: dict[str, KVCacheSpec] = {}
    for worker in workers:
        for name, spec in worker.items():
            if layers.setdefault(name, spec) != spec:
                raise ValueError(f"layer {shown(name)} must have one spec in all workers, not {shown(spec)} as well")
    groups = _groups(layers, hybrid)
    groups_of = [[_on_worker(group, own) for group in groups] for own in workers]
    buffers_of = [_buffers(each) for each in groups_of]
    # What a block takes in each worker; and the worker that can hold the fewest.
    of_block = [sum(page for page, _ in buffers) for buffers in buffers_of]
    fits, tight = min(
        ((int(memory) // size, i) for i, (memory, size) in enumerate(zip(memory_bytes, of_block, strict=True)) if size),
        default=(1, 0),
    )
    blocks = fits if num_blocks is None else int(num_blocks)
    configs = [
        KVCacheConfig(blocks, own, tuple(KVCacheTensor(page * blocks, names) for page, names in buffers))
        for own, buffers in zip(groups_of, buffers_of, strict=True)
    ]
    available = int(memory_bytes[tight]) if num_blocks is None else blocks * of_block[tight]
    if max_model_len is not None:
        request: dict[str, Any] = {
            "max_in_flight_tokens": max_in_flight_tokens,
            "max_encoder_tokens": max_encoder_tokens,
        }
        need = configs[0].blocks_per_request(max_model_len, **request) + 1
        if need > blocks:
            raise KVCacheMemoryError(
                needed=need * of_block[tight],
                available=available,
                fitting_model_len=configs[0].estimate_max_model_len(max_model_len, **request),
            )
    elif blocks < 2 and groups:
        logger.warning(
            "The KV cache has room for %d blocks of %d layers, %d bytes a block: %d bytes are available and the null "
            "block with one more needs %d bytes",
            blocks, len(buffers_of[tight]), of_block[tight], available, 2 * of_block[tight],
        )  # fmt: skip
    return configs


def make_kv_cache_config(layers: Mapping[str, KVCacheSpec], memory_bytes: int) -> KVCacheConfig:
    """Return the configuration of a model with one worker; see `make_kv_cache_configs`.

    `layers` has the spec of each layer, in the model's order.
    """
    check_range(0, INT64_LIMIT, memory_bytes=memory_bytes)
    return make_kv_cache_configs([layers], [memory_bytes])[0]
