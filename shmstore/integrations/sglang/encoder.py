"""Encoder outputs of all engines of a host in one store: what one engine has encoded, the others load.

SGLang calls `get_embedding_and_mask` with the function of its model that encodes, and that function with the items that
its own cache lacks. `Sharing.embed` takes the function's place. It looks all items up, claims those that nobody makes,
encodes them in one call, stores them, and ends the claims. Only then does it wait for what others make, so no two
engines wait for each other. Before that, a request whose picture another engine is making stays in the queue.

All ranks of an engine do the same, since an encoder has collectives: the first one finds, claims and stores, and tells
the others; each rank loads; an item that one rank could not load is encoded by all.

A key has a digest of the item, and not SGLang's hash: that covers only the bytes, so it is the same for a wide and a
tall picture of the same blocks; clients may choose it; and on a GPU anybody can find two inputs for one hash.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import sglang
import torch
import torch.distributed as dist
import transformers
from sglang.srt.managers import mm_schedule
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel, get_server_args, get_serving, process_model_config
from sglang.srt.utils.common import find_local_repo_dir

from shmstore.errors import ShmStoreError, unless_interrupted
from shmstore.integrations.encoder.attaching import WRONG, stored_tensor
from shmstore.integrations.encoder.namespace import namespace_of
from shmstore.integrations.encoder.outputs import APART, FIGURES, Outputs
from shmstore.integrations.encoder.settings import Settings
from shmstore.integrations.sglang import ENCODER, settings
from shmstore.integrations.sglang.compare import UPDATES
from shmstore.multimodal.values.hashing import hash_item
from shmstore.refs import ObjectRef
from shmstore.store.claims import Claim
from shmstore.store.leases import PinnedRef

_log = logging.getLogger("sglang.shmstore")

_SCHEDULE = "sglang.srt.managers.mm_schedule"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_AHEAD = 64
"""How many requests that need not wait are looked for in the queue; a step takes few more, and each costs a digest.

A step may take others if SGLang sorts the queue, by prefix or priority, or a request's grammar has just become ready.
"""
_STEP = 30.0
"""Seconds that a step waits at most: SGLang ends an engine whose step takes long, by default 300 s."""
_SINCE = "shmstore_since"
"""The attribute of an item with the time at which its request began to wait in the queue."""

_sharing: Sharing | None = None


class Ranks:
    """The ranks of one engine that encode the same items at the same time."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.first = group.rank_in_group == 0

    def told(self, what: Any) -> Any:
        """Return what the first rank says."""
        if self._group.world_size == 1:
            return what
        box = [what]
        dist.broadcast_object_list(box, src=self._group.ranks[0], group=self._group.cpu_group)
        return box[0]

    def agree(self, *flags: bool) -> list[bool]:
        """Return for each flag whether it is true on all ranks."""
        votes = torch.tensor(flags, dtype=torch.int32)
        if self._group.world_size > 1:
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=self._group.cpu_group)
        return [bool(vote) for vote in votes.tolist()]


