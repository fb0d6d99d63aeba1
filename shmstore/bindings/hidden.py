"""What the cycle collector must not see; apart from `handles`, because `shmstore verify --quick` needs no numpy."""

from typing import Any

import numpy as np


def held(handle: Any) -> Any:
    """Return a reference to the handle that the cycle collector does not see, because it does not look into arrays.

    Otherwise the collector could free the handle of a garbage store before generators and `__del__` methods of the
    same garbage have used it for the last time.
    """
    cell = np.empty((), object)
    cell[()] = handle
    return cell


def hidden(payload: Any) -> memoryview:
    """Return the same bytes as a buffer whose owner the cycle collector does not see, because it is an array.

    Otherwise it could end the pin of a garbage view before `__del__` methods of the same garbage have read it.
    """
    return np.ndarray((len(payload),), np.uint8, payload).data
