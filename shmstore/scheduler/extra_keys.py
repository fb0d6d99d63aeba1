"""What distinguishes the blocks of a request from others with the same tokens: how a request says it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

_new = tuple.__new__  # half the cost of the generated __new__ of a NamedTuple


def lora_of(request: Any) -> tuple[str | None, int | None, str | None]:
    """Return name, number and path of a request's LoRA adapter; each is None if it is not known.

    `lora_request`, if there is one, has them as `lora_name`, `lora_int_id` and `lora_path`. Otherwise they are the
    request's own `lora_name`, `lora_id` and `lora_path`.
    """
    lora = getattr(request, "lora_request", None)
    if lora is not None:
        return lora.lora_name, lora.lora_int_id, getattr(lora, "lora_path", None)
    return getattr(request, "lora_name", None), getattr(request, "lora_id", None), getattr(request, "lora_path", None)


def digest_of_rows(embeds: Any, start: int, stop: int) -> bytes:
    """Return the SHA-256 of the raw bytes of rows start to stop, in C order and in their own dtype."""
    rows = embeds[start:stop]
    if hasattr(rows, "detach"):  # a tensor: its bytes, because numpy has no bfloat16
        import torch

        rows = rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(rows.tobytes("C")).digest()


class EventSource(NamedTuple):
    """What an event tells of a request."""

    token_ids: Sequence[int]
    lora_name: str | None
    lora_id: int | None
    mm_features: Sequence[Any]
    cache_salt: str | None
    prompt_embeds: Any

    @classmethod
    def of(cls, request: Any) -> EventSource:
        """Read it from a request; AttributeError if it has no tokens."""
        name, number, _ = lora_of(request)
        return _new(cls, (
            request.all_token_ids, name, number, getattr(request, "mm_features", None) or (),
            getattr(request, "cache_salt", None), getattr(request, "prompt_embeds", None),
        ))  # fmt: skip

    def extra_keys(self, start: int, stop: int, block_size: int) -> list[list[Any] | None]:
        """Return for each block in tokens start … stop its extra keys without their kinds, or None if it has none."""
        if self.lora_name is None and not self.mm_features and self.cache_salt is None and self.prompt_embeds is None:
            return [None] * ((stop - start) // block_size)  # most requests: no list for each block
        lora = [] if self.lora_name is None else [self.lora_name]
        keys: list[list[Any]] = [[*lora] for _ in range(start, stop, block_size)]
        for feature in self.mm_features:
            offset, length = feature.mm_position.offset, feature.mm_position.length
            first = max(start, offset // block_size * block_size)
            for s in range(first, min(stop, offset + length), block_size) if length else ():
                keys[(s - start) // block_size].append([feature.identifier, offset - s])
        if self.cache_salt is not None and start == 0:
            keys[0].append(self.cache_salt)
        rows = 0 if self.prompt_embeds is None else min(stop, len(self.prompt_embeds))
        for s in range(start, rows, block_size):
            digest = digest_of_rows(self.prompt_embeds, s, min(s + block_size, rows))
            keys[(s - start) // block_size].append(digest)
        return [own or None for own in keys]
