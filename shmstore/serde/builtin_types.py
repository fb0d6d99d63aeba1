"""The types beyond trees and leaves that processors of Hugging Face and others hand out, registered like any other.

A numpy scalar travels as an array without dimensions, which has its dtype and its bits; `torch.Size` as a tuple.
"""

import numpy as np
import torch

from shmstore.serde.registry import register_type

__all__ = ["NUMPY_SCALARS"]

NUMPY_SCALARS: tuple[type[np.generic], ...] = (
    *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
    *(np.float16, np.float32, np.float64, np.complex64, np.complex128),
)
"""Those whose size is the same on every host."""

register_type("torch.Size", torch.Size, tuple, torch.Size)
for _scalar in NUMPY_SCALARS:
    register_type(f"numpy.{_scalar.__name__}", _scalar, np.asarray, lambda array: array[()])
