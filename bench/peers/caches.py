"""Compare `shmstore.Cache` with other caches of arrays: the time of a hit, and how many values are made.

``python -m bench.peers.caches`` measures and writes its table into docs/guides/programs.md. Each way keeps its files in
memory. Hits are measured in one process, all ways in turn. Four processes ask for the same values in the same order,
as a program of that library does: look, and make and store what is not there.
"""

import atexit
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from bench.peers import interface
from bench.peers.harness import machine

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "programs.md"
NBYTES, PROCESSES, VALUES, HITS = 1 << 20, 4, 200, 20
ADDRESS = "RAY_ADDRESS"  # the variable by which Ray's processes find each other
Array = np.ndarray[Any, Any]
Get = Callable[[int], Array]
_made = 0


def make(number: int) -> Array:
    """Make a value, and count it."""
    global _made
    _made += 1
    time.sleep(0.002)  # a small decoder
    return np.full(NBYTES, number % 251, np.uint8)


def _look_or_make(get: Callable[[str], Any], store: Callable[[str, Array], Any], number: int) -> Array:
    value = get(str(number))
    if value is None:
        value = make(number)
        store(str(number), value)
    return value  # type: ignore[no-any-return]


def by_shmstore(folder: str) -> Get:
    import shmstore

    cache = shmstore.Cache("cache", "1 GiB", dir=folder)
    return lambda number: cache.get_or_make(str(number), partial(make, number))


def by_diskcache(folder: str) -> Get:
    import diskcache

    cache = diskcache.Cache(folder, size_limit=1 << 30)
    return partial(_look_or_make, cache.get, cache.set)


def by_cachelib(folder: str) -> Get:
    import cachelib

    cache = cachelib.FileSystemCache(folder, threshold=0)
    return partial(_look_or_make, cache.get, cache.set)


def by_joblib(folder: str, mmap_mode: Any = None) -> Get:
    import joblib

    return joblib.Memory(folder, verbose=0, mmap_mode=mmap_mode).cache(make)  # type: ignore[no-any-return]


def by_ray(folder: str) -> Get:
    from bench.peers.ray_objects import Index, ray

    if ADDRESS in os.environ:  # an asker; Ray runs already
        ray.init(log_to_driver=False, logging_level="error", namespace="caches")
    elif not ray.is_initialized():
        files = tempfile.mkdtemp(prefix="ray")
        atexit.register(lambda: (ray.shutdown(), shutil.rmtree(files, ignore_errors=True)))
        ray.init(
            num_cpus=PROCESSES,
            object_store_memory=2 << 30,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            namespace="caches",
            _temp_dir=files,
        )
        os.environ[ADDRESS] = ray.get_runtime_context().gcs_address
    index = ray.remote(num_cpus=0)(Index).options(name=folder, get_if_exists=True).remote()

    def get(key: str) -> Any:
        boxed = ray.get(index.get.remote(key))
        return None if boxed is None else ray.get(boxed[0])

    return partial(_look_or_make, get, lambda key, value: ray.get(index.store.remote(key, [ray.put(value)])))


WAYS: dict[str, Callable[[str], Get]] = {
    "`shmstore.Cache`": by_shmstore,
    "diskcache": by_diskcache,
    "cachelib, files": by_cachelib,
    "joblib": by_joblib,
    'joblib, `mmap_mode="r"`': partial(by_joblib, mmap_mode="r"),
    "Ray": by_ray,
}


def asker(way: str, folder: str, values: int, channel: Any) -> None:
    """Ask for all values, and say how many this process made."""
    get = WAYS[way](folder)
    channel.send("here")
    channel.recv()
    for number in range(values):
        if get(number)[-1] != number % 251:
            raise ValueError(f"{way} gave another value")
    channel.send(_made)
    channel.recv()


def made_by(way: str, folder: str, processes: int, values: int) -> int:
    """Return how many values the processes made together."""
    channels = []
    with ExitStack() as end:
        for _ in range(processes):
            ours, theirs = interface.CONTEXT.Pipe()
            process = interface.CONTEXT.Process(target=asker, args=(way, folder, values, theirs))
            process.start()
            end.callback(process.join)
            end.callback(ours.close)
            theirs.close()
            channels.append(ours)
        for channel in channels:
            channel.recv()
        for channel in channels:
            channel.send("go")
        made = sum(channel.recv() for channel in channels)
        for channel in channels:
            channel.send("end")
        return int(made)


def measured(ways: list[str], processes: int, values: int, rounds: int) -> dict[str, tuple[float, float, int]]:
    """Return the seconds of a hit and of one whose bytes are read, and the values made, of each way that there is."""
    with ExitStack() as end:
        gets: dict[str, Get] = {}
        made = {}
        for way in ways:
            folder = end.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shmstore-bench-"))
            try:
                gets[way] = WAYS[way](folder)
                gets[way](0)
            except ImportError as error:
                print(f"without {way}: {error}", file=sys.stderr)
                continue
            other = end.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="shmstore-bench-"))
            made[way] = made_by(way, other, processes, values)
        hits: dict[str, list[float]] = {way: [] for way in gets}
        reads: dict[str, list[float]] = {way: [] for way in gets}
        for turn in range(rounds + 1):  # the first one warms up
            for way, get in gets.items():
                begin = perf_counter()
                for _ in range(HITS):
                    get(0)
                between = perf_counter()
                for _ in range(HITS):
                    get(0).max()
                if turn:
                    hits[way].append((between - begin) / HITS)
                    reads[way].append((perf_counter() - between) / HITS)
        return {way: (median(hits[way]), median(reads[way]), made[way]) for way in gets}


def table(found: dict[str, tuple[float, float, int]], processes: int, values: int, rounds: int) -> str:
    """Return the table of the page."""
    lines = ["| cache | a hit | and all bytes read | values made |", "|---|---:|---:|---:|"]
    lines += [
        f"| {way} | {hit * 1e6:.0f} µs | {read * 1e6:.0f} µs | {made} |" for way, (hit, read, made) in found.items()
    ]
    what = (
        f"1 MiB each; medians of {rounds} turns of {HITS} hits; {processes} processes ask for {values} values in order"
    )
    where = ", ".join(f"{name} {value}" for name, value in machine().items())
    return "\n".join([*lines, "", f"{what}; {where}.", ""])


def write(page: Path, said: str) -> None:
    """Write the table between its marks in the page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition("<!-- caches: begin -->\n")
    page.write_text(before + begin + said + "".join(rest.partition("<!-- caches: end -->")[1:]), encoding="utf-8")


def main(page: Path = GUIDE, rounds: int = 40) -> None:
    """Measure, print the table, and write it into the page."""
    said = table(measured(list(WAYS), PROCESSES, VALUES, rounds), PROCESSES, VALUES, rounds)
    print(said)
    write(page, said)


if __name__ == "__main__":
    main()
