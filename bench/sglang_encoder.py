"""`make bench-sglang`: the time to the first token over HTTP of SGLang, with and without stored encoder outputs.

A request has one photograph as a PNG, and comes after the answer to the last one. Two servers, SGLang as it is and
one with shmstore, are asked in turn about each picture: new pictures, the same again, the same of two servers more
while the first ones live, and of two that are started after SIGKILL of the first ones. A figure is the median, with
the quarters below and above it; `times` is the median of SGLang's time divided by ours, picture by picture.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from bench.vllm_http import body, first_token, shown
from shmstore.errors import StoreNotFoundError
from shmstore.store import ObjectStoreWriter
from tests.sglang.conftest import remove_files_since  # sets what each server needs in its environment
from tests.sglang.processes import kill_tree
from tests.sglang.test_http import free_port, server
from tests.vllm.model import make_model

STORE = f"bench-encoder-{os.getpid()}"
WAYS: dict[str, dict[str, str]] = {
    "SGLang": {"SHMSTORE_SGLANG": "0"},
    "with shmstore": {"SHMSTORE_SGLANG_ENCODER": json.dumps({"store": STORE, "capacity_gb": 0.5})},
}
ENCODER = {"depth": 2, "hidden_size": 256, "intermediate_size": 512}
WARM = 2
"""So many requests to a server are not counted."""


@contextmanager
def servers(model: Path, folder: Path) -> Iterator[list[tuple[int, int]]]:
    """Yield the process and the port of a server of each way."""
    with ExitStack() as running, ThreadPoolExecutor(len(WAYS)) as pool:

        def start(way: dict[str, str]) -> tuple[int, int]:
            own, port = Path(tempfile.mkdtemp(dir=folder)), free_port()
            pid, _ = running.enter_context(server(model, own, port=str(port), SHMSTORE_SGLANG_GB="0.5", **way))
            return pid, port

        yield list(pool.map(start, WAYS.values()))


def ask(ports: list[int], pictures: list[bytes]) -> list[list[float]]:
    """Return the times of each server; who is asked first changes from picture to picture."""
    found: list[list[float]] = [[] for _ in ports]
    for number, picture in enumerate(pictures):
        for place in (0, 1) if number % 2 else (1, 0):
            found[place].append(first_token(ports[place], picture))
    return [times[WARM:] for times in found]


def row(part: str, times: list[list[float]]) -> None:
    """Print a row of the table."""
    ratio = statistics.median(theirs / ours for theirs, ours in zip(*times, strict=True))
    print(f"| {part} | {' | '.join(map(shown, times))} | {ratio:.1f} |", flush=True)


def measure(model: Path, folder: Path, pictures: list[bytes]) -> None:
    """Print the rows."""
    with servers(model, folder) as first:
        ports = [port for _, port in first]
        row("new", ask(ports, pictures))
        row("seen by the same engine, in its own cache", ask(ports, pictures))
        with servers(model, folder) as second:
            row("seen by another engine", ask([port for _, port in second], pictures))
        for pid, _ in first:
            kill_tree(pid)
    with servers(model, folder) as third:
        row("seen before SIGKILL and a restart", ask([port for _, port in third], pictures))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="make bench-sglang", description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=12)
    parser.add_argument("--size", type=int, nargs=2, default=(672, 504), metavar="PIXELS")
    arguments = parser.parse_args()
    pictures = [body(number, tuple(arguments.size)) for number in range(WARM + arguments.pictures)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers end, too
    before = set(os.listdir("/dev/shm"))
    print(f"| picture | {' | '.join(WAYS)} | times |\n|---|" + "---:|" * (len(WAYS) + 1), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            measure(make_model(Path(folder, "model"), **ENCODER), Path(folder), pictures)
        finally:
            remove_files_since(before)
            with suppress(StoreNotFoundError):
                ObjectStoreWriter.unlink(STORE)


if __name__ == "__main__":
    main()
