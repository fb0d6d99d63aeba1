"""vLLM's prompt updates as bytes, so that the next API server has them.

They hold functions: a mask of the tokens that get embeddings. What the function answers is data. An update whose target
is a function of the prompt stays in its process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from vllm.multimodal.processing import PromptUpdateDetails

from shmstore.errors import unless_interrupted
from shmstore.multimodal.values.updates import pack, shortened, unpack

_module = sys.modules[PromptUpdateDetails.__module__]
_Update: Any = _module.ResolvedPromptUpdate
_MODES: Any = _module.UpdateMode
_FIELDS = ["modality", "item_idx", "mode", "target", "content", "full", "is_embed"]
_IS_KNOWN = [field.name for cls in (_Update, PromptUpdateDetails) for field in fields(cls)] == _FIELDS


def encode_updates(given: Any) -> bytes | None:
    """Return prompt updates as bytes, or None if they are not data."""
    if not _IS_KNOWN:
        return None
    rows = []
    for update in given:
        if type(update) is not _Update or type(update.content) is not PromptUpdateDetails:
            return None
        full, is_embed = update.content.full, update.content.is_embed
        try:
            mask = None if is_embed is None else bytes(is_embed(full).bool().tolist())
        except unless_interrupted(Exception):  # a function that wants more than the tokens
            return None
        rows.append([update.modality, update.item_idx, update.mode.value, update.target, mask, *shortened(full)])
    return pack(rows)


def decode_updates(packed: bytes) -> list[Any]:
    """Return what `encode_updates` has encoded; an exception for other bytes."""
    return [
        _Update(
            kind, item_idx, _MODES(mode), target, PromptUpdateDetails(full, None if mask is None else _answer(mask))
        )
        for kind, item_idx, mode, target, mask, full in unpack(packed)
    ]


def _answer(mask: bytes) -> Callable[..., torch.Tensor]:
    return lambda *_: torch.tensor(list(mask), dtype=torch.bool)
