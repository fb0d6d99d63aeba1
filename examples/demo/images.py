"""The photographs that the demo sends: those in the wheels of scikit-image and scikit-learn, or the user's own.

The two packages are located but not imported: the demo only needs their files, and scikit-image's own loader would
fetch a photograph from the network if its wheel does not contain it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

# Photographs only: the other image files of these packages are drawings, masks and test patterns.
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
"""Import names of the packages that `shipped_photographs` searches."""

_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})


class ImageError(ValueError):
    """The requested images cannot be used; the message names the file or the folder."""


def shipped_photographs() -> tuple[Path, ...]:
    """Return the paths of the photographs inside the installed scikit-image and scikit-learn, in a fixed order.

    Raises `ImageError` if there are none.
    """
    found = []
    for package, (folder, names) in _SHIPPED.items():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        base = Path(spec.origin).parent / folder
        found += [base / name for name in names if (base / name).is_file()]
    if not found:
        raise ImageError(f"{' and '.join(SHIPPING_PACKAGES)} contain no photographs: use --images DIR")
    return tuple(found)


def folder_photographs(folder: Path) -> tuple[Path, ...]:
    """Return the image files directly in `folder`, sorted by name.

    Raises `ImageError` if it is not a folder or contains no image.
    """
    if not folder.is_dir():
        raise ImageError(f"{folder}: not a folder")
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES and path.is_file())
    except OSError as error:
        raise ImageError(f"{folder}: {error.strerror}") from None
    if not found:
        raise ImageError(f"{folder}: contains no image (looked for {', '.join(sorted(_SUFFIXES))})")
    return tuple(found)


def load_image(path: Path) -> Image:
    """Return the photograph at `path`, decoded as RGB. Raises `ImageError` if it cannot be decoded."""
    from PIL import Image  # only the demo extra installs it

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Exception as error:  # Pillow's decoders raise a dozen kinds for a broken file
        raise ImageError(f"{path}: {error or type(error).__name__}") from None
