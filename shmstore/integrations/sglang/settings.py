"""What the environment says about the store."""

import os
from contextlib import suppress

STORE = "SHMSTORE_SGLANG_STORE"
"""The variable with a name for the store, which then outlives its server."""
GIB = "SHMSTORE_SGLANG_GB"
"""The variable with the size of the store."""


def capacity() -> int:
    """Return the bytes that the store shall have; ValueError if the variable says no size."""
    chosen = os.environ.get(GIB, "4")
    with suppress(ValueError, OverflowError):
        if (size := int(float(chosen) * (1 << 30))) > 0:
            return size
    raise ValueError(f"{GIB} must be a number of GiB above 0, not {chosen!r}")
