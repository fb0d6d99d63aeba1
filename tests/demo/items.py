"""Sources of pictures for the tests of the demo: spawned processes import them by name, so they live apart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import parent_process
from pathlib import Path

import torch

from examples.demo.processing import Picture, Processed, processed


@dataclass(frozen=True)
class RandomPicture:
    """A picture whose item has the shape that the image processor gives, filled at random."""

    number: int
    rows: int

    @property
    def name(self) -> str:
        return f"item {self.number}"

    def mm_hash(self) -> str:
        return f"{self.number:064x}"

    def process(self) -> Processed:
        generator = torch.Generator().manual_seed(self.number)
        features = {
            "pixel_values": torch.rand(self.rows, 1176, generator=generator),
            "image_grid_thw": torch.tensor([[1, self.rows, 1]]),
        }
        return processed(features)


@dataclass(frozen=True)
class RandomItems:
    """Pictures with `rows` of 1176 float32 each."""

    rows: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Picture]:
        for number, rows in enumerate(self.rows):
            yield RandomPicture(number, rows)


@dataclass(frozen=True)
class NotedPicture(RandomPicture):
    """Adds a line with the process's id to a file whenever it is processed."""

    notes: Path = Path()

    def process(self) -> Processed:
        with self.notes.open("a") as notes:
            print(os.getpid(), file=notes)
        return super().process()


@dataclass(frozen=True)
class NotedItems(RandomItems):
    """Pictures that note who processes them."""

    notes: Path = Path()

    def __iter__(self) -> Iterator[Picture]:
        for number, rows in enumerate(self.rows):
            yield NotedPicture(number, rows, notes=self.notes)


@dataclass(frozen=True)
class SpoiltPicture(RandomPicture):
    """A picture whose item has one wrong bit from the second time on that it is processed."""

    times: list[int] = field(default_factory=list)

    def process(self) -> Processed:
        item, updates = super().process()
        self.times.append(1)
        if len(self.times) > 1:
            item["pixel_values"].data.view(torch.int32)[0, 0] ^= 1
        return item, updates


@dataclass(frozen=True)
class SpoiltItems(RandomItems):
    """Pictures of which the first is spoilt."""

    def __iter__(self) -> Iterator[Picture]:
        yield SpoiltPicture(0, self.rows[0])
        yield from list(super().__iter__())[1:]


@dataclass(frozen=True)
class LosesTheStore(RandomItems):
    """The second API process finds nothing: its pictures remove the segment that the first one has left."""

    def __iter__(self) -> Iterator[Picture]:
        supervisor = parent_process()
        assert supervisor is not None
        for left in Path("/dev/shm").glob(f"shmstore-demo-{supervisor.pid}-*"):
            left.unlink()
        yield from super().__iter__()
