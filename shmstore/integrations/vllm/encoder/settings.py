"""What `--ec-transfer-config` says to the connector, and what it does not serve."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from shmstore.integrations.vllm import names
from shmstore.store.options import MAX_READERS, MAX_WRITERS, StoreOptions, mode_for

START = 600.0
"""Seconds within which the store must be there: whoever makes it reserves some GiB a second."""

_OUTPUT = 1 << 20
"""The bytes of a small encoder output; the store has an entry for each that fits."""

_Gib = Annotated[float, Field(gt=0, le=2**14, allow_inf_nan=False)]
_Engines = Annotated[int, Field(ge=1, le=MAX_WRITERS)]
_Readers = Annotated[int, Field(ge=1, le=MAX_READERS)]
_Id = Annotated[int, Field(ge=0, le=2**32 - 2)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_EXAMPLE = '{"store": "mm-encoder", "capacity_gb": 16}, and other options as in the guide on encoder outputs'


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Settings:
    """The options of `ec_connector_extra_config`."""

    store: str
    """The store's name; engines with the same name share it."""
    capacity_gb: _Gib
    """The space of each engine that stores, in GiB, which is reserved in shared memory when it starts."""
    dir: str | None = None
    """The folder of the store, as this engine sees it; by default that of SHMSTORE_DIR, without it /dev/shm."""
    gid: _Id | None = None
    """A group that may use the store, too, with `allow_uid`; by default only the user who makes it may."""
    allow_uid: _Id | None = None
    """The user who owns the store, in the options of all its engines if there is a `gid`; only that user makes it."""
    engines: _Engines = 8
    """How many engines may store at a time; more of them only read."""
    readers: _Readers = 64
    """How many processes may read: of each engine its scheduler and its first stage's workers."""
    quota_gb: _Gib | None = None
    """The limit for encoder outputs, if the store is shared with something else; by default the capacity."""
    read: Literal["copy", "views"] = "copy"
    """Whether a worker's own encoder cache holds copies, or read-only views that pin their place in the store.

    Nothing writes to an encoder output, so there is no "private"."""
    single_flight: bool = True
    """Whether an engine waits for an output that another one is making."""
    wait_s: _Seconds = 30.0
    """Seconds after a request's first wait in which it waits again; then its engine encodes what is missing."""
    weights: Literal["any", "files"] = "any"
    """What may be in the weights after vLLM has reset the encoder cache, as a pause does: anything, so that the engine
    shares with no other from then on, or what the model's files have."""
    share_uuids: bool = False
    """Whether items that a client has named itself are shared, too: see the guide."""

    @property
    def store_options(self) -> StoreOptions:
        """The options of the store, unless somebody has made it with others."""
        capacity = int(self.capacity_gb * 2**30)
        return {
            "capacity": capacity,
            "max_objects": max(256, capacity // _OUTPUT),
            "n_readers": self.readers,
            "n_writers": self.engines,
            "dir": self.dir,
            "mode": mode_for(self.gid),
            "gid": self.gid,
        }

    @classmethod
    def of(cls, vllm_config: Any) -> Settings:
        """Return the settings of a configuration; ValueError if they, or the engine, cannot be served."""
        refuse(vllm_config)
        try:
            settings = cls(**vllm_config.ec_transfer_config.ec_connector_extra_config)
        except ValidationError as error:
            wrong = "; ".join(f"{one['loc'][0]}: {one['msg']}" for one in error.errors())
            raise ValueError(f"ec_connector_extra_config: {wrong} (hint: write {_EXAMPLE})") from None
        if settings.gid is not None and settings.allow_uid is None:
            raise ValueError("ec_connector_extra_config: gid needs allow_uid: name the user who owns the store, too")
        return settings


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
