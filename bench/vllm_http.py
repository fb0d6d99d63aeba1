"""`python -m bench.vllm_http`: the time to the first token over HTTP, with each multi-modal cache of `vllm serve`.

A request has one photograph of 2000 x 1500 pixels as a PNG. Clients ask one after another, or eight at once. All
pictures are asked about twice: a miss, then a hit. Servers take turns; a figure is the median over all turns, with the
quarters below and above it.
"""

import argparse
import http.client
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.vllm.inputs import message, photograph
from tests.vllm.model import make_model
from tests.vllm.server import server

SIZE = (2000, 1500)
MODES = {
    "lru": ("0", "lru"),
    "shm, vLLM's own": ("0", "shm"),
    "shm with shmstore, views": ("strict", "shm"),
}
"""What SHMSTORE_VLLM says, and the cache type."""
TOGETHER = (1, 8)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "SHMSTORE_VLLM_READ": "views",
}


def first_token(port: int, body: bytes) -> float:
    """Return the milliseconds until the first token of a streamed answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    begun = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    while b'"content":' not in (line := answer.readline()):
        assert line
    taken = time.perf_counter() - begun
    answer.read()
    connection.close()
    return 1e3 * taken


def body(number: int, size: tuple[int, int] = SIZE) -> bytes:
    settings = {"model": "tiny", "temperature": 0, "ignore_eos": True, "max_tokens": 2, "stream": True}
    return json.dumps(settings | {"messages": message(photograph(number, size))}).encode()


def measure(mode: str, bodies: list[bytes], model: Path, log: Path) -> dict[tuple[int, str], list[float]]:
    """Return the times of one server, of misses and hits at each number of clients."""
    os.environ["SHMSTORE_VLLM"], cache = MODES[mode]
    settings = ("--mm-processor-cache-type", cache, "--mm-processor-cache-gb", "4", "--no-enable-prefix-caching")
    found = {}
    with server(model, log, *settings, "--max-num-seqs", "8") as one:
        share = len(bodies) // len(TOGETHER)
        for at, clients in enumerate(TOGETHER):
            mine = bodies[at * share : (at + 1) * share]
            with ThreadPoolExecutor(clients) as pool:
                for kind in ("miss", "hit"):
                    found[clients, kind] = list(pool.map(lambda one_body: first_token(one.port, one_body), mine))
    return found


def shown(times: list[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.0f} ({low:.0f} to {high:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3, help="how often each server is started")
    parser.add_argument("--pictures", type=int, default=32, help="pictures of one turn")
    arguments = parser.parse_args()
    os.environ |= ENVIRONMENT
    bodies = [body(number) for number in range(arguments.pictures)]
    found: dict[str, dict[tuple[int, str], list[float]]] = {mode: {} for mode in MODES}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder, "model"))
        for _ in range(arguments.turns):
            for mode in MODES:
                for what, times in measure(mode, bodies, model, Path(folder, "log")).items():
                    found[mode].setdefault(what, []).extend(times)
    kinds = [(clients, kind) for clients in TOGETHER for kind in ("miss", "hit")]
    print("| cache | " + " | ".join(f"{kind}, {clients} at once" for clients, kind in kinds) + " |")
    print("|---|" + "---:|" * len(kinds))
    for mode, times in found.items():
        print(f"| {mode} | " + " | ".join(shown(times[kind]) for kind in kinds) + " |")


if __name__ == "__main__":
    main()
