"""From a photograph to an item: a real Hugging Face image processor, a content hash, a digest.

Qwen2-VL's processor is built from its class and its defaults: no weights, no files, no network. Its variant on Pillow
and numpy is taken, which does without torchvision.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from shmstore.demo.images import ImageError, load_image

PROCESSING_PACKAGES = ("transformers", "PIL")
"""Import names of the packages that `PhotographSource` needs."""

Item = Mapping[str, torch.Tensor]
"""What one photograph becomes, e.g. `pixel_values` (patches, 1176) float32 and `image_grid_thw` (1, 3) int64."""


@dataclass(frozen=True)
class PreparedItem:
    """One item, ready to be sent."""

    name: str
    """What the report calls it: the file's name."""
    key: str
    """Content hash of the image and of the processor's configuration: equal keys mean equal tensors."""
    tensors: Item
    processing_s: float
    """Seconds that the processor took."""
    hashing_s: float
    """Seconds that the content hash took."""


class ItemSource(Protocol):
    """Makes the items, in the API process; it must pickle, since it travels there."""

    def __len__(self) -> int:
        """Return how many items `__iter__` yields."""
        ...

    def __iter__(self) -> Iterator[PreparedItem]:
        """Yield the items, each prepared when it is asked for."""
        ...


@dataclass(frozen=True)
class PhotographSource:
    """Items from image files, by Qwen2-VL's image processor."""

    paths: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[PreparedItem]:
        """Yield an item for each file; raises `ImageError` for one that cannot be read or processed."""
        processor = load_processor()
        for path in self.paths:
            image = load_image(path)
            start = time.perf_counter()
            key = image_key(np.asarray(image), processor)
            hashed = time.perf_counter()
            try:
                features = processor(images=[image], return_tensors="pt")
            except ValueError as error:  # e.g. one side more than 200 times the other
                raise ImageError(f"{path}: {error}") from None
            done = time.perf_counter()
            yield PreparedItem(path.name, key, dict(features), done - hashed, hashed - start)


def load_processor() -> Any:
    """Return Qwen2-VL's image processor with its default configuration, on Pillow and numpy."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is needed from there, so nothing may be asked of it
    transformers = importlib.import_module("transformers")
    # Until transformers 5 the plain name was the Pillow variant; since then it is the torchvision one.
    variant = getattr(transformers, "Qwen2VLImageProcessorPil", None) or transformers.Qwen2VLImageProcessor
    return variant()


def image_key(pixels: np.ndarray[Any, Any], processor: Any) -> str:
    """Return the content hash that names an item: over the pixels, their shape and dtype, and the processor."""
    digest = hashlib.sha256()
    digest.update(f"{type(processor).__name__} {processor.to_json_string()}\n".encode())
    digest.update(f"{pixels.dtype} {pixels.shape}\n".encode())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()


def item_bytes(item: Item) -> int:
    """Return the bytes of all tensors of an item."""
    return sum(tensor.numel() * tensor.element_size() for tensor in item.values())


def item_digest(item: Item) -> bytes:
    """Return a SHA-256 digest over names, dtypes, shapes and every byte, in the order of the item's keys."""
    digest = hashlib.sha256()
    for name, tensor in item.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
