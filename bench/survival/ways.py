"""Ways that Python's library and small packages give."""

import ctypes
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np

from bench.survival.scene import PATIENCE, ROOM, SIZE, Array, LostError, Way, payload


class Shmstore(Way):
    title = "shmstore"

    def write(self) -> None:
        from shmstore import ObjectStoreWriter

        name = Path(self.folder).name
        self._writer = ObjectStoreWriter.open(name, capacity=(ROOM + 1) * SIZE, n_readers=2)

    def put(self, number: int) -> Any:
        return self._writer.handle, self._writer.put(str(number), payload(number))

    def find(self, number: int) -> Any:
        if str(number) in self._writer:
            return self._writer.handle, self._writer.get_cached(str(number))
        return None

    def read(self, rank: int) -> None:
        self._rank, self._reader = rank, None

    def get(self, ticket: Any) -> tuple[Array, Callable[[], None]]:
        from shmstore import ObjectStoreReader

        if self._reader is None:
            self._reader = ObjectStoreReader.attach(ticket[0], self._rank)
        return self._reader.get(ticket[1]), lambda: None

    def end(self) -> None:
        self._writer.close(unlink=True)


class Blocks(Way):
    title = "multiprocessing.shared_memory"
    servers = ("resource_tracker",)

    def write(self) -> None:
        self._blocks: list[SharedMemory] = []

    def put(self, number: int) -> Any:
        if len(self._blocks) == ROOM:
            old = self._blocks.pop(1)
            old.close()
            old.unlink()
        self._blocks.append(SharedMemory(f"{Path(self.folder).name}-{number}", create=True, size=SIZE))
        np.frombuffer(self._blocks[-1].buf, np.uint64)[:] = payload(number)
        return self._blocks[-1].name

    def find(self, number: int) -> Any:
        with suppress(FileNotFoundError):
            self._blocks.append(SharedMemory(f"{Path(self.folder).name}-{number}"))
            return self._blocks[-1].name
        return None

    def get(self, ticket: Any) -> tuple[Array, Callable[[], None]]:
        block = SharedMemory(ticket)
        return np.frombuffer(block.buf, np.uint64), lambda: None

    def end(self) -> None:
        for block in self._blocks:
            with suppress(FileNotFoundError):
                block.unlink()


class TorchDescriptors(Way):
    title = "torch.multiprocessing, file_descriptor"
    imports = ("torch.multiprocessing",)
    strategy = "file_descriptor"

    def write(self) -> None:
        import torch.multiprocessing

        torch.multiprocessing.set_sharing_strategy(self.strategy)
        self._kept: list[torch.Tensor] = []

    def put(self, number: int) -> Any:
        import torch

        del self._kept[: -ROOM + 1]
        self._kept.append(torch.from_numpy(payload(number).view(np.int64)))
        return self._kept[-1]

    def read(self, rank: int) -> None:
        import torch.multiprocessing

        torch.multiprocessing.set_sharing_strategy(self.strategy)

    def get(self, ticket: Any) -> tuple[Array, Callable[[], None]]:
        return ticket.numpy(), lambda: None


class TorchNames(TorchDescriptors):
    title = "torch.multiprocessing, file_system"
    servers = ("torch_shm_manager",)
    strategy = "file_system"


class Redis(Way):
    title = "Redis, over a Unix socket (copies)"
    servers = ("redis-server",)

    def serve(self, server: str = "") -> bool:
        command = ["redis-server", "--port", "0", "--unixsocket", f"{self.folder}/redis", "--save", "", "--dir"]
        limits = ["--maxmemory", str((ROOM + 1) * SIZE), "--maxmemory-policy", "allkeys-lru"]
        Path(self.folder, "redis").unlink(missing_ok=True)
        self.started.append(subprocess.Popen([*command, self.folder, *limits], stdout=subprocess.DEVNULL))
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and not Path(self.folder, "redis").exists():
            time.sleep(0.02)
        return True

    def write(self) -> None:
        import redis

        self._client = redis.Redis(unix_socket_path=f"{self.folder}/redis")

    read = lambda self, rank: self.write()  # noqa: E731 - both sides are clients

    def put(self, number: int) -> Any:
        self._client.set(str(number), payload(number).tobytes())
        return str(number)

    def find(self, number: int) -> Any:
        return str(number) if self._client.exists(str(number)) else None

    def get(self, ticket: Any) -> tuple[Array, Callable[[], None]]:
        if (found := self._client.get(ticket)) is None:
            raise LostError
        return np.frombuffer(found, np.uint64), lambda: None


class Lmdb(Way):
    title = "lmdb on /dev/shm"

    def write(self) -> None:
        import lmdb

        size = (ROOM + 2) * SIZE
        self._where = f"/dev/shm/{Path(self.folder).name}"
        self._env = lmdb.open(self._where, map_size=size, writemap=True, sync=False, metasync=False)

    def put(self, number: int) -> Any:
        with self._env.begin(write=True) as transaction:
            transaction.delete(str(number - ROOM // 2).encode()) if number > ROOM else None
            transaction.put(str(number).encode(), payload(number).tobytes())
        return str(number)

    def find(self, number: int) -> Any:
        with self._env.begin() as transaction:
            return str(number) if transaction.get(str(number).encode()) is not None else None

    def read(self, rank: int) -> None:
        self.write()

    def get(self, ticket: Any) -> tuple[Array, Callable[[], None]]:
        transaction = self._env.begin(buffers=True)
        return np.frombuffer(transaction.get(ticket.encode()), np.uint64), transaction.abort

    def end(self) -> None:
        self.leave()
        shutil.rmtree(self._where, ignore_errors=True)

    def leave(self) -> None:
        self._env.close()


class Iceoryx(Way):
    title = "iceoryx2, publish and subscribe"

    def write(self) -> None:
        self._publisher = self._service().publisher_builder().initial_max_slice_len(SIZE).create()

    def _service(self) -> Any:
        import iceoryx2

        iceoryx2.set_log_level(iceoryx2.LogLevel.Fatal)
        self._bytes = ctypes.c_uint8 * SIZE
        node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
        builder = node.service_builder(iceoryx2.ServiceName.new(Path(self.folder).name))
        builder = builder.publish_subscribe(iceoryx2.Slice[ctypes.c_uint8]).payload_alignment(
            iceoryx2.Alignment.new(64)
        )
        return builder.subscriber_max_buffer_size(2).subscriber_max_borrowed_samples(2).open_or_create()

    def put(self, number: int) -> Any:
        sample = self._publisher.loan_slice_uninit(SIZE)
        np.frombuffer(self._bytes.from_address(sample.payload_ptr), np.uint64)[:] = payload(number)
        sample.assume_init().send()
        return number

    def read(self, rank: int) -> None:
        self._subscriber = self._service().subscriber_builder().create()

    def get(self, ticket: Any) -> tuple[Array, Callable[[], None]]:
        if (sample := self._subscriber.receive()) is None:
            raise LostError
        return np.frombuffer(self._bytes.from_address(sample.payload_ptr), np.uint64), sample.delete
