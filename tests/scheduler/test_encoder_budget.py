"""Encoder budgets and how many items they are."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from shmstore.scheduler import MultiModalBudget, compute_encoder_budget


def encoder_budget(tokens: Any, **options: Any) -> tuple[int, int]:
    numbers = {"max_num_encoder_input_tokens": 100, "encoder_cache_size": 80, "max_num_batched_tokens": 64}
    return compute_encoder_budget(tokens, **{**numbers, **options})


def test_both_budgets_hold_the_largest_item() -> None:
    assert (100, 80) == encoder_budget({"image": 50, "audio": 60})
    assert (100, 90) == encoder_budget({"image": 90, "audio": 60})
    assert (120, 120) == encoder_budget({"image": 90, "audio": 120})


def test_no_modalities_need_no_budget(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert (0, 0) == encoder_budget(None)
        assert [] == caplog.records
        assert (0, 0) == encoder_budget({})
    assert ["WARNING"] == [record.levelname for record in caplog.records]


def test_an_item_that_may_not_be_split_must_fit_into_a_batch() -> None:
    message = (
        r"^Chunked MM input disabled but max_tokens_per_mm_item \(65\) is larger than max_num_batched_tokens \(64\)\. "
        r"Please increase max_num_batched_tokens\.$"
    )
    with pytest.raises(ValueError, match=message):
        encoder_budget({"image": 65}, disable_chunked_mm_input=True)
    assert (100, 80) == encoder_budget({"image": 64}, disable_chunked_mm_input=True)
    assert (100, 80) == encoder_budget({"image": 65})


def budget(tokens: dict[str, int], limits: dict[str, int], **options: Any) -> MultiModalBudget:
    numbers: dict[str, Any] = {
        "compute_budget": 1000,
        "cache_size": 900,
        "max_model_len": 400,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 500,
    }
    return MultiModalBudget(tokens, limits, **{**numbers, **options})


@pytest.mark.parametrize(
    ("tokens", "limit", "options", "want"),
    [
        (100, 2, {}, (2, 9)),
        (100, 9, {}, (4, 9)),
        (10, 3, {}, (3, 24)),
        (100, 2, {"enable_chunked_prefill": False}, (2, 9)),
        (200, 1, {"enable_chunked_prefill": False}, (1, 2)),
        (600, 5, {}, (1, 1)),
        (600, 5, {"enable_chunked_prefill": False}, (1, 1)),
        (2000, 5, {}, (1, 1)),
        (100, 0, {}, (1, 8)),
        (0, 5, {}, (0, 0)),
        (100, 5, {"cache_size": 0}, (0, 0)),
        (100, 5, {"compute_budget": 250}, (4, 2)),
    ],
)
def test_items_per_prompt_and_per_batch(
    tokens: int, limit: int, options: dict[str, Any], want: tuple[int, int]
) -> None:
    assert want == budget({"image": tokens}, {"image": limit}, **options).get_max_items("image")


def test_the_first_of_the_largest_modalities_is_named() -> None:
    assert "b" == budget({"a": 1, "b": 5, "c": 5}, {"a": 1, "b": 1, "c": 1}).get_modality_with_max_tokens()
