"""Operators that torch lacks on a CPU here; installed so that each process of the environment imports this first.

torchvision arrives as a build for CUDA, whose operators do not load; its Python part registers shapes for two of them.
SGLang looks some of its own kernels up among torch's operators, and asks of two whether they are there.
"""

from collections.abc import Callable
from typing import Any

import torch

_torchvision: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
_torchvision.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_torchvision.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

_ABSENT = ("fused_qk_norm_rope_cpu", "fused_qk_norm_cpu")


class _Kernels:
    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.endswith("_cpu") or name in _ABSENT:
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"torch.ops.sgl_kernel.{name} was called")

        return missing


torch.ops.__dict__["sgl_kernel"] = _Kernels()
