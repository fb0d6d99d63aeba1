"""A service with several worker processes: what one of them has rendered, all of them answer with.

docs/guides/programs.md explains it. Run it: `python service.py`.
"""

import asyncio
import multiprocessing
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.request import urlopen

import numpy as np

import shmstore

WORKERS, IMAGES, REQUESTS = 3, 8, 96
CACHE = f"service-{os.getpid()}"  # yours has a name that all workers know


def render(number: int) -> dict[str, Any]:
    """Stand for something slow."""
    time.sleep(0.05)
    return {"pixels": np.full((256, 256), number, np.uint8), "rendered by": os.getpid()}


async def answer(cache: shmstore.Cache, request: asyncio.StreamReader, response: asyncio.StreamWriter) -> None:
    """Answer one GET: other requests go on while this one waits for `render`, here or in another worker."""
    path = (await request.readline()).split()[1].decode()
    image = await cache.aget_or_make(path, partial(render, int(path[1:])), expire=60)
    head = (
        f"HTTP/1.0 200 OK\r\nX-Rendered-By: {image['rendered by']}\r\nContent-Length: {image['pixels'].nbytes}\r\n\r\n"
    )
    response.write(head.encode())
    response.write(image["pixels"].data.cast("B"))  # from shared memory to the socket
    await response.drain()
    response.close()


def worker(listening: socket.socket, cache_name: str) -> None:
    """Serve until this process is terminated."""

    async def serve() -> None:
        cache = shmstore.Cache(cache_name, "64 MiB", processes=WORKERS)
        server = await asyncio.start_server(partial(answer, cache), sock=listening)
        await server.serve_forever()

    asyncio.run(serve())


def ask(port: int, number: int) -> tuple[int, str]:
    """Return the image's number, and who has rendered it."""
    with urlopen(f"http://127.0.0.1:{port}/{number}", timeout=60) as response:
        return response.read()[-1], response.headers["X-Rendered-By"]


def main() -> None:
    """Start the workers, and ask for each image many times at once."""
    with socket.create_server(("127.0.0.1", 0), backlog=REQUESTS) as listening:
        spawn = multiprocessing.get_context("spawn")
        workers = [spawn.Process(target=worker, args=(listening, CACHE), daemon=True) for _ in range(WORKERS)]
        for process in workers:
            process.start()
        with ThreadPoolExecutor(32) as pool:
            numbers = [number % IMAGES for number in range(REQUESTS)]
            found = list(pool.map(partial(ask, listening.getsockname()[1]), numbers))
        for process in workers:
            process.terminate()
            process.join()
    assert numbers == [number for number, _ in found]
    print(f"{len(found)} answers, {IMAGES} images, rendered {len(set(found))} times")
    shmstore.Cache.unlink(CACHE)


if __name__ == "__main__":
    main()