class Sharing:
    """What one rank of an engine has of the store."""

    def __init__(self, wanted: Settings, ranks: Ranks, outputs: Outputs, namespace: str, width: int) -> None:
        """`width` is that of the language model, of which the width of an output is a multiple."""
        self._settings, self._ranks, self._outputs, self._width = wanted, ranks, outputs, width
        self._usual = self._namespace = namespace
        self.claims = wanted.single_flight and outputs.stores
        self._made: dict[str, tuple[int, torch.dtype]] = {}
        """Width and dtype of what this engine has encoded, by modality."""
        self._held: dict[int, PinnedRef | Claim] = {}
        """What the first rank holds in a call, by the item's index."""

    # ---- in a step

    def embed(self, encode: Callable[[list[Any]], Any], items: list[Any], features: list[Any]) -> Any:
        """Return the output of each item, or whatever else the encoder makes; `features` are those of the items."""
        keys = [self._key(*one) if self._ranks.first else "" for one in zip(items, features, strict=True)]
        counts, begun, waits = [tokens_of(item) for item in items], time.monotonic(), False
        outputs: list[Any] = [None] * len(items)
        try:
            while missing := [i for i, output in enumerate(outputs) if output is None]:
                plan = self._plan(items, keys, counts, missing, begun, waits=waits) if self._ranks.first else None
                waits = True
                steps = dict(zip(missing, self._ranks.told(plan), strict=True))
                make = [i for i, step in steps.items() if step is True]
                make += self._load(outputs, {i: step for i, step in steps.items() if isinstance(step, bytes)})
                if not make:
                    continue
                made = encode([items[i] for i in sorted(make)])
                parts = split(made, [counts[i] for i in sorted(make)])
                if parts is None:  # of a pruned video, say, whose outputs are not those of its items
                    return made if len(make) == len(items) else encode(items)
                for i, part in zip(sorted(make), parts, strict=True):
                    outputs[i] = part
                    self._keep(i, items[i], keys[i], part)
            return outputs
        finally:
            self._end_all()
            self._show()

    def _plan(
        self, items: list[Any], keys: list[str], counts: list[int], missing: list[int], begun: float, *, waits: bool
    ) -> list[bytes | bool]:
        """Return for each item the reference to load, or whether to encode it now; else another engine makes it."""
        plan: list[bytes | bool] = []
        if waits:
            self._outputs.settle()  # which ends our claims
        for i in missing:
            until: float = vars(items[i]).get(_SINCE, begun) + self._settings.wait_s
            left = min(until, begun + _STEP) - time.monotonic()
            may_wait = waits and not any(isinstance(one, Claim) for one in self._held.values())
            step: bytes | bool = True
            with suppress(ShmStoreError):  # whatever is wrong with the store, the engine can encode
                found = self._take(keys[i], max(left, 0.0) if may_wait else 0.0) if keys[i] else None
                if isinstance(found, PinnedRef):
                    if self._is_output(found, items[i], counts[i], keys[i]):
                        self._held[i] = found
                        step = found.ref.to_bytes()
                elif found is not None:
                    self._held[i] = found
                elif keys[i] and self.claims:
                    step = left <= 0
                    self._outputs.count("unclaimed", step)
            plan.append(step)
        return plan

    def _take(self, key: str, wait: float) -> PinnedRef | Claim | None:
        reader = self._outputs.reader
        if self.claims:
            return reader.find_or_claim(key, namespace=self._namespace, wait=wait)
        return reader.find(key, namespace=self._namespace)

    def _is_output(self, found: PinnedRef, item: Any, rows: int, key: str) -> bool:
        """Return whether what somebody has stored is an output for this item: else loading it would end the engine."""
        value = stored_tensor(self._outputs.reader, found.ref)
        if (
            value is not None
            and value.ndim == 2
            and len(value) == rows
            and value.shape[1] % self._width == 0
            and self._made.get(item.modality.name, made := (value.shape[1], value.dtype)) == made
        ):
            return True
        self._outputs.count("wrong")
        self._outputs.warn(WRONG, self._settings.store, key, self._namespace, f"{rows} rows")
        return False

    def _load(self, outputs: list[Any], loads: dict[int, bytes]) -> list[int]:
        """Load what all ranks can load, and return the others."""
        if not loads:
            return []
        there = {i: self._read(packed) for i, packed in loads.items()}
        votes = self._ranks.agree(*(output is not None for output in there.values()))
        lost = [i for i, vote in zip(loads, votes, strict=True) if not vote]
        for i in loads:
            if i not in lost:
                outputs[i] = there[i]
            self._held.pop(i, None)
        if self._ranks.first:  # for all of them
            self._outputs.count("hits", len(loads) - len(lost))
        return lost

    def _read(self, packed: bytes) -> Any:
        with suppress(ShmStoreError):
            return self._outputs.read(ObjectRef.from_bytes(packed))
        return None

    def _keep(self, i: int, item: Any, key: str, output: torch.Tensor) -> None:
        if self._ranks.first:
            self._made[item.modality.name] = output.shape[1], output.dtype
            self._outputs.count("encoded")
            claim = self._held.pop(i, None)
            if key:
                self._outputs.store(key, self._namespace, output, claim if isinstance(claim, Claim) else None)

    def _end_all(self) -> None:
        for held in self._held.values():
            held.end()
        self._held.clear()

    # ---- before a step

    def held_back(self, queue: list[Any]) -> list[int]:
        """Return which requests at the head of the queue wait for an output that another engine makes."""
        asked = [n for n, request in enumerate(queue) if request.multimodal_inputs is not None]
        if not asked or not self._settings.single_flight:
            return []
        back: list[int] | None = None
        if self._ranks.first:
            now, back = time.monotonic(), []
            for seen, n in enumerate(asked):
                if seen - len(back) == _AHEAD:
                    break
                items = queue[n].multimodal_inputs.mm_items
                if self._made_elsewhere(items):
                    since = [vars(item).setdefault(_SINCE, now) for item in items]
                    if now - min(since) < self._settings.wait_s:
                        back.append(n)
                        self._outputs.count("deferred", min(since) == now)
            self._show()
        told: list[int] = self._ranks.told(back)
        return told

    def _made_elsewhere(self, items: list[Any]) -> bool:
        lacking = [item for item in items if not mm_schedule.embedding_cache.has(item.hash)]
        keys = [self._key(item, item.feature) for item in lacking]
        with suppress(ShmStoreError):
            return any(key and self._outputs.reader.claimed(key, namespace=self._namespace) for key in keys)
        return False

    def _key(self, item: Any, feature: Any) -> str:
        """Return the item's key, which is found once; an empty one if its output is not shared."""
        about = vars(item)
        if "shmstore_key" not in about:
            key = ""
            with suppress(TypeError, ValueError):  # it has something else than plain data
                digest = hash_item([feature, item.model_specific_data], "sha256")
                key = f"{item.modality.name.lower()}/{digest}/{tokens_of(item)}" if feature is not None else ""
            about["shmstore_key"] = key
        return str(about["shmstore_key"])

    # ---- and else

    def begin_apart(self) -> None:
        """Share with no other engine from now on, because the weights are new."""
        if self._ranks.first and self._namespace == self._usual:
            _log.warning(
                "the weights were updated, and until its restart this engine shares encoder outputs with no other"
            )
        self._namespace = f"{self._usual} {secrets.token_hex(8)}"
        if (gauge := _metrics().get("apart")) is not None:
            gauge.set(1)

    def _show(self) -> None:
        for name, count in self._outputs.figures().items():
            if (counter := _metrics().get(name)) is not None:
                counter.inc(count)


