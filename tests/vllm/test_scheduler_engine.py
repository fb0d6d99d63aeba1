"""An engine whose scheduler has the managers of shmstore gives vLLM's tokens, with the same hits and preemptions."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from shmstore.integrations.vllm.scheduler import KVManager
from tests.vllm.model import make_text_model

NAME = "shmstore.integrations.vllm.scheduler.Scheduler"
SENTENCE = "The quick brown fox jumps over the lazy dog, and what it does then nobody knows. " * 3
# Prompts share beginnings, are computed in several steps, and push each other out.
TIGHT = {"max_num_batched_tokens": 128, "num_gpu_blocks_override": 24, "scheduler_reserve_full_isl": False}


def run(model: Path, scheduler: str | None) -> dict[str, Any]:
    """Return what an engine in this process answers to prompts that it sees twice, and its counts."""
    from vllm import LLM, SamplingParams

    settings: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "disable_log_stats": False,
        "seed": 0,
    }
    llm = LLM(str(model), scheduler_cls=scheduler, **settings | TIGHT)
    try:
        core = llm.llm_engine.engine_core.engine_core
        assert isinstance(core.scheduler.kv_cache_manager, KVManager) == (scheduler is not None)
        sampling = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        prompts = [SENTENCE[: 40 + 17 * i] + str(i) for i in range(12)]
        rounds = [llm.generate(prompts, sampling, use_tqdm=False) for _ in range(2)]
        names = ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions")
        counts = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in names}
        return counts | {
            "tokens": [list(one.outputs[0].token_ids) for answers in rounds for one in answers],
            "cached": [one.num_cached_tokens for answers in rounds for one in answers],
        }
    finally:
        llm.llm_engine.engine_core.shutdown()
        llm.llm_engine.renderer.shutdown()
        del llm
        gc.collect()


def test_the_tokens_and_hits_are_those_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two groups; test_scheduler.py compares each step in more settings."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = make_text_model(tmp_path, "two groups")
    theirs, mine = (run(model, scheduler) for scheduler in (None, NAME))
    assert theirs == mine
    assert 1 < len({token for tokens in mine["tokens"] for token in tokens})
    assert 0 < mine["vllm:num_preemptions"]
    assert 0 < mine["vllm:prefix_cache_hits"]
