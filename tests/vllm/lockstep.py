"""Two schedulers of vLLM in step, without a model: both get the same requests, and a stand-in answers for the model."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

init_none_hash(sha256_cbor)
SHAPE: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def full(block_size: int = 16) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block_size, **SHAPE)


def window(tokens: int, block_size: int = 16) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=tokens, **SHAPE)


def vllm_config(model: Path, blocks: int, **settings: Any) -> Any:
    common: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "block_size": 16,
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "disable_log_stats": False,
    }
    config = EngineArgs(model=str(model), **common | settings).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    return config


def kv_cache_config(blocks: int, *specs: KVCacheSpec, eagle: tuple[int, ...] = (), **settings: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec, is_eagle_group=i in eagle) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups, **settings)


Images = Sequence[tuple[str, int, int]]
"""Identifier, offset and length of each."""


class Engine:
    """A scheduler with as many steps under way as vLLM's engine would have, and a stand-in for its workers."""

    def __init__(self, scheduler_cls: Any, config: Any, groups: KVCacheConfig) -> None:
        block_size, hash_block_size = resolve_kv_cache_block_sizes(groups, config)
        self.scheduler = scheduler_cls(
            vllm_config=config,
            kv_cache_config=groups,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        self.hasher = get_request_block_hasher(hash_block_size, sha256_cbor)
        self.depth = config.max_concurrent_batches
        self.drafts = config.num_speculative_tokens if not config.scheduler_config.async_scheduling else 0
        self.under_way: deque[tuple[Any, dict[str, int]]] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.stats: dict[str, Any] | None = None

    def add(
        self, name: str, prompt: list[int], max_tokens: int, images: Images = (), data: Any = None, **about: Any
    ) -> None:
        places = ((what, PlaceholderRange(offset, length)) for what, offset, length in images)
        features = [MultiModalFeatureSpec(data, "image", what, place) for what, place in places]
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
        sampling.update_from_generation_config({}, None)
        hasher = self.hasher if self.scheduler.cache_config.enable_prefix_caching else None
        about |= {"block_hasher": hasher, "mm_features": features, "arrival_time": float(len(self.tokens))}
        self.scheduler.add_request(Request(name, list(prompt), sampling, None, **about))
        self.tokens[name] = []

    def take_images(self, cache: int, budget: int) -> None:
        """Let the scheduler take images, which its model for texts has not asked for."""
        cls = type(self.scheduler.encoder_cache_manager)
        self.scheduler.encoder_cache_manager = cls.create_manager(
            cache_size=cache, vllm_config=self.scheduler.vllm_config
        )
        self.scheduler.max_num_encoder_input_tokens = budget

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> tuple[Any, Any]:
        """Schedule, let the oldest step end if enough are under way, and return what each of both said."""
        scheduler = self.scheduler
        output = scheduler.schedule()
        # Where the token that is sampled comes to stand; drafts stand before it.
        places = {
            name: scheduler.requests[name].num_computed_tokens
            for name in output.num_scheduled_tokens
            if not scheduler.requests[name].is_prefill_chunk
        }
        said = plain(output)
        self.stats = None
        self.under_way.append((output, places))
        if len(self.under_way) < self.depth and output.total_num_scheduled_tokens:
            return said, None
        output, places = self.under_way.popleft()
        sampled = [self.sample(name, places, output) for name in output.num_scheduled_tokens]
        names = list(output.num_scheduled_tokens)
        answer = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        answer.ec_connector_output = self.encode(output)
        results = scheduler.update_from_output(output, answer)
        if self.drafts and names:
            drafts = []  # they follow the tokens that were taken
            for name in names:
                request = scheduler.requests.get(name)
                at = request.num_tokens if request is not None else 0
                drafts.append([drafted(name, at + j) for j in range(self.drafts)] if name in places else [])
            scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        out = {}
        for outputs in results.values():
            for one in outputs.outputs:
                self.tokens[one.request_id] += one.new_token_ids
                out[one.request_id] = (
                    one.new_token_ids,
                    one.finish_reason,
                    one.num_cached_tokens if hasattr(one, "num_cached_tokens") else None,
                    one.prefill_stats,
                )
            if outputs.scheduler_stats:
                stats = outputs.scheduler_stats
                self.stats = stats.ec_connector_stats
                out["stats"] = (
                    stats.kv_cache_usage,
                    vars(stats.prefix_cache_stats) | {"hits_by_source": {}},
                    stats.num_running_reqs,
                    stats.num_waiting_reqs,
                )
        return said, out

    def encode(self, output: Any) -> Any:
        """Do what the first worker's connector would do; there is none."""
        return None

    def sample(self, name: str, places: dict[str, int], output: Any) -> list[int]:
        if name not in places:
            return []
        drafts = [token for token in output.scheduled_spec_decode_tokens.get(name, ()) if token >= 0]
        at, tokens = places[name] - len(drafts), []
        for draft in drafts:
            tokens.append(right(name, at))
            at += 1
            if draft != tokens[-1]:
                return tokens
        return [*tokens, right(name, at)]


def right(name: str, place: int) -> int:
    return random.Random(f"{name} {place}").randrange(8)


def drafted(name: str, place: int) -> int:
    """Return what a draft model would say: two times of three what the model will say."""
    return right(name, place) if random.Random(f"draft {name} {place}").random() < 0.67 else 9


def plain(output: Any) -> dict[str, Any]:
    """Return what a step schedules, comparable by value."""
    cached = output.scheduled_cached_reqs
    return {
        "new": [(new.req_id, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs],
        "cached": vars(cached)
        | {"resumed_req_ids": sorted(cached.resumed_req_ids), "new_block_ids": cached.new_block_ids},
        "tokens": output.num_scheduled_tokens,
        "drafts": output.scheduled_spec_decode_tokens,
        "encode": output.scheduled_encoder_inputs,
        "drop": sorted(output.free_encoder_mm_hashes),
        "finished": sorted(output.finished_req_ids),
        "preempted": sorted(output.preempted_req_ids or ()),
    }