@functools.cache
def _metrics() -> dict[str, Any]:
    return metrics("encoder", FIGURES, {"apart": APART}, engine=str(get_parallel().dp_rank or 0))


def metrics(part: str, figures: dict[str, str], gauges: dict[str, str], **labels: str) -> dict[str, Any]:
    """Return the counters and gauges for `/metrics`, if SGLang has any; it sets a variable before the import."""
    if "prometheus_client" not in sys.modules:
        return {}
    from prometheus_client import Counter, Gauge

    labels["model_name"] = get_serving().served_model_name
    made: dict[str, Any] = {name: Counter(f"shmstore_{part}_{name}", what, labels) for name, what in figures.items()}
    for name, what in gauges.items():
        made[name] = Gauge(f"shmstore_{part}_{name}", what, labels, multiprocess_mode="mostrecent")
    return {name: metric.labels(**labels) for name, metric in made.items()}


def tokens_of(item: Any) -> int:
    """Return how many tokens of the prompt stand for the item."""
    return sum(end - start + 1 for start, end in item.offsets)


def split(made: Any, counts: list[int]) -> list[torch.Tensor] | None:
    """Return the output of each item; None if what the encoder has made has other parts."""
    if isinstance(made, torch.Tensor):
        flat = made.reshape(-1, made.shape[-1])
        return list(torch.split(flat, counts)) if len(flat) == sum(counts) else None
    if isinstance(made, list):
        parts = [one.reshape(-1, one.shape[-1]) for one in made]
        return parts if [len(part) for part in parts] == counts else None
    return None


# ---- what SGLang calls


def _embed(theirs: Callable[..., Any], data_embedding_func: Any, embedding_items: list[Any], **more: Any) -> Any:
    """Give SGLang's function ours in the place of the encoder."""
    sharing, encode = _sharing, data_embedding_func
    if sharing is not None:
        features = {id(item): item.feature for item in embedding_items}  # before SGLang moves them to the device

        @functools.wraps(data_embedding_func)
        def encode(items: list[Any]) -> Any:
            return sharing.embed(data_embedding_func, items, [features[id(item)] for item in items])

        if (model := getattr(data_embedding_func, "__self__", None)) is not None:
            encode.__self__ = model  # by which SGLang knows encoders that move features themselves
    return theirs(data_embedding_func=encode, embedding_items=embedding_items, **more)


def _updated(_: Any, *args: Any, **more: Any) -> None:
    """Forget what the old weights have made."""
    mm_schedule.embedding_cache.clear()
    if _sharing is not None:
        _sharing.begin_apart()


