"""The answers of an engine with the plug-in are those of vLLM's `lru`, and no lease outlives its request."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.offline import Tokens, answers, offline, store

# The prefix cache is on, a prompt is computed in several steps, and requests push each other out.
TIGHT = {
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 128,
    "max_model_len": 1024,
    "num_gpu_blocks_override": 10,
}
SMALL = {"mm_processor_cache_gb": 0.0015}  # 1.5 MiB, a tenth of what the requests need


def test_the_tokens_of_two_workers_are_those_of_lru(
    model: Path, lru: dict[str, Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMSTORE_VLLM_READ", "views")
    with offline(model, "shm", tensor_parallel_size=2) as engine:
        found, facts = answers(engine, ours=True), store()
    assert lru == found
    assert (2, 0) == (facts.n_readers, facts.refusals)
    assert 0 < facts.hits


def test_preemptions_and_a_cache_that_is_too_small_change_no_token(model: Path) -> None:
    with offline(model, "lru", **TIGHT) as engine:
        expected = answers(engine, ours=False)
    with offline(model, "shm", **TIGHT | SMALL) as engine:
        found = answers(engine, ours=True)
        assert 0 < store().evictions
        assert 0 < engine.metric("vllm:num_preemptions")
    assert expected == found
