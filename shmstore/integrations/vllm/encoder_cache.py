"""vLLM's encoder-cache manager, by that of shmstore.

    vllm serve MODEL --ec-manager-config \
        '{"encoder_cache_manager_cls": "shmstore.integrations.vllm.encoder_cache.EncoderManager"}'
"""

from __future__ import annotations

import logging
from typing import Any

import vllm.v1.core.encoder_cache_manager as _vllm

from shmstore.integrations.vllm import compare, stay_out
from shmstore.integrations.vllm.encoder import scope
from shmstore.scheduler import EncoderCacheManager

_log = logging.getLogger("vllm.shmstore")


class FollowedManager(_vllm.EncoderCacheManager):  # type: ignore[misc]
    """vLLM's own manager, for `ShmstoreECConnector`, which vLLM does not tell when the weights change."""

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: Any) -> Any:
        """Return the manager of this configuration's engine."""
        made = super().create_manager(cache_size=cache_size, vllm_config=vllm_config)
        made.vllm_config = vllm_config
        return made

    def reset(self) -> None:
        """Forget all outputs, also those in the store."""
        super().reset()
        scope.reset(self.vllm_config)


class EncoderManager:
    """Our encoder-cache manager as vLLM's scheduler calls it.

    vLLM asks about all items of a request, and then allocates them, or not if blocks are short.
    """

    def __init__(self, cache_size: int, vllm_config: Any) -> None:
        self._vllm_config = vllm_config
        self._ours = ours = EncoderCacheManager(cache_size)
        self._asked: Any = None
        self.allocate, self.free, self.free_encoder_input = ours.allocate, ours.free, ours.free_encoder_input
        self.check_and_update_cache, self.get_cached_input_ids = ours.check_and_update_cache, ours.get_cached_input_ids
        self.get_freed_mm_hashes = ours.get_freed_mm_hashes

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
            return cls(cache_size, vllm_config)
        stay_out("The encoder-cache manager of shmstore does not serve this, so vLLM's own stays", problem)
        return theirs.create_manager(cache_size=cache_size, vllm_config=vllm_config)

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
        scope.reset(self._vllm_config)

    def get_manager_metadata(self) -> None:
        """Return nothing: the workers need not be told."""
