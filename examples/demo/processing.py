"""From a photograph to an item: a content hash, a real Hugging Face image processor, a digest.

The photographs are those in the wheels of scikit-image and scikit-learn, whose files are found without an import.

Qwen2-VL's processor is built from its class and its defaults, without weights, files or network. The demo uses its
variant on Pillow and numpy, which does not need torchvision.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shmstore.multimodal import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    ResolvedPromptUpdate,
    hash_item,
)

if TYPE_CHECKING:
    from PIL.Image import Image

# Photographs only: the other image files of these packages are drawings, masks and test patterns.
_SHIPPED = {
    "skimage": "data/{}.png astronaut brick camera cell chelsea clock_motion coffee coins grass gravel ihc moon "
    "motorcycle_left motorcycle_right",
    "sklearn": "datasets/images/{}.jpg china flower",
}
PACKAGES = ("transformers", "PIL", *_SHIPPED)
"""Import names of the packages that the demo needs."""

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
        """Return the content hash of the image and the processor's configuration."""
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
        """Return `pixel_values` (patches, 1176) float32 and `image_grid_thw` (3,) int64."""
        return processed(self.processor(images=[self.image], return_tensors="pt"))


@dataclass(frozen=True)
class PhotographSource:
    """Image files, for Qwen2-VL's image processor."""

    paths: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[Photograph]:
        """Yield each file's image."""
        from PIL import Image  # only the demo extra installs it

        processor = load_processor()
        for path in self.paths:
            with Image.open(path) as image:
                yield Photograph(path, image.convert("RGB"), processor)


def shipped_photographs() -> tuple[Path, ...]:
    """Return the paths of the photographs inside the installed scikit-image and scikit-learn, in a fixed order."""
    found = []
    for package, listed in _SHIPPED.items():
        place, *names = listed.split()
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        paths = [Path(spec.origin).parent / place.format(name) for name in names]
        found += [path for path in paths if path.is_file()]
    return tuple(found)


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
        "pixel_values": MultiModalFieldConfig.flat("image", [slice(0, patches)]),
        "image_grid_thw": MultiModalFieldConfig.batched("image"),
    }
    (item,) = MultiModalKwargsItems.from_hf_inputs(features, fields).require_data()["image"]
    assert item is not None  # require_data has seen to it
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
