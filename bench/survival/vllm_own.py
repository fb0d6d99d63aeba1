"""What vLLM has of its own: the ring under its processor cache `shm`, and ECExampleConnector."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.survival.scene import CONTEXT, ROOM, SIZE, Array, LostError, Way, payload


def tensor(number: int) -> Any:
    import torch

    return torch.from_numpy(payload(number).view(np.int64))


class ShmCache(Way):
    """As ShmObjectStoreSenderCache and ShmObjectStoreReceiverCache use it; an engine sends inline what it refuses."""

    title = "vLLM's `shm` processor cache (copies)"
    venv = "VLLM_VENV"
    servers = ("resource_tracker",)
    imports = ("vllm.distributed.device_communicators.shm_object_storage", "vllm.multimodal.inputs")

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._lock = CONTEXT.Lock()  # of all readers

    def write(self) -> None:
        self._storage = self._over({"create": True}, {})

    def _over(self, ring: dict[str, Any], more: dict[str, Any]) -> Any:
        from vllm.distributed.device_communicators import shm_object_storage as vllm

        return vllm.SingleWriterShmObjectStorage(
            max_object_size=SIZE + 4096,
            n_readers=2,
            ring_buffer=vllm.SingleWriterShmRingBuffer((ROOM + 1) * (SIZE + 4096), **ring),
            serde_class=vllm.MsgpackSerde,
            **more,
        )

    def put(self, number: int) -> Any:
        key = str(number)
        where = self._storage.put(key, tensor(number))
        return self._storage.ring_buffer.handle()[1], (*where, self._storage.get_signature(key), key)

    def read(self, rank: int) -> None:
        self._storage = None

    def get(self, ticket: Any) -> tuple[Array, Callable[[], None]]:
        name, reference = ticket
        if self._storage is None:
            self._storage = self._over({"name": name}, {"reader_lock": self._lock})
        return self._storage.get(*reference).numpy(), lambda: None

    def end(self) -> None:
        self._storage.close()

    leave = end


class ExampleConnector(Way):
    """Its files are in the folder of the way."""

    title = "vLLM's ECExampleConnector (files)"
    venv = "VLLM_VENV"
    imports = ("safetensors.torch", "vllm.distributed.ec_transfer.ec_connector.example_connector")

    def write(self) -> None:
        self._connect("ec_producer")

    def read(self, rank: int) -> None:
        self._connect("ec_consumer")

    def _connect(self, role: str) -> None:
        import safetensors.torch  # noqa: F401 - the connector takes it for granted
        from vllm.config import ECTransferConfig
        from vllm.distributed.ec_transfer.ec_connector import example_connector as vllm
        from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

        self._vllm = vllm
        config = ECTransferConfig(
            ec_connector="ECExampleConnector",
            ec_role=role,
            ec_connector_extra_config={"shared_storage_path": self.folder},
        )
        all_of_it: Any = SimpleNamespace(ec_transfer_config=config, model_config=None)
        self._connector = vllm.ECExampleConnector(all_of_it, ECConnectorRole.WORKER)

    def put(self, number: int) -> Any:
        self._connector.save_caches({str(number): tensor(number)}, str(number))
        return str(number)

    def find(self, number: int) -> Any:
        return str(number) if self._connector.has_cache_item(str(number)) else None

    def get(self, ticket: Any) -> tuple[Array, Callable[[], None]]:
        if not self._connector.has_cache_item(ticket):
            raise LostError
        loads = self._vllm.ECExampleConnectorMetadata()
        loads.add_mm_data(self._vllm.MMMeta.make_meta(ticket, 1))
        self._connector.bind_connector_metadata(loads)
        cache: dict[str, Any] = {}
        self._connector.start_load_caches(cache)
        return cache[ticket].numpy(), lambda: None
