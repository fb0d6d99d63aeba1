"""The answers of an engine with the plug-in are those of vLLM's `lru`, and no lease outlives its request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.inputs import film, film_prompt, photograph, picture_prompt
from tests.vllm.offline import Offline, Tokens, offline, store

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
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


def photographs(engine: Offline) -> Tokens:
    prompts = [picture_prompt(photograph(number)) for number in range(6)]
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
    found = {}
    for scenario in SCENARIOS:
        found[scenario.__name__] = scenario(engine)
        if ours:
            assert 0 == store().open_leases, f"after {scenario.__name__}"
    return found


@pytest.fixture(scope="module")
def expected(model: Path) -> Callable[[str], dict[str, Tokens]]:
    """The answers with `lru`, made once for each kind of engine."""
    made: dict[str, dict[str, Tokens]] = {}

    def of(kind: str) -> dict[str, Tokens]:
        if kind not in made:
            with offline(model, "lru", **KINDS[kind]) as engine:
                made[kind] = answers(engine, ours=False)
        return made[kind]

    return of


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_lru(
    model: Path, expected: Callable[[str], dict[str, Tokens]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMSTORE_VLLM_READ", "views" if kind == "two workers" else "copy")
    with offline(model, "shm", **KINDS[kind]) as engine:
        found = answers(engine, ours=True)
        facts = store()
        assert 0 < facts.hits
        assert 0 == facts.refusals
        if kind == "tight":
            assert 0 < engine.metric("vllm:num_preemptions")
    assert expected(kind) == found


@pytest.mark.parametrize("read", ["copy", "until_step"])
def test_a_cache_of_a_tenth_of_what_is_needed_changes_no_token(
    model: Path, expected: Callable[[str], dict[str, Tokens]], read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHMSTORE_VLLM_READ", read)
    with offline(model, "shm", **KINDS["plain"] | SMALL) as engine:
        found = answers(engine, ours=True)
        assert 0 < store().evictions
    assert expected("plain") == found
