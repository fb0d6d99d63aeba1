"""The encoder budget of a step, in tokens and in items."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields

from shmstore.errors import check_flags, shown
from shmstore.scheduler.checks import check_range

logger = logging.getLogger(__name__)


def _check_counts(name: str, counts: Mapping[str, int]) -> None:
    check_range(0, **{f"{name}[{shown(modality)}]": count for modality, count in counts.items()})


def compute_encoder_budget(
    max_tokens_by_modality: Mapping[str, int] | None,
    *,
    max_num_encoder_input_tokens: int,
    encoder_cache_size: int,
    max_num_batched_tokens: int,
    disable_chunked_mm_input: bool = False,
) -> tuple[int, int]:
    """Return (compute budget of a step, cache size) in encoder tokens; each holds at least the largest item.

    `max_tokens_by_modality` has the tokens of the largest item of each modality. Return (0, 0) if it is None, because
    the model is not multimodal. Return (0, 0) with a warning if it is empty, because all modalities are switched off.
    ValueError for negative numbers, and if the largest item exceeds `max_num_batched_tokens` and may not be split.
    """
    check_flags(disable_chunked_mm_input=disable_chunked_mm_input)
    _check_counts("max_tokens_by_modality", max_tokens_by_modality or {})
    check_range(
        0,
        max_num_encoder_input_tokens=max_num_encoder_input_tokens,
        encoder_cache_size=encoder_cache_size,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    if max_tokens_by_modality is None:
        return 0, 0
    if not max_tokens_by_modality:
        logger.warning(
            "All modalities are switched off: the multimodal model runs with text only, without encoder cache"
        )
        return 0, 0
    largest = max(max_tokens_by_modality.values())
    if disable_chunked_mm_input and largest > max_num_batched_tokens:
        raise ValueError(
            f"Chunked MM input disabled but max_tokens_per_mm_item ({largest}) is larger than max_num_batched_tokens "
            f"({max_num_batched_tokens}). Please increase max_num_batched_tokens."
        )
    return max(max_num_encoder_input_tokens, largest), max(encoder_cache_size, largest)


@dataclass(eq=False)
class MultiModalBudget:
    """How many items of each modality fit into a prompt and into a batch.

    `max_tokens_by_modality` has the encoder tokens of the largest item, and `limits_per_prompt` the items that a prompt
    may have. ValueError for negative numbers, and for a modality without a limit.
    """

    max_tokens_by_modality: Mapping[str, int]
    limits_per_prompt: Mapping[str, int]
    _: KW_ONLY
    compute_budget: int
    cache_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = True

    def __post_init__(self) -> None:
        check_flags(enable_chunked_prefill=self.enable_chunked_prefill)
        self.max_tokens_by_modality = dict(self.max_tokens_by_modality)
        self.limits_per_prompt = dict(self.limits_per_prompt)
        _check_counts("max_tokens_by_modality", self.max_tokens_by_modality)
        _check_counts("limits_per_prompt", self.limits_per_prompt)
        check_range(0, **{each.name: getattr(self, each.name) for each in fields(self) if each.type == "int"})
        for modality in self.max_tokens_by_modality:
            if modality not in self.limits_per_prompt:
                raise ValueError(f"limits_per_prompt says nothing of {shown(modality)}")

    @property
    def budget(self) -> int:
        """Encoder tokens of a step: the smaller of `compute_budget` and `cache_size`."""
        return min(self.compute_budget, self.cache_size)

    def get_max_items(self, modality: str) -> tuple[int, int]:
        """Return (items per prompt, items per batch), 0 without tokens or budget; KeyError for another modality."""
        tokens = self.max_tokens_by_modality[modality]
        if tokens == 0 or self.budget == 0:
            return 0, 0
        per_prompt = max(1, min(self.limits_per_prompt[modality], self.max_model_len // tokens))
        requests = self.max_num_seqs
        if not self.enable_chunked_prefill:
            requests = min(requests, self.max_num_batched_tokens // tokens)
        return per_prompt, max(1, min(self.budget // tokens, requests * per_prompt))

    def get_modality_with_max_tokens(self) -> str:
        """Return the modality with the largest items, the first of several; ValueError if there are no modalities."""
        if not self.max_tokens_by_modality:
            raise ValueError("there are no modalities")
        return max(self.max_tokens_by_modality, key=self.max_tokens_by_modality.__getitem__)
