"""A small engine with its own types: an API server, an engine core, and two workers, in four processes.

It shows the recipe of docs/guides/engine.md: item and updates types of the engine, leases that last for a request, a
request that is rejected, two samples of one request, and private copies in the workers. Run it: `python engine.py`.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch

from shmstore import CacheMissError, ObjectRef, StoreHandle
from shmstore.multimodal import (
    BaseMultiModalProcessorCache,
    CacheTypes,
    MultiModalCacheConfig,
    processor_cache_from_config,
    worker_receiver_cache_from_config,
)

WORKERS = 2
CONFIG = MultiModalCacheConfig(cache_type="shm", world_size=WORKERS, processor_cache_gb=0.01, ipc_cache_gb=0.05)

Clip = dict[str, torch.Tensor | int]  # an item: what the store's serializer takes


@dataclass
class Prompt:
    """The engine's prompt updates. They hold a function, so they cannot be sent or stored; they stay in P0."""

    tokens: int
    expand: Callable[[str], str]


TYPES: CacheTypes[Clip, Prompt] = CacheTypes(dict, updates_size=lambda prompt, mm_hash: 100)


@dataclass
class Request:
    """What travels to the workers: each item as a reference of 40 bytes, or inline if it does not fit."""

    request_id: int
    text: str
    items: dict[str, ObjectRef | Clip | None]
    samples: int = 1


@dataclass
class ApiServer:
    """P0: preprocesses each clip once, and ends the leases of a request when the request ends."""

    cache: BaseMultiModalProcessorCache[Clip, Prompt]
    to_core: Connection
    decoded: int = 0
    live: dict[int, Request] = field(default_factory=dict)

    def decode(self, name: str) -> tuple[Clip, Prompt]:
        """Do the expensive part."""
        self.decoded += 1
        frames = torch.full((8, 3, 64, 64), len(name), dtype=torch.uint8)
        return {"frames": frames, "fps": 24}, Prompt(8, lambda text: text.replace("<clip>", "<frame>" * 8))

    def submit(self, request_id: int, text: str, names: list[str], samples: int = 1) -> None:
        """Send a request; a rejected one leaves no lease."""
        cached = self.cache.is_cached(names)
        try:
            inputs = [None if cached[at] else self.decode(name) for at, name in enumerate(names)]
            outputs = self.cache.get_and_update(inputs, names)
        except CacheMissError:  # evicted between the two calls
            outputs = self.cache.get_and_update([self.decode(name) for name in names], names)
        request = Request(request_id, text, {name: outputs[at][0] for at, name in enumerate(names)}, samples)
        self.live[request_id] = request
        try:
            for _, prompt in outputs:
                request.text = prompt.expand(request.text)
            if len(request.text) > 200:
                raise ValueError(f"request {request_id}: the prompt has {len(request.text)} characters")
            self.to_core.send_bytes(pickle.dumps(request, 5))
        except BaseException:
            self.finish(request_id)
            raise

    def finish(self, request_id: int) -> None:
        """End the request, in whatever way it ends: answered, aborted, or rejected."""
        self.cache.release(self.live.pop(request_id).items.values())


def engine_core(from_api: Connection, to_workers: list[Connection]) -> None:
    """P1: schedules each sample; it forwards references and reads no tensor."""
    while payload := from_api.recv_bytes():
        request: Request = pickle.loads(payload)
        for _ in range(request.samples):
            for worker in to_workers:
                worker.send_bytes(payload)
    for worker in to_workers:
        worker.send_bytes(b"")


def worker(rank: int, handle: StoreHandle, from_core: Connection, answers: Connection) -> None:
    """Run the model; each sample reads the same references again."""
    cache = worker_receiver_cache_from_config(CONFIG, rank, handle, types=TYPES, policy="copy")
    assert cache is not None
    with cache:
        while payload := from_core.recv_bytes():
            request: Request = pickle.loads(payload)
            clips = [cache.get_and_update_item(item, name) for name, item in request.items.items()]
            total = sum(int(torch.as_tensor(clip["frames"]).sum()) for clip in clips)
            answers.send((request.request_id, rank, total))


def main() -> None:
    """Serve four requests."""
    spawn = multiprocessing.get_context("spawn")
    from_api, to_core = spawn.Pipe(duplex=False)
    pipes = [spawn.Pipe(duplex=False) for _ in range(WORKERS)]
    results = [spawn.Pipe(duplex=False) for _ in range(WORKERS)]
    cache = processor_cache_from_config(CONFIG, types=TYPES, hold=True)
    assert cache is not None
    with cache:
        api, handle = ApiServer(cache, to_core), cache.handle
        processes = [spawn.Process(target=engine_core, args=(from_api, [to for _, to in pipes]))]
        for rank in range(WORKERS):
            processes.append(spawn.Process(target=worker, args=(rank, handle, pipes[rank][0], results[rank][1])))
        for process in processes:
            process.start()
        try:
            api.submit(0, "too long: <clip>" + "!" * 200, ["beach"])
        except ValueError as error:
            print("rejected,", error)
        for request_id, samples in ((1, 1), (2, 3)):
            api.submit(request_id, "what is in <clip> and <clip>?", ["beach", "mountain"], samples)
            for _ in range(samples):
                print("answers:", [answers.recv() for answers, _ in results])
            api.finish(request_id)
        to_core.send_bytes(b"")
        for process in processes:
            process.join()
        leases = cache.writer.stats().open_leases if cache.writer else 0
        print(f"clips decoded: {api.decoded}, {cache.make_stats()}, open leases: {leases}")


if __name__ == "__main__":
    main()
