"""numpy's scalars, which processors of Hugging Face and others return, registered like any other type.

One travels as its bytes. It is not a leaf, because `reserve` leaves out the bytes of leaves.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from shmstore.serde.dtypes import SHARED
from shmstore.serde.registry import register_type

NUMPY_SCALARS: tuple[type[np.generic], ...] = tuple(np.dtype(name).type for name in SHARED)
"""Those whose size is the same on every host."""


def _from_bytes(dtype: "np.dtype[Any]") -> Callable[[Any], Any]:
    def make(data: Any) -> Any:
        (scalar,) = np.frombuffer(data, dtype)
        return scalar

    return make


for _scalar in NUMPY_SCALARS:
    register_type(f"numpy.{_scalar.__name__}", _scalar, _scalar.tobytes, _from_bytes(np.dtype(_scalar)))
