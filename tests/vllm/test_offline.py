"""The answers of an engine with the plug-in are those of vLLM's `lru`, and no lease outlives its request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.offline import Tokens, answers, offline, store

KINDS: dict[str, dict[str, Any]] = {
    "two workers": {"tensor_parallel_size": 2},
    # The prefix cache is on, a prompt is computed in several steps, and requests push each other out.
    "tight": {
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 128,
        "max_model_len": 1024,
        "num_gpu_blocks_override": 10,
    },
}
SMALL = {"mm_processor_cache_gb": 0.0015}  # 1.5 MiB, a tenth of what the requests below need


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_lru(
    model: Path, lru: Callable[..., dict[str, Tokens]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMSTORE_VLLM_READ", "views" if kind == "two workers" else "copy")
    with offline(model, "shm", **KINDS[kind]) as engine:
        found = answers(engine, ours=True)
        facts = store()
        assert 0 < facts.hits
        assert 0 == facts.refusals
        if kind == "tight":
            assert 0 < engine.metric("vllm:num_preemptions")
    assert lru(**KINDS[kind]) == found


def test_a_cache_of_a_tenth_of_what_is_needed_changes_no_token(
    model: Path, lru: Callable[..., dict[str, Tokens]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMSTORE_VLLM_READ", "until_step")
    with offline(model, "shm", **SMALL) as engine:
        found = answers(engine, ours=True)
        assert 0 < store().evictions
    assert lru() == found
