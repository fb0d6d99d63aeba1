"""A plug-in of vLLM that counts what processor and encoder make; an entry point that `environment` writes names it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

CALLS, HOLD = "ENCODER_CALLS", "ENCODER_HOLD"
"""The variables with the file that has a byte for each item, and with the one that holds an encoder while it exists."""
ROOT = Path(__file__).resolve().parent.parent.parent.parent


def environment(folder: Path, hold: str = "hold") -> dict[str, str]:
    """Return what an engine's environment needs, so that its calls are counted in this folder."""
    about = folder / "encoder_calls-1.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: encoder_calls\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[vllm.general_plugins]\nencoder_calls = {__name__}:register\n")
    for name in ("calls", "processed"):
        (folder / name).touch()
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", CALLS: str(folder / "calls"), HOLD: str(folder / hold)}


def calls(folder: Path) -> int:
    """Return how many items the encoders of all engines of this folder have begun."""
    return (folder / "calls").stat().st_size


def processed(folder: Path) -> int:
    """Return how many images the processors of all API servers of this folder have begun."""
    return (folder / "processed").stat().st_size


def register() -> None:
    """Count in this process, if it is one with a processor or an encoder; in the first rank alone."""
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Model
    from vllm.multimodal.processing import BaseMultiModalProcessor as Processor

    process = Processor._call_hf_processor
    real = Model.embed_multimodal

    def counted(self: Any, **given: Any) -> Any:
        items = sum(len(given[name]) for name in ("image_grid_thw", "video_grid_thw") if given.get(name) is not None)
        if get_tp_group().rank_in_group == 0:
            with open(os.environ[CALLS], "ab") as file:
                file.write(b"." * items)
        while os.path.exists(os.environ[HOLD]):
            time.sleep(0.02)
        return real(self, **given)

    def processing(self: Any, hf_data: Any, hf_kwargs: Any) -> Any:
        with open(Path(os.environ[CALLS]).with_name("processed"), "ab") as file:
            file.write(b"." * len(hf_data.get("images", ())))
        return process(self, hf_data, hf_kwargs)

    if not hasattr(real, "__wrapped__"):
        counted.__wrapped__ = real  # type: ignore[attr-defined]
        Model.embed_multimodal, Processor._call_hf_processor = counted, processing
