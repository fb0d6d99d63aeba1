"""From a photograph to an item: a content hash, a real Hugging Face image processor, a digest.

Qwen2-VL's processor is built from its class and its defaults, without weights, files or network. The demo uses its
variant on Pillow and numpy, which does not need torchvision.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from examples.demo.images import ImageError, load_image
from shmstore.multimodal import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    ResolvedPromptUpdate,
    hash_item,
)

if TYPE_CHECKING:
    from PIL.Image import Image

PROCESSING_PACKAGES = ("transformers", "PIL")
"""Import names of the packages that `PhotographSource` needs."""

PLACEHOLDER = "<|image_pad|>"
PLACEHOLDER_ID = 151_655
"""Qwen2-VL's token for the place of one embedding of an image."""
MERGED_PATCHES = 4
"""Patches that Qwen2-VL merges into one embedding."""

Processed = tuple[MultiModalKwargsItem, list[ResolvedPromptUpdate]]
"""The item of an image, and the updates of its place in the prompt."""


class Picture(Protocol):
    """One image of a request."""

    @property
    def name(self) -> str:
        """The name in the report."""
        ...

    def mm_hash(self) -> str:
        """Return the content hash of the image and the processor's configuration; equal hashes mean equal items."""
        ...

    def process(self) -> Processed:
        """Run the image processor."""
        ...


class PictureSource(Sized, Iterable[Picture], Protocol):
    """Yields the images in the API process, and loads each on demand; it must pickle, because it travels there."""


@dataclass(frozen=True)
class Photograph:
    """An image file, decoded."""

    path: Path
    image: Image
    processor: Any

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    def mm_hash(self) -> str:
        """Return the hash of the pixels and of the processor's configuration."""
        return hash_item(self.image, processor=type(self.processor).__name__, config=self.processor.to_json_string())

    def process(self) -> Processed:
        """Return `pixel_values` (patches, 1176) float32 and `image_grid_thw` (3,) int64; raises `ImageError`."""
        try:
            features = self.processor(images=[self.image], return_tensors="pt")
        except ValueError as error:  # one side is more than 200 times the other, for example
            raise ImageError(f"{self.path}: {error}") from None
        return processed(features)


@dataclass(frozen=True)
class PhotographSource:
    """Image files, for Qwen2-VL's image processor."""

    paths: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[Photograph]:
        """Yield each file's image; raise `ImageError` for a file that cannot be read."""
        processor = load_processor()
        for path in self.paths:
            yield Photograph(path, load_image(path), processor)


def load_processor() -> Any:
    """Return Qwen2-VL's image processor with its default configuration, on Pillow and numpy."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # the demo needs nothing from the hub, so it must not ask
    transformers = importlib.import_module("transformers")
    # Before transformers 5 the plain name was the Pillow variant; now it is the torchvision variant.
    variant = getattr(transformers, "Qwen2VLImageProcessorPil", None) or transformers.Qwen2VLImageProcessor
    return variant()


def processed(features: Mapping[str, torch.Tensor]) -> Processed:
    """Return the item and the prompt updates for the output of Qwen2-VL's processor for one image."""
    patches = len(features["pixel_values"])
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", [patches]),
        "image_grid_thw": MultiModalFieldConfig.batched("image"),
    }
    (item,) = MultiModalKwargsItems.from_hf_inputs(features, fields).require_data()["image"]
    if item is None:
        raise TypeError("unreachable: require_data accepts no None")
    content = [PLACEHOLDER_ID] * (patches // MERGED_PATCHES)
    return item, [ResolvedPromptUpdate("image", 0, "replace", PLACEHOLDER, content)]


def item_bytes(item: MultiModalKwargsItem) -> int:
    """Return the bytes of all tensors of an item."""
    return sum(elem.data.nbytes for elem in item.values())


def item_digest(item: MultiModalKwargsItem) -> bytes:
    """Return a SHA-256 digest over names, dtypes, shapes and every byte, in the order of the item's keys."""
    digest = hashlib.sha256()
    for name, elem in item.items():
        tensor = elem.data
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
