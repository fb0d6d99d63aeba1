"""What `--ec-transfer-config` says to the connector, and what it does not serve."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

START = 60.0
"""Seconds within which the store must be there: the first worker makes it before the others need it."""

_EXAMPLE = '"ec_connector_extra_config": {"store": "mm-encoder", "capacity_gb": 16}'


@dataclass(frozen=True)
class Settings:
    """The options of `ec_connector_extra_config`."""

    store: str
    """The store's name; engines with the same name share it."""
    capacity_gb: float
    """The space of each engine that stores, in GiB, which is reserved in shared memory when it starts."""
    dir: str | None = None
    """The folder of the store, as this engine sees it; by default that of SHMSTORE_DIR, without it /dev/shm."""
    engines: int = 8
    """How many engines may store at a time; more of them only read."""
    readers: int = 64
    """How many processes may read: of each engine its scheduler and its first stage's workers."""
    quota_gb: float | None = None
    """The limit for encoder outputs, if the store is shared with something else; by default the capacity."""
    read: Literal["copy", "views"] = "copy"
    """Whether a worker's own encoder cache holds copies, or read-only views that pin their place in the store."""
    single_flight: bool = True
    """Whether an engine waits for an output that another one is making."""
    wait_s: float = 30.0
    """How long it waits at most; then it encodes the item itself."""
    share_uuids: bool = False
    """Whether items that a client has named itself are shared, too: see the guide."""

    def __post_init__(self) -> None:
        for name, wanted in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
                expected = " or ".join("null" if one is type(None) else one.__name__ for one in wanted)
                raise TypeError(f"{name} in ec_connector_extra_config must be {expected}, not {value!r}")
        for name in ("capacity_gb", "engines", "readers"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} in ec_connector_extra_config must be positive, not {getattr(self, name)!r}")
        if self.read not in ("copy", "views"):
            raise ValueError(f"read in ec_connector_extra_config must be 'copy' or 'views', not {self.read!r}")

    @classmethod
    def of(cls, vllm_config: Any) -> Settings:
        """Return the settings of a configuration; ValueError or TypeError if they, or the engine, cannot be served."""
        refuse(vllm_config)
        given = vllm_config.ec_transfer_config.ec_connector_extra_config
        known = {field.name: field for field in fields(cls)}
        for name in given:
            if name not in known:
                raise ValueError(f"ec_connector_extra_config has no {name!r}; it has {', '.join(known)}")
        for name in ("store", "capacity_gb"):
            if name not in given:
                raise ValueError(f"{name} is missing in ec_connector_extra_config; write {_EXAMPLE}")
        return cls(**given)


_TYPES: dict[str, tuple[type, ...]] = {
    "store": (str,),
    "capacity_gb": (int, float),
    "dir": (str, type(None)),
    "engines": (int,),
    "readers": (int,),
    "quota_gb": (int, float, type(None)),
    "read": (str,),
    "single_flight": (bool,),
    "wait_s": (int, float),
    "share_uuids": (bool,),
}


def refuse(vllm_config: Any) -> None:
    """Raise ValueError with a sentence for an engine whose encoder outputs cannot be shared."""
    model, parallel, lora = vllm_config.model_config, vllm_config.parallel_config, vllm_config.lora_config
    problem = None
    if not model.is_multimodal_model:
        problem = f"{model.model} has no encoder"
    elif model.is_encoder_decoder:
        problem = f"{model.model} is an encoder-decoder model, whose encoder outputs vLLM does not load"
    elif lora is not None and lora.enable_tower_connector_lora:
        problem = "enable_tower_connector_lora changes the encoder, and an item's hash has only the adapter's name"
    elif parallel.nnodes > 1:
        problem = "the workers of one engine must be on one host"
    elif parallel.distributed_executor_backend not in ("mp", "uni"):
        problem = f"distributed_executor_backend must be mp or uni, not {parallel.distributed_executor_backend}"
    if problem is not None:
        raise ValueError(f"ShmstoreECConnector cannot serve this engine: {problem} (remove --ec-transfer-config)")
