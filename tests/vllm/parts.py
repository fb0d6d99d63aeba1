"""What tests of the plug-in's parts share: items, prompt updates, configurations, and a desk that requests come to."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedConfig
from vllm.config import ParallelConfig
from vllm.multimodal import processing
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
)
from vllm.v1.engine import FinishReason

import shmstore
from shmstore.integrations.vllm import sender as sender_module
from shmstore.integrations.vllm.items import ReferenceItem
from shmstore.integrations.vllm.receiver import ReceiverCache
from shmstore.integrations.vllm.requests import follow

PromptUpdateDetails = processing.PromptUpdateDetails
processor: Any = sys.modules[PromptUpdateDetails.__module__]

HASH = "0123456789abcdef" * 4
"""A key as vLLM makes them."""
FIELDS = [
    MultiModalBatchedField(),
    MultiModalBatchedField(keep_on_cpu=True),
    MultiModalSharedField(batch_size=3),
    MultiModalFlatField(slices=[slice(0, 4), slice(4, 9)], dim=1),
    MultiModalFlatField(slices=[[slice(0, 4), slice(6, None)], [slice(4, 6, 1)]]),
    MultiModalFlatField(slices=[slice(np.int64(0), np.int64(4))]),
    MultiModalFlatField(slices=[]),
]


def item(*fields: Any) -> MultiModalKwargsItem:
    return MultiModalKwargsItem(
        {f"key {n}": MultiModalFieldElem(data=torch.arange(5.0) + n, field=field) for n, field in enumerate(fields)}
    )


def same(one: MultiModalKwargsItem, other: MultiModalKwargsItem) -> bool:
    return list(one) == list(other) and all(
        one[key].field == other[key].field and torch.equal(one[key].data, other[key].data) for key in one
    )


def prompt_updates() -> list[Any]:
    """Return updates as models make them: with a mask, without, and many tokens."""
    details = [
        PromptUpdateDetails.select_token_id([1, 2, 2, 3], 2),
        PromptUpdateDetails.from_seq([7] * 5000),
        PromptUpdateDetails.select_token_ids(list(range(300)), [5, 299]),
    ]
    return [
        processor.ResolvedPromptUpdate("image", number, processor.UpdateMode(mode), [151655, number], content)
        for number, (mode, content) in enumerate(zip(["insert", "replace", "replace"], details, strict=True))
    ]


def plain(updates: list[Any]) -> list[Any]:
    """Return updates as values that compare: the masks in the place of their functions."""
    return [
        (one.modality, one.item_idx, one.mode, one.target, one.content.full)
        + ((one.content.is_embed(one.content.full).tolist(),) if one.content.is_embed else ())
        for one in updates
    ]


def config(
    gib: float = 2**-10,
    workers: int = 1,
    most: int = 1,
    kind: str = "shm",
    name: str = "tiny",
    processor_kwargs: Any = None,
    **parallel: Any,
) -> Any:
    """Return what the caches read of vLLM's configuration."""
    settings = SimpleNamespace(
        mm_processor_cache_gb=gib,
        mm_shm_cache_max_object_size_mb=most,
        mm_processor_cache_type=kind,
        mm_processor_kwargs=processor_kwargs,
        media_io_kwargs=None,
        mm_hasher_algorithm="blake3",
        video_pruning_rate=None,
        video_pruning_method=None,
    )
    model = SimpleNamespace(
        get_multimodal_config=lambda: settings,
        supports_multimodal_inputs=True,
        model=name,
        revision=None,
        code_revision=None,
        model_impl="auto",
        tokenizer=name,
        tokenizer_revision=None,
        tokenizer_mode="auto",
        hf_config=PreTrainedConfig(),
    )
    chosen = ParallelConfig()
    for setting, value in {"world_size": workers, **parallel}.items():
        setattr(chosen, setting, value)
    return SimpleNamespace(model_config=model, parallel_config=chosen)


def received(cache: ReceiverCache, sent: Any) -> Any:
    feature = SimpleNamespace(data=sent, identifier="a")
    assert [feature] == cache.get_and_update_features([feature, SimpleNamespace(data=None)])[:1]
    return feature.data


class Desk:
    """What `follow` needs of an `OutputProcessor`, and a store with one item for each request."""

    _key = str
    stopped: tuple[str, ...] = ()
    """Requests that the next output ends, though the core has not finished them."""

    def __init__(self, writer: shmstore.ObjectStoreWriter) -> None:
        self.writer = writer
        self.request_states: dict[str, Any] = {}

    @property
    def books(self) -> Any:
        return vars(self).get("_shmstore_leases")

    @property
    def opened(self) -> int:
        return self.writer.stats().open_leases

    def item(self, name: str) -> ReferenceItem:
        ref = self.writer.put(name, b"")
        again = partial(sender_module.SenderCache._lease_again, cast(Any, self), name, ref)
        return ReferenceItem(self._held(ref), again)

    def _held(self, ref: shmstore.ObjectRef) -> shmstore.LeasedRef:
        return self.writer.hold(ref)

    def request(self, name: str, *, children: int = 1) -> None:
        features = [SimpleNamespace(data=self.item(name))]
        for child in range(children):
            request_id = name if children == 1 else f"{child}_{name}"
            self.add_request(SimpleNamespace(request_id=request_id, mm_features=features))

    def output(
        self,
        name: str,
        *,
        finished: bool = False,
        reason: Any = FinishReason.STOP,
        tokens: tuple[int, ...] = (1,),
        pooled: Any = None,
    ) -> Any:
        of = {"request_id": name, "new_token_ids": tokens, "pooling_output": pooled}
        return self.process_outputs(
            [SimpleNamespace(**of, finished=finished, finish_reason=reason if finished else None)]
        )

    def add_request(self, request: Any) -> str:
        self.request_states[request.request_id] = request
        if getattr(request, "last", False):
            del self.request_states[request.request_id]
        return "added"

    def abort_requests(self, request_ids: list[str]) -> list[str]:
        return [request_id for request_id in request_ids if self.request_states.pop(request_id, None)]

    def process_outputs(self, engine_core_outputs: list[Any]) -> Any:
        if hasattr(self, "own_outputs"):
            return self.own_outputs(engine_core_outputs)
        for output in engine_core_outputs:
            if output.finished or output.request_id in self.stopped:
                self.request_states.pop(output.request_id, None)
        return "processed"


follow(Desk)
