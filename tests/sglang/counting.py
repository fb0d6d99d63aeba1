"""A plug-in of SGLang that counts what processors and encoders make; `environment` writes its entry point."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

CALLS, HOLD = "ENCODER_CALLS", "ENCODER_HOLD"
"""The variables with the file that has a digit for each item, its rank, and with the one that holds an encoder."""
PROCESSED = b"p"
"""What is written for each image that a tokenizer process has processed."""
_QWEN = "sglang.srt.multimodal.processors.qwen_vl.QwenVLImageProcessor"
ROOT = Path(__file__).resolve().parent.parent.parent


def environment(folder: Path, hold: str = "hold") -> dict[str, str]:
    """Return what an engine's environment needs, so that its calls are counted in this folder."""
    about = folder / "encoder_calls-1.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: encoder_calls\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nencoder_calls = {__name__}:register\n")
    (folder / "calls").touch()
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", CALLS: str(folder / "calls"), HOLD: str(folder / hold)}


def calls(folder: Path, rank: int = 0) -> int:
    """Return how many items the encoders of all engines of this folder have begun, in this rank of each."""
    return (folder / "calls").read_bytes().count(b"%d" % rank)


def processed(folder: Path) -> int:
    """Return how many images the tokenizer processes of all engines of this folder have begun to process."""
    return (folder / "calls").read_bytes().count(PROCESSED)


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_QWEN}.prepare_artifact_batch", count_processed, HookType.AROUND)
    HookRegistry.register("sglang.srt.managers.mm_schedule.init_mm_embedding_cache", count, HookType.AFTER)


def count_processed(real: Any, ours: Any, entries: list[Any], **more: Any) -> Any:
    with open(os.environ[CALLS], "ab") as file:
        file.write(PROCESSED * len(entries))
    return real(ours, entries, **more)


def count(*_: Any) -> None:
    """Count in this process, which is a scheduler."""
    from sglang.srt.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Model
    from sglang.srt.runtime_context import get_parallel

    real = Model.get_image_feature

    @functools.wraps(real)
    def counted(self: Any, items: list[Any]) -> Any:
        with open(os.environ[CALLS], "ab") as file:
            file.write(b"%d" % get_parallel().tp_rank * len(items))
        while os.path.exists(os.environ[HOLD]):
            time.sleep(0.02)
        return real(self, items)

    Model.get_image_feature = counted
