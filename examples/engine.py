"""A small engine with its own types: an API server, an engine core, and two workers, in four processes.

It shows the recipe of docs/guides/engine.md: items of a type of its own, prompt updates that are stored with them,
leases that last for a request, a request that is rejected, three samples of one request, private copies in the workers,
and an API server that is killed: the next one decodes nothing again. Run it: `python engine.py`.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from shmstore import CacheMissError, ObjectRef, StoreHandle
from shmstore.multimodal import (
    BaseMultiModalProcessorCache,
    CacheTypes,
    MultiModalCacheConfig,
    ResolvedPromptUpdate,
    decode_updates,
    encode_updates,
    processor_cache_from_config,
    worker_receiver_cache_from_config,
)
from shmstore.serde import register_type

WORKERS = 2


@dataclass
class Clip:
    """The engine's item: a class that the store does not know by itself."""

    frames: torch.Tensor
    fps: int

    @staticmethod
    def from_tree(tree: Any) -> Clip:
        """Make a clip of what the store has; its bytes may be forged."""
        if type(tree) is not dict or tree.keys() != {"frames", "fps"}:
            raise ValueError("a clip is a dict of frames and fps")
        return Clip(**tree)


register_type("example.Clip", Clip, lambda clip: {"frames": clip.frames, "fps": clip.fps}, Clip.from_tree)
# The codec stores the prompt updates with their clip, so that the next API server has them, too.
TYPES: CacheTypes[Clip, list[ResolvedPromptUpdate]] = CacheTypes(
    Clip, encode_updates=encode_updates, decode_updates=decode_updates
)


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

    cache: BaseMultiModalProcessorCache[Clip, list[ResolvedPromptUpdate]]
    to_core: Connection
    decoded: int = 0
    live: dict[int, Request] = field(default_factory=dict)

    def decode(self, name: str) -> tuple[Clip, list[ResolvedPromptUpdate]]:
        """Do the expensive part."""
        self.decoded += 1
        clip = Clip(torch.full((8, 3, 64, 64), len(name), dtype=torch.uint8), fps=24)
        return clip, [ResolvedPromptUpdate("video", 0, "replace", "<clip>", "<frame>" * 8)]

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
            for update in (update for _, updates in outputs for update in updates):
                request.text = request.text.replace(update.target, update.content, 1)
            if len(request.text) > 200:
                raise ValueError(f"request {request_id}: the prompt has {len(request.text)} characters")
            self.to_core.send_bytes(pickle.dumps(request, 5))
        except BaseException:
            self.finish(request_id)
            raise

    def finish(self, request_id: int) -> None:
        """End the request, in whatever way it ends: answered, aborted, or rejected."""
        self.cache.release(self.live.pop(request_id).items.values())


def api_server(config: MultiModalCacheConfig, client: Connection, to_core: Connection, ranks: list[Connection]) -> None:
    """Serve the client; the store has a name, so what an API server before this one has stored is a hit."""
    cache = processor_cache_from_config(config, types=TYPES, hold=True)
    assert cache is not None
    assert cache.writer is not None
    with cache:
        api = ApiServer(cache, to_core)
        client.send(cache.handle)
        while request := client.recv():
            request_id, text, names, samples = request
            try:
                api.submit(request_id, text, names, samples)
            except ValueError as error:
                client.send(f"rejected, {error}")
                continue
            found = [[rank.recv() for rank in ranks] for _ in range(samples)]
            client.send(f"answers: {found}, clips decoded: {api.decoded}")
            api.finish(request_id)
        client.send(f"{cache.make_stats()}, open leases: {cache.writer.stats().open_leases}")
        cache.writer.close(unlink=True)  # else the store stays for the next start


def engine_core(from_api: Connection, to_workers: list[Connection]) -> None:
    """P1: schedules each sample; it forwards references and reads no tensor."""
    while payload := from_api.recv_bytes():
        request: Request = pickle.loads(payload)
        for _ in range(request.samples):
            for worker in to_workers:
                worker.send_bytes(payload)
    for worker in to_workers:
        worker.send_bytes(b"")


def worker(config: MultiModalCacheConfig, rank: int, handle: StoreHandle, work: Connection, result: Connection) -> None:
    """Run the model; each sample reads the same references again."""
    cache = worker_receiver_cache_from_config(config, rank, handle, types=TYPES, policy="copy")
    assert cache is not None
    with cache:
        while payload := work.recv_bytes():
            request: Request = pickle.loads(payload)
            clips = [cache.get_and_update_item(item, name) for name, item in request.items.items()]
            total = sum(int(clip.frames.sum()) for clip in clips if isinstance(clip, Clip))
            result.send((request.request_id, rank, total))


def main() -> None:
    """Serve three requests, kill the API server, and serve one more."""
    name = f"example-engine-{os.getpid()}"  # an engine has one name, which every start of it uses
    config = MultiModalCacheConfig(
        cache_type="shm", shm_name=name, world_size=WORKERS, processor_cache_gb=0.01, ipc_cache_gb=0.05
    )
    spawn = multiprocessing.get_context("spawn")
    from_api, to_core = spawn.Pipe(duplex=False)
    pipes = [spawn.Pipe(duplex=False) for _ in range(WORKERS)]
    results = [spawn.Pipe(duplex=False) for _ in range(WORKERS)]

    def start_api() -> tuple[Any, Connection, StoreHandle]:
        client, other = spawn.Pipe()
        serves = config, other, to_core, [answers for answers, _ in results]
        process = spawn.Process(target=api_server, args=serves, daemon=True)  # none outlives this one, however it ends
        process.start()
        return process, client, client.recv()

    api, client, handle = start_api()
    engine = [spawn.Process(target=engine_core, args=(from_api, [to for _, to in pipes]), daemon=True)]
    for rank in range(WORKERS):
        work = config, rank, handle, pipes[rank][0], results[rank][1]
        engine.append(spawn.Process(target=worker, args=work, daemon=True))
    for process in engine:
        process.start()
    clips = "what is in <clip> and <clip>?", ["beach", "mountain"]
    for request in ((0, "too long: <clip>" + "!" * 200, ["beach"], 1), (1, *clips, 1), (2, *clips, 3)):
        client.send(request)
        print(client.recv())
    api.kill()
    api.join()
    api, client, _ = start_api()  # the core and the workers go on
    for order in ((3, *clips, 1), None):
        client.send(order)
        print(client.recv())
    to_core.send_bytes(b"")
    for process in (api, *engine):
        process.join()


if __name__ == "__main__":
    main()
