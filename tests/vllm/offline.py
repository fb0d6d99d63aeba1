"""An offline engine, whose API server is this process."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shmstore.inspect.segments import find_segments
from tests.vllm.inputs import film, film_prompt, photograph, picture_prompt

Tokens = list[list[int]]


def store() -> Any:
    """Return what can be seen of this process's store from outside; there is one."""
    (found,) = [info for info in find_segments() if info.facts and info.facts.writer_pid == os.getpid()]
    return found.facts


class Offline:
    """A vLLM in this process; `shm` is the cache type whose place the plug-in takes."""

    def __init__(self, model: Path, cache: str, settings: dict[str, Any]) -> None:
        from vllm import LLM

        common: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 8192,
            "max_num_seqs": 8,
            "enable_prefix_caching": False,
            "limit_mm_per_prompt": {"image": 4, "video": 1},
            "mm_processor_cache_gb": 0.25,
            "disable_log_stats": False,
            "seed": 0,
        }
        self.llm = LLM(str(model), mm_processor_cache_type=cache, **common | settings)

    def ask(self, *prompts: dict[str, Any], n: int = 1, tokens: int = 8) -> Tokens:
        """Return the tokens of each answer; `n` of them a prompt, which only sampling gives, here of one token."""
        from vllm import SamplingParams

        sampling = SamplingParams(n=n, max_tokens=tokens, ignore_eos=True, temperature=1 if n > 1 else 0, top_k=1)
        answers = self.llm.generate(list(prompts), sampling, use_tqdm=False)
        return [list(answer.token_ids) for request in answers for answer in request.outputs]

    def metric(self, name: str) -> float:
        return float(sum(metric.value for metric in self.llm.get_metrics() if metric.name == name))

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        self.llm.llm_engine.renderer.shutdown()
        del self.llm
        gc.collect()


@contextmanager
def offline(model: Path, cache: str, **settings: Any) -> Iterator[Offline]:
    engine = Offline(model, cache, settings)
    try:
        yield engine
    finally:
        engine.close()


# ---- what is asked of each engine


def photographs(engine: Offline) -> Tokens:
    prompts = [picture_prompt(photograph(number)) for number in range(12)]
    first = [tokens for prompt in prompts for tokens in engine.ask(prompt)]
    assert first == [tokens for prompt in prompts for tokens in engine.ask(prompt)]
    return first


def several_in_a_request(engine: Offline) -> Tokens:
    return [
        tokens
        for first in range(3)
        for tokens in engine.ask(picture_prompt(*(photograph(first + more) for more in range(2 + first))))
    ]


def films(engine: Offline) -> Tokens:
    return engine.ask(*(film_prompt(film(number)) for number in (1, 2, 1)))


def three_answers(engine: Offline) -> Tokens:
    return engine.ask(*(picture_prompt(photograph(number % 5)) for number in range(7)), n=3)


def many_at_once(engine: Offline) -> Tokens:
    return engine.ask(*(picture_prompt(photograph(20 + number % 12)) for number in range(16)), tokens=160)


SCENARIOS: list[Callable[[Offline], Tokens]] = [
    photographs,
    several_in_a_request,
    films,
    three_answers,
    many_at_once,
]


def answers(engine: Offline, *, ours: bool) -> dict[str, Tokens]:
    """Return the answers of each scenario; after each, a store of ours has no open lease."""
    found = {}
    for scenario in SCENARIOS:
        found[scenario.__name__] = scenario(engine)
        if ours:
            assert 0 == store().open_leases, f"after {scenario.__name__}"
    return found
