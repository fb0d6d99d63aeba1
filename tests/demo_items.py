"""Sources of items for the tests of `shmstore demo`: spawned processes import them by name, so they live apart."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shmstore.demo.images import ImageError
from shmstore.demo.processing import PreparedItem


@dataclass(frozen=True)
class RandomItems:
    """Items of the shape that the image processor gives, filled at random; `rows` of 1176 float32 each."""

    rows: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[PreparedItem]:
        for number, rows in enumerate(self.rows):
            generator = torch.Generator().manual_seed(number)
            tensors = {
                "pixel_values": torch.rand(rows, 1176, generator=generator),
                "image_grid_thw": torch.tensor([[1, rows, 1]]),
            }
            yield PreparedItem(f"item {number}", f"{number:064x}", tensors, processing_s=0.5, hashing_s=0.25)


class LateTerminationError(ImageError):
    """Has the process get SIGTERM while it is on its way out, at the latest moment before its supervisor knows why."""

    def __str__(self) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return super().__str__()


@dataclass(frozen=True)
class BrokenImage:
    """The image cannot be read."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[PreparedItem]:
        raise LateTerminationError("broken.png: truncated")


@dataclass(frozen=True)
class FailingProcessor:
    """The processor has a defect."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[PreparedItem]:
        raise ZeroDivisionError("a defect")


@dataclass(frozen=True)
class StuckProcessor:
    """The processor never comes back from its second image."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[PreparedItem]:
        yield from RandomItems(rows=(1,))
        time.sleep(3600)
