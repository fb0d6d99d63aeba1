"""Compare a vLLM with what the plug-in and the scheduler know of it, by its sources: nothing of it is imported.

    python -m shmstore.integrations.vllm.compare vllm-0.33.0-*.whl

prints a line for each wheel: what is known, or the first difference. The plug-in asks the same before it changes
anything, and so do our managers and the connector.
"""

import sys

from shmstore.integrations.compare import Sources, compare_wheels, difference, installed_sources
from shmstore.integrations.vllm.known import CACHES, ENCODER_CACHE, ENCODER_CONNECTOR, KV_CACHE

__all__ = ["PARTS", "difference", "installed", "main"]

PARTS = {
    "caches": CACHES,
    "KV-cache manager": KV_CACHE,
    "encoder-cache manager": ENCODER_CACHE,
    "encoder connector": ENCODER_CONNECTOR,
}


def installed() -> Sources:
    """Return the sources of the vLLM in this environment; ModuleNotFoundError if there is none."""
    return installed_sources("vllm")


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each wheel; return 1 if something differs in one of them, else 0."""
    return compare_wheels("vllm", "vLLM", PARTS, arguments)


if __name__ == "__main__":
    sys.exit(main())
