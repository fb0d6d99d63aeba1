"""The answers of an engine with the plug-in are those of vLLM's `lru`, and no lease outlives its request."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.offline import Tokens, answers, offline, store

# Two workers. The prefix cache is on, a prompt is computed in several steps, and requests push each other out. The
# processor cache of 1.5 MiB has room for a tenth of what the requests need.
TIGHT = {
    "tensor_parallel_size": 2,
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 128,
    "max_model_len": 1024,
    "num_gpu_blocks_override": 10,
    "mm_processor_cache_gb": 0.0015,
}


def test_neither_workers_nor_preemptions_nor_a_small_cache_change_a_token(
    model: Path, lru: dict[str, Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMSTORE_VLLM_READ", "views")
    with offline(model, "shm", **TIGHT) as engine:
        found, facts = answers(engine, ours=True), store()
        assert 0 < engine.metric("vllm:num_preemptions")
    assert lru == found
    assert 2 == facts.n_readers
    assert 0 < facts.evictions
    assert 0 < facts.hits