def _prefill(theirs: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    """Let SGLang choose among the requests that need not wait for another engine.

    It chooses none if the batch is full, so no rank asks the first one then: all ranks have the same queue and batch.
    """
    full = running_batch.batch_is_full and not running_batch.is_empty() and scheduler.chunked_req is None
    full = full and not (scheduler.enable_priority_preemption or scheduler.is_hybrid_swa)
    back = _sharing.held_back(scheduler.waiting_queue) if _sharing is not None and not full else []
    if not back:
        return theirs(scheduler, running_batch)
    waiting = [scheduler.waiting_queue[n] for n in back]
    scheduler.waiting_queue = [one for n, one in enumerate(scheduler.waiting_queue) if n not in back]
    try:
        return theirs(scheduler, running_batch)
    finally:
        scheduler.waiting_queue = [*waiting, *scheduler.waiting_queue]


def _start(*_: Any) -> None:
    """Open the store in a scheduler that has just made its own cache; a problem is logged, and nothing is shared."""
    global _sharing
    parallel, given, model = get_parallel(), get_server_args(), process_model_config()
    wanted, outputs = settings(ENCODER), None
    if _sharing is not None or wanted is None or not model.is_multimodal or parallel.pp_rank:
        return
    ranks = Ranks(parallel.tp_group)
    if (problem := _unserved(parallel, given)) is not None:
        if ranks.first:
            _log.warning("encoder outputs are not shared: %s", problem)
        return
    for first in (True, False):  # the others attach to what the first one has opened
        if ranks.first is first:
            try:
                namespace = _namespace(given, model)
                outputs = Outputs(wanted, str(given.device), stores=first)
            except unless_interrupted(Exception) as error:  # of whatever kind: the engine serves without it
                _log.warning("encoder outputs are not shared: %s", error)
        if not ranks.agree(outputs is not None or ranks.first is not first)[0]:
            if outputs is not None:
                outputs.close()
            return
    _sharing = Sharing(wanted, ranks, cast(Outputs, outputs), namespace, model.hidden_size)
    for update in UPDATES:
        HookRegistry.register(f"{_UPDATER}.{update}", _updated, HookType.AFTER)
    if parallel.pp_size == 1:  # else each stage has a queue, and all must be the same
        HookRegistry.register(f"{_SCHEDULER}.get_new_batch_prefill", _prefill, HookType.AROUND)
    HookRegistry.apply_hooks()


def _unserved(parallel: Any, given: Any) -> str | None:
    """Return why outputs of this engine cannot be shared, if they cannot."""
    if parallel.attn_dp_enabled:
        return "with --enable-dp-attention the ranks of an engine encode different items"
    if given.encoder_only or given.language_only:
        return "encoders of their own (--encoder-only, --language-only) send their outputs themselves"
    if given.enable_lora:
        return "an adapter (--enable-lora) may change the encoder"
    if given.load_format == "remote_instance":
        return "another engine, whose weights may be new, gives them (--load-format remote_instance)"
    return None


def _namespace(given: Any, model: Any) -> str:
    """Return the namespace: of all that changes outputs, and is not in an item; ValueError if weights are unknown."""
    names = ("model_path", "revision", "quantization", "load_format", "model_loader_extra_config", "device")
    more = ("download_dir", "model_impl", "custom_weight_loader")
    backends = ("mm_attention_backend", "attention_backend", "mm_enable_dp_encoder")
    return scope_of(given, model, *names, *more, *backends)


def scope_of(given: Any, model: Any, *names: str, **more: str) -> str:
    """Return a namespace of the model's files, the versions, and these options; ValueError if the files are unknown.

    The commit of a model from a hub is the name of its folder: Transformers no longer keeps it in the configuration.
    """
    snapshot = find_local_repo_dir(given.model_path, given.revision)
    if snapshot is None and not os.path.isdir(given.model_path):
        raise ValueError(f"{given.model_path} is neither a folder nor in the hub's cache, so its weights are unknown")
    about = {
        "engine": ["sglang", sglang.__version__, transformers.__version__],
        "given": [str(getattr(given, name, None)) for name in names],
        "commit": snapshot and os.path.basename(snapshot),
        "config": model.hf_config.to_json_string(use_diff=False),
        **more,
    }
    return namespace_of(str(given.model_path), model.dtype, about)


@functools.cache
def install() -> None:
    """Register what begins with a scheduler, which `load_plugins` then applies; idempotent."""
    HookRegistry.register(f"{_SCHEDULE}.init_mm_embedding_cache", _start, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULE}.get_embedding_and_mask", _embed, HookType.AROUND)
