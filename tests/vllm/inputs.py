"""Pictures, and the prompts around them: the same offline and over HTTP."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


def photograph(number: int, size: tuple[int, int] = (320, 240)) -> Image.Image:
    """Return a picture with large and small structures, which no other number has."""
    noise = np.random.default_rng(number)
    coarse = Image.fromarray(noise.integers(0, 256, (6, 8, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    fine = Image.fromarray(noise.integers(0, 256, (48, 64, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    return Image.blend(coarse, fine, 0.3)


def film(number: int, frames: int = 8) -> Any:
    """Return the frames of a film, and what its file would say of them."""
    about = {"fps": 2.0, "duration": frames / 2, "total_num_frames": frames, "frames_indices": list(range(frames))}
    pictures = [np.asarray(photograph(1000 * number + frame, (112, 84))) for frame in range(frames)]
    return np.stack(pictures), about | {"do_sample_frames": False, "video_backend": "opencv"}


def chat(*parts: str) -> str:
    return f"<|im_start|>user\n{''.join(parts)}<|im_end|>\n<|im_start|>assistant\n"


def picture_prompt(*pictures: Image.Image, text: str = "what is this") -> dict[str, Any]:
    """Return one request for the offline engine."""
    return {"prompt": chat(IMAGE * len(pictures), text), "multi_modal_data": {"image": list(pictures)}}


def film_prompt(frames: Any, text: str = "what is this") -> dict[str, Any]:
    return {"prompt": chat(VIDEO, text), "multi_modal_data": {"video": frames}}


def message(*pictures: Image.Image, text: str = "what is this") -> list[dict[str, Any]]:
    """Return the same request as the messages of a chat."""
    parts: list[dict[str, Any]] = []
    for picture in pictures:
        png = io.BytesIO()
        picture.save(png, "PNG", compress_level=1)
        url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
