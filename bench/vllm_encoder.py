"""`python -m bench.vllm_encoder`: the time to the first token over HTTP, with and without stored encoder outputs.

A request has one photograph of 2000 x 1500 pixels as a PNG. One server gets new pictures. A second one gets the same,
which it has not seen, and then gets them again: its processor cache has them then, and its own encoder cache, which
holds two, does not. Each part has 8 pictures for 1 and for 4 clients, and 16 for 16. A figure is the median, with the
quarters below and above it.

With --kills: what is encoded again after SIGKILL of each process of an engine, and a restart.
"""

import argparse
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from bench.vllm_http import ENVIRONMENT, body, first_token, shown
from shmstore.errors import StoreNotFoundError
from shmstore.store import ObjectStoreWriter
from tests.vllm.encoder.counting import calls
from tests.vllm.encoder.engine import Engine, engine
from tests.vllm.model import make_model
from tests.vllm.server import server

STORE = f"bench-encoder-{os.getpid()}"
TOGETHER = (1, 4, 16)
PICTURES = 8
"""For each number of clients, or one a client."""
PARTS = ("new", "seen by another engine", "seen before")


def connectors(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what each way tells vLLM."""
    ours = {
        "ec_connector": "ShmstoreECConnector",
        "ec_connector_module_path": "shmstore.integrations.vllm.encoder",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"store": STORE, "capacity_gb": 0.5},
    }
    example = {
        "ec_connector": "ECExampleConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return {"none": {}, "`ECExampleConnector`, in `/dev/shm`": example, "ours": ours}


def ask(port: int, first: int) -> dict[int, list[float]]:
    """Return the times for each number of clients, each with pictures of its own."""
    found = {}
    for at, clients in enumerate(TOGETHER):
        bodies = [body(first + 100 * at + i) for i in range(max(PICTURES, clients))]
        with ThreadPoolExecutor(clients) as pool:
            found[clients] = list(pool.map(lambda one: first_token(port, one), bodies))
    return found


def measure(way: dict[str, Any], model: Path, log: Path) -> dict[str, dict[int, list[float]]]:
    """Return the times of one way."""
    settings = ["--mm-processor-cache-gb", "4", "--no-enable-prefix-caching", "--max-num-seqs", "16"]
    if way:
        settings += ["--ec-transfer-config", json.dumps(way)]
    found = {}
    with server(model, log, *settings) as one:
        first_token(one.port, body(900))  # the first requests are slower
        found[PARTS[0]] = ask(one.port, 0)
    with server(model, log, *settings) as two:
        first_token(two.port, body(900))
        if way:
            found[PARTS[1]] = ask(two.port, 0)
        else:
            ask(two.port, 0)
        found[PARTS[2]] = ask(two.port, 0)
    return found


def times(model: Path, folder: Path, files: Path) -> None:
    """Print the table of times."""
    print("| connector | picture | " + " | ".join(f"{n} client{'s' * (n > 1)}" for n in TOGETHER) + " |")
    print("|---|---|" + "---:|" * len(TOGETHER))
    for name, way in connectors(files).items():
        for part, found in measure(way, model, folder / "log").items():
            print(f"| {name} | {part} | " + " | ".join(shown(found[n]) for n in TOGETHER) + " |", flush=True)
        remove()


def remove() -> None:
    """Remove the store, if there is one."""
    with suppress(StoreNotFoundError):
        ObjectStoreWriter.unlink(STORE)


VICTIMS = {"its worker": "VLLM::Worker", "its engine core": "VLLM::EngineCore", "all its processes": ""}


def kills(model: Path, folder: Path, files: Path) -> None:
    """Print how many of 8 pictures are encoded again by the engine that comes after a death."""
    print("| connector | " + " | ".join(f"SIGKILL of {victim}" for victim in VICTIMS) + " |")
    print("|---|" + "---:|" * len(VICTIMS))
    pictures = [[number] for number in range(8)]
    for name, way in connectors(files).items():
        settings = {"ec_transfer_config": way} if way else {}
        row = []
        with engine(model, folder, **settings) as one:
            one.ask(*pictures)
            for title in [*VICTIMS.values()]:
                for process in psutil.Process(one.process.pid).children(recursive=True):
                    if title and title in "".join(process.cmdline()):
                        process.kill()
                        process.wait()
                one.kill()
                one = Engine(model, folder, **settings)
                one.wait()
                before = calls(folder)
                one.ask(*pictures)
                row.append(calls(folder) - before)
            one.kill()
        print(f"| {name} | " + " | ".join(map(str, row)) + " |", flush=True)
        remove()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.vllm_encoder", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", action="store_true", help="what is encoded again after a death")
    work = kills if parser.parse_args().kills else times
    os.environ |= ENVIRONMENT
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as files:
        sizes = {"depth": 2, "hidden_size": 256, "intermediate_size": 512}
        try:
            work(make_model(Path(folder, "model"), **sizes), Path(folder), Path(files))
        finally:
            remove()


if __name__ == "__main__":
    main()
