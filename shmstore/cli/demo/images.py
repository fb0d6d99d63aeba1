"""Which photographs the demo sends: those that scikit-image and scikit-learn ship in their wheels, or one's own.

The two packages are only located, not imported: what is wanted of them is a file, and scikit-image's own loader
would go to the network for a photograph that its wheel does not hold.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

# Photographs only: the other files beside them are drawings, masks and test patterns.
_SHIPPED = {
    "skimage": (
        "data",
        (
            "astronaut.png",
            "brick.png",
            "camera.png",
            "cell.png",
            "chelsea.png",
            "clock_motion.png",
            "coffee.png",
            "coins.png",
            "grass.png",
            "gravel.png",
            "hubble_deep_field.jpg",
            "ihc.png",
            "moon.png",
            "motorcycle_left.png",
            "motorcycle_right.png",
            "retina.jpg",
            "rocket.jpg",
        ),
    ),
    "sklearn": ("datasets/images", ("china.jpg", "flower.jpg")),
}
SHIPPING_PACKAGES = tuple(_SHIPPED)
"""Import names of the packages that `shipped_photographs` looks into."""

_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})


class ImageError(ValueError):
    """The images asked for cannot be used; the message names the file or the folder."""


def shipped_photographs() -> tuple[Path, ...]:
    """Return the paths of the photographs inside the installed scikit-image and scikit-learn, in a fixed order.

    Raises `ImageError` where neither package brings a single one.
    """
    found = []
    for package, (folder, names) in _SHIPPED.items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        base = Path(spec.origin).parent / folder
        found += [base / name for name in names if (base / name).is_file()]
    if not found:
        raise ImageError(f"no photographs inside {' or '.join(SHIPPING_PACKAGES)}: use --images DIR")
    return tuple(found)


def folder_photographs(folder: Path) -> tuple[Path, ...]:
    """Return the image files directly in `folder`, by name.

    Raises `ImageError` where it is not a folder or holds no image.
    """
    if not folder.is_dir():
        raise ImageError(f"{folder}: not a folder")
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES and path.is_file())
    except OSError as error:
        raise ImageError(f"{folder}: {error.strerror}") from None
    if not found:
        raise ImageError(f"{folder}: no image in it (looked for {', '.join(sorted(_SUFFIXES))})")
    return tuple(found)


def load_image(path: Path) -> Image:
    """Return the photograph at `path`, decoded, as RGB. Raises `ImageError` where that cannot be done."""
    from PIL import Image  # the demo extra brings it; the rest of the package does without

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Exception as error:  # what a broken file makes Pillow's decoders raise is any of a dozen kinds
        raise ImageError(f"{path}: {error or type(error).__name__}") from None
