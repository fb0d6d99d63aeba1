"""What is common to all handles of C."""

from typing import Any

import numpy as np


def held(handle: Any) -> Any:
    """Return a reference to the handle that the cycle collector does not see.

    It would end a handle that is garbage before generators and `__del__` methods of the same garbage that still use
    it. An array is not looked into.
    """
    cell = np.empty((), object)
    cell[()] = handle
    return cell
