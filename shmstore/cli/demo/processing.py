"""From a photograph to an item: a content hash, a real Hugging Face image processor, a digest.

Qwen2-VL's processor is built from its class and its defaults: no weights, no files, no network. Its variant on Pillow
and numpy is taken, which does without torchvision.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shmstore.cli.demo.images import ImageError, load_image
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
"""Qwen2-VL's token for a place that an embedding of an image takes."""
MERGED_PATCHES = 4
"""Patches that Qwen2-VL merges into one embedding."""

Processed = tuple[MultiModalKwargsItem, list[ResolvedPromptUpdate]]
"""What an image becomes, and what becomes of its place in the prompt."""


class Picture(Protocol):
    """One image as a request brings it."""

    @property
    def name(self) -> str:
        """What the report calls it."""
        ...

    def mm_hash(self) -> str:
        """Return the content hash of the image and of the processor's configuration: equal hashes, equal items."""
        ...

    def process(self) -> Processed:
        """Run the image processor."""
        ...


class PictureSource(Protocol):
    """Loads the images, in the API process; it must pickle, since it travels there."""

    def __len__(self) -> int:
        """Return how many images `__iter__` yields."""
        ...

    def __iter__(self) -> Iterator[Picture]:
        """Yield the images, each loaded when it is asked for."""
        ...


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
        """Return the hash of the pixels and the processor's configuration."""
        return hash_item(self.image, processor=type(self.processor).__name__, config=self.processor.to_json_string())

    def process(self) -> Processed:
        """Return `pixel_values` (patches, 1176) float32 and `image_grid_thw` (3,) int64; raises `ImageError`."""
        try:
            features = self.processor(images=[self.image], return_tensors="pt")
        except ValueError as error:  # e.g. one side more than 200 times the other
            raise ImageError(f"{self.path}: {error}") from None
        return processed(features)


@dataclass(frozen=True)
class PhotographSource:
    """Image files, for Qwen2-VL's image processor."""

    paths: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[Photograph]:
        """Yield each file's image; raises `ImageError` for one that cannot be read."""
        processor = load_processor()
        for path in self.paths:
            yield Photograph(path, load_image(path), processor)


def usable_photographs(
    paths: Sequence[Path], progressed: Callable[[int], None]
) -> tuple[tuple[Path, ...], tuple[ImageError, ...]]:
    """Return those of `paths` that can be read and processed, and why the others cannot; `progressed` counts them.

    Every image is tried as every mode will use it, so that all that is wrong comes to light at once and beforehand.
    """
    processor = load_processor()
    usable, errors = [], []
    for number, path in enumerate(paths, 1):
        try:
            Photograph(path, load_image(path), processor).process()
            usable.append(path)
        except ImageError as error:
            errors.append(error)
        progressed(number)
    return tuple(usable), tuple(errors)


def load_processor() -> Any:
    """Return Qwen2-VL's image processor with its default configuration, on Pillow and numpy."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is needed from there, so nothing may be asked of it
    transformers = importlib.import_module("transformers")
    # Until transformers 5 the plain name was the Pillow variant; since then it is the torchvision one.
    variant = getattr(transformers, "Qwen2VLImageProcessorPil", None) or transformers.Qwen2VLImageProcessor
    return variant()


def processed(features: Mapping[str, torch.Tensor]) -> Processed:
    """Return the item and the prompt updates of what Qwen2-VL's processor gave for one image."""
    patches = len(features["pixel_values"])
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", [patches]),
        "image_grid_thw": MultiModalFieldConfig.batched("image"),
    }
    (item,) = MultiModalKwargsItems.from_hf_inputs(features, fields).require_data()["image"]
    if item is None:
        raise TypeError("unreachable: require_data lets no None pass")
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
