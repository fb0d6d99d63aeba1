"""The namespace of an engine's encoder outputs: whatever changes them, and is not in an item's hash.

vLLM's hash has the item, the model's name, and the request's own processor and media options. Tensor parallelism is not
here: outputs are whole on each rank, and sharing them between engines of other sizes is worth it.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

import torch
import vllm

_FORMAT = 1
"""The way in which outputs are stored."""
_NAME = 200
"""How much of the model's name is kept, in bytes; a namespace has at most 255."""

_turned = ""
_namespaces: dict[str, str] = {}


def turn() -> None:
    """Begin a namespace of this process alone, because the weights have changed in place and no digest shows it."""
    global _turned
    _turned = f" {secrets.token_hex(8)}"


def turned() -> str:
    """Return what to append to the namespace: nothing until the weights have changed."""
    return _turned


def namespace(vllm_config: Any) -> str:
    """Return the namespace: the model's name and dtype, to be readable in `shmstore dump`, and a digest.

    It is that of the first call of a process for this configuration, since a model may change it while it is built.
    """
    engine = vllm_config.ec_transfer_config.engine_id
    if engine not in _namespaces:
        _namespaces[engine] = _digested(vllm_config)
    return _namespaces[engine]


def _digested(vllm_config: Any) -> str:
    model, load = vllm_config.model_config, vllm_config.load_config
    media = model.multimodal_config
    about = {
        "format": _FORMAT,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "model": [model.model, model.model_weights, model.revision, model.code_revision, str(model.model_impl)],
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "files": _files(Path(model.model)),
        "config": model.hf_config.to_json_string(use_diff=False),
        "dtype": str(model.dtype),
        "quantization": [model.quantization, repr(model.quantization_config)],
        "load": [str(load.load_format), repr(load.model_loader_extra_config)],
        "device": vllm_config.device_config.device_type,
        "processor": [media.mm_processor_kwargs, media.media_io_kwargs, media.mm_hasher_algorithm],
        "encoder": media.compute_hash(),
        "pruning": [media.video_pruning_rate, media.video_pruning_method],
    }
    digest = hashlib.sha256(json.dumps(about, sort_keys=True, default=repr).encode()).hexdigest()[:16]
    name = str(model.model).encode()[-_NAME:].decode(errors="ignore")
    return f"{name} {str(model.dtype).removeprefix('torch.')} {digest}"


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of each file of a model that is a folder: weights, code, and what processors do."""
    files = sorted(path for path in folder.iterdir() if path.is_file()) if os.path.isdir(folder) else []
    return [(path.name, about.st_size, about.st_mtime_ns) for path in files if (about := path.stat())]
