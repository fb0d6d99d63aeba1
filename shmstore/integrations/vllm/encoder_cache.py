"""vLLM's encoder-cache manager, by that of shmstore.

    vllm serve MODEL --ec-manager-config \
        '{"encoder_cache_manager_cls": "shmstore.integrations.vllm.encoder_cache.EncoderManager"}'
"""

from __future__ import annotations

import logging
from typing import Any

import vllm.v1.core.encoder_cache_manager as _vllm

from shmstore.integrations.vllm import compare
from shmstore.integrations.vllm.encoder import scope
from shmstore.scheduler import EncoderCacheManager

_log = logging.getLogger("vllm.shmstore")


class FollowedManager(_vllm.EncoderCacheManager):  # type: ignore[misc]
    """vLLM's own manager, for `ShmstoreECConnector`, which vLLM does not tell when the weights change."""

    def reset(self) -> None:
        """Forget all outputs, also those in the store."""
        super().reset()
        scope.turn()


class EncoderManager:
    """Our encoder-cache manager as vLLM's scheduler calls it; calls that are not here go to `EncoderCacheManager`.

    vLLM asks about all items of a request, and then allocates them, or not if blocks are short.
    """

    def __init__(self, cache_size: int) -> None:
        self._ours = EncoderCacheManager(cache_size)
        self._asked: Any = None

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: Any) -> Any:
        """Return ours, or vLLM's own for an encoder-decoder model or a vLLM that is not known; the log says which."""
        if vllm_config.model_config.is_encoder_decoder:
            problem: str | None = "it does not know encoder-decoder models"
            theirs: Any = _vllm.EncoderDecoderCacheManager
        else:
            problem = compare.difference(compare.ENCODER_CACHE)
            theirs = FollowedManager
        if problem is None:
            _log.info("vLLM's scheduler uses the encoder-cache manager of shmstore")
            return cls(cache_size)
        _log.warning("The encoder-cache manager of shmstore does not serve this, so vLLM's own stays: %s", problem)
        return theirs.create_manager(cache_size=cache_size, vllm_config=vllm_config)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours, name)

    def can_allocate(self, request: Any, i: int, encoder_compute_budget: int, num_embeds_to_schedule: int) -> bool:
        """Reserve room for item i. With its first item a request frees what the one before has reserved in vain."""
        if self._asked is not None and not num_embeds_to_schedule:
            self._ours.unreserve(self._asked)
        self._asked = request
        return self._ours.reserve(request, i, encoder_compute_budget, num_embeds_to_schedule)

    def get_cached_num_encoder_embeds(self, request: Any, i: int) -> int | None:
        """Return the size of the entry that is cached under item i's hash, or None."""
        mm_hash = request.mm_features[i].identifier
        return self._ours._sizes[mm_hash] if mm_hash in self._ours.cached else None

    def reset(self) -> None:
        """Forget all outputs, also those in the store: the weights have changed."""
        self._ours.reset()
        scope.turn()

    def get_manager_metadata(self) -> None:
        """Return nothing: the workers need not be told."""
