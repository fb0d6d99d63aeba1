"""Two training jobs on one host decode each sample once: the workers of their DataLoaders share a cache.

docs/guides/programs.md explains it. Run it: `python dataset.py`.
"""

import multiprocessing
import os
import tempfile
import zlib
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import shmstore

COUNT, JOBS, WORKERS, EPOCHS = 48, 2, 2, 2
SHAPE = (3, 96, 96)
CACHE = f"dataset-{os.getpid()}"  # yours has a name that all jobs know, such as "imagenet-224"


class Samples(Dataset[torch.Tensor]):
    """The files of a folder, decoded; any number of processes may have this dataset."""

    def __init__(self, folder: str, cache: str) -> None:
        self.paths = sorted(Path(folder).glob("*.z"))
        self.cache = shmstore.Cache(cache, "256 MiB", processes=JOBS * WORKERS)  # workers get a copy, forked or spawned

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        path = self.paths[index]
        decoded: torch.Tensor = self.cache.get_or_make(str(path), lambda: decode(path))
        return decoded  # the same memory in all workers of all jobs; read-only, so augment a copy of it


def decode(path: Path) -> torch.Tensor:
    """Stand for a JPEG decoder, and leave a mark that it ran."""
    with open(path.parent / "decoded", "a") as marks:
        marks.write(f"{path.name}\n")
    return torch.frombuffer(bytearray(zlib.decompress(path.read_bytes())), dtype=torch.uint8).view(SHAPE)


def job(number: int, folder: str, cache: str) -> None:
    """Train, as far as a loader sees of it."""
    loader = DataLoader(Samples(folder, cache), batch_size=8, shuffle=True, num_workers=WORKERS)
    for epoch in range(EPOCHS):
        total = sum(int(batch.sum()) for batch in loader)
        print(f"job {number}, epoch {epoch}: all pixels together are {total}", flush=True)


def main() -> None:
    """Run two jobs at once over one folder."""
    fork = multiprocessing.get_context("fork")  # which imports torch once; jobs of yours start in any way
    with tempfile.TemporaryDirectory() as folder:
        for number in range(COUNT):
            Path(folder, f"{number:03}.z").write_bytes(zlib.compress(bytes([number]) * (3 * 96 * 96)))
        jobs = [fork.Process(target=job, args=(number, folder, CACHE)) for number in range(JOBS)]
        for process in jobs:
            process.start()
        for process in jobs:
            process.join()
        decoded = Path(folder, "decoded").read_text().split()
        print(f"{JOBS} jobs, {EPOCHS} epochs, {COUNT} samples: {len(decoded)} were decoded")
    shmstore.Cache.unlink(CACHE)  # leave it out, and the next run finds them all


if __name__ == "__main__":
    main()
