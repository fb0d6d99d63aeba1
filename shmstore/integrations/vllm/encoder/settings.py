"""What `--ec-transfer-config` says to the connector, and what it does not serve."""

from __future__ import annotations

from typing import Any, Literal

from pydantic.dataclasses import dataclass

from shmstore.integrations.encoder import settings
from shmstore.integrations.vllm import names


@dataclass(frozen=True, config=settings.CONFIG)
class Settings(settings.Settings):
    """The options of `ec_connector_extra_config`."""

    read: Literal["copy", "views"] = "copy"
    """Whether a worker's own encoder cache holds copies, or read-only views that pin their place in the store.

    Nothing writes to an encoder output, so there is no "private"."""
    weights: Literal["any", "files"] = "any"
    """What may be in the weights after vLLM has reset the encoder cache, as a pause does: anything, so that the engine
    shares with no other from then on, or what the model's files have."""
    share_uuids: bool = False
    """Whether items that a client has named itself are shared, too: see the guide."""

    @classmethod
    def of(cls, vllm_config: Any) -> Settings:
        """Return the settings of a configuration; ValueError if they, or the engine, cannot be served."""
        refuse(vllm_config)
        return cls.parse(vllm_config.ec_transfer_config.ec_connector_extra_config, "ec_connector_extra_config")


def refuse(vllm_config: Any) -> None:
    """Raise ValueError with a sentence for an engine whose encoder outputs cannot be shared."""
    model, parallel, lora = vllm_config.model_config, vllm_config.parallel_config, vllm_config.lora_config
    problem = None
    if not model.is_multimodal_model:
        problem = f"{model.model} has no encoder"
    elif (
        model.multimodal_config.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
        and not names.numbered_by_run
    ):
        problem = (
            "with mm_processor_cache_gb 0 and no prefix caching vLLM numbers items as other servers do, "
            "unless the plug-in shmstore is in use (see SHMSTORE_VLLM and VLLM_PLUGINS)"
        )
    elif model.is_encoder_decoder:
        problem = f"{model.model} is an encoder-decoder model, whose encoder outputs vLLM does not load"
    elif lora is not None and lora.enable_tower_connector_lora:
        problem = "enable_tower_connector_lora changes the encoder, and an item's hash has only the adapter's name"
    elif vllm_config.weight_transfer_config is not None:
        problem = "weight_transfer_config changes the weights, and tells no connector"
    elif parallel.nnodes > 1:
        problem = "the workers of one engine must be on one host"
    elif parallel.distributed_executor_backend not in ("mp", "uni"):
        problem = f"distributed_executor_backend must be mp or uni, not {parallel.distributed_executor_backend}"
    if problem is not None:
        raise ValueError(f"ShmstoreECConnector cannot serve this engine: {problem} (remove --ec-transfer-config)")
