"""A stand-in for SGLang's kernels for CPUs, of which no index has a build; installed as the module ``sgl_kernel``.

Each name can be imported. Without AMX SGLang takes its native paths, so none is called; one that is called raises.
"""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} was called")

    return missing
